"""Covering arrays: few cases in which every two values of two axes meet, wherever they may meet.

A mistake in code with many options mostly needs one value of one option, or two values of two. All
combinations of ten options are thousands of cases; all pairs are a few tens. Rules say which values
may not meet: `Rule(("pp", "vp"), lambda pp, vp: vp is None or pp > 1)`.

Used by: tests/parity_cases.py, tests of schedules on real ranks, tests/trace. The array is the same in
every run and every process.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

ATTEMPTS = 12
"""Rows that are tried for each row of the array; the one that covers most stays."""

Row = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]
"""Two axes, and for each the index of its value."""


class Rule(NamedTuple):
    """What the values of some axes must satisfy together."""

    axes: tuple[str, ...]
    holds: Callable[..., bool]


class Space:
    """Axes with their values, and the rules that a row must keep."""

    def __init__(self, axes: Mapping[str, Sequence[Any]], rules: Iterable[Rule] = ()):
        self.axes = {name: tuple(values) for name, values in axes.items()}
        self.rules = tuple(rules)
        self._rules_of = {
            name: [rule for rule in self.rules if name in rule.axes] for name in self.axes
        }

    def allows(self, row: Row, changed: str | None = None) -> bool:
        """Whether all rules hold whose axes are in the row; if given, only those about `changed`."""
        rules = self.rules if changed is None else self._rules_of[changed]
        return all(
            rule.holds(*(row[name] for name in rule.axes))
            for rule in rules
            if all(name in row for name in rule.axes)
        )

    def complete(self, row: Row, draw: random.Random | None = None) -> Row | None:
        """A legal row that contains `row`, None if there is none; with `draw`, any of them."""
        missing = [name for name in self.axes if name not in row]
        # What a value of the row rules out shows soonest among the axes that share a rule with it.
        near = {
            name
            for rule in self.rules
            if not row.keys().isdisjoint(rule.axes)
            for name in rule.axes
        }
        missing.sort(key=lambda name: (name not in near, not self._rules_of[name]))
        if not self.allows(row):
            return None
        return self._complete(dict(row), missing, draw)

    def _complete(self, row: Row, missing: list[str], draw: random.Random | None) -> Row | None:
        if not missing:
            return row
        name, *others = missing
        values = list(self.axes[name])
        if draw is not None:
            draw.shuffle(values)
        for value in values:
            row[name] = value
            if self.allows(row, name) and self._complete(row, others, draw) is not None:
                return row
        del row[name]
        return None

    def pairs(self) -> Iterator[Pair]:
        """All pairs of values of two axes, legal or not."""
        for first, second in combinations(self.axes, 2):
            sizes = range(len(self.axes[first])), range(len(self.axes[second]))
            for i, j in product(*sizes):
                yield (first, i), (second, j)

    def row_of(self, pair: Pair) -> Row:
        return {name: self.axes[name][index] for name, index in pair}

    def pairs_of(self, row: Row) -> set[Pair]:
        """The pairs that a whole row covers."""
        chosen = [(name, self.axes[name].index(row[name])) for name in self.axes]
        return set(combinations(chosen, 2))

    def legal_pairs(self) -> list[Pair]:
        """Those that some legal row contains."""
        known: set[Pair] = set()
        for pair in self.pairs():
            if pair not in known:
                row = self.complete(self.row_of(pair))
                known |= set() if row is None else self.pairs_of(row)
        return [pair for pair in self.pairs() if pair in known]


def covering_array(space: Space, seed: int = 0) -> list[Row]:
    """Legal rows which together contain every legal pair. Raises ValueError if no row is legal."""
    draw, rows = random.Random(seed), []
    missing = dict.fromkeys(space.legal_pairs())  # in a fixed order, which a set has not
    if space.complete({}) is None:
        raise ValueError("no row satisfies all rules")
    while missing:
        first = space.row_of(next(iter(missing)))
        tried = [_climb(space, first, missing, draw) for _ in range(ATTEMPTS)]
        best = max(tried, key=lambda row: _gain(space, row, missing))
        for pair in space.pairs_of(best):
            missing.pop(pair, None)
        rows.append(best)
    return rows


def _gain(space: Space, row: Row, missing: Mapping[Pair, None]) -> int:
    return sum(pair in missing for pair in space.pairs_of(row))


def _climb(space: Space, fixed: Row, missing: Mapping[Pair, None], draw: random.Random) -> Row:
    """A legal row around `fixed`, each other axis changed for as long as that covers more."""
    row = space.complete(fixed, draw)
    gain = _gain(space, row, missing)
    names = [name for name in space.axes if name not in fixed]
    draw.shuffle(names)
    for name in names:
        for value in space.axes[name]:
            other = row | {name: value}
            if value != row[name] and space.allows(other, name):
                gained = _gain(space, other, missing)
                if gained > gain:
                    row, gain = other, gained
    return row
