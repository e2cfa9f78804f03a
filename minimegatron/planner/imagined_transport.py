"""Runs a plan on an imagined transport: which message meets which, who waits for whom, and when.

Megatron has no counterpart; what is imagined here is NCCL: messages between two ranks have no tags
and meet in the order in which they were started, and neither end goes on before the other is there
(rendezvous; on NCCL that is true of the GPU's stream, not of the program). In a plan for a tagged
wire, activations meet activations and gradients meet gradients; among those, order decides.

Because the n-th send from a to b always meets the n-th receive of b from a, the outcome does not
depend on who is quicker. So each rank can be run until it must wait, in any order, and times are
plain sums and maxima: exact for integers and Fractions.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minimegatron.core.orders.orders import TAGGED
from minimegatron.planner.actions import (
    ACTIVATION,
    COMMUNICATE,
    GRADIENT,
    KINDS,
    SEND,
    Action,
    Message,
    Time,
)
from minimegatron.planner.plan import Plan

RENDEZVOUS = "rendezvous"
BUFFERED = "buffered"

Place = tuple[int, int]
"""(rank, index): the index-th action of a rank."""


TAKES = {kind.name: kind.takes for kind in KINDS.values()}


class Side(NamedTuple):
    """One end of a message: the call that started it, and the message as that rank sees it."""

    place: Place
    message: Message


def match_messages(plan: Plan) -> dict[tuple, tuple[list[Side], list[Side]]]:
    """For each (sender, receiver): all sends and all receives; the n-th ones meet.

    In a plan for a tagged wire for each (sender, receiver, payload).
    """
    is_tagged = plan.config.wire == TAGGED
    pairs: dict[tuple, tuple[list[Side], list[Side]]] = defaultdict(lambda: ([], []))
    for rank, actions in enumerate(plan.ranks):
        for index, action in enumerate(actions):
            for message in action.messages:
                is_send = message.direction == SEND
                pair: tuple = (rank, message.peer) if is_send else (message.peer, rank)
                if is_tagged:
                    pair += (message.payload,)
                pairs[pair][0 if is_send else 1].append(Side((rank, index), message))
    return pairs


# -- How long work takes --

CostKey = int | tuple[tuple[str, int], ...]
"""The chunk; of a pair, kind and chunk of each of its parts."""
Times = Mapping[str, Sequence[Mapping[CostKey, Time] | Sequence[Time]]]
"""[kind][rank][`cost_key`] -> how long such work takes."""


def cost_key(action: Action) -> CostKey:
    """What `Times` are asked for.

    >>> cost_key(Action("pair", 0, parts=(Action("forward", 0, None, 3, 1),
    ...                                   Action("backward", 0, None, 0, 0))))
    (('forward', 1), ('backward', 0))
    """
    if action.parts:
        return tuple((part.kind, part.chunk) for part in action.parts)
    return action.chunk


class Stuck(NamedTuple):
    """Where a rank waits for ever: at its index-th action, for the other ends of `messages`."""

    index: int
    messages: list[Message]


@dataclass
class Execution:
    """What happened. All lists are per rank, and within a rank per action that was finished.

    `causes` holds for a piece of work the one whose end (plus transfers) let it start, on this or
    on another rank; None for those that could start at once. For a communication: the one that let
    it end.
    """

    starts: list[list[Time]]
    ends: list[list[Time]]
    waits: list[list[Time]]
    causes: list[list[Place | None]]
    stuck: dict[int, "Stuck"] = field(default_factory=dict)
    """Ranks that never finished."""


def execute(
    plan: Plan,
    times: Times,
    message_times: Mapping[int, Time],
    transport: str = RENDEZVOUS,
) -> Execution:
    """Runs the plan until every rank has finished or none can go on.

    Args:
        times: how long work takes; see `Times`.
        message_times: bytes -> length of one transfer, from when both ends are ready.
        transport: `RENDEZVOUS`; or `BUFFERED`, where a send never waits for its receiver, as on
            gloo.

    Within one call, batched messages start together; separate ones start one after the other. A
    call with `overlap` waits for nothing; what it receives is waited for by the work that needs it.
    Messages do not slow each other down. A pair starts when the inputs of both its parts are there,
    and both results exist when it ends. What one chunk of a rank makes for another one of the same
    rank needs no message: it is there once it is made.
    """
    return _Engine(plan, times, message_times, transport).run()


class _Rank:
    """Where one rank is: its clock, its next action, and the messages it has started."""

    __slots__ = (
        "actions",
        "call_start",
        "cause",
        "causes",
        "ends",
        "groups",
        "index",
        "is_stuck",
        "now",
        "on_their_way",
        "open",
        "rank",
        "received",
        "sent",
        "starts",
        "times",
        "waited",
        "waits",
    )

    def __init__(self, rank: int, actions: list[Action], times: dict, plan: Plan):
        self.rank, self.actions, self.index = rank, actions, 0
        self.times = times
        self.now: Time = 0
        # The work that `now` goes back to, here or elsewhere.
        self.cause: Place | None = None
        self.is_stuck = False
        # The current call: when it began, its groups of messages that are not started yet, the
        # messages that are, and how long it has waited.
        self.call_start: Time | None = None
        self.groups: list[tuple[Message, ...]] = []
        self.open: list[_Open] = []
        self.waited: Time = 0
        # Receives of overlapped calls, by what needs them: (payload, microbatch, chunk).
        self.on_their_way: dict[tuple, _Open] = {}
        # (time, cause) of every message started so far, per payload and peer.
        self.sent, self.received = _per_payload(plan), _per_payload(plan)
        self.starts: list[Time] = []
        self.ends: list[Time] = []
        self.waits: list[Time] = []
        self.causes: list[Place | None] = []

    def record(self, start: Time, wait: Time) -> None:
        """Notes the action that ends now."""
        self.starts.append(start)
        self.ends.append(self.now)
        self.waits.append(wait)
        self.causes.append(self.cause)


def _per_payload(plan: Plan) -> dict[str, list[list]]:
    """[payload][peer], an empty list each; where there are no tags, one list for both payloads."""
    activations: list[list] = [[] for _ in plan.ranks]
    is_tagged = plan.config.wire == TAGGED
    gradients: list[list] = [[] for _ in plan.ranks] if is_tagged else activations
    return {ACTIVATION: activations, GRADIENT: gradients}


_Open = tuple[Message, list, int, Time]
"""A started message: itself, its partners (the other end's list), its number there, its time."""


class _Engine:
    def __init__(self, plan: Plan, times: Times, message_times: Mapping[int, Time], transport: str):
        self.is_batched = plan.config.batch_p2p_comm
        self.is_buffered = transport == BUFFERED
        self.message_times = message_times
        self.ranks = [
            _Rank(rank, actions, {kind: of_ranks[rank] for kind, of_ranks in times.items()}, plan)
            for rank, actions in enumerate(plan.ranks)
        ]
        self.ready = deque(self.ranks)

    def run(self) -> Execution:
        while self.ready:
            self._advance(self.ready.popleft())
        ranks = self.ranks
        return Execution(
            [state.starts for state in ranks],
            [state.ends for state in ranks],
            [state.waits for state in ranks],
            [state.causes for state in ranks],
            {state.rank: self._missing_for(state) for state in ranks if state.is_stuck},
        )

    def _advance(self, state: _Rank) -> None:
        state.is_stuck = False
        actions, num_actions = state.actions, len(state.actions)
        while state.index < num_actions:
            action = actions[state.index]
            step = self._communicate if action.kind == COMMUNICATE else self._compute
            if not step(state, action):
                state.is_stuck = True
                return
            state.index += 1

    # -- Work --

    def _compute(self, state: _Rank, action: Action) -> bool:
        if state.on_their_way:
            needs = self._needs(state, action)
            if needs:
                if not self._finish(state, [state.on_their_way[need] for need in needs]):
                    return False
                for need in needs:
                    del state.on_their_way[need]
        start = state.now
        key = cost_key(action) if action.parts else action.chunk
        state.now = start + state.times[action.kind][key]
        state.record(start, 0)
        state.cause = (state.rank, state.index)
        return True

    def _needs(self, state: _Rank, action: Action) -> list[tuple]:
        """The keys of what is on its way for this work."""
        if action.parts:
            keys = [(TAKES[part.kind], part.microbatch, part.chunk) for part in action.parts]
            return [key for key in keys if key in state.on_their_way]
        key = (TAKES[action.kind], action.microbatch, action.chunk)
        return [key] if key in state.on_their_way else []

    # -- Messages --

    def _communicate(self, state: _Rank, action: Action) -> bool:
        if state.call_start is None:
            state.call_start, state.waited = state.now, 0
            if action.overlap:
                self._start_overlapped(state, action)
            elif self.is_batched:
                state.groups.append(action.messages)
            else:
                state.groups.extend((message,) for message in reversed(action.messages))
        while state.open or state.groups:
            if not state.open:
                state.open = [self._start(state, message) for message in state.groups.pop()]
            if not self._finish(state, state.open):
                return False
            state.open = []
        state.record(state.call_start, state.waited)
        state.call_start = None
        return True

    def _start_overlapped(self, state: _Rank, action: Action) -> None:
        for message in action.messages:
            opened = self._start(state, message)
            if message.direction != SEND:
                state.on_their_way[message.payload, message.microbatch, message.chunk] = opened

    def _start(self, state: _Rank, message: Message) -> _Open:
        peer = self.ranks[message.peer]
        if message.direction == SEND:
            mine = state.sent[message.payload][peer.rank]
            partners = peer.received[message.payload][state.rank]
        else:
            mine = state.received[message.payload][peer.rank]
            partners = peer.sent[message.payload][state.rank]
        mine.append((state.now, state.cause))
        if peer.is_stuck:
            peer.is_stuck = False
            self.ready.append(peer)
        return message, partners, len(mine) - 1, state.now

    def _finish(self, state: _Rank, group: list[_Open]) -> bool:
        """Moves the rank's clock to when all of `group` is through; False if that is not known."""
        end, wait, cause = state.now, 0, state.cause
        for message, partners, number, time in group:
            if self.is_buffered and message.direction == SEND:
                continue
            if len(partners) <= number:
                return False
            partner_time, partner_cause = partners[number]
            transfer = self.message_times[message.num_bytes]
            if self.is_buffered:
                partner_time, transfer = partner_time + transfer, 0
            is_late = partner_time > time
            this_end = (partner_time if is_late else time) + transfer
            if this_end > end:
                end = this_end
                cause, wait = (partner_cause, partner_time - time) if is_late else (state.cause, 0)
        state.now, state.cause = end, cause
        state.waited += wait
        return True

    def _missing_for(self, state: _Rank) -> Stuck:
        action = state.actions[state.index]
        group = state.open
        if action.kind != COMMUNICATE:
            group = [state.on_their_way[need] for need in self._needs(state, action)]
        missing = [
            message
            for message, partners, number, _ in group
            if len(partners) <= number and not (self.is_buffered and message.direction == SEND)
        ]
        return Stuck(state.index, missing)
