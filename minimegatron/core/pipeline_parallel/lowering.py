"""From an order of work to a plan: which message is started when, for the wire that is there.

Torch-free. Megatron has no counterpart.

A piece of work needs a tensor that a neighbour's work makes. If the neighbour is the same rank, there
is no message: the runner hands the tensor over. Otherwise the tensor is sent right after the work that
makes it, and nobody waits for that. It is received by a call that returns at once; the work that needs
it waits. What is left to decide is where that call stands:

* On a tagged wire (gloo, shared memory) a message is known by its payload. The receive stands one piece
  of work before its use, so that the message travels meanwhile; earlier, if a message that is sent
  later is used before.
* On an untagged wire (NCCL) the n-th send of a pair of ranks meets the n-th receive, whatever is in
  them, and each may block the stream until the other is there. So all messages of a step get one
  order, that of the moments at which they are sent when a forward takes one unit of time and a
  backward two; every rank starts its sends and receives in that order, one exchange for each moment.
  The message that comes first of those that are not through has nothing to wait for, so no rank waits
  for ever.

>>> from minimegatron.core.pipeline_parallel.orders import order_of_ranks
>>> config = PlanConfig("1f1b", pp_size=2, num_microbatches=2, wire=UNTAGGED)
>>> for action in lower(order_of_ranks(config), config)[1][:3]:
...     print(action)
exchange(receive activation of microbatch 0, chunk 0 from rank 0)
forward of microbatch 0, chunk 0
exchange(receive activation of microbatch 1, chunk 0 from rank 0)
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from minimegatron.core.pipeline_parallel.order_check import check_orders, stuck_order
from minimegatron.core.pipeline_parallel.orders import (
    UNTAGGED,
    PlanConfig,
    Schedule,
    get_schedule,
    order_of_ranks,
)
from minimegatron.core.pipeline_parallel.placement import Place, Placement
from minimegatron.core.pipeline_parallel.work import (
    ACTIVATION,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMMUNICATE,
    FORWARD,
    KINDS,
    RECEIVE,
    SEND,
    Action,
    Message,
    Work,
)

EXCHANGE = "exchange"
"""The communicator's method that lowered messages are given to."""

TIMES = {FORWARD: 1, BACKWARD: 2, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1}


@dataclass(frozen=True)
class LoweredStep:
    """A step that is ready to run. Lists are per rank."""

    config: PlanConfig
    ranks: list[list[Action]]
    limits: list[int]
    """The most messages of a payload to one peer that are sent and not yet used; see `send_limits`."""


def lowered_step(config: PlanConfig, schedule: Schedule | None = None) -> LoweredStep:
    """The step of an order: that of `schedule`, or else of what `config.schedule` names.

    Raises `ScheduleError`, a ValueError, if it cannot be done.
    """
    return _lowered_step(config, schedule or get_schedule(config.schedule))


@lru_cache(maxsize=64)
def _lowered_step(config: PlanConfig, schedule: Schedule) -> LoweredStep:
    orders = order_of_ranks(config, schedule)
    times = simulate_orders(orders, config)
    ranks = [_with_messages(orders, times, config, rank) for rank in range(config.pp_size)]
    return LoweredStep(config, ranks, count_unreceived(orders, times, config.placement))


def lower(orders: list[list[Work]], config: PlanConfig) -> list[list[Action]]:
    """The actions of each rank, work and messages. Raises as `lowered_step`."""
    times = simulate_orders(orders, config)
    return [_with_messages(orders, times, config, rank) for rank in range(config.pp_size)]


# -- What work needs from a neighbour, and makes for one --


def source_of(placement: Placement, rank: int, work: Work | Action) -> tuple[str, Place] | None:
    """What single work needs of a neighbour: (payload, who makes it); None if nothing.

    The neighbour may be the same rank.
    """
    payload = KINDS[work.kind].takes
    if payload is None:
        return None
    before = placement.previous_of if payload == ACTIVATION else placement.next_of
    place = before(rank, work.chunk)
    return None if place is None else (payload, place)


