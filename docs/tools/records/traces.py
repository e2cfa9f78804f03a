"""Records the runs that the documentation replays, into docs/recordings. `make traces` runs this.

Run by: `make traces`, or `python docs/tools/record.py traces [NAME ...]`.
Calls: torchrun with a program of the package and `--trace`, then
`minimegatron.tracing`, whose timeline page has the same data. Real ranks, tensors, messages, losses and
gradients; in paced runs computation is padded, so that few cores show the schedule and not their
own shortage. Of the recorded steps the one of median length is kept.

A recording is what `tracing.html.page_data` says, with texts that occur often written once:

    {"provenance": {"command", "date", "versions", "machine", "clock"}, "title",
     "steps": [...],           of page_data; an event's "f" is its number in "functions",
                               its "x" a list of numbers in "words", its "st" one in "stacks"
     "functions": [[name, source]], "sources": [[dotted name, path, first line]],
     "stacks": [[frame]], "frames": [[source, line, the line's text]], "words": [text]}

Lines are kept with their text: the pages that link them find them again after the source was
edited, or say that they are gone (`emit_player`).

One step more is recorded line by line, into docs/recordings/unrolled: `tracing.unrolled_page` says what
NAME.json holds. Its functions, which many runs have in common, stand in functions.json. An event's "u",
in the recording above, is its call there.
"""

import argparse
import collections
import datetime
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minimegatron.planner.actions import Event
from minimegatron.tracing.html import page_data
from minimegatron.tracing.trace_view import Trace
from minimegatron.tracing.unrolled import unroll
from minimegatron.tracing.unrolled_page import unrolled_data
from records.recorded_words import launched
from records.timeline import MODEL, NUM_WARMUP_STEPS, median_step
from source.package import commit
from source.places import RECORDINGS, ROOT, UNROLLED, read_json
from source.places import write as write_file

FUNCTIONS = UNROLLED / "functions.json"
MAX_BYTES = 300_000

PACE = {"--pace-forward-ms": 100, "--pace-backward-ms": 200}


class Recipe(NamedTuple):
    """A run to record."""

    title: str
    num_ranks: int
    flags: dict[str, Any]
    program: str = "pretrain_gpt"


RECIPES = {
    "1f1b-paced": Recipe(
        "1F1B on 4 ranks, paced",
        4,
        {"--pipeline-model-parallel-size": 4, "--global-batch-size": 8, **PACE},
    ),
    "1f1b": Recipe(
        "1F1B on 4 ranks, as fast as they go",
        4,
        {"--pipeline-model-parallel-size": 4, "--global-batch-size": 8},
    ),
    "interleaved-paced": Recipe(
        "Interleaved 1F1B on 4 ranks, paced",
        4,
        {
            "--pipeline-model-parallel-size": 4,
            "--num-virtual-stages-per-pipeline-rank": 2,
            "--global-batch-size": 8,
            **PACE,
        },
    ),
    "tp2-pp2": Recipe(
        "2 tensor-parallel ranks × 2 stages",
        4,
        {
            "--tensor-model-parallel-size": 2,
            "--pipeline-model-parallel-size": 2,
            "--num-layers": 4,
            "--global-batch-size": 4,
        },
    ),
    "combined-paced": Recipe(
        "Combined 1F1B on 4 ranks, paced",
        4,
        {
            "--pipeline-model-parallel-size": 2,
            "--num-virtual-stages-per-pipeline-rank": 2,
            "--num-layers": 4,
            "--num-experts": 4,
            "--expert-model-parallel-size": 2,
            "--moe-token-dispatcher-type": "alltoall",
            "--overlap-moe-expert-parallel-comm": "",
            "--global-batch-size": 8,
            "--pace-forward-ms": 80,
            "--pace-backward-ms": 160,
            "--pace-attention-ms": 40,
            "--pace-mlp-ms": 40,
            "--pace-all-to-all-ms": 30,
        },
    ),
    "zero1": Recipe(
        "ZeRO-1 with overlap, 2 stages × 2 copies",
        4,
        {
            "--pipeline-model-parallel-size": 2,
            "--num-layers": 4,
            "--use-distributed-optimizer": "",
            "--overlap-grad-reduce": "",
            "--overlap-param-gather": "",
            "--global-batch-size": 8,
        },
    ),
    "experts": Recipe(
        "Experts over 2 ranks, 2 stages",
        4,
        {
            "--pipeline-model-parallel-size": 2,
            "--num-layers": 4,
            "--num-experts": 4,
            "--expert-model-parallel-size": 2,
            "--moe-token-dispatcher-type": "alltoall",
            "--global-batch-size": 8,
        },
    ),
    "ring": Recipe(
        "A ring of attention on 2 ranks",
        2,
        {
            "--context-parallel-size": 2,
            "--num-layers": 2,
            "--seq-length": 1024,
            "--max-position-embeddings": 1024,
            "--position-embedding-type": "rope",
            "--global-batch-size": 1,
        },
    ),
    "t5": Recipe(
        "T5 on 3 ranks, paced",
        3,
        {
            "--pipeline-model-parallel-size": 3,
            "--pipeline-model-parallel-split-rank": 1,
            "--num-layers": 2,
            "--decoder-seq-length": 32,
            "--vocab-extra-ids": 16,
            "--global-batch-size": 4,
            **PACE,
        },
        "pretrain_t5",
    ),
    "one-rank": Recipe("One rank, no pipeline", 1, {"--num-layers": 2, "--global-batch-size": 3}),
}
NUM_STEPS = 3
"""Steps with times. One more is recorded line by line, and takes longer."""
LINES_STEP = NUM_WARMUP_STEPS + NUM_STEPS


