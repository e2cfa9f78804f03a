"""How far a stage may run ahead of its neighbour: how many messages may lie unreceived.

A schedule with its own messages is counted in `planner.unreceived`. Torch-free. Megatron has no
counterpart: NCCL's messages wait in the sender's stream.

A send need not wait for its receiver, and that is what keeps a pipeline moving. But a stage that
never waited would fill the memory with messages: in a forward-only step nothing else holds the first
stage back. So a send waits while K messages of its payload to that peer are unreceived.

A limit that is too small costs time, and can make stages wait for each other for ever. The rule: K is
the largest number of unreceived messages when nothing but the order of work holds a stage back, and
a backward takes twice as long as a forward. With this much room the whole step can be done in that
one way, so no other timing of the same order can come to a standstill.
"""

from functools import lru_cache

from minimegatron.core.orders import lowering
from minimegatron.core.orders import orders as written
from minimegatron.core.orders.work import (
    FORWARD_ONLY_SEND_LIMIT,
    INTERLEAVED,
    SEND_LIMIT,
)
from minimegatron.core.pipeline_parallel.schedule_table import InterleavedOrder


def least_send_limit(forward_only: bool) -> int:
    """The smallest K. It is enough where a stage receives in every exchange."""
    return FORWARD_ONLY_SEND_LIMIT if forward_only else SEND_LIMIT


def get_interleaved_send_limit(order: InterleavedOrder, overlap: bool) -> int:
    """The K of one stage under interleaving. Without overlap the least is enough."""
    least = least_send_limit(order.forward_only)
    if not overlap:
        return least
    sizes = (order.pp_size, order.num_microbatches, order.num_model_chunks, order.group_size)
    limits = get_interleaved_send_limits(*sizes, order.forward_only, order.is_combined)
    return max(least, limits[order.pp_rank])


@lru_cache(maxsize=64)
def get_interleaved_send_limits(
    pp_size: int,
    num_microbatches: int,
    num_model_chunks: int,
    group_size: int,
    forward_only: bool,
    is_combined: bool = False,
) -> list[int]:
    """The most unreceived messages of each stage, where messages are overlapped.

    >>> get_interleaved_send_limits(2, 8, 2, 2, False), get_interleaved_send_limits(2, 8, 2, 8, False)
    ([2, 1], [7, 7])
    """
    sizes = (pp_size, num_microbatches, num_model_chunks, group_size)
    name = written.COMBINED if is_combined else INTERLEAVED
    config = written.PlanConfig(name, *sizes, forward_only)
    orders = written.order_of_ranks(config)
    return lowering.count_unreceived(
        orders, lowering.simulate_orders(orders, config), config.placement
    )
