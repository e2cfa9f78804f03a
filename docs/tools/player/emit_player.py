"""Writes what the schedule player and the replay load: orders, call chains, packed recordings.

Called by: `build_docs`, `unrolled_pages`, tests/docs. Calls: `emit_orders`,
`recorded_lines` (to find lines in today's source). Writes below the folder, beside what is copied from
docs/:

    javascripts/orders*.js      every plan, from the planner
    javascripts/links.js        {"chains": schedule -> "F warmup", "send_forward steady", ... -> frames,
                                 "recordings": name -> title, "kinds": letter -> kind}
    recordings/NAME.js          docs/recordings/NAME.json, its frames and functions with links

A frame is [dotted name, url or "", text of the line]. A recorded line is looked up in today's source
(`recorded_lines`): `url` points at it, or at the function where the line is gone.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from player.emit_orders import script
from player.plan_words import kinds_data
from player.recorded_lines import MOVED, Finder, Missing, RecordedLine
from source.annotate import AnnotatedPage
from source.package import Package
from source.places import RECORDINGS, UNROLLED, read_json, write

SCHEDULES = {
    "1f1b-paced": "1f1b",
    "interleaved-paced": "interleaved",
    "combined-paced": "combined",
    "one-rank": "no-pipelining",
}
"""Recording -> the schedule whose call chains the player shows from it."""

Frame = tuple[str, str, str]


def write_player(package: Package, out: Path) -> None:
    """Writes all of it but the orders, which the site's build has a second process write."""
    recordings = read_recordings()
    chains = {"gpipe": planned_chains(package), "planned": planned_chains(package, "")}
    chains["combined"] = combined_chains(package)
    for name, data in recordings.items():
        resolved = resolve(data, package)
        if (UNROLLED / f"{name}.json").exists():
            resolved["unrolled"] = f"unrolled/{name}.html"
        if name in SCHEDULES:
            chains[SCHEDULES[name]] = recorded_chains(resolved)
        write(out / "recordings" / f"{name}.js", script(resolved, f"recording {name}"))
    titles = {name: data["title"] for name, data in recordings.items()}
    links = {"chains": chains, "recordings": titles, "kinds": kinds_data()}
    write(out / "javascripts" / "links.js", script(links, "links"))


def read_recordings(folder: Path = RECORDINGS) -> dict[str, dict[str, Any]]:
    """Name -> recording, in the order in which `records.traces` makes them, then any others."""
    order = ["1f1b-paced", "1f1b", "interleaved-paced", "tp2-pp2", "combined-paced", "one-rank"]
    paths = {path.stem: path for path in sorted(folder.glob("*.json"))}
    return {name: read_json(path) for name, path in in_order(paths, order).items()}


def in_order(paths: Mapping[str, Path], first: Sequence[str]) -> dict[str, Path]:
    """The same, those of `first` first."""
    names = [*(name for name in first if name in paths), *(n for n in paths if n not in first)]
    return {name: paths[name] for name in names}


# -- Recorded lines in today's source --


def resolve(
    data: dict[str, Any], package: Package, moved: Mapping[str, str] = MOVED
) -> dict[str, Any]:
    """The recording with links: frames as (name, url, text), functions as (name, url, dotted name).

    All are today's, wherever the recorded ones are still there; "gone" has a sentence for each other.
    """
    finder, gone = Finder(package, moved), {}

    def function(name: str, path: str) -> tuple[str, str]:
        try:
            return function_url(*finder.function(name, path)), finder.name_today(name, path)
        except Missing as missing:
            gone[str(missing)] = None
            return "", name

    def frame(source: int, line: int, text: str) -> Frame:
        name, path, first_line = data["sources"][source]
        try:
            found = finder.line(RecordedLine(name, path, first_line, line, text))
        except Missing as missing:
            gone[str(missing)] = None
            return name, function(name, path)[0], text
        return finder.name_today(name, path), found.url, found.text

    frames = [frame(*recorded) for recorded in data["frames"]]
    functions = [
        (name, *function(*data["sources"][source][:2])) for name, source in data["functions"]
    ]
    decorators = decorators_of(package)
    stacks = [[n for n in stack if frames[n][0] not in decorators] for stack in data["stacks"]]
    kept = {key: value for key, value in data.items() if key != "sources"}
    found = {"frames": frames, "stacks": stacks, "functions": functions, "gone": list(gone)}
    return kept | found


