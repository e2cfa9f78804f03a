"""Writes what the schedule player and the replay load: orders, call chains, packed recordings.

Called by: `build_docs`, `python docs/tools/emit_player.py FOLDER`, tests/docs. Calls: `emit_orders`,
`package` (to find lines in today's source). Writes below the folder, beside what is copied from docs/:

    javascripts/orders*.js      every plan, from the planner
    javascripts/links.js        {"chains": schedule -> "F warmup", "send_forward steady", ... -> frames,
                                 "recordings": name -> title}
    recordings/NAME.js          docs/recordings/NAME.json, its frames and functions with links

A frame is [dotted name, url or "", text of the line]. A recorded line is looked up in today's source
by its text, since lines move: `url` points at it, or at the function where the line is gone.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from emit_orders import script, write_orders  # noqa: E402
from package import ROOT, Package  # noqa: E402

RECORDINGS = ROOT / "docs" / "recordings"
SCHEDULES = {"1f1b-paced": "1f1b", "interleaved-paced": "interleaved", "one-rank": "no-pipelining"}
"""Recording -> the schedule whose call chains the player shows from it."""

Frame = tuple[str, str, str]


def write_player(package: Package, out: Path) -> None:
    """Writes all of it."""
    write_orders(out / "javascripts")
    recordings = read_recordings()
    chains = {"gpipe": planned_chains(package), "mine": planned_chains(package, "")}
    for name, data in recordings.items():
        resolved = resolve(data, package)
        if name in SCHEDULES:
            chains[SCHEDULES[name]] = recorded_chains(resolved)
        _write(out / "recordings" / f"{name}.js", script(resolved, f"recording {name}"))
    titles = {name: data["title"] for name, data in recordings.items()}
    links = {"chains": chains, "recordings": titles}
    _write(out / "javascripts" / "links.js", script(links, "links"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read_recordings(folder: Path = RECORDINGS) -> dict[str, dict[str, Any]]:
    """Name -> recording, in the order in which `record_traces` makes them, then any others."""
    order = ["1f1b-paced", "1f1b", "interleaved-paced", "tp2-pp2", "one-rank"]
    paths = {path.stem: path for path in sorted(folder.glob("*.json"))}
    names = [name for name in order if name in paths] + [n for n in paths if n not in order]
    return {name: json.loads(paths[name].read_text()) for name in names}


# -- Recorded lines in today's source --


def module_of(path: str) -> str:
    """
    >>> module_of("minimegatron/core/optimizer/__init__.py")
    'minimegatron.core.optimizer'
    """
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def line_url(package: Package, path: str, name: str, line: int, text: str) -> str | None:
    """The recorded line's place in the annotated source; None if no line has that text any more.

    Of several lines with the text, the one nearest to where it was, within its function if that is
    still there.
    """
    page = package.pages.get(module_of(path))
    if page is None or not text:
        return None
    numbers = [n for n, found in enumerate(page.lines, 1) if found.strip() == text]
    definition = page.definitions.get(_symbol(name, page.module))
    if definition is not None:
        inside = [n for n in numbers if definition.line <= n <= definition.end_line]
        numbers = inside or numbers
    if not numbers:
        return None
    return f"source/{page.module}.html#L{min(numbers, key=lambda n: abs(n - line))}"


def function_url(package: Package, path: str, name: str) -> str:
    """Where a function is defined, or its module, or "" outside the package."""
    page = package.pages.get(module_of(path))
    if page is None:
        return ""
    definition = page.definitions.get(_symbol(name, page.module))
    anchor = f"#{definition.anchor}" if definition is not None else ""
    return f"source/{page.module}.html{anchor}"


def _symbol(name: str, module: str) -> str:
    """The name within its module; of a nested function, that of the outer one."""
    return name.removeprefix(f"{module}.").partition(".<locals>")[0]


def resolve(data: dict[str, Any], package: Package) -> dict[str, Any]:
    """The recording with links: frames as (name, url, text), functions as (name, url, dotted name)."""
    sources = data["sources"]
    frames, num_gone = [], 0
    for source, line, text in data["frames"]:
        name, path, _ = sources[source]
        url = line_url(package, path, name, line, text)
        num_gone += url is None
        frames.append((name, url or function_url(package, path, name), text))
    functions = [
        (name, function_url(package, sources[source][1], sources[source][0]), sources[source][0])
        for name, source in data["functions"]
    ]
    kept = {key: value for key, value in data.items() if key != "sources"}
    return kept | {"frames": frames, "functions": functions, "gone": num_gone}


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
            if event["k"] in ("forward", "backward", "communicate"):
                letter = event["k"][0].upper()
                what = event["a"] if event["k"] == "communicate" else letter
                yield f"{what} {event.get('ph', 'steady')}", event


def planned_chains(package: Package, schedule: str = "gpipe") -> dict[str, list[Frame]]:
    """GPipe has no function of its own in the chain: the runner of all orders runs its plan.

    Nor has a reader's own schedule, of which no line is in the annotated source: "".
    """
    planned = ("minimegatron.planner.written_schedules", schedule)
    runner = (
        "minimegatron.core.pipeline_parallel.planned_schedule",
        "planned_forward_backward_func",
    )
    chains = {}
    for key, line, last in (
        ("F warmup", "yield stage.forward(i)", "forward_step"),
        ("B cooldown", "yield stage.backward(i)", "backward_step"),
    ):
        chains[key] = [
            _named(package, *runner, "PlannedRun(step, rank, frame.chunks, p2p, shape).run()"),
            *([_named(package, *planned, line)] if schedule else []),
            _named(package, "minimegatron.core.pipeline_parallel.steps", f"ModelChunk.{last}"),
            _named(package, "minimegatron.core.pipeline_parallel.steps", last),
        ]
    return chains


def _named(package: Package, module: str, symbol: str, text: str = "") -> Frame:
    page = package.pages[module]
    path, name = page.path, f"{module}.{symbol}"
    if symbol not in page.definitions:
        raise ValueError(f"{module} has no {symbol}, which the player's call chain of GPipe names")
    if not text:
        return name, function_url(package, path, name), ""
    url = line_url(package, path, name, page.definitions[symbol].line, text)
    if url is None:
        raise ValueError(f"{name} has no line {text!r}, which the player's call chain names")
    return name, url, text


if __name__ == "__main__":
    write_player(Package.read(), Path(sys.argv[1]))
