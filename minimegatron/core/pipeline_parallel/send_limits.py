"""How far a stage may run ahead of its neighbour: how many messages may lie unreceived.

Called by: `interleaved`, once per step, for `StepFrame`. Calls: `schedule_table`. A planned
schedule's limits are counted from its plan, in `planner.unreceived`.
Torch-free. Megatron has no counterpart: NCCL's messages wait in the sender's stream.

A send need not wait for its receiver, and that is what keeps a pipeline moving. But a stage that
never waited would fill the memory with messages: in a forward-only step nothing else holds the first
stage back. So each channel (neighbour, payload, chunk) has a limit K, and a send waits while K
messages of its channel are unreceived.

A limit that is too small costs time, and can make stages wait for each other for ever. The rule: K is
the largest number of unreceived messages when nothing but the order of work holds a stage back, and
a backward takes twice as long as a forward. With this much room the whole step can be done in that
one way, so no other timing of the same order can come to a standstill.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from minimegatron.core.pipeline_parallel.schedule_table import InterleavedOrder

SEND_LIMIT = 2
"""The smallest K: one message is being used while the next one travels."""

FORWARD_ONLY_SEND_LIMIT = 4

Channel = tuple[str, int]
"""(payload, chunk that sends it), on one rank; the payload decides which neighbour it goes to."""


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

    def limit(self, channel: Channel) -> int:
        """K of a channel."""
        return self.limits.get(channel, self.least_limit)

    def chunk(self, payload: str, number: int) -> int:
        """The chunk that sends message `number` of a payload; 0 beyond what is planned."""
        chunks = self.chunks.get(payload, ())
        return chunks[number] if number < len(chunks) else 0


def get_interleaved_send_plan(order: InterleavedOrder, overlap: bool) -> SendPlan:
    """The send plan of one stage under interleaving. Without overlap the least K is enough."""
    least = FORWARD_ONLY_SEND_LIMIT if order.forward_only else SEND_LIMIT
    ks = range(order.counts.total)
    forwards = [order.model_chunk_id(k, forward=True) for k in ks]
    backwards = [] if order.forward_only else [order.model_chunk_id(k, forward=False) for k in ks]
    chunks = {
        _FORWARD: [chunk for chunk in forwards if not order.is_last_virtual_stage(chunk)],
        _BACKWARD: [chunk for chunk in backwards if not order.is_first_virtual_stage(chunk)],
    }
    if not overlap:
        return SendPlan(least, {}, chunks)
    sizes = (order.pp_size, order.num_microbatches, order.num_model_chunks, order.group_size)
    limits = get_interleaved_send_limits(*sizes, order.forward_only)
    return SendPlan(least, limits[order.pp_rank], chunks)


_FORWARD, _BACKWARD = "activation", "gradient"  # work, by the payload that it waits for
_TIMES = {_FORWARD: 1, _BACKWARD: 2}


@lru_cache(maxsize=64)
def get_interleaved_send_limits(
    pp_size: int, num_microbatches: int, num_model_chunks: int, group_size: int, forward_only: bool
) -> list[Mapping[Channel, int]]:
    """The channels of each stage whose K is more than the smallest, where messages are overlapped.

    Without overlap a stage receives in every exchange, and the smallest K is enough.

    >>> get_interleaved_send_limits(2, 8, 2, 2, False), get_interleaved_send_limits(2, 8, 2, 8, False)
    ([{}, {}], [{('gradient', 1): 7}, {('activation', 0): 7}])
    """
    arguments = (num_microbatches, num_model_chunks, group_size, forward_only)
    orders = [_order(InterleavedOrder(pp_size, rank, *arguments)) for rank in range(pp_size)]
    least = FORWARD_ONLY_SEND_LIMIT if forward_only else SEND_LIMIT
    return [
        {channel: k for channel, k in sorted(peaks.items()) if k > least}
        for peaks in _count_unreceived(orders, num_model_chunks)
    ]


Work = tuple[str, int, int]
"""(payload, microbatch, chunk): a forward, or a backward, by the payload that it waits for."""


def _order(order: InterleavedOrder) -> list[Work]:
    """Everything that one stage computes, in order."""
    num_warmup, total = order.counts.num_warmup, order.counts.total
    forwards = [(_FORWARD, *row) for row in order.table]
    work = forwards[:num_warmup]
    for k in range(0 if order.forward_only else total):
        work += forwards[num_warmup + k : num_warmup + k + 1]
        work.append((_BACKWARD, order.microbatch_id(k), order.model_chunk_id(k, forward=False)))
    return work


def _count_unreceived(orders: list[list[Work]], num_chunks: int) -> list[dict[Channel, int]]:
    """Per stage and channel, the most messages that were sent and not yet used."""
    p = len(orders)
    last = p * num_chunks - 1
    starts: dict[tuple, int] = {}
    ends: dict[tuple, int] = {}
    clocks, places = [0] * p, [0] * p
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, microbatch, chunk = order[places[rank]]
                stage = chunk * p + rank
                before = stage - 1 if kind == _FORWARD else stage + 1
                is_free = not 0 <= before <= last  # data, or the loss: nothing to wait for
                if not is_free and (kind, microbatch, before) not in ends:
                    break
                ready = 0 if is_free else ends[kind, microbatch, before]
                unit = (kind, microbatch, stage)
                starts[unit] = max(clocks[rank], ready)
                clocks[rank] = ends[unit] = starts[unit] + _TIMES[kind]
                places[rank] += 1
    return [_peaks(order, rank, p, last, starts, ends) for rank, order in enumerate(orders)]


def _peaks(
    order: list[Work], rank: int, p: int, last: int, starts: dict, ends: dict
) -> dict[Channel, int]:
    """The channels of one stage: +1 when a message is sent, -1 when the neighbour begins to use it."""
    changes: dict[Channel, list[tuple[int, int]]] = defaultdict(list)
    for kind, microbatch, chunk in order:
        stage = chunk * p + rank
        after = stage + 1 if kind == _FORWARD else stage - 1
        if 0 <= after <= last:
            changes[kind, chunk].append((ends[kind, microbatch, stage], 1))
            changes[kind, chunk].append((starts[kind, microbatch, after], -1))
    peaks: dict[Channel, int] = {}
    for channel, of_channel in changes.items():
        held = peaks[channel] = 0
        # What is sent and used at the same moment has been there.
        for _, change in sorted(of_channel, key=lambda at: (at[0], -at[1])):
            held += change
            peaks[channel] = max(peaks[channel], held)
    return peaks
