"""Every module of the package, annotated, and where each dotted name leads.

Called by: everything in `docs/tools`. Calls: `annotate`.
"""

import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from source.annotate import ANY_OTHER, AnnotatedPage, Definition, annotate
from source.places import ROOT


@dataclass(frozen=True)
class Place:
    """A module, or a definition in one."""

    page: AnnotatedPage
    symbol: str = ""

    @property
    def definition(self) -> Definition | None:
        return self.page.definitions.get(self.symbol) if self.symbol else None

    @property
    def anchor(self) -> str:
        """A row's anchor where a row opens there; else the line."""
        if not self.symbol:
            return ""
        definition = self.definition
        return f"L{definition.line}" if definition.kind == "variable" else definition.anchor

    @property
    def url(self) -> str:
        """Relative to the folder of the annotated pages."""
        return f"{self.page.module}.html" + (f"#{self.anchor}" if self.anchor else "")


class Package:
    """The annotated modules, by name."""

    def __init__(self, pages: dict[str, AnnotatedPage]):
        self.pages = pages

    @classmethod
    def read(cls, root: Path = ROOT, name: str = "minimegatron") -> "Package":
        """All modules that git knows or would add; other people's ignored files are not ours."""
        paths = sorted(
            path
            for path in (root / name).rglob("*.py")
            if not any(part.startswith((".", "_build")) for part in path.relative_to(root).parts)
        )
        pages = {}
        for path in paths:
            text = path.read_text()
            if text.strip():
                page = annotate(path.relative_to(root).as_posix(), text)
                pages[page.module] = page
        return cls(pages)

    def find(self, dotted: str, depth: int = 0) -> Place | None:
        """Where a dotted name is defined, through re-exports and base classes.

        None if it is not of this package, or has no definition that can be read off the source.
        """
        module, symbol = dotted, ""
        while module and module not in self.pages:
            module, _, last = module.rpartition(".")
            symbol = f"{last}.{symbol}" if symbol else last
        if not module:
            return None
        page = self.pages[module]
        if not symbol or symbol in page.definitions:
            return Place(page, symbol)
        head, _, rest = symbol.partition(".")
        target = page.aliases.get(head) or page.looked_up.get(head)
        if target is None and ANY_OTHER in page.looked_up:
            target = f"{page.looked_up[ANY_OTHER]}.{head}"
        if depth < 8 and target and target != dotted:
            return self.find(target + (f".{rest}" if rest else ""), depth + 1)
        return None

    @cached_property
    def used_by(self) -> dict[str, list[str]]:
        """Module -> the modules that import it."""
        users: dict[str, set[str]] = {name: set() for name in self.pages}
        for name, page in self.pages.items():
            for target in {*page.imports, *page.aliases.values()}:
                place = self.find(target)
                if place and place.page.module != name:
                    users[place.page.module].add(name)
        return {name: sorted(found) for name, found in users.items()}

    @cached_property
    def by_last_name(self) -> dict[str, list[str]]:
        """`forward_step` -> every dotted name that ends so; modules too. For names in prose."""
        found: dict[str, list[str]] = {}
        for name, page in self.pages.items():
            found.setdefault(name.rpartition(".")[2], []).append(name)
            for symbol, definition in page.definitions.items():
                if definition.anchor == symbol and definition.kind != "variable":
                    found.setdefault(symbol, []).append(f"{name}.{symbol}")
        return found

    def find_in_prose(self, words: str, module: str) -> Place | None:
        """What a name in backticks means in this module's prose; None unless it is unambiguous."""
        words = words.removesuffix("()")
        page = self.pages.get(module)
        if page is not None:
            if words in page.definitions:
                return Place(page, words)
            head = words.partition(".")[0]
            if head in page.aliases:
                return self.find(page.aliases[head] + words[len(head) :])
        sibling = f"{module.rpartition('.')[0]}.{words}"
        if place := self.find(sibling):
            return place
        for candidate in (words, f"minimegatron.{words}", f"minimegatron.core.{words}"):
            if "." in words and (place := self.find(candidate)):
                return place
        options = self.by_last_name.get(words, [])
        return self.find(options[0]) if len(options) == 1 and len(words) > 3 else None


def commit() -> str:
    """The commit that is documented, or "" outside a repository."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip()
