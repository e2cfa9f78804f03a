"""Five plain runs of a small GPT, and how much of the package a reader of their step has to know.

    python -m tests.plain_runs

Each run is the whole program, from its import to its end, on real ranks that `code_recorder` watches.
What of the spine (docs/spine.toml) any of them executes is counted over all runs; calls, walks and the
lines of one step over the later steps: the first one connects the ranks. The runs:

* tp2·pp2, plain 1F1B
* the same with sequence parallelism
* pp2·dp2 with ZeRO-1, both kinds of communication overlapped
* tp2·dp2 in fp16, with learned positions; the others have rotary ones
* pp2·v2 with overlapped messages

Of 4 microbatches each, stage 0 of two has one in warm-up, three in the steady state, one in cool-down.

*Rooms* are parts of the package that the step enters through a door, and that a reader may leave shut;
docs/spine.toml names them.
What ranks call in them depends on when messages come. So each figure is taken rooms apart, which is the
same every time, and with rooms: there a loop's turns count as one, and of what comes several times the
shortest counts, because a neighbour that is late makes another longer.
"""

import contextlib
import importlib
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tqdm import tqdm

import minimegatron
from minimegatron import pretrain_gpt
from minimegatron.training import progress, training
from tests.code_recorder import WIRE, Call, Record, Recorder, wire_noted
from tests.code_shares import Shares, num_statements, shares_of
from tests.plain_doors import files_outside, lines_with_doors
from tests.plain_house import house_table
from tests.plain_walks import (
    Calls,
    Length,
    callers,
    extents,
    length_of,
    places,
    walks,
    ways_to_wire,
    without,
    without_turns,
)
from tests.ranks import run_ranks
from tests.training.short_runs import PP2, TP2, VP2, ZERO1, little_text

spine = importlib.import_module("source.spine")  # `code_shares` has put its folder on the path

PACKAGE = Path(minimegatron.__file__).parent
NUM_STEPS = 3

MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1 "
    f"--max-position-embeddings 8 --padded-vocab-size 512 --train-iters {NUM_STEPS} --lr 1e-3 "
    "--eval-iters 0 --log-interval 1"
)
ROTARY = "--position-embedding-type rope"
ONE_COPY, TWO_COPIES = "--global-batch-size 4", "--global-batch-size 8"


class PlainRun(NamedTuple):
    """One of the five."""

    name: str
    num_ranks: int
    flags: str


RUNS = (
    PlainRun("tp2·pp2", 4, f"{TP2} {PP2} {ROTARY} {ONE_COPY}"),
    PlainRun("tp2·pp2 sequence", 4, f"{TP2} {PP2} {ROTARY} {ONE_COPY} --sequence-parallel"),
    PlainRun(
        "pp2·dp2 ZeRO-1",
        4,
        f"{PP2} {ROTARY} {TWO_COPIES} {ZERO1} --overlap-grad-reduce --overlap-param-gather",
    ),
    # With the usual first scale of the loss, the first steps would overflow.
    PlainRun("tp2·dp2 fp16", 4, f"{TP2} {TWO_COPIES} --fp16 --initial-loss-scale 1024"),
    PlainRun("pp2·v2", 2, f"{PP2} {VP2} {ROTARY} {ONE_COPY} --overlap-p2p-communication"),
)


ROOMS = {room.name: room for room in spine.read_rooms()}

TIMED = {"wait_until_taken", "_make_room", "_handle"}
"""Functions with lines that depend on when a neighbour comes. All their lines count as executed, so
that no figure depends on it. The last two are the communicator's."""


def is_in_room(file: str) -> bool:
    """Whether a file of the package is in a room."""
    return any(room.has(file) for room in ROOMS.values())


# -- In a rank --


@dataclass
class RankRecord:
    """What one rank has run: everything, with the import; and its later steps alone."""

    run: Record
    steps: list[Record]


def record_run(flags: str) -> RankRecord:
    """Runs the program with these flags, and records it."""
    run, steps, train_step = Recorder(PACKAGE), [], training.train_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        step = Recorder(PACKAGE)
        with step, wire_noted(step):
            result = train_step(*args, **kwargs)
        steps.append(step.record)
        return result

    training.train_step = watched
    sys.argv = ["pretrain_gpt", *MODEL.split(), *flags.split()]
    # What a rank that fails prints goes to stderr, so the bar alone is kept from there.
    bar = mock.patch.object(progress, "tqdm", lambda **options: tqdm(**options | {"disable": True}))
    with little_text(), contextlib.redirect_stdout(io.StringIO()), bar, run:
        pretrain_gpt.main()
    for step in steps:
        run.record.add(step)
    run.record.calls.clear()
    return RankRecord(run.record, steps[1:])


def record_import() -> RankRecord:
    """Imports the program as if nothing of the package were there yet, and records that."""
    package = PACKAGE.name
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        with Recorder(PACKAGE) as recorder:
            importlib.import_module(f"{package}.pretrain_gpt")
    recorder.record.calls.clear()
    return RankRecord(recorder.record, [])


# -- What was recorded --


