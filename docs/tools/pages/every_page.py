"""Every page of the site by its address: the file that it is made from, and what makes it once more.

Called by: `observed`, for `why`; tests/docs. Calls: what the build calls to make each kind of page.
Nothing is written, no notebook is run and no rank is started.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from jupytext import read

from cases import gpu_page
from minimegatron.exercises.exercise import exercises
from minimegatron.moved import MOVED
from pages import benchmarks_page, exercise_pages, notebook_pages, redirects, unrolled_pages
from pages.macros import Macros, read_glossary
from pages.notebook_runs import remembered, sources
from pages.site_pages import (
    filled_in,
    parts_of,
    reference_index,
    reference_page,
    source_index,
    written_pages,
)
from pages.source_pages import source_page
from rosetta.rosetta import DATA, rosetta_page
from source.package import Package
from source.places import DOCS, ROOT, TOOLS, UNROLLED
from source.stash import Stash

MOVED_HERE = ROOT / "minimegatron" / "moved.py"


class Origin(NamedTuple):
    """Where a page comes from."""

    file: Path
    """What a person edits to change it; of a page that is computed from others, the tool."""
    make: Callable[[], str]
    """Makes its text anew, with all that a comment stands for until the page is whole."""


def every_page(package: Package) -> dict[str, Origin]:
    """Address, without the ending, -> where the page comes from."""
    found = {page.removesuffix(".md"): _written(page, package) for page in written_pages()}
    for name, page in package.pages.items():
        found[f"source/{name}"] = Origin(
            ROOT / page.path, partial(_with_pieces, partial(source_page, page, package))
        )
    for kind in (_generated, _reference, _of_runs, _practice):
        found |= dict(kind(package))
    for old, new in redirects.read_redirects().items():
        is_module = old.removeprefix("source/minimegatron.").removesuffix(".html") in MOVED
        file = MOVED_HERE if is_module else redirects.REDIRECTS
        found[_address(old)] = Origin(file, partial(redirects.redirect_page, old, new))
    return found


def _address(path: str) -> str:
    return path.removesuffix(".html").removesuffix(".md")


def _with_pieces(make: Callable[[Stash], str]) -> str:
    stash = Stash()
    return "\n".join([make(stash), *stash.pieces])


# -- Each kind of page --


def _written(page: str, package: Package) -> Origin:
    """A page of docs/, with its macros filled in. Raises SystemExit with what is wrong in them."""

    def make() -> str:
        macros = Macros(package, page, read_glossary(DOCS / "glossary.md"), titles_of_practice())
        text = filled_in(macros)
        if macros.faults:
            raise SystemExit("\n".join(macros.faults))
        return "\n".join([text, *macros.stash.pieces])

    return Origin(DOCS / page, make)


def _generated(package: Package) -> Iterator[tuple[str, Origin]]:
    """Pages of which there is one each."""
    yield "source/index", Origin(DOCS / "spine.toml", partial(source_index, package))
    yield "rosetta", Origin(DATA, partial(_with_pieces, partial(rosetta_page, package)))
    yield (
        "benchmarks",
        _by_tool(benchmarks_page, benchmarks_page.benchmarks_page, benchmarks_page.RESULTS),
    )
    # The parts are read from the tests' own list when the page is made.
    yield "gpu", _by_tool(gpu_page, _gpu_page)


def _gpu_page() -> str:
    return gpu_page.gpu_page(gpu_page.REPORT, gpu_page.planned_parts())


def _by_tool(tool: object, make: Callable[..., str], *given: object) -> Origin:
    return Origin(Path(tool.__file__), partial(make, *given))


def _reference(package: Package) -> Iterator[tuple[str, Origin]]:
    parts = parts_of(package)
    for part, names in parts.items():
        folder = ROOT.joinpath("minimegatron", *part.split("."))
        yield f"reference/{part}", Origin(folder, partial(reference_page, part, names))
    tool = TOOLS / "pages" / "site_pages.py"
    yield "reference/index", Origin(tool, partial(reference_index, parts))


def _of_runs(package: Package) -> Iterator[tuple[str, Origin]]:
    """Pages of unrolled steps."""

    def make(name: str, stash: Stash) -> str:
        data = unrolled_pages.read_unrolled()[name]
        return unrolled_pages.run_page(name, unrolled_pages.explain(name, data, package), stash)

    for path in UNROLLED.glob("*.json"):
        if path != unrolled_pages.FUNCTIONS:
            made = partial(_with_pieces, partial(make, path.stem))
            yield f"unrolled/{path.stem}", Origin(path, made)


def _practice(_: Package) -> Iterator[tuple[str, Origin]]:
    """Pages of notebooks, as the last run left them, and of exercises."""
    for path in sources():
        yield f"notebooks/{path.stem}", Origin(path, partial(_notebook_page, path))
    for exercise in exercises():
        make = partial(exercise_pages.exercise_page, exercise)
        yield f"exercises/{exercise.name}", Origin(exercise.folder / "page.md", make)
    yield "notebooks/index", _by_tool(notebook_pages, notebook_pages.index_page, sources())
    yield "exercises/index", _by_tool(exercise_pages, exercise_pages.index_page)


def _notebook_page(path: Path) -> str:
    return notebook_pages.notebook_page(path, remembered(path))[0]


@cache
def titles_of_practice() -> dict[str, str]:
    """As `macros.read_practice` finds them once those pages are written."""
    found = {
        f"notebooks/{path.stem}.md": notebook_pages.title_of(read(path).cells[0].source)
        for path in sources()
    }
    return found | {f"exercises/{exercise.name}.md": exercise.title for exercise in exercises()}
