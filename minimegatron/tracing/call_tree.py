"""The calls of one rank as a tree for the terminal.

Torch-free. Megatron has no counterpart.
"""

from collections.abc import Iterator

from minimegatron.planner.actions import COMMUNICATE, Event
from minimegatron.tracing.rank_trace import RankTrace
from minimegatron.tracing.trace_words import (
    communicator_words,
    event_title,
    message_words,
    moved_words,
    shape_words,
    wait_words,
)

WORDS = (moved_words, communicator_words, shape_words, wait_words)
"""What is said of a call, where there is something to say."""
HEADER = f"{'start ms':>10} {'length ms':>10}  call"


def call_tree(
    rank: RankTrace,
    events: dict[int, Event],
    microbatch: int | None = None,
    chunk: int | None = None,
    depth: int | None = None,
    origin: float | None = None,
) -> Iterator[str]:
    """One line per call, indented by nesting.

    Args:
        rank: whose calls.
        events: those to show, by index in `rank.events`; a `Step`'s, or all.
        microbatch, chunk: only calls that work on these or carry their messages, and the calls
            around those.
        depth: levels of nesting shown below the first.
        origin: what start times are counted from, in microseconds; None for the first event shown.
    """
    wanted = [index for index, event in events.items() if _is_about(event, microbatch, chunk)]
    shown: set[int] = set()
    for index in wanted:
        at: int | None = index
        while at is not None and at in events and at not in shown:
            shown.add(at)
            at = rank.events[at].parent
    if not shown:
        yield "no such calls"
        return
    tree = _Tree(rank, events, sorted(shown), depth)
    yield HEADER
    yield from tree.lines(events[min(shown)].start if origin is None else origin)


def _is_about(event: Event, microbatch: int | None, chunk: int | None) -> bool:
    if microbatch is None and chunk is None:
        return True
    units = [(event.action.microbatch, event.action.chunk)]
    units += [(message.microbatch, message.chunk) for message in event.action.messages]
    return any(
        (microbatch is None or unit[0] == microbatch) and (chunk is None or unit[1] == chunk)
        for unit in units
        if unit[0] is not None
    )


class _Tree:
    def __init__(
        self, rank: RankTrace, events: dict[int, Event], shown: list[int], depth: int | None
    ):
        self.rank, self.events, self.depth = rank, events, depth
        self.children: dict[int | None, list[int]] = {}
        for index in shown:
            parent = rank.events[index].parent
            self.children.setdefault(parent if parent in events else None, []).append(index)
        self.num_chunks = 1 + max((event.action.chunk or 0 for event in events.values()), default=0)

    def lines(self, origin: float) -> Iterator[str]:
        for root in self.children.get(None, ()):
            yield from self._below(root, origin, "", "", 0)

    def _below(
        self, index: int, origin: float, branch: str, indent: str, level: int
    ) -> Iterator[str]:
        event = self.events[index]
        times = f"{(event.start - origin) / 1e3:10.3f} {(event.end - event.start) / 1e3:10.3f}"
        yield f"{times}  {branch}{self._words(event)}"
        inside = self.children.get(index, [])
        if self.depth is not None and level >= self.depth:
            if inside:
                yield f"{'':21}  {indent}└─ {len(inside)} more inside"
            return
        for child in inside:
            is_last = child == inside[-1]
            yield from self._below(
                child,
                origin,
                indent + ("└─ " if is_last else "├─ "),
                indent + ("   " if is_last else "│  "),
                level + 1,
            )

    def _words(self, event: Event) -> str:
        parts = [event_title(event, self.num_chunks)]
        if event.action.kind == COMMUNICATE:
            messages = [message_words(m, self.num_chunks) for m in event.action.messages]
            parts.append("; ".join(messages) or "nothing to move")
        parts += filter(None, (w(event) for w in WORDS))
        if event.action.phase:
            parts.append(event.action.phase)
        if event.attributes.get("unfinished"):
            parts.append("NOT FINISHED")
        line = "  ".join(parts)
        return f"{line}  [{event.file.rpartition('/')[2]}:{event.line}]"
