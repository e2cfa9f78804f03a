"""What the runner of orders cannot run, found before any message is sent, and on every rank alike.

Megatron has no counterpart.
"""

import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders.lowering import CommonOrder, LoweredStep, RankStep
from minimegatron.core.orders.orders import placement_of
from minimegatron.core.orders.placement import Placement
from minimegatron.core.orders.work import BACKWARD, FORWARD
from minimegatron.core.pipeline_parallel.schedule_checks import refuse_shared_iterators


def require_runnable(step: CommonOrder | LoweredStep) -> None:
    """Raises ValueError for a step that can be planned, but that this runner cannot run."""
    name, placement = step.config.schedule, step.config.placement
    if placement.num_copies > 1:
        raise ValueError(
            f"schedule {name} runs {placement.num_copies} copies of the model against each other, "
            "and nothing here sums their gradients; plan it (minimegatron plan), or train with "
            "another schedule"
        )
    if split := sorted(step.kinds - {FORWARD, BACKWARD}):
        raise ValueError(
            f"schedule {name} has work of the kind {split[0]}, which can be planned and simulated "
            "but not run; yield rank.backward(...), which computes both gradients"
        )


def check_step(
    step: RankStep, config: ModelParallelConfig, models: list[torch.nn.Module], iterators: list
) -> None:
    """Raises ValueError for a step that does not fit the chunks, their data, or their places."""
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
    num_in_flight = 0 if step.config.forward_only else step.most_in_flight
    wrappers = (part for model in models for part in model.modules())
    ddp = torch.nn.parallel.DistributedDataParallel
    if num_in_flight > 1 and any(isinstance(part, ddp) for part in wrappers):
        raise ValueError(
            f"this schedule has {num_in_flight} microbatches in flight, but torch's "
            "DistributedDataParallel pairs each backward with the latest forward and would not sum "
            "gradients; use our own, or a schedule with one in flight"
        )


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
