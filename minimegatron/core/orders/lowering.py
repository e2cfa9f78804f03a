"""From an order of work to a plan: which message is started when, for the wire that is there.

Torch-free. Megatron has no counterpart.

A piece of work needs a tensor that a neighbour's work makes. If the neighbour is on the same rank, the
runner hands the tensor over, without a message. Otherwise the rank sends it right after the work that
makes it, and nobody waits for that. A call that returns at once receives it; the work that needs it
waits. What is left to decide is where that call stands:

* On a tagged wire (gloo, shared memory) a message is known by its payload. The receive stands one piece
  of work before its use, so that the message travels meanwhile; earlier, if a message that is sent
  later is used before.
* On an untagged wire (NCCL) the n-th send of a pair of ranks meets the n-th receive, whatever is in
  them, and each may block the stream until the other is there. So all messages of a step get one
  order, that of the moments at which they are sent when a forward takes one unit of time and a
  backward two; every rank starts its sends and receives in that order, one exchange for each moment.
  The message that comes first of those that are not through has nothing to wait for, so no rank waits
  for ever.

>>> from minimegatron.core.orders.orders import order_of_ranks
>>> config = PlanConfig("1f1b", pp_size=2, num_microbatches=2, wire=UNTAGGED)
>>> for action in lower(order_of_ranks(config), config)[1][:3]:
...     print(action)
exchange(receive activation of microbatch 0, chunk 0 from rank 0)
forward of microbatch 0, chunk 0
exchange(receive activation of microbatch 1, chunk 0 from rank 0)
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple

from minimegatron.core.orders.order_check import check_orders, stuck_order
from minimegatron.core.orders.orders import (
    UNTAGGED,
    PlanConfig,
    Schedule,
    get_schedule,
    order_of_ranks,
)
from minimegatron.core.orders.placement import Place, Placement
from minimegatron.core.orders.work import (
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
    parts_of,
)

EXCHANGE = "exchange"
"""The communicator's method that lowered messages are given to."""

TIMES = {FORWARD: 1, BACKWARD: 2, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1}


# -- A step of all ranks, and what one rank needs of it --


@dataclass(frozen=True)
class RankStep:
    """What one rank does in a step that is ready to run."""

    config: PlanConfig
    rank: int
    actions: list[Action]
    limit: int
    """The most messages of a payload to one peer that are sent and not yet used; see `send_limits`."""
    most_in_flight: int
    """`count_in_flight` of the rank where it is largest."""

    def ready(self, config: PlanConfig) -> "RankStep":
        """Itself: as `RankOrder.ready`."""
        return self


@dataclass(frozen=True)
class LoweredStep:
    """The same of all ranks. Lists are per rank."""

    config: PlanConfig
    ranks: list[list[Action]]
    limits: list[int]

    @property
    def kinds(self) -> set[str]:
        """The kinds of work that any rank does."""
        return {action.kind for actions in self.ranks for action in work_of(actions)}

    @cached_property
    def most_in_flight(self) -> int:
        """As `RankStep.most_in_flight`."""
        return max(map(count_in_flight, self.ranks))

    def of_rank(self, rank: int) -> RankStep:
        """One rank's part."""
        limit, most = self.limits[rank], self.most_in_flight
        return RankStep(self.config, rank, self.ranks[rank], limit, most)


class RankOrder(NamedTuple):
    """One rank's part of the common order: enough to place its messages, without the other ranks."""

    rank: int
    order: list[Work]
    starts: list[int]
    ends: list[int]
    """When each piece of its work starts, and ends."""
    sent: dict[tuple[str, int], Sequence[int]]
    """(kind of work, chunk) -> by microbatch, when the neighbour sends what that work needs."""
    limit: int
    most_in_flight: int

    def ready(self, config: PlanConfig) -> RankStep:
        """The rank's step, on the wire of `config`."""
        actions = _with_messages(self, config)
        return RankStep(config, self.rank, actions, self.limit, self.most_in_flight)


@dataclass(frozen=True)
class CommonOrder:
    """The orders of all ranks, which can be done, and the moments at which they are."""

    config: PlanConfig
    orders: list[list[Work]]
    times: "Times"

    @property
    def kinds(self) -> set[str]:
        """The kinds of work that any rank does."""
        return {part.kind for order in self.orders for part in _single(order)}

    @cached_property
    def limits(self) -> list[int]:
        """By rank, as `RankStep.limit`."""
        return count_unreceived(self.orders, self.times, self.config.placement)

    @cached_property
    def most_in_flight(self) -> int:
        """As `RankStep.most_in_flight`."""
        return max(_before_backward(_single(order)) for order in self.orders)

    def of_rank(self, rank: int) -> RankOrder:
        """One rank's part."""
        starts, ends = self.times.starts[rank], self.times.ends[rank]
        sent = _sent_to(rank, self.times, self.config.placement)
        limit, most = self.limits[rank], self.most_in_flight
        return RankOrder(rank, self.orders[rank], starts, ends, sent, limit, most)


