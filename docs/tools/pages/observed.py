"""How one page comes about: it is made once more, and what happens meanwhile is written down.

Called by: `why`; tests/docs. Calls: `every_page`. Nothing here knows any page: the tools are those
that were entered, the files those that were opened, the numbers those that a macro asked for.
"""

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from pages import every_page
from pages.every_page import Origin
from pages.macros import names_of_cases
from source import places
from source.places import DOCS, RECORDINGS, ROOT, TOOLS

SCRIPTS = DOCS / "javascripts"
CATALOGUE = every_page.__file__
"""It stands in for `build_docs` here, and makes nothing itself."""
LOADED = re.compile(r'<(?:script[^>]* src|link[^>]* href)="([^"]+\.(?:m?js|css))"')
LOOKS_FOR = re.compile(r"document\.querySelector(?:All)?\((['\"])(.+?)\1\)")
CLASS = re.compile(r"\.(mm-[\w-]+)")
OF_ALL_PAGES = re.compile(r"^  - javascripts/(\w+\.js)$", re.MULTILINE)
"""In mkdocs.yml."""
REPLAYED = re.compile(r'data-recording="([\w-]+)"')


class Tool(NamedTuple):
    """The function through which a module of docs/tools was first entered."""

    place: str
    """`room/module.function`."""
    about: str
    """The first line of its docstring, or of the module's."""


class Number(NamedTuple):
    """An expression of a macro, and what works it out."""

    expression: str
    found_in: list[str]
    """`path:line` of each function that it calls, the outermost first."""


class Excerpt(NamedTuple):
    """Lines of the package that the page shows."""

    path: str
    symbol: str
    first: int
    last: int


@dataclass
class Observed:
    """What was seen while a page was made, each list in the order in which it happened."""

    tools: list[Tool] = field(default_factory=list)
    expressions: list[str] = field(default_factory=list)
    macros: Counter = field(default_factory=Counter)
    excerpts: list[Excerpt] = field(default_factory=list)
    opened: dict[Path, str] = field(default_factory=dict)
    """File -> the module of docs/tools that has read it."""
    text: str = ""
    """The page."""

    @property
    def numbers(self) -> list[Number]:
        """Each expression once."""
        return [Number(words, functions_of(words)) for words in dict.fromkeys(self.expressions)]

    @property
    def records(self) -> list[Path]:
        """JSON that was read; recordings too that the page's replay will load."""
        read = [path for path in self.opened if path.suffix == ".json"]
        replayed = [RECORDINGS / f"{name}.json" for name in REPLAYED.findall(self.text)]
        return list(dict.fromkeys([*read, *filter(Path.exists, replayed)]))

    @property
    def lists(self) -> list[Path]:
        """Other files that were read: lists, problems, pages that this one counts or links."""
        return [path for path in self.opened if path.suffix in (".toml", ".md")]

    @property
    def scripts(self) -> list[str]:
        """Scripts and styles that it names, and scripts of all pages that look for what it has."""
        shown = set(re.findall(r"mm-[\w-]+", " ".join(re.findall(r'class="([^"]*)"', self.text))))
        looking = []
        for name in OF_ALL_PAGES.findall((ROOT / "mkdocs.yml").read_text()):
            path = SCRIPTS / name
            asked = " ".join(words for _, words in LOOKS_FOR.findall(_text(path)))
            if found := [one for one in CLASS.findall(asked) if one in shown]:
                looking.append(f"{name} (looks for {', '.join(dict.fromkeys(found))})")
        return [*dict.fromkeys(LOADED.findall(self.text)), *looking]


def _text(path: Path) -> str:
    """Of a script; words.js is written by the build, and looks for nothing."""
    return path.read_text() if path.exists() else ""


def observe(origin: Origin) -> Observed:
    """Makes the page, and says what was seen."""
    forget()
    observed = Observed()
    _watching.append(observed)
    sys.setprofile(_Entered(observed))
    try:
        observed.text = origin.make()
    finally:
        sys.setprofile(None)
        _watching.pop()
    return observed


