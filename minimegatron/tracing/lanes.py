"""The lanes of a recorded step: per rank what computed, and what each communicator did meanwhile.

Torch-free. Megatron has no counterpart.

A recording of GPUs over NCCL has a lane per communicator (`communicator_clock` says what its times
mean). Any other has one lane instead, of the calls in which the program, or the compute stream, waited.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from minimegatron.core.orders.work import ALL_TO_ALL, HIDDEN, RING_HOP
from minimegatron.planner.actions import KINDS, Event, parts_of
from minimegatron.tracing.step import Step

COMPUTE, WAITS = "compute", "waits"
"""Names of lanes; every other lane has its communicator's."""
SENDING, RECEIVING, BATCH, COLLECTIVE = "sending", "receiving", "batch", "collective"
"""What a bar of communication is. Bars of computation are of a kind of work."""
SHORT = {ALL_TO_ALL: "A2A", RING_HOP: "HOP"}
"""Collectives with a name of their own in a picture; others have their initials."""
SIGNS = {SENDING: ">", RECEIVING: "<"}
"""What stands before the name of a message."""


@dataclass
class Bar:
    """One stretch of a lane. Microseconds, as the recording's."""

    start: float
    end: float
    kind: str
    """A kind of work, or one of this module's four."""
    events: list[Event] = field(default_factory=list)
    """What it was recorded as: the messages of a batch are several."""

    @property
    def label(self) -> str:
        """Its name in a few characters: `F3`, `>F3`, `>B0 <F3`, `AR` for an all-reduce."""
        if self.kind in KINDS:
            parts = parts_of(self.events[0].action)
            return "&".join(_unit(KINDS[x.kind].letter, x.microbatch, x.chunk) for x in parts)
        if self.kind == COLLECTIVE:
            name = self.events[0].name
            return SHORT.get(name) or "".join(word[0] for word in name.split("-")).upper()
        return " ".join(map(message_label, self.events))


@dataclass
class Lane:
    """One line of a picture: bars in order, that do not overlap but on the two lanes of `HIDDEN`."""

    rank: int
    """The global rank."""
    name: str
    bars: list[Bar]


def lanes_of(step: Step) -> list[list[Lane]]:
    """Of each stage: the lane of its compute stream, then the others."""
    return [list(_lanes_of_stage(step, stage)) for stage in range(len(step.stages))]


def _lanes_of_stage(step: Step, stage: int) -> Iterator[Lane]:
    rank, events = step.stages[stage].rank, step.events[stage]
    work = (events[index] for index in step.work(stage))
    yield Lane(rank, COMPUTE, [Bar(e.start, e.end, e.action.kind, [e]) for e in work])
    of_communicators = communications(events.values())
    for name in sorted(of_communicators):
        yield Lane(rank, name, of_communicators[name])
    for name in HIDDEN:
        if bars := in_flight(events, name):
            yield Lane(rank, name, bars)
    if not has_communicators(step):
        yield Lane(rank, WAITS, list(_waits(events.values())))


def has_communicators(step: Step) -> bool:
    """Whether any stage's recording has times of a communicator."""
    events = (event for of_stage in step.events for event in of_stage.values())
    return any("communicator" in event.attributes for event in events)


def communications(events: Iterable[Event]) -> dict[str, list[Bar]]:
    """By communicator: its bars in order, one for each collective, lone message and batch."""
    found: dict[str, dict[tuple[float, float], Bar]] = {}
    for event in events:
        if "communicator" not in event.attributes:
            continue
        bars = found.setdefault(event.attributes["communicator"], {})
        span = (event.attributes["device_start"], event.attributes["device_end"])
        # A communicator does one thing at a time: what has the same times is one batch.
        bar = bars.setdefault(span, Bar(*span, _kind(event)))
        bar.events.append(event)
        if len(bar.events) > 1:
            bar.kind = BATCH
    return {
        name: sorted(bars.values(), key=lambda bar: (bar.start, bar.end))
        for name, bars in found.items()
    }


def _waits(events: Iterable[Event]) -> Iterator[Bar]:
    for event in events:
        if event.name == RING_HOP:
            continue  # it is started here and waited for later: its own lane shows where
        if event.name == "p2p-wait" or "group_size" in event.attributes:
            yield Bar(event.start, event.end, _kind(event), [event])


def in_flight(events: Mapping[int, Event], name: str = ALL_TO_ALL) -> list[Bar]:
    """Each collective of a name, in order: from its start to the end of the wait for it.

    That is longer than it takes, if the rank computes meanwhile. A bar's events are the call that
    started it and, if it was not waited for there, the wait. `exposed_of` says what was exposed.
    """
    waits: dict[int, Event] = {}
    for event in events.values():
        if "begun" in event.attributes:
            waits.setdefault(
                event.attributes["begun"], event
            )  # whoever waits again waits for nothing
    found = []
    for index, event in events.items():
        if event.name == name:
            parts = [event, waits[index]] if index in waits else [event]
            found.append(Bar(event.start, parts[-1].end, COLLECTIVE, parts))
    return found


@dataclass(frozen=True)
class Exposure:
    """The all-to-alls, or the hops, of one stage. Microseconds."""

    number: int
    in_flight: float
    """The time in which at least one is."""
    exposed: float
    """Of it, the time that the program, or the compute stream, waits for one."""


def exposed_of(bar: Bar) -> tuple[float, float]:
    """The wait for a collective: all of it where it is waited for at once."""
    return (bar.start, bar.end) if len(bar.events) == 1 else (bar.events[1].start, bar.end)


def exposure(events: Mapping[int, Event], name: str = ALL_TO_ALL) -> Exposure:
    """What a stage's all-to-alls, or its `RING_HOP`s, cost it."""
    bars = in_flight(events, name)
    spans = [(bar.start, bar.end) for bar in bars]
    return Exposure(len(bars), _covered(spans), _covered(map(exposed_of, bars)))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what several stretches cover together."""
    length, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, until))
        until = max(until, end)
    return length


def _kind(event: Event) -> str:
    return event.attributes.get("doing", COLLECTIVE)


def message_label(event: Event) -> str:
    """`>F3`: the output of the forward of microbatch 3 goes out. `<B0`: a gradient comes in.

    Small letters are messages of sizes, which belong to no microbatch.
    """
    payload = event.attributes["payload"]
    is_tensor = not payload.endswith("shape")
    makers = [kind.letter for kind in KINDS.values() if kind.gives == payload.split()[0]]
    sign, action = SIGNS[event.attributes["doing"]], event.action
    if is_tensor:
        return sign + _unit(makers[0], action.microbatch, action.chunk)
    return sign + makers[0].lower()


def _unit(letter: str, microbatch: int | None, chunk: int | None) -> str:
    return f"{letter}{'?' if microbatch is None else microbatch}" + "'" * (chunk or 0)
