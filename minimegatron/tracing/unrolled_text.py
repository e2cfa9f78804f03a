"""A step unrolled as text: each call with the lines that it ran, in the order of the calls.

Torch-free. Megatron has no counterpart.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby

from minimegatron.planner.actions import SEND
from minimegatron.tracing.trace_words import size
from minimegatron.tracing.unrolled import CallNode, Loop, MessageRow, Unit, Unrolled


def unrolled_text(
    unrolled: Unrolled, microbatch: int | None = None, depth: int | None = None
) -> Iterator[str]:
    """The lines to print.

    Args:
        unrolled: the step of one rank.
        microbatch: only calls that work on this one or carry its messages, and the calls around them.
        depth: so many levels of calls are shown with their lines, the first being the step itself;
            below them the links of the chain, each in one line. 0: who calls whom. None: all lines.

    Raises ValueError if the step has no such microbatch.
    """
    if microbatch is not None and not any(node.is_about(microbatch) for node in unrolled.nodes):
        there = number_words(unit[0] for node in unrolled.nodes for unit in node.units)
        raise ValueError(
            f"no call of this step is about microbatch {microbatch}; there are {there}"
        )
    yield from _Text(unrolled, microbatch, depth).lines()


def heading(unrolled: Unrolled) -> str:
    """Whose step it is, and how much of it there is."""
    recording = unrolled.recording
    place = ", ".join(f"{axis} {value}" for axis, value in recording.coordinates.items())
    lines = unrolled.lines
    return (
        f"rank {recording.rank} of {recording.world_size} ({place}): {len(lines.calls):,} calls of "
        f"{len(lines.functions)} functions, {unrolled.num_lines:,} lines ran"
    )


class _Text:
    def __init__(self, unrolled: Unrolled, microbatch: int | None, depth: int | None):
        self.unrolled, self.microbatch, self.depth = unrolled, microbatch, depth
        self.wanted: set[CallNode] | None = None
        if microbatch is not None:
            self.wanted = set()
            for node in unrolled.nodes:
                at: CallNode | None = node if node.is_about(microbatch) else None
                while at is not None and at not in self.wanted:
                    self.wanted.add(at)
                    at = at.parent

    def lines(self) -> Iterator[str]:
        root = self.unrolled.root
        yield self._head(root)
        yield from self._body(root, "", 0)

    def _is_shown(self, node: CallNode) -> bool:
        return self.wanted is None or node in self.wanted

    def _head(self, node: CallNode, names_helpers: bool = False) -> str:
        """A call's own line. `names_helpers`: those that stand in no line of their own."""
        path, line = self.unrolled.place(node)
        parts = [self.unrolled.name(node)]
        if names_helpers and node.helpers():
            names = [self.unrolled.name(helper).partition(", ")[0] for helper in node.helpers()]
            parts.append(f"via {' > '.join(names)}")
        parts += [call_words(node, self.microbatch), f"[{path.rpartition('/')[2]}:{line}]"]
        return "  ".join(filter(None, parts))

    def _body(self, node: CallNode, indent: str, level: int) -> Iterator[str]:
        """What stands below a call's own line: its messages, then its code or whom it calls."""
        yield from self._messages(node, indent)
        if self.depth is not None and level >= self.depth:
            yield from self._links(node, indent, level)
        elif node in self.unrolled.first:
            yield from self._code(node, indent, level)
        else:
            yield f"{indent}= its lines stand at an earlier call, above"
            yield from self._again(node, indent, level)

    def _links(self, node: CallNode, indent: str, level: int) -> Iterator[str]:
        """The links of the chain within a call, and above those of a loop how it begins."""
        loops: list[Loop] = []
        for link in filter(self._is_shown, node.links()):
            before, loops = loops, self._loops(link)
            for depth, loop in enumerate(loops):
                if loops[: depth + 1] != before[: depth + 1]:
                    yield f"{indent}{'| ' * (depth + 1)}{loop.words}"
            more = indent + "| " * len(loops)
            yield f"{more}{self._head(link, True)}"
            yield from self._body(link, f"{more}  ", level + 1)

    def _loops(self, link: CallNode) -> list[Loop]:
        """The loops around a link, up to the link that calls it, the outermost first."""
        return [loop for node in (*link.helpers(), link) for loop in self.unrolled.loops(node)]

    def _again(self, node: CallNode, indent: str, level: int) -> Iterator[str]:
        """Of a function whose lines were shown: the links in it, and first calls of others."""
        for callee in filter(self._is_shown, node.children):
            if callee in self.unrolled.new:
                yield f"{indent}      └ {self._head(callee)}"
                yield from self._body(callee, f"{indent}        ", level + 1)
            elif callee.is_link:
                yield f"{indent}{self._head(callee, True)}"
                yield from self._messages(callee, f"{indent}  ")
                yield from self._again(callee, f"{indent}  ", level + 1)
            else:
                yield from self._again(callee, indent, level + 1)

    def _code(self, node: CallNode, indent: str, level: int) -> Iterator[str]:
        text, rows = self.unrolled.source(node).text, self.unrolled.rows(node)
        lines, first = text.rstrip("\n").split("\n"), self.unrolled.place(node)[1]
        own = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        folds = {fold.first: fold for fold in rows.folds}
        callees: dict[int, list[CallNode]] = {}
        for child in node.children:
            callees.setdefault(self.unrolled.place_in_caller(child), []).append(child)
        number = 1
        while number <= rows.num_lines:
            fold = folds.get(number)
            last = number if fold is None else fold.last
            if fold is not None:
                yield f"{indent}    … {counted(fold.num_lines, 'line')}: {fold.words}"
            elif lines[number - 1].strip():
                count = rows.counts.get(number)
                some = "" if count is None else f"   # in {count} of {node.num_calls} calls"
                yield f"{indent}{first + number - 1:5} {lines[number - 1][own:]}{some}"
            for at in range(number, last + 1):
                for callee in filter(self._is_shown, callees.get(at, ())):
                    yield f"{indent}      └ {self._head(callee)}"
                    yield from self._body(callee, f"{indent}        ", level + 1)
            number = last + 1

    def _messages(self, node: CallNode, indent: str) -> Iterator[str]:
        """One line for each call: what it sent, and what it received."""
        for _, found in groupby(node.rows, key=lambda row: row.event):
            rows = list(found)
            if self.microbatch in (None, *(row.message.microbatch for row in rows)):
                yield indent + "; ".join(row_words(row, self.unrolled.has_chunks) for row in rows)


