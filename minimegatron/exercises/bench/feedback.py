"""What a check says when something is wrong: which invariant, where, and what it usually means.

Torch-free; tensors are compared in `feedback_numbers`. Megatron has no counterpart.
"""

from collections.abc import Callable, Sequence
from typing import Any

from minimegatron.exercises.bench.cases import Wrong

# -- Words --


def num_of(number: int, one: str, many: str = "") -> str:
    """A number with its noun.

    >>> num_of(1, "rank"), num_of(3, "rank"), num_of(0, "box", "boxes")
    ('1 rank', '3 ranks', '0 boxes')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


# -- Values --


def check_value(what: str, got: Any, expected: Any, why: str = "") -> None:
    """Raises `wrong_value(...)` unless the two are equal."""
    if got != expected:
        raise wrong_value(what, got, expected, why)


def wrong_value(what: str, got: Any, expected: Any, why: str = "") -> Wrong:
    """A plain value (a rank, a list, a table) that differs: yours, the right one, and why."""
    lines = [f"{what} is wrong", f"  yours:    {_short(got)}", f"  expected: {_short(expected)}"]
    if got is None:
        lines[1] += "   (was `return` forgotten?)"
    place = _first_difference(got, expected)
    return Wrong("\n".join([*lines, *([place] if place else []), *([why] if why else [])]))


def _first_difference(got: Any, expected: Any) -> str:
    if not (isinstance(got, list | tuple) and isinstance(expected, list | tuple)):
        return ""
    if type(got) is not type(expected) and list(got) == list(expected):
        return f"the same items, but a {type(expected).__name__} is expected"
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=False)):
        if mine != theirs:
            return f"first difference at [{index}]: {_short(mine)}, expected {_short(theirs)}"
    return f"{num_of(len(got), 'item')}; expected: {len(expected)}"


def _short(value: Any, most: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


# -- Order --


def check_order(
    plan_actions: Sequence[Any],
    trace_actions: Sequence[Any],
    rank: int | None = None,
    words: Callable[[Any], str] | None = None,
) -> None:
    """Raises `wrong_order(...)` unless both lists have the same actions in the same order."""
    say = words or _action_words
    if list(map(say, plan_actions)) != list(map(say, trace_actions)):
        raise wrong_order(plan_actions, trace_actions, rank, words)


def wrong_order(
    plan_actions: Sequence[Any],
    trace_actions: Sequence[Any],
    rank: int | None = None,
    words: Callable[[Any], str] | None = None,
) -> Wrong:
    """The plan beside what was done, one action per line, with the first divergence marked.

    Actions are the planner's, or plain words such as "F0"; `words` says them otherwise.

    >>> print(wrong_order(["F0", "F1", "B0"], ["F0", "B0", "F1"], rank=1))
    rank 1: the order is wrong from action 1 on: the plan has F1, your code did B0
           plan  yours
       0   F0    F0
    -> 1   F1    B0   <- first difference
       2   B0    F1
    """
    say = words or _action_words
    plan, done = list(map(say, plan_actions)), list(map(say, trace_actions))
    longest = max(len(plan), len(done))
    pairs = [(_at(plan, i), _at(done, i)) for i in range(longest)]
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), longest)
    wanted, found = pairs[first] if first < longest else ("nothing", "nothing")
    lines = [
        f"{on_rank(rank)}the order is wrong from action {first} on: the plan has "
        f"{wanted or 'nothing more'}, your code did {found or 'nothing more'}"
    ]
    begin, end = max(0, first - 6), min(longest, first + 6)
    width = max(4, *(len(a) for a, _ in pairs[begin:end])) if end > begin else 4
    lines.append(f"       {'plan'.ljust(width)}  yours")
    if begin:
        lines.append(f"       ... {begin} equal actions")
    for i in range(begin, end):
        mark, tail = ("->", "   <- first difference") if i == first else ("  ", "")
        lines.append(f"{mark}{i:>3}   {pairs[i][0].ljust(width)}  {pairs[i][1]}{tail}".rstrip())
    if end < longest:
        lines.append(f"       ... {longest - end} more")
    return Wrong("\n".join(lines))


def _at(actions: Sequence[str], index: int) -> str:
    return actions[index] if index < len(actions) else ""


def _action_words(action: Any) -> str:
    """Short for forwards and backwards (F3, or F3.1 on chunk 1), the full words for messages."""
    kind = getattr(action, "kind", None)
    if kind not in ("forward", "backward"):
        return str(action)
    chunk = f".{action.chunk}" if action.chunk else ""
    return f"{kind[0].upper()}{action.microbatch}{chunk}"


def on_rank(rank: int | None) -> str:
    """How a message about a rank begins; "" for None."""
    return "" if rank is None else f"rank {rank}: "
