"""How far a stage may run ahead of its neighbour: how many messages may lie unreceived.

A schedule with its own messages is counted in `planner.unreceived`. Torch-free. Megatron has no
counterpart: NCCL's messages wait in the sender's stream.

A send need not wait for its receiver, and that is what keeps a pipeline moving. But a stage that
never waited would fill the memory with messages: in a forward-only step nothing else holds the first
stage back. So each channel (peer, payload, chunk) has a limit K, and a send waits while K
messages of its channel are unreceived.

A limit that is too small costs time, and can make stages wait for each other for ever. The rule: K is
the largest number of unreceived messages when nothing but the order of work holds a stage back, and
a backward takes twice as long as a forward. With this much room the whole step can be done in that
one way, so no other timing of the same order can come to a standstill.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from minimegatron.core.pipeline_parallel.lowering import (
    Channel,
    count_unreceived,
    simulate_orders,
)
from minimegatron.core.pipeline_parallel.orders import (
    COMBINED,
    INTERLEAVED,
    PlanConfig,
    order_of_ranks,
)
from minimegatron.core.pipeline_parallel.schedule_table import InterleavedOrder
from minimegatron.core.pipeline_parallel.work import ACTIVATION, GRADIENT

SEND_LIMIT = 2
"""The smallest K: one message is being used while the next one travels."""

FORWARD_ONLY_SEND_LIMIT = 4


@dataclass(frozen=True)
class SendPlan:
    """What a stage sends in one step, as far as its communicator must know it beforehand.

    The communicator's methods say what is sent, not which chunk made it; so the order says it here.
    """

    least_limit: int = SEND_LIMIT
    limits: Mapping[Channel, int] = field(default_factory=dict)
    """The channels whose K is more than the least."""
    chunks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Per payload, the chunk of its n-th message; left out where a stage has one chunk."""


def get_interleaved_send_plan(order: InterleavedOrder, overlap: bool) -> SendPlan:
    """The send plan of one stage under interleaving. Without overlap the least K is enough."""
    least = FORWARD_ONLY_SEND_LIMIT if order.forward_only else SEND_LIMIT
    ks = range(order.counts.total)
    forwards = [order.model_chunk_id(k, forward=True) for k in ks]
    backwards = [] if order.forward_only else [order.model_chunk_id(k, forward=False) for k in ks]
    chunks = {
        ACTIVATION: [chunk for chunk in forwards if not order.is_last_virtual_stage(chunk)],
        GRADIENT: [chunk for chunk in backwards if not order.is_first_virtual_stage(chunk)],
    }
    if not overlap:
        return SendPlan(least, {}, chunks)
    sizes = (order.pp_size, order.num_microbatches, order.num_model_chunks, order.group_size)
    limits = get_interleaved_send_limits(*sizes, order.forward_only, order.is_combined)
    return SendPlan(least, limits[order.pp_rank], chunks)


@lru_cache(maxsize=64)
def get_interleaved_send_limits(
    pp_size: int,
    num_microbatches: int,
    num_model_chunks: int,
    group_size: int,
    forward_only: bool,
    is_combined: bool = False,
) -> list[Mapping[Channel, int]]:
    """The channels of each stage whose K is more than the smallest, where messages are overlapped.

    Without overlap a stage receives in every exchange, and the smallest K is enough.

    >>> get_interleaved_send_limits(2, 8, 2, 2, False), get_interleaved_send_limits(2, 8, 2, 8, False)
    ([{}, {}], [{('gradient', 1): 7}, {('activation', 0): 7}])
    """
    sizes = (pp_size, num_microbatches, num_model_chunks, group_size)
    config = PlanConfig(COMBINED if is_combined else INTERLEAVED, *sizes, forward_only)
    orders = order_of_ranks(config)
    counts = count_unreceived(orders, simulate_orders(orders, config), config.placement)
    return [limits_above_least(of_rank, forward_only) for of_rank in counts]


def limits_above_least(counts: Mapping[Channel, int], forward_only: bool) -> dict[Channel, int]:
    """Of the most unreceived messages of each channel, those that are more than the least K."""
    least = FORWARD_ONLY_SEND_LIMIT if forward_only else SEND_LIMIT
    return {channel: k for channel, k in counts.items() if k > least}