# -- Recording --


def record(recipe: Recipe, folder: str) -> str:
    """Trains for a few steps under torchrun and leaves the last ones in `folder`.

    Returns the command as a reader would type it.
    """
    flags = MODEL | recipe.flags | {"--train-iters": LINES_STEP + 1}
    flags |= {"--trace-first-step": NUM_WARMUP_STEPS, "--trace-num-steps": NUM_STEPS + 1}
    flags |= {"--trace-lines": LINES_STEP}
    words = [str(word) for flag, value in flags.items() for word in (flag, value) if word != ""]
    launch = ["--standalone", "--nproc-per-node", str(recipe.num_ranks)]
    launch += ["-m", f"minimegatron.{recipe.program}"]
    launched([*launch, *words, "--trace", folder])
    return " ".join(["OMP_NUM_THREADS=1 torchrun", *launch, *words, "--trace DIR"])


def provenance(command: str, run: Trace) -> dict[str, Any]:
    """Where a recording comes from, as far as a reader needs it to judge or repeat it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            "minimegatron": commit(),
            "Python": platform.python_version(),
            "PyTorch": torch.__version__,
        },
        "machine": f"{os.cpu_count()} CPU cores ({platform.machine()}), {memory:.0f} GiB memory, "
        f"{platform.system()}; {run.ranks[0].device}, gloo",
        "clock": run.clock_words,
    }


# -- Making it small --


class _Table:
    """Values, each once, by number."""

    def __init__(self):
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def list(self) -> list[Any]:
        return list(self.numbers)


class _Compactor:
    def __init__(self, data: dict[str, Any]):
        self.data = data
        self.functions, self.sources, self.frames, self.words = (_Table() for _ in range(4))

    def source(self, key: str) -> int:
        path, _, first = key.rpartition(":")
        known = self.data["sources"].get(key)
        name = known["n"] if known else ""
        if name == "<module>":
            name = path.removesuffix(".py").replace("/", ".")
        return self.sources.number((name, path, int(first)))

    def frame(self, key: str, line: int) -> int:
        first = int(key.rpartition(":")[2])
        known = self.data["sources"].get(key)
        lines = known["t"].split("\n") if known else []
        text = lines[line - first].strip() if 0 <= line - first < len(lines) else ""
        # Of a comprehension only the first line is known; the file has not changed since it ran.
        path = ROOT / key.rpartition(":")[0]
        if not text and path.is_file():
            text = path.read_text().split("\n")[line - 1].strip()
        return self.frames.number((self.source(key), line, text))

    def event(self, event: dict[str, Any]) -> dict[str, Any]:
        small = {key: value for key, value in event.items() if key not in ("n", "so", "x")}
        small["f"] = self.functions.number((event["n"], self.source(event["so"])))
        if "x" in event:
            small["x"] = [self.words.number(word) for word in event["x"]]
        return small

    def run(self) -> dict[str, Any]:
        steps = [
            {
                **step,
                "ranks": [
                    {**rank, "events": [self.event(event) for event in rank["events"]]}
                    for rank in step["ranks"]
                ],
            }
            for step in self.data["steps"]
        ]
        stacks = [[self.frame(key, line) for key, line in stack] for stack in self.data["stacks"]]
        return {
            "steps": steps,
            "stacks": stacks,
            "frames": self.frames.list(),
            "functions": self.functions.list(),
            "sources": self.sources.list(),
            "words": self.words.list(),
        }


def recording(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Makes one recording: of a step's calls, and of a step's lines."""
    recipe = RECIPES[name]
    with tempfile.TemporaryDirectory() as folder:
        command = record(recipe, folder)
        run = Trace.load(folder)
    step = median_step(run, range(NUM_STEPS))
    about = {"title": recipe.title, "provenance": provenance(command, run)}
    page = page_data(run, [step])
    for of_pipeline in page["steps"]:
        for rank in of_pipeline["ranks"]:
            add_nodes(run, rank, step)
    return about | _Compactor(page).run(), about | unrolled_data(run)


