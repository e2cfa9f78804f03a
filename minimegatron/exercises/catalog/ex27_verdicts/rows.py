"""Results and requests that a check asks about, what is right, and what known mistakes say of them.

Torch-free. Megatron has no counterpart.
"""

import math
import random
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

NOTHING, AGAIN, GO_ON = "nothing", "again", "go on"
CHECKPOINT, ELSEWHERE, END = "checkpoint", "elsewhere", "end"
TRANSIENT, PERSISTENT, CORRECT = "transient error", "persistent error", "correct result"
EXITS = {
    GO_ON: (False, False, 0),
    CHECKPOINT: (True, True, 16),
    ELSEWHERE: (False, True, 16),
    END: (False, True, 17),
}
NAN, INF = math.nan, math.inf
TOLERANCE = 0.01

# -- Two results --


def pairs(draw: random.Random, kind: str = "") -> list[list[float]]:
    """(first, second, tolerance), mixed; `kind` "nan" or "inf": one in each pair."""
    x = draw.choice([2.0, 40.0, 500.0])
    if not kind:
        found = [[x, x, 0.0], [-x, -x, 0.0], [x, x * 1.001, 0.0], [0.0, 0.0, TOLERANCE]]
        found += [[x, x * 1.005, TOLERANCE], [x, x * 1.02, TOLERANCE], [x, x * 0.98, TOLERANCE]]
        found += [[-x, -x * 1.005, TOLERANCE], [-x, -x * 1.02, TOLERANCE]]
        found += [[x, -x, TOLERANCE], [-x, x, 0.5], [0.0, 1e-6, TOLERANCE], [1e-6, 1.2e-6, 0.1]]
    else:
        special = (NAN, INF, -INF, x, -x, 0.0) if kind == "nan" else (INF, -INF, x, -x, 0.0)
        wanted = math.isnan if kind == "nan" else math.isinf
        found = [
            [a, b, tolerance]
            for a, b in product(special, repeat=2)
            if wanted(a) or wanted(b)
            for tolerance in (0.0, 0.5)
        ]
    draw.shuffle(found)
    return found


def is_same(first: float, second: float, tolerance: float) -> bool:
    """The right answer."""
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    if math.isinf(first) or math.isinf(second):
        return first == second
    return abs(first - second) <= tolerance * 0.5 * (abs(first) + abs(second))


def why_not_same(first: float, second: float, tolerance: float) -> str:
    """Which question a wrong answer to this pair raises."""
    if math.isnan(first) and math.isnan(second):
        return "What is NaN == NaN?"
    if math.isnan(first) or math.isnan(second):
        return "A difference with NaN is NaN. Is it larger than a tolerance? Is it smaller?"
    if math.isinf(first) and first == second:
        return "What is Inf - Inf?"
    if math.isinf(first) or math.isinf(second):
        return "How far is Inf from another number, and what is a share of Inf?"
    if first == -second != 0.0:
        return "What is the mean of the two, and what is that of their sizes?"
    if first == second:
        return "The two are equal. What was divided by what?"
    if max(abs(first), abs(second)) < 1e-3:
        return "Small numbers, and far apart for their size. What is the tolerance a share of?"
    if first < 0.0:
        return "Both are negative. Which sign have the difference and the mean?"
    return "What is the tolerance a share of?"


# -- One rank's verdict --


class Row(NamedTuple):
    """What `verdict` is given."""

    results: list[float]
    tolerance: float
    fatal: bool
    on_suspected_device: bool


def rows(draw: random.Random, num_runs: int) -> list[list[Any]]:
    """Each way in which so many runs may end, mixed."""
    x = draw.choice([3.0, 70.0, 900.0])
    near, far, farther = x * 1.008, x * 2.0, x * 1.016
    if num_runs < 2:
        found = [[[NAN] * num_runs], [[x] * num_runs]]
    elif num_runs == 2:
        found = [[[NAN, NAN]], [[x, near]], [[NAN, x]], [[x, far]], [[x, NAN]], [[INF, -INF]]]
    else:
        # The third is near the second, and not near the first.
        found = [[[x, near, farther]], [[NAN, NAN, NAN]], [[x, x, x]], [[x, near, x]]]
        found += [[[NAN, NAN, x]], [[x, x, far]], [[x, x, NAN]]]
    both = (False, True)
    devices = both if num_runs == 3 else (False,)
    mixed = [
        [*results, TOLERANCE, fatal, device]
        for results, fatal, device in product(found, both, devices)
    ]
    draw.shuffle(mixed)
    return mixed


def verdict_of(row: Row) -> tuple[str | None, str]:
    """The right answer."""
    results, end = row.results, END if row.fatal else GO_ON
    if not results:
        return None, NOTHING
    if len(results) == 1:
        return None, AGAIN
    if len(results) == 3 and row.on_suspected_device:
        return None, ELSEWHERE
    same = is_same(results[0], results[-1], row.tolerance)
    if len(results) == 3:
        return (CORRECT if same else PERSISTENT), end
    if same:
        return None, CHECKPOINT if row.fatal else GO_ON
    return TRANSIENT, end


def why_verdict(row: Row, found: tuple) -> str:
    """Which question a wrong answer to this row raises."""
    said, asked = found
    right = verdict_of(row)
    if len(row.results) < 2:
        return "There is no second result. What may be said already, and what is to be done?"
    if right[1] == ELSEWHERE:
        return "This is the suspected device again. What can it tell that it has not told?"
    if said != right[0] and len(row.results) == 3:
        if said == TRANSIENT:
            return "Would a transient error come again in the second run?"
        if {said, right[0]} == {CORRECT, PERSISTENT}:
            return "With which of the other two is the third result compared?"
    if said != right[0] and len(row.results) == 2:
        return "Does the same device compute the same? And is that a verdict already?"
    if asked in (END, CHECKPOINT) and not row.fatal:
        return "The result was not fatal. Does the run end for it?"
    if asked == GO_ON and row.fatal:
        return "The result was fatal. Does the run go on with it?"
    return "Which row of the table in the stub is this?"


# -- What all decide --

BY_WEIGHT = (AGAIN, CHECKPOINT, END, ELSEWHERE, GO_ON)


def decision_of(asks: Sequence[str]) -> str:
    """The right answer."""
    return next((one for one in BY_WEIGHT if one in asks), GO_ON)