def target_of(placement: Placement, rank: int, work: Work | Action) -> tuple[str, Place] | None:
    """What single work makes for a neighbour: (payload, who needs it); None if nothing."""
    payload = KINDS[work.kind].gives
    if payload is None:
        return None
    after = placement.next_of if payload == ACTIVATION else placement.previous_of
    place = after(rank, work.chunk)
    return None if place is None else (payload, place)


# -- The common simulated order --


class Times(NamedTuple):
    """When each piece of work is done if nothing but the order holds a rank back."""

    starts: list[list[int]]
    ends: list[list[int]]
    """Per rank, per piece of its work."""
    made: dict[tuple[str, int, int, int], int]
    """(payload, microbatch, rank and chunk that make it) -> when."""


def simulate_orders(orders: list[list[Work]], config: PlanConfig) -> Times:
    """Runs all orders at once. Raises `ScheduleError` if they are not complete, or wait for ever."""
    check_orders(orders, config)
    placement, num_ranks = config.placement, len(orders)
    times = Times([[] for _ in orders], [[] for _ in orders], {})
    made, clocks = times.made, [0] * num_ranks
    waiting_for: dict[tuple, int] = {}  # what a rank waits for -> the rank
    ready = deque(range(num_ranks))
    while ready:
        rank = ready.popleft()
        order, starts, ends = orders[rank], times.starts[rank], times.ends[rank]
        while len(starts) < len(order):
            work = order[len(starts)]
            start = clocks[rank]
            for part in work.parts or (work,):
                source = source_of(placement, rank, part)
                if source is None:
                    continue
                key = (source[0], part.microbatch, *source[1])
                if key not in made:
                    waiting_for[key] = rank
                    start = None
                    break
                start = max(start, made[key])
            if start is None:
                break
            starts.append(start)
            parts = work.parts or (work,)
            clocks[rank] = start + sum(TIMES[part.kind] for part in parts)
            ends.append(clocks[rank])
            for part in parts:
                if KINDS[part.kind].gives:
                    key = (KINDS[part.kind].gives, part.microbatch, rank, part.chunk)
                    made[key] = clocks[rank]
                    if key in waiting_for:
                        ready.append(waiting_for.pop(key))
    if waiting_for:
        raise stuck_order(
            {
                rank: (orders[rank][len(times.starts[rank])], key[0], Place(*key[2:]))
                for key, rank in waiting_for.items()
            }
        )
    return times


def count_unreceived(orders: list[list[Work]], times: Times, placement: Placement) -> list[int]:
    """Per rank, the most messages of a payload to a peer that are sent and not yet used, at any time.

    What is sent and used at the same moment has been there.
    """
    changes: list[dict[tuple[str, int], list[tuple[int, int]]]] = [
        defaultdict(list) for _ in orders
    ]
    for rank, order in enumerate(orders):
        for work, start in zip(order, times.starts[rank], strict=True):
            for part in work.parts or (work,):
                source = source_of(placement, rank, part)
                if source is None or source[1].rank == rank:
                    continue
                payload, (maker, chunk) = source
                sent = times.made[payload, part.microbatch, maker, chunk]
                changes[maker][payload, rank] += [(sent, 1), (start, -1)]
    return [max(map(_peak, mine.values()), default=0) for mine in changes]


def _peak(changes: list[tuple[int, int]]) -> int:
    held = peak = 0
    for _, change in sorted(changes, key=lambda at: (at[0], -at[1])):
        held += change
        peak = max(peak, held)
    return peak


# -- Messages, each at its place among one rank's work --


class _Placed(NamedTuple):
    """A message, and its place among one rank's work and messages."""

    before: int
    """The piece of work that it stands before."""
    turn: int
    """Of the exchanges that stand there, which: on an untagged wire one for each moment."""
    key: tuple
    """Its place in the common order; its two ends compute the same."""
    message: Message


