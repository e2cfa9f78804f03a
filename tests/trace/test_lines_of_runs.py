"""The lines of whole training steps on real ranks are those that a recorder of the tests sees."""

import contextlib
import importlib
import io
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from minimegatron import pretrain_gpt
from minimegatron.tracing.run import Run
from minimegatron.tracing.unrolled import Unrolled, unroll
from tests.plain_runs import MODEL, PACKAGE, RUNS, TIMED, PlainRun, is_in_room, record_run
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
OF_PLAIN = {run.name: run for run in RUNS}


def train(flags: str) -> None:
    """Runs the program with these flags."""
    sys.argv = ["pretrain_gpt", *MODEL.split(), *flags.split()]
    with little_text(), contextlib.redirect_stdout(io.StringIO()):
        pretrain_gpt.main()


def lines_of(unrolled: Unrolled) -> dict[str, set[int]]:
    """By file of the package, rooms apart: the lines that ran."""
    found: dict[str, set[int]] = defaultdict(set)
    for function in unrolled.lines.functions:
        path, _, first = function.source.rpartition(":")
        file = path.removeprefix(f"{PACKAGE.name}/")
        name = unrolled.recording.sources[function.source].name.rpartition(".")[2]
        if not is_in_room(file) and name not in TIMED:
            found[file] |= {int(first) + line - 1 for line in function.lines}
    return found


def timed_lines(file: str) -> set[int]:
    """Lines of functions that wait for a neighbour."""
    annotate = importlib.import_module("annotate").annotate
    page = annotate(f"{PACKAGE.name}/{file}", (PACKAGE / file).read_text())
    return {
        line
        for symbol, definition in page.definitions.items()
        if symbol.rpartition(".")[2] in TIMED
        for line in range(definition.first_line, definition.end_line + 1)
    }


@pytest.mark.parametrize(
    "run",
    [
        OF_PLAIN["pp2·dp2 ZeRO-1"],
        OF_PLAIN["pp2·v2"],
        OF_PLAIN["tp2·pp2"],
        EXPERTS,
        ONE,
    ],
    ids=lambda run: run.name,
)
def test_its_lines_are_those_of_another_recorder(run: PlainRun, tmp_path: Path) -> None:
    watched = run_ranks(record_run, run.num_ranks, run.flags, timeout=240)
    flags = f"{run.flags} --trace {tmp_path} --trace-lines {STEP}"
    run_ranks(train, run.num_ranks, flags, timeout=240)
    found = unroll(Run.load(tmp_path))
    assert len(found) == run.num_ranks
    for rank, unrolled in found.items():
        # The first step is not among those that `record_run` keeps.
        other, mine = watched[rank].steps[STEP - 1].lines, lines_of(unrolled)
        expected = {
            file: lines - timed_lines(file)
            for file, lines in other.items()
            if not is_in_room(file) and file != "core/tracing.py"
        }
        mine = {file: lines - timed_lines(file) for file, lines in mine.items()}
        assert {f: sorted(n) for f, n in mine.items() if n} == {
            f: sorted(n) for f, n in expected.items() if n
        }