def add_nodes(run: Trace, rank: dict[str, Any], step: int) -> None:
    """Says of each event which call it is of the step that was recorded line by line.

    Both steps do the same, but for waits that come or not, as a neighbour is late or not.
    """
    recorded, unrolled = run.rank(rank["rank"]), unroll(run)[rank["rank"]]
    of_lines = dict(_by_place(recorded.events, recorded.steps[NUM_STEPS]))
    shown = {event["i"]: event for event in rank["events"]}
    for place, index in _by_place(recorded.events, recorded.steps[step]):
        node = unrolled.node_of(of_lines.get(place, -1))
        if node is not None and index in shown:
            shown[index]["u"] = node.number


def _by_place(events: list[Event], indices: list[int]) -> Iterator[tuple[tuple, int]]:
    """Each event by what it is and works on, and how many like it came before."""
    counts: collections.Counter = collections.Counter()
    for index in indices:
        event = events[index]
        told = tuple(event.attributes.get(key) for key in ("doing", "payload", "peer", "layer"))
        caller = "" if event.parent is None else events[event.parent].name
        place = (event.name, caller, event.action.microbatch, event.action.chunk, *told)
        yield (*place, counts[place]), index
        counts[place] += 1


# -- Writing --


def write(path: Path, data: dict[str, Any]) -> str:
    """Writes it, if it is not too large. Returns what it wrote, in words."""
    text = f"{_compact(data)}\n"
    if len(text) > MAX_BYTES:
        raise ValueError(f"{path} would have {len(text)} bytes, above {MAX_BYTES}")
    write_file(path, text)
    return f"{path.relative_to(ROOT)}, {len(text) // 1000} KB"


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def write_unrolled(name: str, data: dict[str, Any]) -> str:
    """Writes a run's lines; its functions join those of the other runs, by a key of their text."""
    known = read_json(FUNCTIONS) if FUNCTIONS.exists() else {}
    keys = [_key_of(function) for function in data["functions"]]
    known |= dict(zip(keys, data["functions"], strict=True))
    words = write(UNROLLED / f"{name}.json", data | {"functions": keys})
    used = {
        key
        for path in UNROLLED.glob("*.json")
        if path != FUNCTIONS
        for key in read_json(path)["functions"]
    }
    lines = (f"{json.dumps(key)}: {_compact(known[key])}" for key in sorted(used))
    FUNCTIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return words


def _key_of(function: list) -> str:
    return hashlib.sha256(json.dumps(function).encode()).hexdigest()[:12]


def main() -> None:
    """Makes the recordings that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    for name in parser.parse_args().names or RECIPES:
        calls, lines = recording(name)
        written = f"{write(RECORDINGS / f'{name}.json', calls)}; {write_unrolled(name, lines)}"
        figures = ", ".join(f"{f['label']} {f['value']}" for f in calls["steps"][0]["figures"])
        print(f"wrote {written}: {figures}", flush=True)
