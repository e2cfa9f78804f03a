"""A part on one GPU: a step that is captured as a CUDA graph does what eager steps do.

Called by: `run_part`. Calls: short runs of `pretrain_gpt`. On the CPU a recorded graph stands for one.
"""

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from minimegatron.core.full_cuda_graph import FullCudaGraphWrapper
from minimegatron.training import captured_step, training
from minimegatron.training.arguments import parse_args
from tests.gpu.place import Finding, Place, at_least, each, is_equal, no_problems
from tests.training import short_runs
from tests.training.bad_graph_configs import FLAG, QUIET
from tests.training.captured_runs import CAPTURED, EAGER, STEPS, Watched

OPTIONS = {
    "evaluation between": "--eval-iters 2 --split 60,20,20",
    "alone": "",
    "per token, untied": "--calculate-per-token-loss --untie-embeddings-and-output-weights",
    "bf16, ZeRO-1": "--bf16 --use-distributed-optimizer --overlap-grad-reduce",
}
TINY = "--num-layers 24 --hidden-size 64"
"""So little work that a GPU waits for the program, in eager steps."""


def differences(flags: str) -> tuple[list[str], list[float], list[float]]:
    """In a rank: what is not the same to the bit, and the evaluations' losses of both runs."""
    eager, captured = Watched(f"{EAGER} {flags}"), Watched(f"{CAPTURED} {flags}")
    return captured.same_as(eager), captured.evaluated, eager.evaluated


def to_the_bit(name: str, flags: str, place: Place) -> Iterator[Finding]:
    """Losses, gradients and weights of five steps with new data."""
    ((different, captured, eager),) = place.launch(differences, 1, flags)
    yield no_problems(f"{name}: steps, eager beside captured", STEPS, different)
    yield is_equal(f"{name}: losses of evaluations", captured, eager)


# -- What a capture forbids --


def refusal() -> str:
    """What the program says to a captured run with the check for NaN."""
    flags = f"{short_runs.MODEL} --attention-dropout 0 {FLAG}"
    try:
        parse_args(argv=flags.split(), environ={})
    except ValueError as error:
        return str(error)
    return "nothing"


def capture_with_a_check() -> str:
    """In a rank: the same run, if nobody refuses it. The name of the error, or "nothing"."""
    flags = CAPTURED.replace(QUIET, "")
    with mock.patch.object(captured_step, "_reads_numbers", lambda args: ()):
        try:
            Watched(flags)
        except RuntimeError as error:  # torch has several kinds of it
            return type(error).__name__
    return "nothing"


def forbidden(place: Place) -> Iterator[Finding]:
    """A run that reads a number in each microbatch."""
    said = refusal()
    found = "refused" if "the check for NaN" in said and QUIET in said else said
    yield is_equal("a captured run with the check for NaN", found, "refused")
    (error,) = place.launch(capture_with_a_check, 1)
    yield Finding("the same, not refused: error", error, "an error", error != "nothing")


# -- What it saves, and what it takes --


class Timed:
    """In place of `train_step`: it notes how long the schedule's call takes, and the memory."""

    def __init__(self) -> None:
        self.launch_ms: list[float] = []
        self.mebibytes: list[float] = []
        self._train_step = training.train_step

    def train_step(self, *args: Any) -> Any:
        *others, schedule = args
        return self._train_step(*others, partial(self._call, schedule))

    def _call(self, schedule: Any, **kwargs: Any) -> Any:
        _synchronize()
        begin = time.perf_counter()
        found = schedule(**kwargs)
        self.launch_ms.append(1000 * (time.perf_counter() - begin))
        _synchronize()
        self.mebibytes.append(_reserved())
        return found


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reserved() -> float:
    return torch.cuda.memory_reserved() / 2**20 if torch.cuda.is_available() else 0.0


def timed(flags: str, steps: int) -> tuple[float, float]:
    """In a rank: the median time of a call, in ms, and by how many MiB memory grew after two steps."""
    run = Timed()
    with mock.patch.object(training, "train_step", run.train_step):
        short_runs.run(flags, steps)
    return statistics.median(run.launch_ms[3:]), run.mebibytes[-1] - run.mebibytes[1]


def eager_and_replayed(sizes: str, steps: int) -> tuple[tuple[float, float], ...]:
    """In a rank: `timed` of both."""
    return timed(f"{EAGER} {sizes}", steps), timed(f"{CAPTURED} {sizes}", steps)


def launches(place: Place) -> Iterator[Finding]:
    """Two measurements of tiny layers; and the memory of a graph."""
    sizes, steps = ("--num-layers 1", 4) if place.is_quick else (TINY, 20)
    for number in range(1, 2 if place.is_quick else 3):
        (((eager, _), (replay, pool)),) = place.launch(eager_and_replayed, 1, sizes, steps)
        what = f"measurement {number}: time to launch a step, eager / replayed"
        yield at_least(what, eager / replay, 1.0, place.is_gpu)
    yield at_least("memory that the graph's pool adds, MiB", pool, 0.0, place.is_gpu)


def beside_eager(place: Place) -> Iterator[Finding]:
    """All of it; on a GPU with real graphs, else with recorded ones."""
    assert FullCudaGraphWrapper.cuda_graph["training"] is None
    options = list(OPTIONS.items())[: 1 if place.is_quick else None]
    sections = [partial(to_the_bit, name, flags, place) for name, flags in options]
    yield from each(*sections, partial(forbidden, place), partial(launches, place))