@cache
def decorators_of(package: Package) -> frozenset[str]:
    """The functions inside decorators that only hand a call on: no step of anything, and not shown."""
    found = set()
    for module, page in package.pages.items():
        for outer in ast.walk(page.tree) if "functools.wraps(" in page.source else ():
            if isinstance(outer, ast.FunctionDef):
                inner = [node for node in outer.body if isinstance(node, ast.FunctionDef)]
                wraps = (node.name for node in inner if any(map(_wraps, node.decorator_list)))
                found.update(f"{module}.{outer.name}.<locals>.{name}" for name in wraps)
    return frozenset(found)


def _wraps(node: ast.expr) -> bool:
    return ast.unparse(node).startswith("functools.wraps(")


def function_url(page: AnnotatedPage, symbol: str) -> str:
    """Where a function is defined, or its module."""
    definition = page.definitions.get(symbol)
    anchor = f"#{definition.anchor}" if definition is not None else ""
    return f"source/{page.module}.html{anchor}"


# -- Call chains --


def recorded_chains(data: dict[str, Any]) -> dict[str, list[Frame]]:
    """`F warmup`, `send_forward steady`, ... -> the frames of the first such call recorded."""
    chains: dict[str, list[Frame]] = {}
    for key, event in _actions(data):
        if key not in chains:
            name, url, dotted = data["functions"][event["f"]]
            frames = [data["frames"][number] for number in data["stacks"][event["st"]]]
            chains[key] = [*frames, (dotted or name, url, "")]
    return chains


def _actions(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    # Middle stages first: the ends of the pipeline make some of their calls without a message.
    ranks = data["steps"][0]["ranks"]
    for rank in sorted(range(len(ranks)), key=lambda r: r in (0, len(ranks) - 1)):
        for event in ranks[rank]["events"]:
            if event["k"] in ("forward", "backward", "pair", "communicate"):
                letter = event.get("q", [[event["k"]]])[0][0][0].upper()  # of a pair, the first
                what = event["a"] if event["k"] == "communicate" else letter
                yield f"{what} {event.get('ph', 'steady')}", event


def planned_chains(package: Package, schedule: str = "gpipe") -> dict[str, list[Frame]]:
    """GPipe has no function of its own in the chain: the runner of all orders runs its plan.

    Nor has a reader's own schedule, of which no line is in the annotated source: "".
    """
    planned = ("minimegatron.planner.written_loops", schedule)
    runner = (
        "minimegatron.core.orders.planned_schedule",
        "planned_forward_backward_func",
    )
    chains = {}
    for key, line, last in (
        ("F warmup", "output_tensor = chunk.forward_step(i, input_tensor)", "forward_step"),
        ("B cooldown", "input_grad = chunk.backward_step(grad)", "backward_step"),
    ):
        chains[key] = [
            _named(package, *runner, "PlannedRun(step, frame.chunks, p2p, shape).run()"),
            *([_named(package, *planned, line)] if schedule else []),
            _named(package, "minimegatron.core.pipeline_parallel.steps", f"ModelChunk.{last}"),
            _named(package, "minimegatron.core.pipeline_parallel.steps", last),
        ]
    return chains


def combined_chains(package: Package) -> dict[str, list[Frame]]:
    """One step of combined 1F1B, whichever halves it has, for a site without a recording of it."""
    frames = [
        _named(package, module, symbol)
        for module, symbol in (
            ("minimegatron.core.pipeline_parallel.combined_1f1b", "combined_forward_backward_step"),
            (
                "minimegatron.core.models.common.model_chunk_schedule_plan",
                "TransformerModelChunkSchedulePlan.run",
            ),
            (
                "minimegatron.core.models.common.model_chunk_schedule_plan",
                "TransformerLayerSchedulePlan.run",
            ),
        )
    ]
    return {"F warmup": frames, "B cooldown": frames}


def _named(package: Package, module: str, symbol: str, text: str = "") -> Frame:
    page, name = package.pages[module], f"{module}.{symbol}"
    definition = page.definitions.get(symbol)
    if definition is None:
        raise ValueError(f"{module} has no {symbol}, which the player's call chain of GPipe names")
    if not text:
        return name, function_url(page, symbol), ""
    for number in range(definition.line, definition.end_line + 1):
        if page.lines[number - 1].strip() == text:
            return name, f"source/{page.module}.html#L{number}", text
    raise ValueError(f"{name} has no line {text!r}, which the player's call chain names")
