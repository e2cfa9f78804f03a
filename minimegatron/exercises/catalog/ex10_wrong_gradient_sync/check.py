"""Checks the predictions for three versions of the gradient sync, then runs the chosen one.

Called by: the exercises' engine, on 4 ranks. Calls: `bench_gpt`.
"""

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch.distributed as dist

from minimegatron.core.pipeline_parallel.model_chunk import ModelChunk
from minimegatron.core.pipeline_parallel.schedule_table import get_num_warmup_microbatches
from minimegatron.core.pipeline_parallel.utils import GradSync
from minimegatron.exercises.bench_gpt import (
    GptStep,
    StepCase,
    check_gradients,
    on_these_ranks,
    reference_gradients,
)
from minimegatron.exercises.check import Case, Result, Wrong, installed

CHUNK = "minimegatron.core.pipeline_parallel.model_chunk.ModelChunk."
SYNC = "minimegatron.core.pipeline_parallel.utils.GradSync"
OURS = {"backward_step": ModelChunk.backward_step}
"""In a dict, where `installed` does not replace it."""
REFUSALS = ("another gradient of", "no gradient came")
"""How the gradient buffers begin to say that they were let go too early, or never."""


def cases(seed: int) -> list[Case]:
    """Predictions for drawn sizes, edge cases among them; then real steps."""
    draw = random.Random(seed)
    sizes = [(2, 3), (4, 8), (4, 2), (4, 1), (3, 3), (1, 4)]
    sizes += [(draw.randint(2, 6), draw.randint(1, 9)) for _ in range(4)]
    predictions = Case("predictions", sizes=sizes)
    counts = [1, 3] if not seed else draw.sample([1, 2, 3, 4], 2)
    steps = [
        StepCase(pp=2, num_microbatches=M, seed=seed, overlap_grad_reduce=True) for M in counts
    ]
    return [predictions] + [
        Case(f"2 stages, 2 replicas, M={s.num_microbatches}", step=s) for s in steps
    ]


def run(student: ModuleType, case: Case) -> Result:
    """Predictions, or a step with the chosen version."""
    if "sizes" in case.values:
        return _check_predictions(student, case)
    version = _chosen(student)
    step = on_these_ranks(case.step)
    expected = reference_gradients(case.step, step.groups.dp.size())
    decision = _Decision(getattr(student, f"version_{version.lower()}"), step)
    with (
        installed(_HeldBack, SYNC),
        installed(decision.backward_step, CHUNK + "backward_step"),
    ):
        try:
            step.forward_backward()
        except RuntimeError as error:
            if not any(words in str(error) for words in REFUSALS):
                raise
            raise Wrong(_refused(version, step, str(error))) from error
    step.meet()
    check_gradients(step, expected)
    return Result({"version": version, "let go": f"{decision.num_let_go} of its backwards"})


# -- Predictions --


class _Counter:
    """Stands for a `GradSync`, and counts the backwards that run while it is let go."""

    def __init__(self) -> None:
        self.is_let_go, self.num_backwards = False, 0

    def enable(self) -> None:
        self.is_let_go = True

    def disable(self) -> None:
        self.is_let_go = False


def _count(version: Any, p: int, r: int, M: int) -> int:
    counter = _Counter()
    for _ in version(get_num_warmup_microbatches(p, r, M), M, counter):
        counter.num_backwards += counter.is_let_go
    return counter.num_backwards


def _check_predictions(student: ModuleType, case: Case) -> Result:
    for p, M in case.sizes:
        for version in "ABC":
            for r in range(p):
                found = student.num_backwards_that_send(version, p, r, M)
                expected = _count(getattr(student, f"version_{version.lower()}"), p, r, M)
                if found != expected:
                    raise Wrong(_prediction_words(version, p, r, M, found, expected))
    _chosen(student)
    return Result({"predicted": f"{3 * len(case.sizes)} timelines, right on every stage"})


def _prediction_words(version: str, p: int, r: int, M: int, found: Any, expected: int) -> str:
    num_warmup = get_num_warmup_microbatches(p, r, M)
    return (
        f"version {version}, p={p}, M={M}, stage {r}: you predict {found!r}, but gradients are let "
        f"go during {expected} of its backwards\n"
        f"This stage has {num_warmup} warm-up microbatches, so its steady loop runs "
        f"{M - num_warmup} times and its cool-down loop {num_warmup} times."
    )


def _chosen(student: ModuleType) -> str:
    version = student.RIGHT
    if version not in ("A", "B", "C"):
        raise Wrong(f'RIGHT is {version!r}; set it to "A", "B" or "C", the version that is right')
    return version


# -- The real step --


class _HeldBack(GradSync):
    """The schedule's own decisions are not listened to; `_Decision` takes them."""

    current: GradSync | None = None

    def __init__(self, config: Any):
        super().__init__(config)
        _HeldBack.current = self

    def enable(self) -> None:
        """What the schedule says at its usual places."""

    def let_go(self) -> None:
        """What the student's version says."""
        super().enable()


class _Decision:
    """Runs the student's version alongside the schedule: one `yield` for each backward."""

    def __init__(self, version: Any, step: GptStep):
        M, pp_group = step.case.num_microbatches, step.groups.pp
        num_warmup = get_num_warmup_microbatches(pp_group.size(), pp_group.rank(), M)
        self.num_let_go, self._is_let_go = 0, False
        self._backwards: Iterator[None] = iter(version(num_warmup, M, self))

    def enable(self) -> None:
        """Called by the version."""
        _HeldBack.current.let_go()
        self._is_let_go = True

    def disable(self) -> None:
        """Called by the version."""
        _HeldBack.current.disable()
        self._is_let_go = False

    @property
    def backward_step(self) -> Any:
        """A `ModelChunk.backward_step` that asks the version first."""

        def backward_step(chunk: ModelChunk, *arguments: Any) -> Any:
            next(self._backwards, None)
            self.num_let_go += self._is_let_go
            return OURS["backward_step"](chunk, *arguments)

        return backward_step


def _refused(version: str, step: GptStep, reason: str) -> str:
    stage, M = step.groups.pp.rank(), step.case.num_microbatches
    num_warmup = get_num_warmup_microbatches(step.case.pp, stage, M)
    loops = (
        f"On stage {stage} the steady loop runs {M - num_warmup} x and the cool-down loop "
        f"{num_warmup} x. "
    )
    if REFUSALS[0] in reason:
        loops += (
            "Gradients were let go before the stage's last backward: what was sent lacks a "
            "microbatch, and the next one's gradient has nowhere to go."
        )
    else:
        loops += (
            f"Gradients were never let go: its {dist.get_world_size() // step.case.pp} replicas "
            "would each keep their own, and become different models without any error."
        )
    shown = reason if len(reason) < 300 else f"{reason[:140]} ... {reason[-140:]}"
    return (
        f"rank {step.place()}: version {version} is not right\n{loops}\n"
        f"The gradient buffers say: {shown}"
    )
