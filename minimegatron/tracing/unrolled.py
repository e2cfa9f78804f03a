"""One recorded step of one rank as a tree: who called whom, from which line, for which microbatches.

Torch-free. Megatron has no counterpart.

Calls of one function from one line of one caller are one `CallNode`: a loop's turns do not repeat. Its
children are the calls that any of them made, in the order of the first.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from minimegatron.planner.actions import COMMUNICATE, SEND, Event, Message
from minimegatron.tracing.code_rows import CodeRows, rows_of
from minimegatron.tracing.rank_trace import RankTrace, Source
from minimegatron.tracing.run import Run
from minimegatron.tracing.step_lines import NONE, LinesCall
from minimegatron.tracing.trace_words import moved_words, names_of

Unit = tuple[int | None, int | None]
"""A microbatch and a chunk; None for what belongs to none."""

HELPERS = ("p2p-start", "p2p-wait")
"""Traced calls that are no links of the chain: they are within a call that says the same."""
LINKS = frozenset(
    {
        "core.distributed.distributed_data_parallel.DistributedDataParallel._after_grad",
        "core.distributed.distributed_data_parallel.DistributedDataParallel.zero_grad_buffer",
        "core.optimizer_param_scheduler.OptimizerParamScheduler.step",
        "core.pipeline_parallel.loops.interleaved_1f1b",
        "core.pipeline_parallel.loops.one_f_one_b",
        "pretrain_bert.get_batch",
        "pretrain_gpt.get_batch",
        "pretrain_mamba.get_batch",
        "pretrain_t5.get_batch",
    }
)
"""Links of the chain that are not traced, without the package's name."""


class MessageRow(NamedTuple):
    """A message that a node's calls sent or received; and its other end, at a node of another rank."""

    message: Message
    peer_rank: int
    """The other's global rank."""
    peer_node: int | None
    """The node of its tree; None where it left no recorded lines."""
    event: int
    """Of this rank's recording: the call that carried it, maybe with others."""
    number: int
    """Place among all messages of this rank, in the order of the calls."""
    peer_number: int | None
    """The same of the other rank."""


