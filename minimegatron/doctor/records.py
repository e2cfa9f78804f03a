"""What is known of one rank at a moment: its open calls, its counts, the state of its process.

Torch-free. Megatron has no counterpart.

Ranks are global ranks everywhere here, never places within a group. Times are seconds on the
machine's monotonic clock, which all its processes share.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from minimegatron.core.rank_generator import GROUP_KINDS

RUNNING = "running"
RETURNED = "returned"
"""The rank's function, or its training run, is over."""
RAISED = "raised"
STARTING = "starting"
"""Not yet under way: other ranks may have to wait for a while."""

SENDING, RECEIVING = "sending", "receiving"

Unit = tuple[int | None, int | None]
"""(microbatch, chunk)"""

PICKED = [kind.name for kind in GROUP_KINDS if kind.token is None]
EXCHANGING = "ep"
"""Whose ranks send each other tokens, whatever else the same ranks share."""
TITLES = {kind.name: kind.title for kind in GROUP_KINDS} | {"default_pg": "world"}


@dataclass(frozen=True)
class OpenCall:
    """One traced call that has begun and not ended."""

    name: str
    """The link's name, such as "forward-compute", "p2p-wait", "all-reduce"."""
    symbol: str = ""
    """The function's dotted path."""
    since: float = 0.0
    number: int | None = None
    """How many of its like came before it: in this step (work of this name; messages of this
    direction and payload to or from this peer), or since the beginning in this group (collectives)."""
    microbatch: int | None = None
    chunk: int | None = None
    layer: int | None = None
    doing: str | None = None
    """`SENDING` or `RECEIVING`: the call starts or awaits a message."""
    payload: str | None = None
    """"activation", "gradient", or one of them and " shape"."""
    peer: int | None = None
    group: int | None = None
    """Index into `RankRecord.groups`: the call is a collective, or waits for one."""
    op: str | None = None
    """What a reduction computes; the source of a broadcast."""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    num_bytes: int | None = None
    on_device: bool = False
    """The program's call has returned; its GPU was given this, and has not completed it."""
    is_awaited: bool = True
    """False where the program has not asked for the result yet, so that nothing waits for it."""


@dataclass(frozen=True)
class Collective:
    """One collective that a rank has entered, whether or not it is over."""

    number: int
    name: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    op: str | None = None
    work: str | None = None
    """The work it belongs to, by its link ("forward-compute", "backward-compute", ...), and"""
    work_number: int | None = None
    """that one's number in the step."""
    layer: int | None = None


@dataclass(frozen=True)
class GroupUse:
    """A process group, and how far this rank has come in it."""

    name: str
    """The same on all of the group's ranks, and different from any other group's."""
    ranks: tuple[int, ...]
    title: str = ""
    """For people: "tensor", "data", ..."""
    num_started: int = 0
    """Collectives that this rank has entered; the next one has this number."""
    recent: tuple[Collective, ...] = ()
    """The last few of them, oldest first."""


@dataclass(frozen=True)
class MessageCount:
    """Messages of one direction and payload between this rank and a peer, in this step."""

    doing: str
    payload: str
    peer: int
    num_started: int = 0
    num_awaited: int = 0


@dataclass(frozen=True)
class CaughtException:
    """An exception that ended a traced call; the rank went on, so somebody caught it."""

    text: str
    """Type and message."""
    call: OpenCall
    at: float
    num_steps: int = 0
    """Schedule runs begun by then."""


