"""The pages that are not annotated source: those of docs/, filled in, and the generated ones.

Called by: `build_docs`, `every_page`. Calls: `macros`, `tour_frame`, `rosetta`, `architecture`,
`page_heads`.
"""

import re
from itertools import groupby
from pathlib import Path

from cases.calculator import calculator_script
from minimegatron.planner.svg_shapes import STYLE
from pages.macros import Macros, read_glossary, read_practice
from pages.page_heads import shortened
from pages.source_pages import first_sentence
from pictures.architecture import architecture_svg
from rosetta.rosetta import rosetta_page
from source.annotate import AnnotatedPage
from source.package import Package
from source.page_words import bare
from source.places import DOCS, write
from source.spine import (
    Room,
    read_rooms,
    read_spine,
    spine_files,
    spine_hours,
    spine_lines,
    spine_rate,
)
from source.stash import Stash
from tour.tour_frame import framed

SKIPPED = {"tools", "overrides", "problems"}
"""Folders of docs/ that hold no pages; a translation has such a folder too."""

REFERENCE = ("core", "planner", "tracing", "training")
"""What the reference covers; the rest of the package is no library but a program."""


def written_pages() -> list[str]:
    """The pages that a person has written, below docs/."""
    found = sorted(path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
    return [
        page.as_posix()
        for page in found
        if bare(page.as_posix()).partition("/")[0] not in SKIPPED
        and "node_modules" not in page.parts
    ]


def filled_in(macros: Macros) -> str:
    """The page that the macros are of, with all of them filled in."""
    page = macros.page
    if page == "contributing.md":
        macros.extra = {"architecture": architecture_svg(macros.package)}
    # What else ends a page of the tour stands before "why next".
    below = "\n{{ problems }}\n" if bare(page).startswith("tour/") else ""
    return macros.expand(framed(page, (DOCS / page).read_text() + below))


def write_pages(package: Package, out: Path, pieces: Path) -> None:
    """Everything but the annotated modules, below `out`, where notebooks and exercises are by now."""
    glossary, practice = read_glossary(DOCS / "glossary.md"), read_practice(out)
    faults = []
    for page in written_pages():
        macros = Macros(package, page, glossary, practice)
        write(out / page, filled_in(macros))
        macros.stash.save(pieces / f"{page}.json")
        faults += macros.faults
    if faults:
        raise SystemExit("\n".join(faults))
    write(out / "source" / "index.md", source_index(package))
    stash = Stash()
    write(out / "rosetta.md", rosetta_page(package, stash))
    stash.save(pieces / "rosetta.md.json")
    write_reference(package, out / "reference")
    write(out / "stylesheets" / "timeline.css", timeline_css())
    write(out / "javascripts" / "formulas.js", calculator_script())
    write(out / "assets" / "favicon.svg", FAVICON)
    # The theme asks for this file when pages are opened from a folder, where search cannot run.
    write(out / "search" / "search_index.js", "var __index = {config: {}, docs: []};\n")


FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<rect x="2" y="4" width="12" height="6" rx="1.5" fill="#0072b2"/>'
    '<rect x="15" y="4" width="15" height="6" rx="1.5" fill="#e69f00"/>'
    '<rect x="7" y="13" width="12" height="6" rx="1.5" fill="#0072b2"/>'
    '<rect x="20" y="13" width="10" height="6" rx="1.5" fill="#e69f00"/>'
    '<rect x="12" y="22" width="12" height="6" rx="1.5" fill="#0072b2"/></svg>\n'
)


# -- The planner's pictures, in the page's colours --


def timeline_css() -> str:
    """The style of `render_svg`, limited to its pictures; its dark part for the dark scheme.

    A picture that stands alone asks the system; on a page the reader's switch decides.
    """
    light, _, dark = STYLE.partition("@media (prefers-color-scheme: dark) {")
    dark = dark.rpartition("}")[0]
    of_dark = _scoped(dark, '[data-md-color-scheme="slate"] .mm-timeline')
    return f"{_scoped(light, '.mm-timeline')}@media screen {{\n{of_dark}}}\n"


def _scoped(css: str, scope: str) -> str:
    rules = re.findall(r"([^{}]+)\{([^}]*)\}", css)
    return "".join(
        ", ".join(f"{scope} {s.strip()}" for s in selectors.split(",")) + " {" + body + "}\n"
        for selectors, body in rules
    )


# -- Index of the source --

ORDER = [
    (
        "Start",
        "training.training training.initialize training.arguments training.model_setup pretrain_gpt",
    ),
    ("Groups", "core.rank_generator core.parallel_state core.process_groups_config"),
    ("The schedule", "core.pipeline_parallel"),
    ("The model", "core.models core.transformer core.tensor_parallel"),
    ("Gradients", "core.distributed core.optimizer"),
    ("Data", "core.datasets training.data_iterators training.datasets"),
    ("Checkpoints", "core.dist_checkpointing training.checkpointing training.checkpoint_folder"),
    ("On paper", "planner"),
    ("Watching it", "core.tracing tracing doctor"),
]


