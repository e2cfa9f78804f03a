"""What an observer of a run must know to find its plan: links of work by name, configs of runs.

Torch-free. Megatron has no counterpart.
"""

from collections.abc import Mapping

from minimegatron.core.orders.orders import (
    COMBINED,
    INTERLEAVED,
    NO_PIPELINING,
    ONE_F_ONE_B,
    TAGGED,
    PlanConfig,
    get_schedule,
)
from minimegatron.core.orders.placement import Placement
from minimegatron.planner.actions import KINDS

KIND_OF_LINK = {f"{kind.name}-compute": kind.name for kind in KINDS.values() if kind.computes}
"""The name that a link of work is traced under -> its kind. A pair is traced as its two parts."""

COMBINED_STEP = "combined-step"
"""The link of a step of combined 1F1B: a pair, or either half alone. Its attributes say of what."""
LAYER_NODE = "layer-node"
"""A node of a layer within it: one that computes, or the start of one that communicates."""
ATTENTION_BLOCK = "attention-block"
"""Attention to some keys, where ranks share a sequence; or its gradients."""

FUNCTIONS = {
    "forward_backward_no_pipelining": NO_PIPELINING,
    "forward_backward_pipelining_without_interleaving": ONE_F_ONE_B,
    "forward_backward_pipelining_with_interleaving": INTERLEAVED,
}
"""The function that runs a written schedule -> its name among plans."""


def schedule_of_run(symbol: str, attributes: Mapping) -> str:
    """The schedule's name, from the symbol and the attributes of the "forward-backward" link.

    >>> schedule_of_run("a.forward_backward_no_pipelining", {}), schedule_of_run("a.my_own", {})
    ('no-pipelining', 'my_own')
    """
    function = symbol.rpartition(".")[2]
    return attributes.get("schedule") or FUNCTIONS.get(function, function)


def config_of_run(
    schedule: str,
    pp_size: int,
    num_microbatches: int,
    num_model_chunks: int = 1,
    *,
    group_size: int | None = None,
    forward_only: bool = False,
    overlap_p2p_comm: bool = False,
    batch_p2p_comm: bool = True,
    message_bytes: int = 0,
    wire: str | None = None,
    message_factors: tuple[int, ...] | None = None,
    message_sizes: tuple[tuple[int, ...], ...] | None = None,
) -> PlanConfig:
    """The config of the plan that a run should follow, from what the run was given.

    As `plan.plan` fills it in; but nothing is refused, because a student may have written the run.

    >>> config_of_run("interleaved", 2, 4, 2).microbatch_group_size_per_vp_stage
    2
    """
    is_interleaved = schedule == INTERLEAVED or (schedule == COMBINED and pp_size > 1)
    has_chunks = is_interleaved or num_model_chunks > 1
    return PlanConfig(
        schedule=schedule,
        pp_size=pp_size,
        num_microbatches=num_microbatches,
        num_model_chunks=num_model_chunks,
        microbatch_group_size_per_vp_stage=(group_size or pp_size) if is_interleaved else None,
        forward_only=forward_only,
        overlap_p2p_comm=overlap_p2p_comm and has_chunks and wire is None,
        batch_p2p_comm=batch_p2p_comm or wire == TAGGED,
        message_bytes=message_bytes,
        placement=placement_of_run(schedule, pp_size, num_model_chunks),
        wire=wire,
        message_factors=message_factors,
        message_sizes=message_sizes,
    )


def placement_of_run(schedule: str, pp_size: int, num_model_chunks: int) -> Placement | None:
    """Where the schedule's stages are; None (a line or a loop) if nobody registered it."""
    try:
        return get_schedule(schedule).placed(pp_size, num_model_chunks)
    except ValueError:
        return None
