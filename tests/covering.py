"""Covering arrays: few cases in which every two values of two axes meet, wherever they may meet.

A mistake in code with many options mostly needs one value of one option, or two values of two. All
combinations of ten options are thousands of cases; all pairs are a few tens. Rules say which values
may not meet: `Rule(("pp", "vp"), lambda pp, vp: vp is None or pp > 1)`.

Used by: tests/parity_cases.py, tests of schedules on real ranks, tests/trace. The array is the same in
every run and every process.
"""

import random
from collections import Counter
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
        self._index = {
            name: {value: index for index, value in enumerate(values)}
            for name, values in self.axes.items()
        }
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
        chosen = [(name, indexes[row[name]]) for name, indexes in self._index.items()]
        return set(combinations(chosen, 2))

    def pairs_with(self, row: Row, name: str) -> Iterator[Pair]:
        """Those of a whole row in which one axis is."""
        own = (name, self._index[name][row[name]])
        before = True
        for other, indexes in self._index.items():
            if other == name:
                before = False
            else:
                pair = (other, indexes[row[other]])
                yield (pair, own) if before else (own, pair)

    def legal_pairs(self) -> list[Pair]:
        """Those that some legal row contains."""
        known: set[Pair] = set()
        for pair in self.pairs():
            if pair not in known:
                row = self.complete(self.row_of(pair))
                known |= set() if row is None else self.pairs_of(row)
        return [pair for pair in self.pairs() if pair in known]


def covering_array(
    space: Space, seed: int = 0, cost: Callable[[Row], float] = lambda row: 1.0
) -> list[Row]:
    """Legal rows which together contain every legal pair. Raises ValueError if no row is legal.

    With `cost`, how long a row takes in any unit: of two rows, the one with more pairs for its cost.
    """
    draw, rows = random.Random(seed), []
    missing = dict.fromkeys(space.legal_pairs())  # in a fixed order, which a set has not
    if space.complete({}) is None:
        raise ValueError("no row satisfies all rules")
    while missing:
        first = space.row_of(next(iter(missing)))
        tried = [_climb(space, first, missing, cost, draw) for _ in range(ATTEMPTS)]
        best, _ = max(tried, key=lambda found: found[1])
        for pair in space.pairs_of(best):
            missing.pop(pair, None)
        rows.append(best)
    return _with_something_of_its_own(space, rows, cost)


def _with_something_of_its_own(
    space: Space, rows: list[Row], cost: Callable[[Row], float]
) -> list[Row]:
    """Without the rows, the dearest first, whose pairs all stand in others."""
    number = Counter(pair for row in rows for pair in space.pairs_of(row))
    for row in sorted(rows, key=cost, reverse=True):
        pairs = space.pairs_of(row)
        if all(number[pair] > 1 for pair in pairs):
            number.subtract(pairs)
            rows = [other for other in rows if other is not row]
    return rows


def _climb(
    space: Space,
    fixed: Row,
    missing: Mapping[Pair, None],
    cost: Callable[[Row], float],
    draw: random.Random,
) -> tuple[Row, float]:
    """A legal row around `fixed`, each other axis changed for as long as that covers more for the cost;
    and how much that is.
    """
    row = space.complete(fixed, draw)
    number = sum(pair in missing for pair in space.pairs_of(row))
    worth = number / cost(row)
    names = [name for name in space.axes if name not in fixed]
    draw.shuffle(names)
    for name in names:
        without = number - sum(pair in missing for pair in space.pairs_with(row, name))
        for value in space.axes[name]:
            other = row | {name: value}
            if value != row[name] and space.allows(other, name):
                covered = without + sum(pair in missing for pair in space.pairs_with(other, name))
                if covered / cost(other) > worth:
                    row, number, worth = other, covered, covered / cost(other)
    return row, worth