def common_order(config: PlanConfig, schedule: Schedule | None = None) -> CommonOrder:
    """The common order of a schedule's: that of `schedule`, or of what `config.schedule` names.

    Raises `ScheduleError`, a ValueError, if it cannot be done.
    """
    return _common_order(config, schedule or get_schedule(config.schedule))


@lru_cache(maxsize=4)  # each holds all work of all ranks
def _common_order(config: PlanConfig, schedule: Schedule) -> CommonOrder:
    orders = order_of_ranks(config, schedule)
    return CommonOrder(config, orders, simulate_orders(orders, config))


def lowered_step(config: PlanConfig, schedule: Schedule | None = None) -> LoweredStep:
    """The step of an order, for all ranks. Raises as `common_order`."""
    return _lowered_step(config, schedule or get_schedule(config.schedule))


@lru_cache(maxsize=64)
def _lowered_step(config: PlanConfig, schedule: Schedule) -> LoweredStep:
    found = common_order(config, schedule)
    parts = map(found.of_rank, range(config.pp_size))
    return LoweredStep(config, [_with_messages(part, config) for part in parts], found.limits)


def lower(orders: list[list[Work]], config: PlanConfig) -> list[list[Action]]:
    """The actions of each rank, work and messages. Raises as `lowered_step`."""
    times = simulate_orders(orders, config)
    sent = partial(_sent_to, times=times, placement=config.placement)
    return [
        _with_messages(RankOrder(rank, *of_rank, sent(rank), 0, 0), config)
        for rank, of_rank in enumerate(zip(orders, times.starts, times.ends, strict=True))
    ]


def work_of(actions: Iterable[Action]) -> Iterator[Action]:
    """The single pieces of work among a rank's actions, in order."""
    for action in actions:
        if action.kind != COMMUNICATE:
            yield from parts_of(action)


def count_in_flight(actions: Iterable[Action]) -> int:
    """Forwards before the first backward: what a schedule calls its warm-up, and one more."""
    return _before_backward(work_of(actions))


def _before_backward(work: Iterable[Work | Action]) -> int:
    number = 0
    for part in work:
        if part.kind == BACKWARD:
            break
        number += 1
    return max(1, number)


def _single(order: list[Work]) -> Iterator[Work]:
    return chain.from_iterable(work.parts or (work,) for work in order)


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
    made: dict[tuple[str, int, int], list[int | None]]
    """(payload, rank and chunk that make it) -> when, by microbatch; None for what is not made."""


class _Needs(NamedTuple):
    """What one kind of work of one chunk takes and gives, looked up once for all microbatches."""

    taken: list[int | None] | None
    """Of `Times.made`, what it needs; None if it needs nothing."""
    given: list[int | None] | None
    """The same of what it makes."""
    source: tuple[str, int, int] | None
    target: tuple[str, int, int] | None
    """Their keys."""
    time: int


def _needs_of(rank: int, times: Times, config: PlanConfig) -> dict[tuple[str, int], _Needs]:
    found = {}
    for kind, time in TIMES.items():
        for chunk in range(config.num_model_chunks):
            source = source_of(config.placement, rank, Work(kind, 0, chunk))
            source_key = None if source is None else (source[0], *source[1])
            gives = KINDS[kind].gives
            target_key = None if gives is None else (gives, rank, chunk)
            moments = [None if key is None else times.made[key] for key in (source_key, target_key)]
            found[kind, chunk] = _Needs(*moments, source_key, target_key, time)
    return found


def simulate_orders(orders: list[list[Work]], config: PlanConfig) -> Times:
    """Runs all orders at once. Raises `ScheduleError` if they are not complete, or wait for ever."""
    check_orders(orders, config)
    made = defaultdict(lambda: [None] * config.num_microbatches)
    times = Times([[] for _ in orders], [[] for _ in orders], made)
    needs = [_needs_of(rank, times, config) for rank in range(len(orders))]
    waiting_for: dict[tuple, int] = {}  # what a rank waits for -> the rank
    ready = deque(range(len(orders)))
    while ready:
        rank = ready.popleft()
        missing = _go_on(orders[rank], needs[rank], times, rank, waiting_for, ready)
        if missing is not None:
            waiting_for[missing] = rank
    if waiting_for:
        raise stuck_order(
            {
                rank: (orders[rank][len(times.starts[rank])], key[0][0], Place(*key[0][1:]))
                for key, rank in waiting_for.items()
            }
        )
    return times