class Records:
    """Of all runs, by name: each rank's record; and of all ranks together."""

    def __init__(self, ranks: dict[str, list[RankRecord]], imported: RankRecord):
        self.ranks = ranks
        self.everything, self.steps = Record(), Record()
        self.everything.add(imported.run)
        for rank in self._all():
            self.everything.add(rank.run)
            for step in rank.steps:
                self.steps.add(step)
        # By run, rank and step. A stage makes room for a message where its neighbour is late.
        self.calls = {
            name: [
                [
                    without_turns(without(step.calls, "P2PCommunicator._make_room"), is_in_room)
                    for step in rank.steps
                ]
                for rank in of_run
            ]
            for name, of_run in ranks.items()
        }

        # The program's import, and the first run of one rank: a late module is loaded by its first use.
        first = next(iter(ranks.values()))[0]
        self.loaded = {*imported.run.lines, *first.run.lines}

    def _all(self) -> Iterator[RankRecord]:
        for ranks in self.ranks.values():
            yield from ranks

    def most_of_a_step(self, count: Callable[[Record], int]) -> int:
        """What is counted of a step: of each rank the least, of these the most."""
        return max(min(count(step) for step in rank.steps) for rank in self._all())

    def lines_of_a_step(self, counts: Callable[[str], bool]) -> int:
        """Of files that count."""
        return self.most_of_a_step(
            lambda step: sum(len(lines) for file, lines in step.lines.items() if counts(file))
        )


def record_all() -> Records:
    """Does all five runs, one after the other; 20 seconds on two quiet cores."""
    ranks = {run.name: run_ranks(record_run, run.num_ranks, run.flags, timeout=240) for run in RUNS}
    return Records(ranks, *run_ranks(record_import, 1, timeout=120))


# -- Lines --


def shares_in(record: Record, files: list[str]) -> Shares:
    """The lines of these files, by what was recorded."""
    total = Shares()
    for file in files:
        entered, lines = record.entered.get(file, set()), record.lines.get(file, set())
        total.add(shares_of((PACKAGE / file).read_text(), entered, lines, TIMED))
    return total


def spine_files(section: str | None = None) -> list[str]:
    """Files of the spine; of one section, or of all."""
    return [link.file for link in spine.read_spine() if section in (None, link.section)]


def room_files() -> list[str]:
    """All files of the rooms, also those that are in the spine."""
    files = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")]
    return [file for file in sorted(files) if is_in_room(file)]


def outside(record: Record) -> list[str]:
    """Files that were entered and are neither in the spine nor in a room."""
    files = {file for file, functions in record.entered.items() if functions}
    return sorted(file for file in files - set(spine_files()) if not is_in_room(file))


# -- Walks --

SCHEDULE = "forward_backward_pipelining_without_interleaving"
WALKS: dict[str, Callable[[Calls], Iterator[Calls]]] = {
    "send_forward to the wire": lambda calls: ways_to_wire(calls, "P2PCommunicator.send_forward"),
    # Up to its return: the tensor itself lies in the memory that is shared.
    "recv_forward, its message from the wire": lambda calls: extents_with_receive(
        calls, "P2PCommunicator.recv_forward"
    ),
    "1F1B to its first receive": lambda calls: walks(
        calls, SCHEDULE, "P2PCommunicator.recv_forward"
    ),
    "chunk.forward_step to GPTModel.forward": lambda calls: walks(
        calls, "ModelChunk.forward_step", "GPTModel.forward"
    ),
    "last gradient to the wire": lambda calls: ways_to_wire(
        calls, "DistributedDataParallel._after_grad"
    ),
    "optimizer.step to the learning rate": lambda calls: walks(
        calls, "MegatronOptimizer.step", "OptimizerParamScheduler.get_lr"
    ),
}
"""By name: from the calls of one rank in one step, each time that it goes this way."""


def extents_with_receive(calls: Calls, name: str) -> Iterator[Calls]:
    """The calls of a function that receive a tensor: not the first stage's, which has none to get."""
    for calls_within in extents(calls, name):
        if places(calls_within, "Receive.wait"):
            yield calls_within


def longest_walk(records: Records, walk: str, rooms_apart: bool) -> Length:
    """Of each run the longest if rooms are apart, else the shortest; of the runs the longest.

    Raises ValueError if no run goes this way: then functions have got other names, and `WALKS` needs
    them.
    """
    of_runs = []
    for ranks in records.calls.values():
        lengths = [
            length_of([call for call in found if not (rooms_apart and is_in_room(call.file))])
            for steps in ranks
            for calls in steps
            for found in WALKS[walk](calls)
        ]
        if lengths:
            each = zip(*lengths, strict=True)
            of_runs.append(Length(*map(max if rooms_apart else min, each)))
    if not of_runs:
        raise ValueError(f"no run goes the way {walk!r}; are its ends called otherwise now?")
    return Length(*map(max, zip(*of_runs, strict=True)))


def num_wrappers(calls: Calls) -> int:
    """Functions between `train_step` and plain 1F1B, which have called each other; 0 without 1F1B."""
    for place in places(calls, SCHEDULE):
        names = [calls[caller].name for caller in callers(calls, place)]
        return names.index("train_step")
    return 0


