"""One page per recorded run: a step unrolled into the lines that it ran. And the table of these pages.

Called by: `build_docs`, `every_page`, `macros` (the table). Calls: `recorded_lines` (to find
functions in today's source), `minimegatron.tracing.unrolled_page`. Reads docs/recordings/unrolled;
`traces` says what is there. Writes, below the folder:

    unrolled/NAME.md         the outline with its links, for a reader without scripts
    unrolled/NAME.js         the data, packed
    javascripts/unrolled.js, stylesheets/unrolled.css    what shows them; the package's own

A function is looked up by its name. Where its text is no longer the recorded one, the page says so, and
shows the recorded one: its lines ran.
"""

import ast
import inspect
import re
import shutil
from collections.abc import Iterator
from functools import cache, lru_cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from minimegatron.tracing.code_rows import DOCSTRING, rows_of
from minimegatron.tracing.unrolled_outline import outline_html
from minimegatron.tracing.unrolled_page import ASSETS, page_text
from player.emit_orders import script
from player.emit_player import function_url, in_order, read_recordings
from player.plan_words import kinds_data
from player.recorded_lines import Finder, Missing
from source.annotate import AnnotatedPage
from source.package import Package
from source.places import DOCS, UNROLLED, read_json, write
from source.spine import lines_per_minute
from source.stash import Stash
from tour.tour import read_chain, read_tour

FUNCTIONS = UNROLLED / "functions.json"
FIRST = ("1f1b-paced", "tp2-pp2", "interleaved-paced", "zero1", "experts", "one-rank")
"""The runs that the table begins with."""
QUOTED = re.compile(r"\{\{ code (minimegatron[\w.]+)")
OF_MICROBATCH = re.compile(r"of microbatch (\d+)")
CHANGED, GONE = "changed", "gone"
ROOMS_PAGES = {"backend.": ("Messages in shared memory", "backend.html")}
"""Parts of the package that have a page outside the tour."""

PAGE = """---
title: "One step, unrolled: {title}"
description: "{title}: who calls whom in one recorded training step, and each line that it ran."
hide: [navigation, toc]
search:
  exclude: true
---

# One step, unrolled: {title}

{intro}
{body}
"""
INTRO = """Below is one training step that was recorded, call for call. Open a call to see the lines
that it ran, and only these. Calls of one function from one line stand in one row.
[How to read it](index.md#how-to-read-it), [other runs](index.md).
"""


def write_unrolled_pages(package: Package, out: Path, pieces: Path) -> None:
    """Writes all of it."""
    for name, data in read_unrolled().items():
        explained = explain(name, data, package)
        write(out / "unrolled" / f"{name}.js", script(explained, f"unrolled {name}"))
        stash = Stash()
        write(out / "unrolled" / f"{name}.md", run_page(name, explained, stash))
        stash.save(pieces / "unrolled" / f"{name}.md.json")
    for folder, file in (("javascripts", "unrolled.js"), ("stylesheets", "unrolled.css")):
        (out / folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ASSETS / file, out / folder / file)


@cache
def read_unrolled(folder: Path = UNROLLED) -> dict[str, dict[str, Any]]:
    """Name -> data as `unrolled_page` has them; those of `FIRST` first."""
    functions = read_json(folder / FUNCTIONS.name)
    paths = {
        path.stem: path for path in sorted(folder.glob("*.json")) if path.name != FUNCTIONS.name
    }
    found = {name: read_json(path) for name, path in in_order(paths, FIRST).items()}
    for data in found.values():
        data["functions"] = [functions[key] for key in data["functions"]]
    return found


def runs_table() -> str:
    """The pages, as a table in Markdown."""
    rows = ["| run | ranks | functions | lines that ran |", "|---|--:|--:|--:|"]
    for name, data in read_unrolled().items():
        ranks = data["ranks"]
        functions = _span([rank["functions"] for rank in ranks])
        lines = _span([rank["lines"] for rank in ranks])
        rows.append(f"| [{data['title']}]({name}.md) | {len(ranks)} | {functions} | {lines} |")
    return "\n".join(rows) + "\n"


