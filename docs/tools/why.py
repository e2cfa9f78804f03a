"""Says how a page of the site was made: its file, the tools, the numbers, the excerpts, the records.

    python docs/tools/why.py tour/p2p                 an address, with or without .html
    python docs/tools/why.py docs/tour/p2p.md         or the file
    python docs/tools/why.py tour/p2p --all           leaves nothing out

Run by: a person who wants to know where to change a page. Calls: `pages.observed`, which makes the
page once more and writes down what happens; no list of pages or tools is kept anywhere.
"""

import argparse
import gc
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from pages.every_page import Origin, every_page  # noqa: E402
from pages.observed import Observed, observe  # noqa: E402
from record import COMMANDS  # noqa: E402
from source.package import Package  # noqa: E402
from source.places import RECORDINGS, RECORDS, ROOT, read_json  # noqa: E402

FEW, FEW_TOOLS = 5, 12
"""Lines of a part; the rest is counted, but with --all."""
WIDTH = 110
COMPUTED = ("value", "table", "figure")
"""Macros whose expressions are listed."""


class NoSuchPageError(LookupError):
    """The site has no such page; the message names some that are near."""


def find_page(words: str, pages: dict[str, Origin]) -> str:
    """The address of the page that is meant: by its address, or by the file it is made from."""
    bare = words.partition("#")[0].removeprefix("./").removesuffix("/")
    bare = bare.removesuffix(".html").removesuffix(".md") or "index"
    for name in (bare, f"{bare}/index", "index" if bare == "." else bare):
        if name in pages:
            return name
    path = Path(words).absolute()
    of_file = [name for name, origin in pages.items() if origin.file == path]
    if of_file:
        return of_file[0]
    last = bare.rpartition("/")[2]
    near = [*get_close_matches(bare, pages, 3), *(name for name in pages if last in name)]
    near = list(dict.fromkeys(near))[:FEW]
    said = f"; near it are {', '.join(near)}" if near else ""
    raise NoSuchPageError(f"the site has no page {words}{said}")


def explain(name: str, origin: Origin, observed: Observed, has_all: bool = False) -> str:
    """What was seen, in lines that a person reads."""
    others = {kind: n for kind, n in observed.macros.items() if kind not in COMPUTED}
    parts = [
        f"{name}.html is made from {shown(origin.file)}",
        *section(
            "Tools, as they were first entered (room/module.function):",
            (f"{tool.place:44} {tool.about}" for tool in observed.tools),
            sys.maxsize if has_all else FEW_TOOLS,
        ),
        *section(
            "Numbers, tables and figures, and what computes them:",
            (
                f"{', '.join(n.found_in) or 'a name'}  {{{{ {n.expression} }}}}"
                for n in observed.numbers
            ),
            sys.maxsize if has_all else FEW,
        ),
        *section(
            "Excerpts of the package:",
            (f"{e.path}:{e.first}-{e.last}  {e.symbol}" for e in observed.excerpts),
            sys.maxsize if has_all else FEW,
        ),
        *section(
            "Records that it reads:",
            (
                f"{shown(path)}  {made_by(path, observed.opened.get(path, ''))}"
                for path in observed.records
            ),
            sys.maxsize if has_all else FEW,
        ),
    ]
    if others:
        parts.append("Macros: " + ", ".join(f"{kind} x{n}" for kind, n in others.items()))
    if also := [shown(path) for path in observed.lists if path != origin.file]:
        parts.append(listed("Reads too: ", also, sys.maxsize if has_all else FEW))
    if observed.scripts:
        parts.append("Scripts and styles: " + ", ".join(observed.scripts))
    parts.append("Then MkDocs makes HTML of it, with docs/tools/mkdocs_hook.py, as of every page.")
    return "\n".join(line if has_all else shorten(line) for line in parts)


def shorten(line: str) -> str:
    """No longer than a terminal is wide."""
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def section(title: str, lines: Iterable[str], few: int) -> list[str]:
    """A title with its lines, some of which are only counted; nothing without any."""
    lines = list(lines)
    if not lines:
        return []
    left = [f"  and {len(lines) - few} more (--all)"] if len(lines) > few else []
    return [title, *(f"  {line}" for line in lines[:few]), *left]


def listed(title: str, names: list[str], few: int) -> str:
    """In one line."""
    left = f" and {len(names) - few} more" if len(names) > few else ""
    return title + ", ".join(names[:few]) + left


def shown(path: Path) -> str:
    """As a reader types it."""
    return path.relative_to(ROOT).as_posix()


def made_by(path: Path, reader: str) -> str:
    """The command that makes a record anew; where none is known, the tool that reads it."""
    modules = {module.rpartition(".")[2]: name for name, module in COMMANDS.items()}
    if path.parent == RECORDS:
        return f"python docs/tools/record.py {modules[path.stem]}"
    if path.is_relative_to(RECORDINGS):
        run = "" if path.stem == "functions" else f" {path.stem}"
        return f"python docs/tools/record.py traces{run}"
    if path == ROOT / "minimegatron" / "core" / "left_out.json":
        return f"python docs/tools/record.py {modules['megatron_core']}"
    said = read_json(path)
    command = said.get("command") if isinstance(said, dict) else None
    return command if isinstance(command, str) else f"see {reader}"


def main() -> None:
    """Explains the page that is named."""
    # It would look again and again through the trees of all modules, which are kept until the end.
    gc.disable()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", help="tour/p2p, source/minimegatron.backend, index, or a file")
    parser.add_argument("--all", action="store_true", help="leaves nothing out")
    args = parser.parse_args()
    pages = every_page(Package.read())
    try:
        name = find_page(args.page, pages)
    except NoSuchPageError as error:
        raise SystemExit(str(error)) from error
    print(explain(name, pages[name], observe(pages[name]), args.all))


if __name__ == "__main__":
    main()