# -- All figures --


def figures_of(records: Records) -> dict[str, int]:
    """By name: all that is capped. The less of each, the better."""
    found, rooms = shares_in(records.everything, spine_files()), room_files()
    figures = {
        "spine: files": len(spine_files()),
        "spine: lines": found.num_lines,
        "spine: statements": sum(num_statements((PACKAGE / x).read_text()) for x in spine_files()),
        "spine: lines executed": found.executed,
        "spine: lines of branches never taken": found.dead,
        "spine: lines of functions never entered": found.never_entered,
        "spine: lines outside functions": found.rest,
        "spine: lines of signatures": found.signatures,
        "spine: functions never entered": len(found.unused),
        "rooms: lines executed": shares_in(records.everything, rooms).executed,
        "spine and rooms: lines executed": shares_in(
            records.everything, sorted({*spine_files(), *rooms})
        ).executed,
        "other files that a whole run enters": len(outside(records.everything)),
        "one step: lines reported, rooms apart": records.lines_of_a_step(
            lambda file: not is_in_room(file)
        ),
        "one step: lines reported, with doors": records.most_of_a_step(
            lambda step: lines_with_doors(step, PACKAGE, is_in_room)
        ),
        "one step: lines reported, with rooms": records.lines_of_a_step(lambda file: True),
        "one step: files, rooms apart": records.most_of_a_step(
            lambda step: len(files_outside(step, is_in_room))
        ),
        "files loaded by a GPT run": len(records.loaded),
        "wrappers before 1F1B": max(
            num_wrappers(calls)
            for ranks in records.calls.values()
            for steps in ranks
            for calls in steps
        ),
    }
    for name, ranks in records.calls.items():
        figures[f"calls of {name}, rooms apart"] = max(num_calls(steps)[0] for steps in ranks)
        figures[f"calls of {name}, with rooms"] = max(sum(num_calls(steps)) for steps in ranks)
    for walk in WALKS:
        for rooms_apart, suffix in ((True, "rooms apart"), (False, "with rooms")):
            length = longest_walk(records, walk, rooms_apart)
            for unit, number in length._asdict().items():
                figures[f"{walk}: {unit}, {suffix}"] = number
    return figures


def num_calls(steps: list[list[Call]]) -> tuple[int, int]:
    """How many calls of functions one rank makes in a step: rooms apart, and in rooms."""
    files = [[call.file for call in calls if call.file != WIRE] for calls in steps]
    in_rooms = [sum(map(is_in_room, of_step)) for of_step in files]
    return max(len(f) - n for f, n in zip(files, in_rooms, strict=True)), min(in_rooms)


def tables(records: Records, figures: dict[str, int], caps: dict[str, int] | None = None) -> str:
    """All figures, with their caps if there are any; the spine by section; shares. As text."""
    lines = [f"{'':62}{'is':>8}{'cap' if caps else '':>8}"]
    lines += [
        f"{name:62}{number:8,}" + (f"{caps[name]:8,}" if caps and name in caps else "")
        for name, number in figures.items()
    ]
    lines += ["", f"{'section of the spine':24}{'files':>8}{'lines':>8}{'executed':>10}"]
    sections = {}
    for section in [*dict.fromkeys(link.section for link in spine.read_spine()), None]:
        files = spine_files(section)
        found = shares_in(records.everything, files)
        sections[section] = len(files), found.num_lines
        counts = f"{len(files):8}{found.num_lines:8,}{found.executed:10,}"
        lines.append(f"{section or 'all':24}{counts}")
    lines += ["", *shares_of_spine(records), "", house_table(figures, sections)]
    for name, ranks in records.calls.items():
        apart, within = max(map(num_calls, ranks), key=sum)
        lines.append(
            f"calls of {name}: {apart + within:,}, {within / (apart + within):.0%} in rooms"
        )
    return "\n".join(lines)


def shares_of_spine(records: Records) -> list[str]:
    """One line for each kind of line that `Shares` knows."""
    found = shares_in(records.everything, spine_files())
    kinds = {
        "executed": found.executed,
        "in branches never taken": found.dead,
        "in functions never entered": found.never_entered,
        "outside functions": found.rest,
        "signatures and decorators, which are in the first or third too": found.signatures,
    }
    return [
        f"{number / found.num_lines:6.1%} of the spine: {kind}" for kind, number in kinds.items()
    ]


def what_is_unused(records: Records) -> list[str]:
    """One line for each file of the spine that has lines which no run executes."""
    lines = []
    for file in spine_files():
        found = shares_in(records.everything, [file])
        if found.dead or found.unused:
            names = ", ".join(found.unused) or "none"
            lines.append(f"{file}: {found.dead} lines of branches; functions: {names}")
    return lines


def main() -> None:
    """Does the runs; prints all figures, and what of the spine no run uses."""
    records = record_all()
    print(tables(records, figures_of(records)))
    print("\nnever taken, never entered:", *what_is_unused(records), sep="\n")


if __name__ == "__main__":
    main()
