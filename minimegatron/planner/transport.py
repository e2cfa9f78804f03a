"""Runs a plan on an imagined transport: which message meets which, who waits for whom, and when.

Called by: `check` (does everybody finish?) and `simulator` (when?). Calls: `plan`. Megatron has no
counterpart; what is imagined here is NCCL: messages between two ranks have no tags and meet in the
order in which they were started, and neither end goes on before the other is there (rendezvous; on
NCCL that is true of the GPU's stream, not of the program).

Because the n-th send from a to b always meets the n-th receive of b from a, the outcome does not
depend on who is quicker. So each rank can be run until it must wait, in any order, and times are
plain sums and maxima: exact for integers and Fractions.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from minimegatron.planner.actions import (
    ACTIVATION,
    COMMUNICATE,
    FORWARD,
    GRADIENT,
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


class Side(NamedTuple):
    """One end of a message: the call that started it, and the message as that rank sees it."""

    place: Place
    message: Message


def match_messages(plan: Plan) -> dict[tuple[int, int], tuple[list[Side], list[Side]]]:
    """For each (sender, receiver): all sends and all receives; the n-th ones meet."""
    pairs: dict[tuple[int, int], tuple[list[Side], list[Side]]] = defaultdict(lambda: ([], []))
    for rank, actions in enumerate(plan.ranks):
        for index, action in enumerate(actions):
            for message in action.messages:
                is_send = message.direction == SEND
                pair = (rank, message.peer) if is_send else (message.peer, rank)
                pairs[pair][0 if is_send else 1].append(Side((rank, index), message))
    return pairs


class Stuck(NamedTuple):
    """Where a rank waits for ever: at its index-th action, for the other ends of `messages`."""

    index: int
    messages: list[Message]


@dataclass
class Execution:
    """What happened. All lists are per rank, and within a rank per action that was finished.

    `causes` holds for a forward or backward the one whose end (plus transfers) let it start, on
    this or on another rank; None for those that could start at once. For a communication: the one
    that let it end.
    """

    starts: list[list[Time]]
    ends: list[list[Time]]
    waits: list[list[Time]]
    causes: list[list[Place | None]]
    stuck: dict[int, "Stuck"] = field(default_factory=dict)
    """Ranks that never finished."""


def execute(
    plan: Plan,
    forward_times: list[list[Time]],
    backward_times: list[list[Time]],
    message_times: Mapping[int, Time],
    transport: str = RENDEZVOUS,
) -> Execution:
    """Runs the plan until every rank has finished or none can go on.

    Args:
        forward_times, backward_times: [rank][chunk], length of one forward or backward there.
        message_times: bytes -> length of one transfer, from when both ends are ready.
        transport: `RENDEZVOUS`; or `BUFFERED`, where a send never waits for its receiver, as on
            gloo.

    Within one call, batched messages start together; separate ones start one after the other. A
    call with `overlap` waits for nothing; what it receives is waited for by the forward or backward
    that needs it. Messages do not slow each other down.
    """
    return _Engine(plan, forward_times, backward_times, message_times, transport).run()


class _Rank:
    """Where one rank is: its clock, its next action, and the messages it has started."""

    __slots__ = (
        "actions",
        "call_start",
        "cause",
        "causes",
        "ends",
        "forward_times",
        "backward_times",
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
        "waited",
        "waits",
    )

    def __init__(self, rank: int, actions: list[Action], num_ranks: int):
        self.rank, self.actions, self.index = rank, actions, 0
        self.now: Time = 0
        # The forward or backward that `now` goes back to, here or elsewhere.
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
        # (time, cause) of every message started so far, per peer.
        self.sent: list[list] = [[] for _ in range(num_ranks)]
        self.received: list[list] = [[] for _ in range(num_ranks)]
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


_Open = tuple[Message, list, int, Time]
"""A started message: itself, its partners (the other end's list), its number there, its time."""


class _Engine:
    def __init__(self, plan, forward_times, backward_times, message_times, transport):
        self.is_batched = plan.config.batch_p2p_comm
        self.is_buffered = transport == BUFFERED
        self.message_times = message_times
        self.ranks = [_Rank(r, actions, len(plan.ranks)) for r, actions in enumerate(plan.ranks)]
        for state in self.ranks:
            state.forward_times = forward_times[state.rank]
            state.backward_times = backward_times[state.rank]
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

    # -- Forwards and backwards --

    def _compute(self, state: _Rank, action: Action) -> bool:
        is_forward = action.kind == FORWARD
        if state.on_their_way:
            needs = (ACTIVATION if is_forward else GRADIENT, action.microbatch, action.chunk)
            receive = state.on_their_way.get(needs)
            if receive is not None:
                if not self._finish(state, [receive]):
                    return False
                del state.on_their_way[needs]
        start = state.now
        times = state.forward_times if is_forward else state.backward_times
        state.now = start + times[action.chunk]
        state.record(start, 0)
        state.cause = (state.rank, state.index)
        return True

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
            mine, partners = state.sent[peer.rank], peer.received[state.rank]
        else:
            mine, partners = state.received[peer.rank], peer.sent[state.rank]
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
            payload = ACTIVATION if action.kind == FORWARD else GRADIENT
            group = [state.on_their_way[payload, action.microbatch, action.chunk]]
        missing = [
            message
            for message, partners, number, _ in group
            if len(partners) <= number and not (self.is_buffered and message.direction == SEND)
        ]
        return Stuck(state.index, missing)