def _go_on(
    order: list[Work],
    needs: dict[tuple[str, int], _Needs],
    times: Times,
    rank: int,
    waiting_for: dict[tuple, int],
    ready: deque[int],
) -> tuple | None:
    """Runs one rank until it waits for what is not made; returns that, or None at its end.

    A rank that waits for what is made here is `ready` again. This is the loop through all work of all
    ranks, so it calls no function for a piece of work.
    """
    starts, ends = times.starts[rank], times.ends[rank]
    clock = ends[-1] if ends else 0
    for index in range(len(starts), len(order)):
        work = order[index]
        parts = work.parts or (work,)
        start = clock
        for part in parts:
            need = needs[part.kind, part.chunk]
            if need.taken is not None:
                moment = need.taken[part.microbatch]
                if moment is None:
                    return need.source, part.microbatch
                if moment > start:
                    start = moment
        clock = start
        for part in parts:
            clock += needs[part.kind, part.chunk].time
        starts.append(start)
        ends.append(clock)
        for part in parts:
            need = needs[part.kind, part.chunk]
            if need.given is not None:
                need.given[part.microbatch] = clock
                key = (need.target, part.microbatch)
                if key in waiting_for:
                    ready.append(waiting_for.pop(key))
    return None


def _sent_to(
    rank: int, times: Times, placement: Placement
) -> dict[tuple[str, int], list[int | None]]:
    """(kind of work, chunk) -> by microbatch, when another rank sends what that work needs."""
    found = {}
    for kind in TIMES:
        for chunk in range(placement.num_model_chunks):
            source = source_of(placement, rank, Work(kind, 0, chunk))
            if source is not None and source[1].rank != rank:
                found[kind, chunk] = times.made[source[0], *source[1]]
    return found


def count_unreceived(orders: list[list[Work]], times: Times, placement: Placement) -> list[int]:
    """Per rank, the most messages of a payload to a peer that are sent and not yet used, at any time.

    What is sent and used at the same moment has been there.
    """
    # By maker, payload and user: the moments at which it is sent, and used.
    moments: dict[tuple[int, str, int], tuple[list, list]] = defaultdict(lambda: ([], []))
    for rank, order in enumerate(orders):
        channels = {}
        for (kind, chunk), sent in _sent_to(rank, times, placement).items():
            payload, place = source_of(placement, rank, Work(kind, 0, chunk))
            channels[kind, chunk] = sent, *moments[place.rank, payload, rank]
        for work, start in zip(order, times.starts[rank], strict=True):
            for part in work.parts or (work,):
                channel = channels.get((part.kind, part.chunk))
                if channel is not None:
                    sent, all_sent, all_used = channel
                    all_sent.append(sent[part.microbatch])
                    all_used.append(start)
    peaks: dict[int, int] = defaultdict(int)
    for (maker, _, _), (sent, used) in moments.items():
        peaks[maker] = max(peaks[maker], _peak(sorted(sent), sorted(used)))
    return [peaks[rank] for rank in range(len(orders))]


def _peak(sent: list[int], used: list[int]) -> int:
    """The most messages that lie there at a time; both lists ascend."""
    num_gone = 0
    for moment in sent:
        # One more comes. If one has gone before, there are as many as at the peak so far, or fewer.
        num_gone += used[num_gone] < moment
    return len(sent) - num_gone


# -- Messages, each at its place among one rank's work --


class _Placed(NamedTuple):
    """A message, and its place among one rank's work and messages."""

    before: int
    """The piece of work that it stands before."""
    turn: int
    """Of the exchanges that stand there, which: on an untagged wire one for each moment."""
    key: tuple
    """Its place in the common order: when it is sent, by which rank, its payload, microbatch, and the
    sender's chunk. Its two ends compute the same."""
    message: Message