# -- Words --


def call_words(node: CallNode, microbatch: int | None = None) -> str:
    """What a node's calls worked on, and how many there were; "" for one call, of no microbatch."""
    units = [unit for unit in node.units if microbatch in (None, unit[0])]
    # What a call carries is said below it, message for message.
    parts = [] if node.rows else [unit_words(units)]
    # One call may carry messages of two microbatches.
    num_calls = node.num_calls
    if microbatch is not None and units:
        num_calls = sum(node.units[unit] for unit in units)
    if num_calls > 1:
        parts.append(f"{num_calls} calls")
    return "  ".join(filter(None, (*parts, "; ".join(node.notes[:2]))))


def unit_words(units: Iterable[Unit]) -> str:
    """
    >>> unit_words([(0, 0), (1, 0), (2, 0), (7, 0)]), unit_words([(3, 0), (3, 1), (4, 1)])
    ('microbatches 0-2, 7', 'chunk 0: microbatch 3; chunk 1: microbatches 3-4')
    """
    found = by_chunk(units)
    if len(found) < 2:
        return "".join(map(_microbatches, found.values()))
    return "; ".join(f"chunk {chunk}: {_microbatches(own)}" for chunk, own in found.items())


def by_chunk(units: Iterable[Unit]) -> dict[int, list[int]]:
    """Chunk -> its microbatches, in the order of chunks; what is of no microbatch is left out."""
    found: dict[int, list[int]] = {}
    for microbatch, chunk in units:
        if microbatch is not None:
            found.setdefault(chunk or 0, []).append(microbatch)
    return dict(sorted(found.items()))


def _microbatches(numbers: list[int]) -> str:
    return f"microbatch{'es' * (len(set(numbers)) > 1)} {number_words(numbers)}"


def number_words(numbers: Iterable[int | None]) -> str:
    """Numbers in order, runs of them by their ends; "none" if there are none.

    >>> number_words([3, 0, 1, None, 2, 7])
    '0-3, 7'
    """
    runs: list[list[int]] = []
    for number in sorted({number for number in numbers if number is not None}):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs) or "none"


def row_words(row: MessageRow, has_chunks: bool = False) -> str:
    """A message, and where its other end is."""
    message = row.message
    chunk = f", chunk {message.chunk}" if has_chunks else ""
    arrow = "→" if message.direction == SEND else "←"
    where = f"rank {row.peer_rank}"
    if row.peer_node is not None:
        where += f", call {row.peer_node}"
    return (
        f"{arrow} {message.payload} of microbatch {message.microbatch}{chunk} "
        f"{'to' if message.direction == SEND else 'from'} {where}, {size(message.num_bytes)}"
    )


def counted(number: int, what: str) -> str:
    """
    >>> counted(1, "line"), counted(3, "line")
    ('1 line', '3 lines')
    """
    return f"{number} {what}{'s' * (number != 1)}"
