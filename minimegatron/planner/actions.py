"""What a rank does, as data: the schema that plans, simulations and recorded runs share.

Megatron has no counterpart.

An `Action` says *what*: a forward, a backward, or one call of a `P2PCommunicator` method with the
messages that this call sends and receives. It holds no time, so the plan of a schedule and the
trace of its run are equal when their lists of actions are. An `Event` adds *when* and *where*: start
and end, how much of it was waiting, the source line, the enclosing event.

A timeline as JSON (`timeline_to_json`):

```
{"schema": "minimegatron-timeline", "version": 1 | 2,
 "source": "plan" | "simulation" | "run",
 "config": {"schedule": "1f1b", "pp_size": 4, "num_microbatches": 8, ...},
 "unit": "forward" | "us" | ...,           what 1 means in start, end and wait
 "summary": {...},                          figures, optional
 "ranks": [[event, ...], ...]}              ranks[r]: the events of stage r, in the order of starting
event = {"kind", "rank", "phase", "microbatch", "chunk", "call", "messages", "overlap",
         "start", "end", "wait", "waits_for": [rank, index],
         "name", "symbol", "file", "line", "parent", "attributes"}
message = {"direction", "payload", "peer", "microbatch", "chunk", "num_bytes"}
```

A key is left out where it would say nothing: None, an empty list, False. A reader must refuse a
higher `version` and ignore keys it does not know; new keys do not raise the version, changed
meanings do. Version 1 knows forwards, backwards and communication; a timeline with another kind of work
is of version 2, where a pair has its two actions under "parts".
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from minimegatron.core.orders.work import (
    ACTIVATION,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMMUNICATE,
    COOLDOWN,
    FORWARD,
    GRADIENT,
    KINDS,
    PAIR,
    RECEIVE,
    SEND,
    STEADY,
    WARMUP,
    Action,
    Message,
    describe_message,
    parts_of,
)

__all__ = [
    "ACTIVATION",
    "BACKWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "CALL",
    "COMMUNICATE",
    "COOLDOWN",
    "FORWARD",
    "GRADIENT",
    "KINDS",
    "PAIR",
    "RECEIVE",
    "SCHEMA",
    "SCHEMA_VERSION",
    "SEND",
    "STEADY",
    "WARMUP",
    "Action",
    "Event",
    "Message",
    "Time",
    "action_from_json",
    "action_to_json",
    "describe_message",
    "event_from_json",
    "event_to_json",
    "number_to_json",
    "parts_of",
    "timeline_from_json",
    "timeline_to_json",
    "version_of",
]

SCHEMA = "minimegatron-timeline"
SCHEMA_VERSION = 2
"""The newest version that this program reads."""

CALL = "call"
"""The kind of every other event: a call that the schedule does not plan."""

_FIRST_KINDS = (FORWARD, BACKWARD, COMMUNICATE, CALL)
"""What a timeline of version 1 may hold."""

Time = int | float | Fraction
"""Any unit. Integers and Fractions stay exact through the simulator."""


@dataclass(frozen=True, slots=True)
class Event:
    """An action that has happened, in a simulation or in a run; or any other call of the chain.

    Calls that are no action of the schedule (`train_step`, a collective, ...) have the action
    `Action("call", rank)`, and are known by `name`.
    """

    action: Action
    start: Time
    end: Time
    wait: Time = 0
    """Of a communication's length, the part before its partner was there; the rest is transfer."""
    waits_for: tuple[int, int] | None = None
    """(rank, index) of the event whose end let this one start, in the timeline's `ranks`."""
    name: str | None = None
    """Megatron's timer name of the link, such as "forward-compute"."""
    symbol: str | None = None
    file: str | None = None
    line: int | None = None
    parent: int | None = None
    """Index, on the same rank, of the event that this one is nested in."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Anything else: tensor- and data-parallel coordinates, shape, dtype, ..."""


# -- JSON --


def action_to_json(action: Action) -> dict[str, Any]:
    """The action as a dict for `json.dumps`, without what it does not say.

    >>> action_to_json(Action(FORWARD, 2, WARMUP, 0, 0))
    {'kind': 'forward', 'rank': 2, 'phase': 'warmup', 'microbatch': 0, 'chunk': 0}
    """
    data = {
        key: value
        for key, value in action._asdict().items()
        if value is not None and value is not False and key not in ("messages", "parts")
    }
    if action.messages:
        data["messages"] = [message._asdict() for message in action.messages]
    if action.parts:
        data["parts"] = [action_to_json(part) for part in action.parts]
    return data


