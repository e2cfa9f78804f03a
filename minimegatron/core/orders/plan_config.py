"""What a plan is a plan of: the schedule's name, the sizes, the placement, the wire.

Torch-free. Megatron has no counterpart.
"""

from dataclasses import dataclass

from minimegatron.core.orders.placement import Placement, usual_placement
from minimegatron.core.orders.work import INTERLEAVED, NO_PIPELINING, ONE_F_ONE_B

GPIPE = "gpipe"
COMBINED = "combined"
BREADTH_FIRST = "breadth-first"

WRITTEN_HERE = (NO_PIPELINING, GPIPE, ONE_F_ONE_B, INTERLEAVED, COMBINED, BREADTH_FIRST)
"""The orders that are written in `orders`."""

TAGGED, UNTAGGED = "tagged", "untagged"
"""Wires: with tags an activation cannot be taken for a gradient; without, order is all there is."""


@dataclass(frozen=True)
class PlanConfig:
    """What a plan is a plan of. `planner.plan.plan` checks these values and fills in the defaults."""

    schedule: str
    pp_size: int
    """p, the number of stages."""
    num_microbatches: int
    """M, microbatches in the step."""
    num_model_chunks: int = 1
    """v, chunks (virtual stages) per stage."""
    microbatch_group_size_per_vp_stage: int | None = None
    """G, microbatches run on one chunk before the next chunk's turn; None without interleaving."""
    forward_only: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    message_bytes: int = 0
    """Size of one activation or gradient between stages; `memory.message_bytes` computes it."""
    placement: Placement | None = None
    """Which stage of the model is where; None for a line or, with several chunks, a loop."""
    wire: str | None = None
    """`TAGGED` or `UNTAGGED`, for messages that were lowered from an order; None for others."""
    message_factors: tuple[int, ...] | None = None
    """Size of what each virtual stage sends on, in `message_bytes`; None: of all of them 1. Behind a
    stage of its own for further tokens it is more, `mtp_costs.lengths_behind`."""
    message_sizes: tuple[tuple[int, ...], ...] | None = None
    """Of each virtual stage, the sizes of all that it sends on, one after the other, where that may be
    several messages: T5's decoder, `stack_costs.messages_behind`. None: one message."""

    def __post_init__(self) -> None:
        if self.placement is None:
            usual = usual_placement(self.pp_size, self.num_model_chunks)
            object.__setattr__(self, "placement", usual)

    @property
    def num_virtual_stages(self) -> int:
        """Stages that a microbatch passes through: p * v, less with two copies of the model."""
        return self.placement.num_stages

    def bytes_behind(self, stage: int) -> int:
        """Size of the activation that a virtual stage sends on, and of the gradient that comes back."""
        factors = self.message_factors
        return self.message_bytes * (1 if factors is None else factors[stage])

    def sizes_behind(self, stage: int) -> tuple[int, ...]:
        """The same of each message, in the order in which they are sent."""
        sizes = self.message_sizes
        return (self.bytes_behind(stage),) if sizes is None else sizes[stage]


@dataclass
class PlannedRank:
    """One rank of a pipeline that is being planned: where it is, and the step's sizes."""

    config: PlanConfig
    pp_rank: int
    phase: str | None = None

    @property
    def pp_size(self) -> int:
        """p, ranks of the pipeline."""
        return self.config.pp_size

    @property
    def num_microbatches(self) -> int:
        """M, microbatches in the step."""
        return self.config.num_microbatches

    @property
    def num_model_chunks(self) -> int:
        """v, chunks on this rank."""
        return self.config.num_model_chunks

    @property
    def placement(self) -> Placement:
        """Which stage each chunk is."""
        return self.config.placement