def _span(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


# -- One page --


def run_page(name: str, data: dict[str, Any], stash: Stash) -> str:
    """The page's Markdown, of data that `explain` has been through."""

    def links_of(number: int) -> str:
        links = data["links"][number]
        path, line = data["functions"][number][1:3]
        place = f"{escape(path.rpartition('/')[2])}:{line}"
        parts = [f'<a href="{links["source"]}">{place}</a>' if links.get("source") else place]
        if "tour" in links:
            title, url = links["tour"]
            parts.append(f'<a href="{url}">{escape(title)}</a>')
        if "status" in links:
            parts.append(f"<b>{STATUS[links['status']]}</b>")
        return " · ".join(parts)

    outline = outline_html(data, links_of)
    body = (
        '<link rel="stylesheet" href="../stylesheets/unrolled.css">'
        f'<div class="mm-unrolled" data-run="{escape(name)}">{outline}</div>{_provenance(data)}'
        f'<script src="{name}.js" defer></script>'
        '<script src="../javascripts/unrolled.js" defer></script>'
    )
    return PAGE.format(title=data["title"], intro=INTRO, body=stash.put(body))


STATUS = {CHANGED: "edited since", GONE: "no longer there"}


def _provenance(data: dict[str, Any]) -> str:
    found = data["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"<details><summary>Recorded on {found['date']}</summary><p><code>{escape(found['command'])}"
        f"</code></p><p>{escape(versions)}; {escape(found['machine'])}</p></details>"
    )


# -- Today's source, the tour, the replay --


def explain(name: str, data: dict[str, Any], package: Package) -> dict[str, Any]:
    """The data with links, and with today's places of the functions that have not been edited."""
    finder = Finder(package)
    functions, links = [], []
    for function in data["functions"]:
        place = today_of(function, finder)
        functions.append([*function[:1], *(place.pop("place", function[1:3])), *function[3:]])
        links.append(place)
    explained = data | {"functions": functions, "links": links, "rate": lines_per_minute()}
    _add_chapters(explained)
    recording = read_recordings().get(name)
    if recording is not None:
        explained["replay"] = f"../tour/whole-step.html#replay.recording={quote(name)}"
        ids = replay_ids(recording)
        ranks = [rank | {"replay": ids.get(rank["rank"], {})} for rank in data["ranks"]]
        explained["ranks"] = ranks
    return explained


def today_of(function: list, finder: Finder) -> dict[str, Any]:
    """Of a recorded function: "source", its page; "place", where it is today; "status" if edited."""
    name, path, _, *text = function
    try:
        page, symbol = finder.function(name, path)
    except Missing:
        return {"status": GONE}
    found: dict[str, Any] = {"source": f"../{function_url(page, symbol)}"}
    module = path.removesuffix(".py").replace("/", ".")
    line, today = _text_today(page, name.removeprefix(f"{module}."), text)
    if today != text:
        return found | {"status": CHANGED}
    return found | {"place": (page.path, line)}


def _text_today(page: AnnotatedPage, qualified: str, recorded: list) -> tuple[int, list]:
    """First line and text, as `page_text` has them; a lambda is looked for by its text."""
    line = _first_lines(page.source).get(qualified)
    if line is not None:
        text = "".join(inspect.getblock(page.source.splitlines(keepends=True)[line - 1 :]))
        folds = rows_of(text, {}, 1).folds
        docstring = next(((f.first, f.last) for f in folds if f.words == DOCSTRING), (0, 0))
        return line, list(page_text(text, docstring))
    wanted = [text.strip() for text in recorded[3].split("\n")]
    lines = [text.strip() for text in page.lines]
    for number in range(len(lines) - len(wanted) + 1):
        if lines[number : number + len(wanted)] == wanted:
            return number + 1, recorded
    return 0, []


@lru_cache(maxsize=512)
def _first_lines(source: str) -> dict[str, int]:
    """Qualified name of each function -> its first line, that of a decorator if it has one."""
    return dict(_functions_in(ast.parse(source), ""))


def _functions_in(node: ast.AST, before: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = before + child.name
            yield name, min([child.lineno, *(d.lineno for d in child.decorator_list)])
            yield from _functions_in(child, f"{name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions_in(child, f"{before}{child.name}.")
        else:
            yield from _functions_in(child, before)


def _add_chapters(data: dict[str, Any]) -> None:
    """Each function's page of the tour: its own, or that of the function that called it first."""
    titles = {page.page: page.title for page in read_tour()}
    pages: dict[int, tuple[str, str] | None] = {}
    for rank in data["ranks"]:
        for node in rank["nodes"]:
            function, caller = data["views"][node[0]][0], node[1]
            if pages.get(function) is not None:
                continue
            dotted = data["functions"][function][0]
            found = _chapter_of(dotted, titles)
            if found is None and caller >= 0:
                found = pages[data["views"][rank["nodes"][caller][0]][0]]
            pages[function] = found
    for function, page in pages.items():
        if page is not None:
            data["links"][function]["tour"] = page


def _chapter_of(dotted: str, titles: dict[str, str]) -> tuple[str, str] | None:
    for part, (title, file) in ROOMS_PAGES.items():
        if dotted.startswith(f"minimegatron.{part}"):
            return title, f"../{file}"
    chapters, name = _chapters(), dotted.partition(".<locals>")[0]
    # A method has the page of its class where it has none of its own.
    page = chapters.get(name) or chapters.get(name.rpartition(".")[0])
    return None if page is None else (titles[page].replace("`", ""), f"../tour/{page}.html")


@cache
def _chapters() -> dict[str, str]:
    """Dotted name -> the page that is about it: a link's of the chain, else the first that quotes it.

    A page beside the path is about a part of what it quotes: of a GPT's forward, the further tokens.
    """
    found = {call.symbol: call.page for call in read_chain().values()}
    of_path = [page for page in read_tour() if not page.aside]
    for page in of_path:
        text = (DOCS / "tour" / f"{page.page}.md").read_text()
        for name in QUOTED.findall(text):
            found.setdefault(name, page.page)
    for call in read_chain().values():
        if call.inside and call.page in [page.page for page in of_path]:
            found.setdefault(call.inside, call.page)
    return found


def replay_ids(recording: dict[str, Any]) -> dict[int, dict[int, dict[int, str]]]:
    """By global rank, call and microbatch, -1 for none: what shows it in the replay's address.

    An event's name there is made by docs/javascripts/recorded_model.js; here likewise.
    """
    letters = {kind["name"]: letter for letter, kind in kinds_data().items()}
    found: dict[int, dict[int, dict[int, str]]] = {}
    for pipeline, step in enumerate(recording["steps"]):
        of_pipeline = f"&replay.pipeline={pipeline}" if pipeline else ""
        for stage, rank in enumerate(step["ranks"]):
            calls = found.setdefault(rank["rank"], {})
            counts: dict[str, int] = {}
            for event in rank["events"]:
                name, is_work = _event_name(event, step, recording, letters)
                number = counts.get(name, 0)
                counts[name] = number + 1
                shown = name if is_work and number == 0 else f"{name}.{number}"
                if "u" in event:
                    at = quote(f"{stage}:{shown}", safe=":.")
                    of_call = calls.setdefault(event["u"], {})
                    for microbatch in _microbatches_of(event, recording):
                        of_call.setdefault(microbatch, f"{of_pipeline}&replay.at={at}")
    return found


def _microbatches_of(event: dict, recording: dict) -> list[int]:
    """What it works on; of a call that carries messages, theirs."""
    words = " ".join(recording["words"][number] for number in event.get("x", ()))
    carried = [int(number) for number in OF_MICROBATCH.findall(words)]
    return [event["m"]] if "m" in event else carried or [-1]


def _event_name(event: dict, step: dict, recording: dict, letters: dict) -> tuple[str, bool]:
    parts = event.get("q") or [[event["k"], event.get("m"), event.get("c")]]
    if event["k"] in letters or event.get("q"):
        chunk = step["chunks"] > 1
        return "&".join(f"{letters[k]}{m}{f'.{c}' * chunk}" for k, m, c in parts), True
    return event.get("a") or recording["functions"][event["f"]][0].split(".")[-1], False