def _with_messages(part: RankOrder, config: PlanConfig) -> list[Action]:
    placed, receives = _sends(part, config), _receives(part, config)
    if config.wire == UNTAGGED:
        placed += _at_their_sends(receives, part.starts)
    else:
        placed += _before_their_use(receives)
    exchanges: dict[int, list[list[_Placed]]] = defaultdict(list)
    for (before, _), together in groupby(sorted(placed), key=itemgetter(0, 1)):
        exchanges[before].append(list(together))
    actions: list[Action] = []
    for index, work in enumerate([*part.order, None]):
        for together in exchanges.get(index, ()):
            # What only receives belongs to what follows; what sends, to what it follows.
            sends = any(one.message.direction == SEND for one in together)
            owner = part.order[index - 1] if sends or work is None else work
            messages = tuple([one.message for one in together])
            actions.append(
                Action(COMMUNICATE, part.rank, owner.phase, None, None, EXCHANGE, messages, True)
            )
        if work is not None:
            actions.append(_action(work, part.rank))
    return actions


def _action(work: Work, rank: int) -> Action:
    kind, microbatch, chunk, parts, phase = work
    if parts:
        parts = tuple(_action(part, rank) for part in parts)
    return Action(kind, rank, phase, microbatch, chunk, None, (), False, parts)


def _sends(part: RankOrder, config: PlanConfig) -> list[_Placed]:
    """Each send stands right after the work that makes it: before the next piece."""
    neighbours = _neighbours(config, part.rank, target_of)
    found, is_untagged, rank = [], config.wire == UNTAGGED, part.rank
    for index, work in enumerate(part.order):
        for kind, microbatch, chunk, _, _ in work.parts or (work,):
            neighbour = neighbours.get((kind, chunk))
            if neighbour is not None:
                payload, peer, _, num_bytes = neighbour
                message = Message(SEND, payload, peer, microbatch, chunk, num_bytes)
                end = part.ends[index]
                key = (end, rank, payload, microbatch, chunk)
                found.append(_Placed(index + 1, end if is_untagged else 0, key, message))
    return found


def _receives(part: RankOrder, config: PlanConfig) -> list[_Placed]:
    """Each receive, before the work that uses it; `key` is that of its send."""
    neighbours = _neighbours(config, part.rank, source_of)
    found, is_untagged = [], config.wire == UNTAGGED
    for index, work in enumerate(part.order):
        for kind, microbatch, chunk, _, _ in work.parts or (work,):
            neighbour = neighbours.get((kind, chunk))
            if neighbour is not None:
                payload, peer, made_by, num_bytes = neighbour
                message = Message(RECEIVE, payload, peer, microbatch, chunk, num_bytes)
                sent = part.sent[kind, chunk][microbatch]
                key = (sent, peer, payload, microbatch, made_by)
                found.append(_Placed(index, sent if is_untagged else 0, key, message))
    return found


def _neighbours(
    config: PlanConfig, rank: int, end_of: Callable
) -> dict[tuple[str, int], tuple[str, int, int, int]]:
    """(kind of work, chunk) -> payload, rank and chunk at the message's other end, and its size."""
    found = {}
    for kind in TIMES:
        for chunk in range(config.num_model_chunks):
            end = end_of(config.placement, rank, Work(kind, 0, chunk))
            if end is not None and end[1].rank != rank:
                payload, place = end
                is_behind = (payload == ACTIVATION) == (end_of is target_of)
                num_bytes = _bytes_of(config, rank, chunk, is_behind)
                found[kind, chunk] = payload, *place, num_bytes
    return found


def _bytes_of(config: PlanConfig, rank: int, chunk: int, is_behind: bool) -> int:
    """Size of a message between a chunk's stage and the one after it, or before it."""
    if config.message_factors is None:
        return config.message_bytes
    stage = config.placement.stage_of(rank, chunk)
    return config.bytes_behind(stage if is_behind else stage - 1)


def _at_their_sends(receives: list[_Placed], starts: list[int]) -> Iterator[_Placed]:
    """On an untagged wire: before the first work that starts when the send has been made."""
    index = 0
    for _, turn, key, message in sorted(receives, key=itemgetter(2)):
        while index < len(starts) and starts[index] < key[0]:
            index += 1
        yield _Placed(index, turn, key, message)


def _before_their_use(receives: list[_Placed]) -> Iterator[_Placed]:
    """On a tagged wire: one piece of work ahead; each payload of a neighbour as it is sent."""
    earliest: dict[tuple[int, str], int] = {}
    for before, turn, key, message in sorted(receives, key=itemgetter(2), reverse=True):
        channel = (message.peer, message.payload)
        ahead = max(before - 1, 0)
        earliest[channel] = min(ahead, earliest.get(channel, ahead))
        # Sends of the same moment come first: a receive never holds up what is ready.
        yield _Placed(earliest[channel], turn, (float("inf"), *key), message)
