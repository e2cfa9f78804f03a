"""The lines of whole training steps on real ranks are those that a recorder of the tests sees."""

import contextlib
import io
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from minimegatron import pretrain_gpt
from minimegatron.tracing import line_recorder
from minimegatron.tracing.run import Run
from minimegatron.tracing.unrolled import Unrolled, unroll
from tests.code_recorder import Recorder
from tests.plain_runs import MODEL, PACKAGE, RUNS, PlainRun
from tests.ranks import run_ranks
from tests.training.short_runs import PP2, little_text

pytestmark = pytest.mark.processes
STEP = 1
EXPERTS = PlainRun(
    "pp2·ep2 experts",
    4,
    f"{PP2} --position-embedding-type rope --global-batch-size 8 --num-experts 4 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
)
ONE = PlainRun("one process", 1, "--position-embedding-type rope --global-batch-size 4")
SEAM = "core/tracing.py"


def train(flags: str) -> dict[str, set[int]]:
    """Runs the program; the lines of the same step, by file, as the tests' recorder sees them."""
    other = Recorder(PACKAGE)
    sys.argv = ["pretrain_gpt", *MODEL.split(), *flags.split()]
    with little_text(), contextlib.redirect_stdout(io.StringIO()), told_as_well(other):
        pretrain_gpt.main()
    return dict(other.record.lines)


@contextlib.contextmanager
def told_as_well(other: Recorder):
    """What the interpreter tells the line recorder, it tells the other one too.

    One step, one timing: a rank that waits for another runs other lines the next time.
    """

    def settrace(trace: Callable | None) -> None:
        is_on = getattr(trace, "__func__", None) is line_recorder.LineRecorder._enter_frame
        sys.settrace(both(trace, other._enter_frame, trace.__self__) if is_on else trace)

    fake = SimpleNamespace(settrace=settrace, gettrace=sys.gettrace)
    with mock.patch.object(line_recorder, "sys", fake):
        yield


def both(first: Callable, second: Callable, recorder: Any) -> Callable:
    def trace(frame: FrameType, event: str, argument: Any) -> Callable | None:
        told = first(frame, event, argument)
        # What watches the step, and all that it calls, is no part of it.
        also = None if recorder._num_muted else second(frame, event, argument)
        if told is None or also is None:
            return told or also
        return both(told, also, recorder)

    return trace


def lines_of(unrolled: Unrolled) -> dict[str, set[int]]:
    """By file of the package: the lines that ran."""
    found: dict[str, set[int]] = defaultdict(set)
    for function in unrolled.lines.functions:
        path, _, first = function.source.rpartition(":")
        file = path.removeprefix(f"{PACKAGE.name}/")
        found[file] |= {int(first) + line - 1 for line in function.lines}
    return found


@pytest.mark.parametrize("run", [*RUNS, EXPERTS, ONE], ids=lambda run: run.name)
def test_its_lines_are_those_of_another_recorder(run: PlainRun, tmp_path: Path) -> None:
    flags = f"{run.flags} --trace {tmp_path} --trace-lines {STEP}"
    watched = run_ranks(train, run.num_ranks, flags, timeout=240)
    found = unroll(Run.load(tmp_path))
    assert len(found) == run.num_ranks
    for rank, unrolled in found.items():
        mine, other = lines_of(unrolled), watched[rank]
        assert {f: sorted(n) for f, n in mine.items() if n} == {
            f: sorted(n) for f, n in other.items() if n and f != SEAM
        }
