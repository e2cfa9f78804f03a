"""What the runner of orders cannot run, found before any message is sent, and on every rank alike.

Megatron has no counterpart.
"""

import weakref
from collections.abc import Iterator
from hashlib import sha256

import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.lowering import LoweredStep
from minimegatron.core.pipeline_parallel.orders import WRITTEN_HERE, placement_of
from minimegatron.core.pipeline_parallel.placement import Placement
from minimegatron.core.pipeline_parallel.step_frame import refuse_shared_iterators
from minimegatron.core.pipeline_parallel.work import (
    BACKWARD,
    COMMUNICATE,
    FORWARD,
    Action,
    parts_of,
)
from minimegatron.core.utils import get_device


def work_of(actions: list[Action]) -> Iterator[Action]:
    """The single pieces of work among a rank's actions, in order."""
    for action in actions:
        if action.kind != COMMUNICATE:
            yield from parts_of(action)


def count_in_flight(actions: list[Action]) -> int:
    """Forwards before the first backward: what a schedule calls its warm-up, and one more."""
    kinds = [action.kind for action in work_of(actions)]
    return max(1, kinds.index(BACKWARD) if BACKWARD in kinds else len(kinds))


def require_runnable(step: LoweredStep) -> None:
    """Raises ValueError for a step that can be planned, but that this runner cannot run."""
    name, placement = step.config.schedule, step.config.placement
    if placement.num_copies > 1:
        raise ValueError(
            f"schedule {name} runs {placement.num_copies} copies of the model against each other, "
            "and nothing here sums their gradients; plan it (minimegatron plan), or train with "
            "another schedule"
        )
    # Every rank looks at all of them: an error on one alone would leave the others waiting.
    kinds = {action.kind for actions in step.ranks for action in work_of(actions)}
    if split := sorted(kinds - {FORWARD, BACKWARD}):
        raise ValueError(
            f"schedule {name} has work of the kind {split[0]}, which can be planned and simulated "
            "but not run; yield rank.backward(...), which computes both gradients"
        )


def check_step(
    step: LoweredStep, config: ModelParallelConfig, models: list[torch.nn.Module], iterators: list
) -> None:
    """Raises ValueError for a step that does not fit the chunks, their data, or their places."""
    require_runnable(step)
    name, placement = step.config.schedule, step.config.placement
    if len(models) != placement.num_model_chunks:
        raise ValueError(
            f"schedule {name} runs {placement.num_model_chunks} chunks on each rank, but the model "
            f"is {len(models)}; set virtual_pipeline_model_parallel_size, and pipeline_schedule"
        )
    if len(iterators) != len(models):
        raise ValueError(
            f"the model is {len(models)} chunks, but there are {len(iterators)} data iterators; give a "
            "list with one for each, that goes through all microbatches by itself"
        )
    refuse_shared_iterators(iterators)
    if config.pipeline_model_parallel_size == placement.pp_size:
        _check_placement(name, placement, config)
    num_in_flight = 0 if step.config.forward_only else max(map(count_in_flight, step.ranks))
    wrappers = (part for model in models for part in model.modules())
    ddp = torch.nn.parallel.DistributedDataParallel
    if num_in_flight > 1 and any(isinstance(part, ddp) for part in wrappers):
        raise ValueError(
            f"this schedule has {num_in_flight} microbatches in flight, but torch's "
            "DistributedDataParallel pairs each backward with the latest forward and would not sum "
            "gradients; use our own, or a schedule with one in flight"
        )


_agreed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def require_agreement(step: LoweredStep, pp_group: dist.ProcessGroup) -> None:
    """Once for each step of a user's own: raises ValueError on every rank if the ranks' plans differ.

    Each rank plans for all. Where these plans differ, messages of one microbatch would be taken for
    those of another.
    """
    if step.config.schedule in WRITTEN_HERE or not isinstance(pp_group, dist.ProcessGroup):
        return
    agreed = _agreed.setdefault(pp_group, {})
    if any(known is step for known in agreed.values()):
        return
    digest = int.from_bytes(sha256(repr(step.ranks).encode()).digest()[:7])
    if digest in agreed:
        return
    ends = torch.tensor([digest, -digest], device=get_device())
    collectives.all_reduce(ends, pp_group, op=collectives.ReduceOp.MAX)
    if ends.tolist() != [digest, -digest]:
        raise ValueError(
            f"schedule {step.config.schedule} is not the same on all ranks of the pipeline; it may "
            "depend on the rank that it is given and on nothing else: no chance, no set's order, no "
            "environment"
        )
    agreed[digest] = step


def _check_placement(name: str, placement: Placement, config: ModelParallelConfig) -> None:
    built_for = placement_of(config)
    if built_for.stages != placement.stages:
        raise ValueError(
            f"schedule {name} places the model's stages as {_words(placement)}, but the model was "
            f"built as {_words(built_for)}; build it with pipeline_schedule={name!r} "
            "(--pipeline-schedule)"
        )


def _words(placement: Placement) -> str:
    return f"{placement.name} {[list(chunks) for chunks in placement.stages]}"