@dataclass(eq=False)
class CallNode:
    """All calls of one function from one line of one caller."""

    number: int
    """Place in `Unrolled.nodes`: 0 is the step, a caller comes before what it calls."""
    function: int
    """Index into the recording's functions."""
    parent: "CallNode | None"
    line: int
    """Of the caller's text: where it is called."""
    is_link: bool
    """Whether it is a link of the chain; else a helper of one."""
    num_calls: int = 0
    units: dict[Unit, int] = field(default_factory=dict)
    """What its calls worked on, or carried, in order -> how many did."""
    ran: dict[int, int] = field(default_factory=dict)
    """Line of the function's text -> how many of its calls ran it."""
    events: list[int] = field(default_factory=list)
    """Of those that are traced, indices into the recording's events."""
    children: list["CallNode"] = field(default_factory=list)
    rows: list[MessageRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What its calls moved, in words; each once."""

    def links(self) -> Iterator["CallNode"]:
        """The nearest links of the chain within it: whom it calls, told without helpers."""
        for child in self.children:
            if child.is_link:
                yield child
            else:
                yield from child.links()

    def below(self) -> Iterator["CallNode"]:
        """It and all that is nested in it, callers first."""
        yield self
        for child in self.children:
            yield from child.below()

    def is_about(self, microbatch: int) -> bool:
        """Whether any of its calls works on this microbatch, or carries its messages."""
        return any(unit[0] == microbatch for unit in self.units)

    def helpers(self) -> list["CallNode"]:
        """The calls between it and the nearest link of the chain around it, the outermost first."""
        found: list[CallNode] = []
        node = self.parent
        while node is not None and not node.is_link:
            found.insert(0, node)
            node = node.parent
        return found


class Loop(NamedTuple):
    """A loop of a function."""

    caller: CallNode
    line: int
    """Where it begins, in the function's text."""
    words: str
    """That line."""


class Unrolled:
    """The step whose lines one rank recorded. `unroll` makes those of all ranks together."""

    def __init__(self, recording: RankTrace):
        self.recording, self.lines = recording, recording.lines
        self.nodes: list[CallNode] = []
        self._of_event: dict[int, CallNode] = {}
        self._rows: dict[CallNode, CodeRows] = {}
        self._grow()

    @property
    def root(self) -> CallNode:
        return self.nodes[0]

    def source(self, node: CallNode) -> Source:
        """The function's name and its own text."""
        return self.recording.sources[self.lines.functions[node.function].source]

    def place(self, node: CallNode) -> tuple[str, int]:
        """The function's file, and its first line there when it was recorded."""
        path, _, line = self.lines.functions[node.function].source.rpartition(":")
        return path, int(line)

    def name(self, node: CallNode) -> str:
        """The function's name as a reader knows it; with its file where two have the same."""
        return self._names[node.function]

    @cached_property
    def _names(self) -> list[str]:
        sources = self.recording.sources
        return names_of([sources[function.source].name for function in self.lines.functions])

    def place_in_caller(self, node: CallNode) -> int:
        """The line of the caller's text below which it stands: the last one of the calling statement.

        What the end of a `with` calls stands below its block.
        """
        if node.parent is None:
            return 0
        rows = self.rows(node.parent)
        if self.source(node).name.endswith(("__exit__", "__aexit__")) and node.line in rows.exits:
            return rows.exits[node.line]
        return rows.ends.get(node.line, node.line)

    def loops(self, node: CallNode) -> list[Loop]:
        """The loops of its caller that it is called in, the outermost first."""
        if node.parent is None:
            return []
        around, lines = self.rows(node.parent).loops, self.source(node.parent).text.split("\n")
        found: list[Loop] = []
        line = around.get(node.line)
        while line is not None:
            words = lines[line - 1].partition("  #")[0].strip()
            found.insert(0, Loop(node.parent, line, words))
            line = around.get(line)
        return found

    def rows(self, node: CallNode) -> CodeRows:
        """The function's text: what is shown of it, since a call of this node ran it; and folds."""
        if node not in self._rows:
            self._rows[node] = rows_of(self.source(node).text, node.ran, node.num_calls)
        return self._rows[node]

    @cached_property
    def has_chunks(self) -> bool:
        """Whether there are several chunks per stage."""
        return any(unit[1] for node in self.nodes for unit in node.units)

    @property
    def num_lines(self) -> int:
        """Lines that ran, of all functions."""
        return sum(len(function.lines) for function in self.lines.functions)

    def node_of(self, event: int) -> CallNode | None:
        """The node that a traced call is of; None for a call outside the step."""
        return self._of_event.get(event)

    def traced(self) -> list[tuple[int, CallNode]]:
        """Each traced call of the step, by its index in the recording, with its node."""
        return sorted(self._of_event.items(), key=lambda item: item[0])

    @cached_property
    def first(self) -> set[CallNode]:
        """The nodes that ran a line which no node before them did: there the lines are shown.

        Mostly that is the function's first call.
        """
        found: set[CallNode] = set()
        shown: dict[int, set[int]] = {}
        for node in self.nodes:
            lines = shown.setdefault(node.function, set())
            if not lines or not node.ran.keys() <= lines:
                found.add(node)
                lines |= {0, *node.ran}
        return found

    @cached_property
    def new(self) -> set[CallNode]:
        """These nodes, and all nodes around them."""
        found: set[CallNode] = set()
        for first in self.first:
            node: CallNode | None = first
            while node is not None and node not in found:
                found.add(node)
                node = node.parent
        return found

    # -- Making it --

    def _grow(self) -> None:
        of_call: list[CallNode] = []
        units: list[tuple[Unit, ...]] = []
        lines: list[int] = []
        known: dict[tuple[CallNode | None, int, int], CallNode] = {}
        handing_on = self._handing_on()
        for call in self.lines.calls:
            parent, line = (of_call[call.parent], call.line) if call.parent != NONE else (None, 0)
            event = self.recording.events[call.event] if call.event != NONE else None
            around = units[call.parent] if call.parent != NONE else ((None, None),)
            units.append(_units_of(event, around))
            if call.parent != NONE and self.lines.calls[call.parent].function in handing_on:
                line = lines[call.parent]
            lines.append(line)
            if call.function in handing_on and parent is not None:
                of_call.append(parent)
                continue
            key = (parent, line, call.function)
            node = known.get(key)
            if node is None:
                node = known[key] = CallNode(0, call.function, parent, line, self._is_link(call))
                if parent is not None:
                    parent.children.append(node)
            of_call.append(node)
            # A collective of one rank is not recorded, and may be the first of its calls.
            node.is_link = node.is_link or self._is_link(call)
            node.num_calls += 1
            for unit in units[-1]:
                node.units[unit] = node.units.get(unit, 0) + 1
            for number in self.lines.functions[call.function].paths[call.path]:
                node.ran[number] = node.ran.get(number, 0) + 1
            if event is not None:
                node.events.append(call.event)
                self._of_event[call.event] = node
        # A caller stands before what it calls, and that in the order of lines that a reader sees.
        self.nodes = list(of_call[0].below())
        for number, node in enumerate(self.nodes):
            node.number = number
            self._add_notes(node)

    def _handing_on(self) -> set[int]:
        """Decorators' functions that make one call each time: they only hand a call on."""
        num_made = [0] * len(self.lines.calls)
        for call in self.lines.calls[1:]:
            num_made[call.parent] += 1
        busy = {c.function for c, made in zip(self.lines.calls, num_made, strict=True) if made != 1}
        return {
            number
            for number, function in enumerate(self.lines.functions)
            if number not in busy and self.recording.hands_on(function.source)
        }

    def _is_link(self, call: LinesCall) -> bool:
        if call.event != NONE:
            return self.recording.events[call.event].name not in HELPERS
        name = self.recording.sources[self.lines.functions[call.function].source].name
        return name.removeprefix("minimegatron.") in LINKS

    def _add_notes(self, node: CallNode) -> None:
        """What its calls moved, where that is no message between stages."""
        events = [self.recording.events[index] for index in node.events]
        words = [moved_words(event) for event in events if "payload" not in event.attributes]
        node.notes = list(dict.fromkeys(filter(None, words)))
        if node.notes and len(events) < node.num_calls:
            node.notes.append(f"{node.num_calls - len(events)} over 1 rank")
        if events and not any(e.action.kind != COMMUNICATE or e.action.messages for e in events):
            node.notes = ["nothing to move here"]


def _units_of(event: Event | None, around: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """What a call works on: its own, else its caller's. Of one that carries messages, theirs."""
    if event is None:
        return around
    if event.action.messages:
        return tuple((message.microbatch, message.chunk) for message in event.action.messages)
    if event.action.microbatch is None:
        return around
    return ((event.action.microbatch, event.action.chunk),)


# -- All ranks --


def unroll(run: Run) -> dict[int, Unrolled]:
    """By global rank: the step whose lines were recorded, each message with its other end.

    Raises ValueError, saying what to do, if no rank recorded lines.
    """
    found = {rank.rank: Unrolled(rank) for rank in run.ranks if rank.lines is not None}
    if not found:
        raise ValueError(
            "the recording has no lines of a step; record with --trace-lines STEP, or with "
            "trace(lines_of_step=...)"
        )
    ends = {rank: {end.key: end for end in _ends(unrolled)} for rank, unrolled in found.items()}
    for rank, unrolled in found.items():
        stage, ranks = unrolled.recording.coordinates["pp"], _pipeline_of(unrolled, run.ranks)
        for end in ends[rank].values():
            is_sent, payload, peer, ordinal = end.key
            if peer not in ranks:
                continue
            other = ends.get(ranks[peer], {}).get((not is_sent, payload, stage, ordinal))
            place = (None, None) if other is None else (other.node.number, other.number)
            end.node.rows.append(
                MessageRow(end.message, ranks[peer], place[0], end.event, end.number, place[1])
            )
    return found


class _End(NamedTuple):
    key: tuple[bool, str, int, int]
    """Whether it is sent, what it carries, the other stage, how many like it came before."""
    node: CallNode
    message: Message
    event: int
    number: int


def _ends(unrolled: Unrolled) -> Iterator[_End]:
    """The ends of messages that a rank has, in the order of its calls."""
    counts: dict[tuple, int] = {}
    for index, node in unrolled.traced():
        for message in unrolled.recording.events[index].action.messages:
            key = (message.direction == SEND, message.payload, message.peer)
            counts[key] = counts.get(key, -1) + 1
            number = sum(counts.values()) + len(counts) - 1
            yield _End((*key, counts[key]), node, message, index, number)


def _pipeline_of(unrolled: Unrolled, ranks: Iterable[RankTrace]) -> dict[int, int]:
    """By stage: the global rank of the pipeline that this rank is in."""
    mine = unrolled.recording.coordinates
    return {
        other.coordinates["pp"]: other.rank
        for other in ranks
        if all(other.coordinates[axis] == mine[axis] for axis in ("tp", "dp", "cp"))
    }
