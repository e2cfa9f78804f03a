"""Which files of the package one training step enters, and how deep a message's way to the wire is.

    python -m tests.step_files

Two ranks do a step of a GPT with plain 1F1B (p = 2, t = 1), over shared memory, with nobody watching. A
file counts if a function of it is called in each of several steps, before the optimizer's part of them.
`core/tracing.py` and `core/left_out.py` do not count: nobody watches and every argument is our own, so
that their decorators hand the call on.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import minimegatron
from minimegatron.backend.channels import Connection
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.training.tiny_gpt import TinyGPT
from tests.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "tools"))
spine = importlib.import_module("source.spine")

PACKAGE = f"{Path(minimegatron.__file__).parent}/"
DECORATORS = ("core/tracing.py", "core/left_out.py")
USERS_FILE = "training/tiny_gpt.py"
NOT_PLUMBING = (
    "core/models/",
    "core/transformer/",
    "core/tensor_parallel/",
    "core/distributed/",
    USERS_FILE,
)
"""What computes, and what the user writes. The rest lies between the schedule and the wire."""
MOST_PLUMBING, MOST_FILES = 7, 25
NUM_STEPS = 4
WAY = ["exchange", "start", "send", "send", "send"]
"""From what the schedule calls: two functions of the communicator, then `torch.distributed`; behind
that door one function each of the group, its mesh and a connection."""


def watch_a_step() -> tuple[dict[str, int], list[list[str]]]:
    """In a rank: calls per file of one step, and each message's way from its front to the wire."""
    gpt = TinyGPT(pp=2, num_layers=4)
    schedule = get_forward_backward_func()
    gpt.step(4, schedule)
    steps = [_watch_one_step(gpt, schedule) for _ in range(NUM_STEPS)]
    # When a rank is late, its neighbour needs memory for one message more: once, in some step.
    always = set.intersection(*(set(entered) for entered, _ in steps))
    entered, ways = steps[-1]
    return {file: entered[file] for file in always}, ways


def _watch_one_step(gpt: TinyGPT, schedule: Callable) -> tuple[dict[str, int], list[list[str]]]:
    entered: Counter[str] = Counter()
    ways = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            entered[name.removeprefix(PACKAGE)] += 1
            if frame.f_code is Connection.send.__code__:
                ways.append(_way_from_schedule(frame))

    sys.setprofile(profile)
    try:
        gpt.step(4, schedule)
    finally:
        sys.setprofile(None)
    for file in DECORATORS:
        del entered[file]
    return dict(entered), [way for way in ways if "exchange" in way]


def _way_from_schedule(frame: FrameType | None) -> list[str]:
    """The package's functions that a message passes, from the one that the schedule calls.

    [] for messages that come from elsewhere.
    """
    way: list[str] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith("pipeline_parallel/loops.py"):
            return way[::-1]
        if file.startswith(PACKAGE) and not file.endswith(DECORATORS):
            way.append(frame.f_code.co_name)
        frame = frame.f_back
    return []


def to_read(ranks: list[tuple[dict[str, int], list]]) -> list[str]:
    """The files of a step, without those in rooms: behind `torch.distributed`, orders of work, ..."""
    files = sorted({file for entered, _ in ranks for file in entered})
    return [file for file in files if not any(room.has(file) for room in spine.read_rooms())]


def plumbing(files: list[str]) -> list[str]:
    """Of the files of a step, those between the schedule and the wire."""
    return [file for file in files if not file.startswith(NOT_PLUMBING)]


def main() -> None:
    """Prints the files, with the calls of each rank, and the ways of the messages."""
    ranks = run_ranks(watch_a_step, 2)
    files = to_read(ranks)
    print(f"{len(files)} files, {len(plumbing(files))} of them plumbing (*); calls on rank 0 and 1")
    for file in files:
        calls = [entered.get(file, 0) for entered, _ in ranks]
        print(f"  {'*' if file in plumbing(files) else ' '} {file:56} {calls[0]:5} {calls[1]:5}")
    for way in sorted({" -> ".join(way) for _, ways in ranks for way in ways}):
        print(f"  {way}")


if __name__ == "__main__":
    main()
