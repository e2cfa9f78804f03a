"""Runs the chosen version of the gradient sync in real steps, on 4 ranks."""

import importlib
import random
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch.distributed as dist

from minimegatron.core.pipeline_parallel.schedule_table import get_num_warmup_microbatches
from minimegatron.core.pipeline_parallel.steps import ModelChunk
from minimegatron.core.pipeline_parallel.utils import GradSync
from minimegatron.exercises.bench.gpt_step import GptStep, StepCase, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.catalog.ex10_wrong_gradient_sync.alone import (
    CHOICE,
    about_edited,
    edited_versions,
)
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed

CHUNK = "minimegatron.core.pipeline_parallel.steps.ModelChunk."
SYNC = "minimegatron.core.pipeline_parallel.step_frame.GradSync"
OURS = {"backward_step": ModelChunk.backward_step}
"""In a dict, where `installed` does not replace it."""
REFUSALS = ("another gradient of", "no gradient came")
"""How the gradient buffers begin to say that they were let go too early, or never."""
WORLD = 4


def cases(seed: int) -> list[Case]:
    """Real steps."""
    draw = random.Random(seed)
    counts = [1, draw.choice([2, 4]) if seed else 3]
    both = {"pp": 2, "seed": data_seed(seed), "overlap_grad_reduce": True}
    steps = [StepCase(num_microbatches=M, **both) for M in counts]
    return [
        Case(f"2 stages, 2 replicas, M={step.num_microbatches}", part=CHOICE, step=step.values)
        for step in steps
    ]


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """A step with the chosen version."""
    version = str(student.RIGHT)
    step = on_these_ranks(case.step)
    stub = importlib.import_module(f"{__package__}.stub")
    decision = _Decision(getattr(stub, f"version_{version.lower()}"), step)
    with (
        installed(_HeldBack, SYNC),
        installed(decision.backward_step, CHUNK + "backward_step"),
    ):
        try:
            step.forward_backward()
        except RuntimeError as error:
            if not any(words in str(error) for words in REFUSALS):
                raise
            words = _refused(version, step, str(error))
            raise Wrong(words + about_edited(version, edited_versions(student))) from error
    step.meet()
    return {"gradients": step.gradients(), "version": version, "let go": decision.num_let_go}


def judge(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    """Every gradient."""
    Reference(case.step, WORLD).run().check_gradients([one["gradients"] for one in answers])
    first = answers[0]
    return Result({"version": first["version"], "let go": f"{first['let go']} of its backwards"})


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


def _who(step: GptStep) -> str:
    stage, replica = step.groups.pp.rank(), step.groups.dp.rank()
    return f"{dist.get_rank()} (stage {stage}, dp {replica})"


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
        f"rank {_who(step)}: version {version} is not right\n{loops}\n"
        f"The gradient buffers say: {shown}"
    )
