"""One schedule run of one pipeline, from the recordings of its stages: who waited for whom, and why.

Torch-free. Megatron has no counterpart.

**Waiting and transfer.** A message has four times: when its sender began to send (s), when its
receiver began to wait for it (w), when it was there (e), and when the receive was posted. Of the
wait from w to e, the part until s is *waiting*: nothing was on its way yet. The rest is *transfer*.
A sender's wait is split likewise, at the time when the receive was posted. Both need the clocks of
two ranks, so they are worked out here and not while recording.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

from minimegatron.planner.actions import (
    BACKWARD,
    COMMUNICATE,
    FORWARD,
    KINDS,
    RECEIVE,
    SEND,
    Action,
    Event,
    Message,
    parts_of,
)
from minimegatron.planner.formulas import Formula, bubble_formulas
from minimegatron.planner.imagined_transport import BUFFERED
from minimegatron.planner.plan import Plan, plan, plan_config_from_json
from minimegatron.planner.registry import schedule_names
from minimegatron.planner.simulator import Simulation, simulate
from minimegatron.planner.stage import PlanConfig
from minimegatron.tracing.rank_trace import RankTrace
from minimegatron.tracing.step_costs import costs_of, paced_lengths

Place = tuple[int, int]
"""(stage, index of an event in that stage's recording)."""

LATE = 1.02
"""A paced computation is late from this multiple of its pace on."""


@dataclass
class Transfer:
    """One message, seen from both ends. Times in microseconds."""

    payload: str
    sender: int
    receiver: int
    num_bytes: int
    sent_by: Place
    """The communicator's call that sent it."""
    sent_at: float
    sent_unit: tuple[int | None, int | None]
    """(microbatch, chunk) that made it."""
    received_by: Place | None = None
    """The call that received it; None where the recording ends before."""
    posted_at: float | None = None
    arrived_at: float | None = None
    received_unit: tuple[int | None, int | None] | None = None
    waited: list[Place] | None = None
    """The receiver's waits for it."""


@dataclass(frozen=True)
class TracedGap:
    """A stretch in which a stage computed nothing. Microseconds."""

    rank: int
    start: float
    end: float
    before: int | None
    """Index of the work that ends the gap; None for the end of the step."""
    waits_for: Place | None
    """The work of another stage that the gap waited for longest."""
    waiting: float
    """Of the gap: until that stage, and others, had begun to send."""
    transfer: float
    """Of the gap: from then until messages were there."""

    @property
    def length(self) -> float:
        return self.end - self.start

    @property
    def other(self) -> float:
        """The rest: the program's own work between two computations."""
        return max(0.0, self.length - self.waiting - self.transfer)


class Step:
    """The events of one step, per stage: `indices[r]` in order, and `events[r][index]`."""

    def __init__(self, stages: list[RankTrace], number: int):
        self.stages, self.number = stages, number
        self.indices = [stage.steps[number] for stage in stages]
        self.events = [
            {index: stage.events[index] for index in indices}
            for stage, indices in zip(stages, self.indices, strict=True)
        ]
        schedule_run = stages[0].events[self.indices[0][0]]
        self.config = plan_config_from_json(schedule_run.attributes["config"])
        self.run = stages[0].run_of(number)
        """Which run of its training step it is, from 1 on."""
        self.transfers = _match(self)
        _split_waits(self)

    @property
    def pace(self) -> dict[str, float] | None:
        """{"forward_ms", "backward_ms", ...} if computation was padded."""
        return next((stage.pace for stage in self.stages if stage.pace), None)

    @property
    def num_late(self) -> int:
        """Pieces of work of a paced run that took clearly longer than the pace."""
        if self.pace is None:
            return 0
        return sum(
            event.end - event.start > LATE * length + 100 for event, length in paced_lengths(self)
        )

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of work that the step did, in the order of `KINDS`."""
        events = map(self.event, self.all_work())
        found = {part.kind for event in events for part in parts_of(event.action)}
        return [kind for kind in KINDS if kind in found]

    @cached_property
    def all_kinds(self) -> list[str]:
        """Forward, backward, and what else was done or planned, in the order of `KINDS`."""
        work = (part for actions in self.plan.ranks for a in actions for part in parts_of(a))
        found = {FORWARD, BACKWARD, *self.kinds, *(part.kind for part in work)}
        return [kind for kind in KINDS if kind in found]

    def event(self, place: Place) -> Event:
        """The event at (stage, index)."""
        return self.events[place[0]][place[1]]

    def place_of_action(self, rank: int, number: int) -> Place:
        """Where the `number`-th action of a stage is among its events."""
        return rank, self.action_indices[rank][number]

    @cached_property
    def action_indices(self) -> list[list[int]]:
        """Per stage, the indices of its actions: pieces of work, communicator calls."""
        kinds = (*KINDS, COMMUNICATE)
        return [
            [index for index in indices if events[index].action.kind in kinds]
            for indices, events in zip(self.indices, self.events, strict=True)
        ]

    def actions(self, rank: int) -> list[Action]:
        """What the stage did, in order."""
        return [self.events[rank][index].action for index in self.action_indices[rank]]

    def work(self, rank: int) -> list[int]:
        """Indices of the stage's pieces of work, in order."""
        events = self.events[rank]
        return [i for i in self.action_indices[rank] if events[i].action.kind != COMMUNICATE]

    # -- How long --

    @cached_property
    def start(self) -> float:
        """When the first computation of any stage began."""
        return min((self.events[r][i].start for r, i in self.all_work()), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last computation of any stage ended."""
        return max((self.events[r][i].end for r, i in self.all_work()), default=0.0)

    @property
    def makespan(self) -> float:
        return self.end - self.start

    def busy(self, rank: int) -> float:
        """Time that the stage spent in work."""
        events = self.events[rank]
        return sum(events[i].end - events[i].start for i in self.work(rank))

    @property
    def bubble_over_total(self) -> float:
        """Idle time over all time, as `planner.simulator.Simulation.bubble_over_total`."""
        total = self.makespan * len(self.stages)
        return 1 - self._busy() / total if total else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over computing time."""
        busy = self._busy()
        return (self.makespan * len(self.stages) - busy) / busy if busy else 0.0

    def _busy(self) -> float:
        return sum(self.busy(rank) for rank in range(len(self.stages)))

    def all_work(self) -> list[Place]:
        """All pieces of work of all stages."""
        return [(rank, i) for rank in range(len(self.stages)) for i in self.work(rank)]

    # -- What should have happened --

    @property
    def has_plan(self) -> bool:
        """Whether its schedule is registered here; a user's own may be known elsewhere only."""
        return self.config.schedule in schedule_names()

    @cached_property
    def plan(self) -> Plan:
        """The plan that this step should have followed; what it did, where nobody knows one."""
        if not self.has_plan:
            return Plan(self.config, [self.actions(rank) for rank in range(len(self.stages))])
        return plan_of(self.config)

    @property
    def formulas(self) -> tuple[Formula, Formula] | None:
        """The closed forms of the bubble, over ideal and over total; None without one."""
        return bubble_formulas(self.config)

    @cached_property
    def simulation(self) -> Simulation:
        """The plan with this run's own mean times per chunk (or its pace), messages free."""
        return simulate(self.plan, costs_of(self), BUFFERED)

    # -- Why --

    def gaps(self, rank: int) -> list[TracedGap]:
        """Every stretch in which the stage computed nothing, with its blame."""
        events, work = self.events[rank], self.work(rank)
        gaps, free_since = [], self.start
        for index in [*work, None]:
            start = self.end if index is None else events[index].start
            if start > free_since:
                gaps.append(self._gap(rank, free_since, start, index))
            if index is not None:
                free_since = max(free_since, events[index].end)
        return gaps

    def _gap(self, rank: int, start: float, end: float, before: int | None) -> TracedGap:
        if before is None:  # the step goes on elsewhere; nobody is waited for
            last = max(self.all_work(), key=lambda place: self.event(place).end)
            return TracedGap(rank, start, end, None, last, end - start, 0.0)
        waiting = transfer = longest = 0.0
        blamed = None
        for message in self._received_by_stage[rank]:
            for place in message.waited or ():
                event = self.event(place)
                middle = event.start + event.wait
                until_sent = _overlap(event.start, middle, start, end)
                on_its_way = _overlap(middle, event.end, start, end)
                waiting, transfer = waiting + until_sent, transfer + on_its_way
                if until_sent + on_its_way > longest:
                    longest, blamed = until_sent + on_its_way, self.maker(message)
        return TracedGap(rank, start, end, before, blamed, waiting, transfer)

    @cached_property
    def _received_by_stage(self) -> dict[int, list[Transfer]]:
        received = defaultdict(list)
        for message in self.transfers:
            received[message.receiver].append(message)
        return received

    def maker(self, message: Transfer) -> Place | None:
        """The work that made a message."""
        return self._makers.get((message.sender, message.payload, message.sent_unit))

    def user(self, message: Transfer) -> Place | None:
        """The work that used a message."""
        return self._users.get((message.receiver, message.payload, message.received_unit))

    @cached_property
    def _makers(self) -> dict[tuple, Place]:
        return self._work_by("gives")

    @cached_property
    def _users(self) -> dict[tuple, Place]:
        return self._work_by("takes")

    def _work_by(self, field: str) -> dict[tuple, Place]:
        """(rank, payload that the work gives or takes, its unit) -> where it is."""
        places = {}
        for rank, index in self.all_work():
            for part in parts_of(self.events[rank][index].action):
                payload = getattr(KINDS[part.kind], field)
                places[rank, payload, (part.microbatch, part.chunk)] = (rank, index)
        return places


def _overlap(start: float, end: float, other_start: float, other_end: float) -> float:
    return max(0.0, min(end, other_end) - max(start, other_start))


def plan_of(config: PlanConfig) -> Plan:
    """The plan of a recorded config. Raises ValueError for a schedule that is not registered."""
    has_chunks = (
        config.num_model_chunks > 1 or config.microbatch_group_size_per_vp_stage is not None
    ) and config.pp_size > 1
    return plan(
        config.schedule,
        config.pp_size,
        config.num_microbatches,
        vpp=config.num_model_chunks if has_chunks else None,
        group_size=config.microbatch_group_size_per_vp_stage,
        forward_only=config.forward_only,
        overlap_p2p_comm=config.overlap_p2p_comm,
        batch_p2p_comm=config.batch_p2p_comm,
        message_bytes=config.message_bytes,
        wire=config.wire,
        message_factors=config.message_factors,
        message_sizes=config.message_sizes,
    )


# -- Messages --


def _match(step: Step) -> list[Transfer]:
    """Pairs the n-th send of each kind with the n-th receive at the other end."""
    sends: dict[tuple, list[Transfer]] = defaultdict(list)
    num_received: dict[tuple, int] = defaultdict(int)
    for rank, indices in enumerate(step.action_indices):
        for index in indices:
            event = step.events[rank][index]
            for message in event.action.messages:
                if message.direction == SEND:
                    sends[message.payload, rank, message.peer].append(
                        _transfer(rank, index, event, message)
                    )
    for rank, indices in enumerate(step.action_indices):
        for index in indices:
            event = step.events[rank][index]
            for message in event.action.messages:
                if message.direction == RECEIVE:
                    key = (message.payload, message.peer, rank)
                    number = num_received[key]
                    num_received[key] += 1
                    if number < len(sends[key]):
                        _receive(sends[key][number], rank, index, event, message)
    return [message for of_link in sends.values() for message in of_link]


def _transfer(rank: int, index: int, event: Event, message: Message) -> Transfer:
    unit = (message.microbatch, message.chunk)
    return Transfer(
        message.payload,
        rank,
        message.peer,
        message.num_bytes,
        (rank, index),
        event.start,
        unit,
        waited=[],
    )


def _receive(transfer: Transfer, rank: int, index: int, event: Event, message: Message) -> None:
    transfer.received_by = (rank, index)
    transfer.received_unit = (message.microbatch, message.chunk)
    transfer.posted_at, transfer.arrived_at = event.start, event.end


def _split_waits(step: Step) -> None:
    """Refines the times of all messages by the calls below the communicator, then splits waits."""
    by_end: dict[tuple, Transfer] = {}
    counts: dict[tuple, int] = defaultdict(int)
    for message in step.transfers:
        for direction, rank in ((SEND, message.sender), (RECEIVE, message.receiver)):
            peer = message.receiver if direction == SEND else message.sender
            channel = (direction, rank, message.payload, peer)
            by_end[(*channel, counts[channel])] = message
            counts[channel] += 1
    waits: list[tuple[int, int, str, Transfer]] = []
    for rank, indices in enumerate(step.indices):
        for index in indices:
            event = step.events[rank][index]
            if "ordinal" not in event.attributes:
                continue
            attributes = event.attributes
            direction = SEND if attributes["doing"] == "sending" else RECEIVE
            of_message = (attributes["payload"], attributes["peer"], attributes["ordinal"])
            message = by_end.get((direction, rank, *of_message))
            if message is None:
                continue
            if event.name == "p2p-wait":
                waits.append((rank, index, direction, message))
                continue
            if direction == SEND:
                message.sent_at = event.start
            else:
                message.posted_at = event.start
            unit = _unit(message, direction)
            action = event.action._replace(microbatch=unit[0], chunk=unit[1])
            step.events[rank][index] = replace(event, action=action)
    for rank, index, direction, message in waits:
        _split(step, rank, index, direction, message)


def _split(step: Step, rank: int, index: int, direction: str, message: Transfer) -> None:
    event = step.events[rank][index]
    unit = _unit(message, direction)
    partner_at = message.posted_at if direction == SEND else message.sent_at
    until = event.start if partner_at is None else min(max(partner_at, event.start), event.end)
    if direction == RECEIVE:
        message.arrived_at = event.end
        message.waited.append((rank, index))
    events = step.events[rank]
    wait, transfer = until - event.start, event.end - until
    events[index] = _with_wait(event, wait, transfer, unit)
    parent = event.parent
    if parent is not None and events[parent].action.kind == COMMUNICATE:
        events[parent] = _with_wait(events[parent], wait, transfer)


def _unit(message: Transfer, direction: str) -> tuple[int | None, int | None]:
    return message.sent_unit if direction == SEND else message.received_unit or (None, None)


def _with_wait(
    event: Event, wait: float, transfer: float, unit: tuple[int | None, int | None] | None = None
) -> Event:
    attributes = dict(event.attributes)
    attributes["transfer"] = attributes.get("transfer", 0.0) + transfer
    action = event.action
    if unit is not None:
        action = action._replace(microbatch=unit[0], chunk=unit[1])
    return replace(event, action=action, wait=event.wait + wait, attributes=attributes)