def _with_messages(
    orders: list[list[Work]], times: Times, config: PlanConfig, rank: int
) -> list[Action]:
    placed = list(_sends(orders[rank], times.ends[rank], config, rank))
    receives = list(_receives(orders[rank], times, config, rank))
    if config.wire == UNTAGGED:
        placed += _at_their_sends(receives, times.starts[rank])
    else:
        placed += _before_their_use(receives)
    exchanges: dict[int, list[list[_Placed]]] = defaultdict(list)
    for (before, _), together in groupby(sorted(placed), key=lambda one: (one.before, one.turn)):
        exchanges[before].append(list(together))
    actions: list[Action] = []
    for index, work in enumerate([*orders[rank], None]):
        for together in exchanges[index]:
            # What only receives belongs to what follows; what sends, to what it follows.
            sends = any(one.message.direction == SEND for one in together)
            owner = orders[rank][index - 1] if sends or work is None else work
            messages = tuple(one.message for one in together)
            actions.append(
                Action(
                    COMMUNICATE, rank, owner.phase, call=EXCHANGE, messages=messages, overlap=True
                )
            )
        if work is not None:
            actions.append(_action(work, rank))
    return actions


def _action(work: Work, rank: int) -> Action:
    parts = tuple(_action(part, rank) for part in work.parts)
    return Action(work.kind, rank, work.phase, work.microbatch, work.chunk, parts=parts)


def _sends(order: list[Work], ends: list[int], config: PlanConfig, rank: int) -> Iterator[_Placed]:
    """Each send stands right after the work that makes it: before the next piece."""
    for index, work in enumerate(order):
        for part in work.parts or (work,):
            target = target_of(config.placement, rank, part)
            if target is None or target[1].rank == rank:
                continue
            payload, (peer, _) = target
            num_bytes = _bytes_of(config, rank, part.chunk, is_behind=payload == ACTIVATION)
            message = Message(SEND, payload, peer, part.microbatch, part.chunk, num_bytes)
            turn = ends[index] if config.wire == UNTAGGED else 0
            yield _Placed(index + 1, turn, _key(ends[index], rank, payload, part), message)


def _receives(order: list[Work], times: Times, config: PlanConfig, rank: int) -> Iterator[_Placed]:
    """Each receive, before the work that uses it; `key` is that of its send."""
    for index, work in enumerate(order):
        for part in work.parts or (work,):
            source = source_of(config.placement, rank, part)
            if source is None or source[1].rank == rank:
                continue
            payload, (peer, chunk) = source
            num_bytes = _bytes_of(config, rank, part.chunk, is_behind=payload != ACTIVATION)
            message = Message(RECEIVE, payload, peer, part.microbatch, part.chunk, num_bytes)
            sent = times.made[payload, part.microbatch, peer, chunk]
            key = _key(sent, peer, payload, part._replace(chunk=chunk))
            yield _Placed(index, sent if config.wire == UNTAGGED else 0, key, message)


def _bytes_of(config: PlanConfig, rank: int, chunk: int, is_behind: bool) -> int:
    """Size of a message between a chunk's stage and the one behind it, or before it."""
    if config.message_factors is None:
        return config.message_bytes
    stage = config.placement.stage_of(rank, chunk)
    return config.bytes_behind(stage if is_behind else stage - 1)


def _key(moment: int, sender: int, payload: str, made_by: Work) -> tuple:
    """The place of a message in the common order; its two ends must compute the same."""
    return moment, sender, payload, made_by.microbatch, made_by.chunk


def _at_their_sends(receives: list[_Placed], starts: list[int]) -> Iterator[_Placed]:
    """On an untagged wire: before the first work that starts when the send has been made."""
    index = 0
    for receive in sorted(receives, key=lambda one: one.key):
        while index < len(starts) and starts[index] < receive.key[0]:
            index += 1
        yield receive._replace(before=index)


def _before_their_use(receives: list[_Placed]) -> Iterator[_Placed]:
    """On a tagged wire: one piece of work ahead; each payload of a neighbour as it is sent."""
    earliest: dict[tuple[int, str], int] = {}
    for receive in sorted(receives, key=lambda one: one.key, reverse=True):
        message = receive.message
        channel = (message.peer, message.payload)
        ahead = max(receive.before - 1, 0)
        earliest[channel] = min(ahead, earliest.get(channel, ahead))
        # Sends of the same moment come first: a receive never holds up what is ready.
        yield receive._replace(before=earliest[channel], key=(float("inf"), *receive.key))