def action_from_json(data: dict[str, Any]) -> Action:
    """The inverse of `action_to_json`. Raises ValueError, naming the fault, for anything else."""
    try:
        values = {key: data[key] for key in Action._fields if key in data}
        values["messages"] = tuple(
            Message(**{key: message[key] for key in Message._fields if key in message})
            for message in data.get("messages", ())
        )
        values["parts"] = tuple(map(action_from_json, data.get("parts", ())))
        action = Action(**values)
        if action.kind in (*KINDS, COMMUNICATE, CALL):
            return action
    except (TypeError, KeyError) as error:
        raise ValueError(f"not an action: {str(data)[:200]} ({error})") from error
    raise ValueError(
        f"unknown kind of work {str(action.kind)[:50]!r}; this program knows {', '.join(KINDS)}"
    )


def number_to_json(value: Time) -> int | float:
    """A time as JSON can hold it: whole Fractions as int, others as the nearest float."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


_EVENT_KEYS = ("waits_for", "name", "symbol", "file", "line", "parent", "attributes")


def event_to_json(event: Event) -> dict[str, Any]:
    """The event as a dict for `json.dumps`: its action's keys, then its own."""
    data = action_to_json(event.action)
    data["start"], data["end"] = number_to_json(event.start), number_to_json(event.end)
    if event.wait:
        data["wait"] = number_to_json(event.wait)
    for key in _EVENT_KEYS:
        value = getattr(event, key)
        if value is not None and value != {}:
            data[key] = list(value) if key == "waits_for" else value
    return data


def event_from_json(data: dict[str, Any]) -> Event:
    """The inverse of `event_to_json`. Raises ValueError for anything else."""
    for key in ("start", "end"):
        if not isinstance(data.get(key), int | float):
            raise ValueError(f"not an event: {key!r} is missing or no number in {str(data)[:200]}")
    values = {key: data[key] for key in _EVENT_KEYS if key in data}
    if "waits_for" in values:
        values["waits_for"] = tuple(values["waits_for"])
    return Event(action_from_json(data), data["start"], data["end"], data.get("wait", 0), **values)


def version_of(actions: Iterable[Action]) -> int:
    """The lowest version of the schema that knows these actions."""
    return 1 if {action.kind for action in actions} <= set(_FIRST_KINDS) else SCHEMA_VERSION


def timeline_to_json(
    ranks: Iterable[Iterable[Action | Event]],
    source: str,
    config: dict[str, Any],
    unit: str | None = None,
    summary: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole timeline as a dict for `json.dumps`; the module's docstring shows its shape."""
    ranks = [list(rank) for rank in ranks]
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "version": version_of(getattr(x, "action", x) for rank in ranks for x in rank),
        "source": source,
        "config": config,
    }
    if unit is not None:
        data["unit"] = unit
    if summary is not None:
        data["summary"] = summary
    data["ranks"] = [
        [event_to_json(x) if isinstance(x, Event) else action_to_json(x) for x in rank]
        for rank in ranks
    ]
    return data


def timeline_from_json(data: dict[str, Any]) -> list[list[Action | Event]]:
    """The events (or, without times, the actions) of each rank.

    Raises ValueError for another schema, for a version that this code does not read, and where the
    ranks are not lists of objects.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"not a timeline: 'schema' must be {SCHEMA!r}")
    if data.get("version") not in range(1, SCHEMA_VERSION + 1):
        raise ValueError(
            f"timeline version {data.get('version')!r}, but this program reads versions 1 to "
            f"{SCHEMA_VERSION}; use the minimegatron that wrote it"
        )
    ranks = data.get("ranks")
    if not isinstance(ranks, list) or not all(isinstance(rank, list) for rank in ranks):
        raise ValueError(f"not a timeline: 'ranks' must hold a list per rank, not {ranks!r:.60}")
    for rank in ranks:
        if strange := [x for x in rank if not isinstance(x, dict)]:
            raise ValueError(f"not an action: {strange[0]!r:.60}; each is a JSON object")
    return [
        [event_from_json(x) if "start" in x else action_from_json(x) for x in rank]
        for rank in ranks
    ]