def forget() -> None:
    """Lets functions without arguments read their files again: what they remember was seen before."""
    for name, module in list(sys.modules.items()):
        if not str(getattr(module, "__file__", None)).startswith(f"{TOOLS}/"):
            continue
        for known in vars(module).values():
            if isinstance(known, _lru_cache_wrapper) and known.__module__ == name:
                given = inspect.signature(known).parameters.values()
                if all(one.default is not one.empty for one in given):
                    known.cache_clear()


# -- Files that are opened --

_watching: list[Observed] = []
"""An audit hook cannot be taken away again: it writes into the last of these, if there is one."""


def _note_opened(event: str, given: tuple) -> None:
    if event != "open" or not _watching or not isinstance(given[0], str):
        return
    path = Path(given[0])
    if path.suffix in (".json", ".toml", ".md") and path.is_relative_to(ROOT) and is_ours(path):
        _watching[-1].opened.setdefault(path, _reader())


def is_ours(path: Path) -> bool:
    """Whether it is of the repository: no library's, and nothing that is built."""
    parts = path.relative_to(ROOT).parts
    return not parts[0].startswith((".", "build"))


def _reader() -> str:
    """The innermost module of docs/tools that is being run, but for those that read for all."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{TOOLS}/") and name not in (__file__, places.__file__):
            return module_of(name)
        frame = frame.f_back
    return ""


sys.addaudithook(_note_opened)


# -- Functions that are entered --


class _Entered:
    """Sees each call of a function of docs/tools that comes from another file."""

    def __init__(self, observed: Observed):
        self.observed = observed
        self.modules: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(f"{TOOLS}/"):
            return
        code, caller = frame.f_code, frame.f_back
        if code.co_name == "_call_now":
            self.observed.macros[frame.f_locals["name"]] += 1
        elif code.co_name == "_evaluate":
            self.observed.expressions.append(frame.f_locals["expression"])
        elif code.co_name == "quote_html":
            self.observed.excerpts.append(excerpt_of(frame.f_locals["quote"]))
        if code.co_filename in self.modules or code.co_name.startswith("<"):
            return
        if caller is not None and caller.f_code.co_filename != code.co_filename != CATALOGUE:
            self.modules.add(code.co_filename)
            self.observed.tools.append(tool_of(code))


def tool_of(code: CodeType) -> Tool:
    """The function with this code, by name, and what it says of itself."""
    module = module_of(code.co_filename)
    about = (code.co_consts[0] if code.co_consts else None) or ""
    loaded = sys.modules.get(module.replace("/", "."))
    if not isinstance(about, str) or not about.strip():
        about = getattr(loaded, "__doc__", None) or ""
    return Tool(f"{module}.{code.co_qualname}", about.strip().partition("\n")[0])


def module_of(file: str) -> str:
    """`room/module`."""
    return Path(file).relative_to(TOOLS).with_suffix("").as_posix()


def excerpt_of(quote: Any) -> Excerpt:
    """Where the lines of a quote stand."""
    place, numbers = quote.place, quote.numbers
    return Excerpt(place.page.path, place.symbol, numbers[0], numbers[-1])


# -- What works a number out --


def functions_of(expression: str) -> list[str]:
    """`path:line` of each function that the expression calls, the outermost first."""
    names, found = names_of_cases(), []
    for node in _calls(expression):
        function = inspect.unwrap(eval(ast.unparse(node.func), names))  # as the macro does
        code = getattr(function, "__code__", None) or getattr(function.__init__, "__code__", None)
        if code is not None and Path(code.co_filename).is_relative_to(ROOT):
            path = Path(code.co_filename).relative_to(ROOT)
            found.append(f"{path}:{code.co_firstlineno}")
    return list(dict.fromkeys(found))


def _calls(expression: str) -> Iterator[ast.Call]:
    """Calls of a name, or of a name's attribute; those of what another call gives are not looked up."""
    for node in ast.walk(ast.parse(expression.strip(), mode="eval")):
        if isinstance(node, ast.Call) and not any(
            isinstance(part, ast.Call) for part in ast.walk(node.func)
        ):
            yield node
