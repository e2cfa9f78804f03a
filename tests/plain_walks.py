"""How far it is from one place of a training step to another: in calls, functions and files.

A walk is the calls of one rank in order, from one call to another, both with it; `code_recorder` has
recorded them. A call of a function begins with the outermost of the wrappers around it: functions that
a decorator has made, and hooks.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tests.code_recorder import WIRE, Call

Calls = Sequence[Call]


class Length(NamedTuple):
    """Of one walk."""

    calls: int
    functions: int
    """Different ones."""
    files: int
    changes: int
    """How often a call is in another file than the call before it."""


def length_of(walk: Calls) -> Length:
    """The length of a walk; calls of a socket do not count."""
    walk = [call for call in walk if call.file != WIRE]
    files = [call.file for call in walk]
    changes = sum(one != other for one, other in pairwise(files))
    return Length(len(walk), len({call[:2] for call in walk}), len(set(files)), changes)


def walks(calls: Calls, begin: str, end: str) -> Iterator[Calls]:
    """From each call of the function `begin` to the next one of `end`, unless `begin` comes again."""
    starts = places(calls, begin)
    for start, after in zip(starts, [*starts[1:], len(calls)], strict=False):
        ends = [place for place in places(calls, end) if start < place < after]
        if ends:
            yield calls[_outermost(calls, start) : ends[0] + 1]


def ways_to_wire(calls: Calls, name: str) -> Iterator[Calls]:
    """From each call of a function to the first that it sends through a socket, if it does."""
    for calls_within in extents(calls, name):
        sends = [place for place, call in enumerate(calls_within) if call[:2] == (WIRE, "send")]
        if sends:
            yield calls_within[: sends[0] + 1]


def without(calls: Calls, name: str) -> list[Call]:
    """The calls, but those of the function `name` and of what it calls."""
    kept: list[Call] = []
    depth = None
    for call in calls:
        if depth is not None and call.depth > depth:
            continue
        is_left_out = call.name == name or call.name.endswith(f".{name}")
        depth = call.depth if is_left_out else None
        if not is_left_out:
            kept.append(call)
    return kept


def extents(calls: Calls, name: str) -> Iterator[Calls]:
    """Each call of a function, with all that is called until it returns."""
    for place in places(calls, name):
        start = end = _outermost(calls, place)
        end += 1
        while end < len(calls) and calls[end].depth > calls[start].depth:
            end += 1
        yield calls[start:end]


def places(calls: Calls, name: str) -> list[int]:
    """Where a function is called; the name may lack its class."""
    return [
        place
        for place, call in enumerate(calls)
        if call.name == name or call.name.endswith(f".{name}")
    ]


def callers(calls: Calls, place: int) -> Iterator[int]:
    """Where those functions are called that have not returned yet at `place`; the innermost first."""
    depth = calls[place].depth
    for before in range(place - 1, -1, -1):
        if calls[before].depth < depth:
            yield before
            depth = calls[before].depth


def _outermost(calls: Calls, place: int) -> int:
    for caller in callers(calls, place):
        if "<locals>" not in calls[caller].name:
            break
        place = caller
    return place


def without_turns(calls: Calls, is_looped: Callable[[str], bool]) -> list[Call]:
    """The calls, but of a loop in certain files one turn alone.

    Where a function of these files calls another of them again, before it has returned itself, the
    second call is left out with all that it calls.
    """
    kept: list[Call] = []
    open_calls: list[tuple[Call, set[tuple[str, str]]]] = []
    left_out: Call | None = None
    for call in calls:
        if left_out is not None and call.depth > left_out.depth:
            continue
        left_out = None
        while open_calls and open_calls[-1][0].depth >= call.depth:
            open_calls.pop()
        if open_calls and is_looped(call.file) and is_looped(open_calls[-1][0].file):
            known = open_calls[-1][1]
            if call[:2] in known:
                left_out = call
                continue
            known.add(call[:2])
        kept.append(call)
        open_calls.append((call, set()))
    return kept