def source_index(package: Package) -> str:
    """Every module: those of the spine in its order, then the others by topic."""
    parts = [
        "---\ntitle: Annotated source\nhide: [toc]\n---\n",
        "# Annotated source\n",
        f"All {len(package.pages)} modules, their prose beside their code. Each page is made from "
        "the comments in the file itself; names in the code lead to their definitions, and every "
        "line has an address.\n",
    ]
    left = dict(package.pages)
    parts += _spine_tables(left)
    parts.append("## Second reading\n")
    parts.append("All other files, by topic. Read one when you need it.\n")
    for title, prefixes in ORDER:
        rows = []
        for prefix in prefixes.split():
            dotted = f"minimegatron.{prefix}"
            for name in [n for n in left if n == dotted or n.startswith(f"{dotted}.")]:
                rows.append(_module_row(left.pop(name)))
        parts += _module_table(title, rows)
    parts += _module_table("Everything else", [_module_row(page) for page in left.values()])
    return "\n".join(parts)


def _module_row(page) -> str:
    shown = page.module.removeprefix("minimegatron.")
    sentence = re.sub(r"[\[|]", lambda m: "\\" + m[0], first_sentence(page).replace("<", "&lt;"))
    return f"| [`{shown}`]({page.module}.md) | {sentence} |"


def _module_table(title: str, rows: list[str]) -> list[str]:
    if not rows:
        return []
    head = '<div class="mm-modules" markdown="1">\n\n| module | what it is |\n|---|---|'
    return [f"### {title}\n", head, *rows, "\n</div>\n"]


SPINE = """## The spine {{ #the-spine }}

The files to read first, in this order: {files} files, {lines} lines of code, about {hours} hours at
{rate} lines an hour. They go down the chain, from the program to one microbatch's backward, and back up
to the optimizer's step. Each page leads to the next one. A GPT's training step enters no other file but
those of the [rooms](#rooms) below.
"""

ROOMS = """### Rooms {#rooms}

A step enters each of these parts of the package through a few calls, its door. To read the step, you
need to know what a room does, not how.
"""


def _spine_tables(left: dict[str, AnnotatedPage]) -> list[str]:
    """The files of the spine, which are taken out of `left`; each with what the list says of it."""
    parts = [
        SPINE.format(
            files=spine_files(), lines=spine_lines(), hours=spine_hours(), rate=spine_rate()
        )
    ]
    head = '<div class="mm-modules mm-links" markdown="1">\n\n| | module | minutes |\n|--:|---|--:|'
    for section, links in groupby(read_spine(), key=lambda link: link.section):
        rows = []
        for link in links:
            left.pop(link.module)
            shown = f"[`{link.module.removeprefix('minimegatron.')}`]({link.module}.md)"
            rows.append(f"| {link.number} | {shown}<br>{link.what} | {link.minutes} |")
        parts += [f"### {section}\n", head, *rows, "\n</div>\n"]
    return [*parts, ROOMS, *map(_room_row, read_rooms()), ""]


def _room_row(room: Room) -> str:
    files = ", ".join(f"`{file.removesuffix('.py')}`" for file in room.files)
    words = f"{room.what} It may stay shut: {room.shut} The door is {room.door}."
    return f"* **{room.name}**: {words} {files}"


# -- Reference --


def write_reference(package: Package, folder: Path) -> None:
    """A page per part of the package, and an index."""
    parts = parts_of(package)
    for part, names in parts.items():
        write(folder / f"{part}.md", reference_page(part, names))
    write(folder / "index.md", reference_index(parts))


def parts_of(package: Package) -> dict[str, list[str]]:
    """Part of the package -> its modules."""
    by_part: dict[str, list[str]] = {}
    for name in package.pages:
        parts = name.split(".")
        if len(parts) > 2 and parts[1] in REFERENCE and not parts[-1].startswith("_"):
            part = ".".join(parts[1:3]) if parts[1] == "core" and len(parts) > 3 else parts[1]
            by_part.setdefault(part, []).append(name)
    return dict(sorted(by_part.items()))


def reference_page(part: str, names: list[str]) -> str:
    """What mkdocstrings makes a page of, from the docstrings of these modules."""
    title = f"minimegatron.{part}"
    modules = "\n\n".join(f"::: {name}" for name in names)
    about = f"Signatures and docstrings of {title}: {', '.join(map(_bare, names))}"
    head = f"---\ntitle: {title}\ndescription: '{shortened(about)}'\n---\n"
    return f"{head}\n# `{title}`\n\n{modules}\n"


def reference_index(parts: dict[str, list[str]]) -> str:
    """Every part, with its modules."""
    index = ["---\ntitle: Reference\n---\n", "# Reference\n"]
    index.append("Signatures and docstrings of public names, by package.\n")
    for part, names in parts.items():
        words = ", ".join(f"`{_bare(name)}`" for name in names)
        index.append(f"- [`minimegatron.{part}`]({part}.md): {words}")
    return "\n".join(index) + "\n"


def _bare(name: str) -> str:
    return name.rpartition(".")[2]