@dataclass(frozen=True)
class RankRecord:
    """Everything known of one rank."""

    rank: int
    world_size: int
    pid: int = 0
    state: str = RUNNING
    """`STARTING`, `RUNNING`, `RETURNED` or `RAISED`."""
    num_events: int = 0
    """Beginnings and ends of traced calls so far."""
    last_progress: float = 0.0
    """When the last of them was."""
    calls: tuple[OpenCall, ...] = ()
    """Open calls, outermost first."""
    groups: tuple[GroupUse, ...] = ()
    messages: tuple[MessageCount, ...] = ()
    num_steps: int = 0
    """Schedule runs begun."""
    num_forwards: int = 0
    """Begun in this step."""
    num_backwards: int = 0
    """Likewise, in one go or for the input's gradient alone."""
    step: Mapping[str, Any] | None = None
    """The `PlanConfig` of the latest step, as `planner.plan.plan_config_to_json` writes it."""
    pipeline: tuple[int, ...] = ()
    """The ranks of this rank's pipeline, first stage first."""
    coordinates: Mapping[str, int] = field(default_factory=dict)
    """{"tp": 0, "pp": 1, "dp": 0}, once known."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    caught: CaughtException | None = None

    # -- What the system tells, filled in by whoever watches --
    seen_at: float | None = None
    """When this was read."""
    process: str | None = None
    """"computing", "sleeping", "stopped" (by a signal) or "gone"; None where it is not known."""
    stack: str = ""
    """The Python stack of its main thread, innermost call first."""
    device_calls: tuple[OpenCall, ...] | None = None
    """What its GPU was given and has not completed, oldest first; None if the rank does not say."""

    def quiet(self) -> float:
        """Seconds since this rank last began or ended a traced call."""
        return 0.0 if self.seen_at is None else max(0.0, self.seen_at - self.last_progress)

    def is_over(self) -> bool:
        """True if nothing more will come from this rank."""
        return self.state in (RETURNED, RAISED) or self.process == "gone"

    def is_in(self, name: str) -> bool:
        """Whether a call of this name is open."""
        return any(call.name == name for call in self.calls)


def group_of(record: RankRecord, name: str) -> GroupUse | None:
    """What `record` says of the group of this name; None if the rank has not used it yet."""
    return next((group for group in record.groups if group.name == name), None)


def record_to_dict(record: RankRecord) -> dict[str, Any]:
    """The record as plain lists and dicts, for `json.dumps`."""
    return asdict(record)


def record_from_dict(data: Mapping[str, Any]) -> RankRecord:
    """The inverse of `record_to_dict`, also after a journey through JSON."""
    values = dict(data)
    values["calls"] = tuple(map(_call, data["calls"]))
    values["groups"] = tuple(
        GroupUse(
            **{
                **group,
                "ranks": tuple(group["ranks"]),
                "recent": tuple(Collective(**_with_shape(entry)) for entry in group["recent"]),
            }
        )
        for group in data["groups"]
    )
    values["messages"] = tuple(MessageCount(**count) for count in data["messages"])
    values["pipeline"] = tuple(data["pipeline"])
    if data["device_calls"] is not None:
        values["device_calls"] = tuple(map(_call, data["device_calls"]))
    if data["caught"] is not None:
        values["caught"] = CaughtException(
            **{**data["caught"], "call": _call(data["caught"]["call"])}
        )
    return RankRecord(**values)


def _call(data: Mapping[str, Any]) -> OpenCall:
    return OpenCall(**_with_shape(data))


def _with_shape(data: Mapping[str, Any]) -> dict[str, Any]:
    return {**data, "shape": None if data["shape"] is None else tuple(data["shape"])}


def title_of(description: str) -> str:
    """For people, what a group is for, by torch's description of it.

    >>> title_of("tp"), title_of("dp+dp_cp+ep"), title_of("default_pg"), title_of("undefined")
    ('tensor', 'data and expert', 'world', '')
    """
    # Groups with the same ranks are made once and described by all of their kinds: "pp+mp+embd".
    # Most kinds after the first only hold the same ranks by their axes.
    first, *others = description.split("+")
    named = (*PICKED, EXCHANGING)
    titles = [TITLES.get(first, ""), *(TITLES[kind] for kind in others if kind in named)]
    return " and ".join(filter(None, titles))


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Ranks in words.

    >>> ranks_in_words([3]), ranks_in_words([0, 2]), ranks_in_words([0, 1, 2])
    ('rank 3', 'ranks 0 and 2', 'ranks 0, 1 and 2')
    """
    listed = [str(rank) for rank in ranks]
    if len(listed) == 1:
        return f"rank {listed[0]}"
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"
