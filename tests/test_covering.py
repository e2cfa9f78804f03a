"""The generator of covering arrays, against all rows of small spaces."""

from itertools import product

import pytest

from tests.covering import Rule, Space, covering_array
from tests.figures import figure


def all_legal_rows(space: Space) -> list[dict]:
    """By trying every row."""
    rows = (dict(zip(space.axes, values, strict=True)) for values in product(*space.axes.values()))
    return [row for row in rows if space.allows(row)]


SMALL = {
    "no rule": Space({"a": (0, 1, 2), "b": "xyz", "c": (False, True), "d": (None, 1)}),
    "rules": Space(
        {"tp": (1, 2, 4), "pp": (1, 2, 3), "vp": (None, 2), "group": (None, 1, 2), "flag": (0, 1)},
        [
            Rule(("tp", "pp"), lambda tp, pp: 1 < tp * pp <= 6),
            Rule(("pp", "vp"), lambda pp, vp: vp is None or pp > 1),
            Rule(("vp", "group"), lambda vp, group: (vp is None) == (group is None)),
        ],
    ),
    # a = 0 needs b = 0, which needs c = 0: the pair a = 0, c = 1 is illegal by way of b alone.
    "by way of another": Space(
        {"a": (0, 1), "c": (0, 1), "b": (0, 1)},
        [
            Rule(("a", "b"), lambda a, b: a == 1 or b == 0),
            Rule(("b", "c"), lambda b, c: b == 1 or c == 0),
        ],
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_legal_pair_is_covered_by_legal_rows(name):
    space = SMALL[name]
    legal = all_legal_rows(space)
    expected = {pair for row in legal for pair in space.pairs_of(row)}
    assert set(space.legal_pairs()) == expected
    rows = covering_array(space)
    assert all(row in legal for row in rows)
    assert {pair for row in rows for pair in space.pairs_of(row)} == expected
    assert len(rows) < len(legal) or len(legal) <= 4


def test_an_illegal_pair_by_way_of_another_axis_is_left_out():
    space = SMALL["by way of another"]
    assert (("a", 0), ("c", 1)) not in space.legal_pairs()
    assert space.complete({"a": 0, "c": 1}) is None
    assert space.complete({"a": 1, "c": 1}) == {"a": 1, "c": 1, "b": 1}


def test_the_array_is_the_same_every_time():
    space = SMALL["rules"]
    assert covering_array(space) == covering_array(space)
    assert covering_array(space) != covering_array(space, seed=1)


def test_it_is_far_smaller_than_the_product():
    space = Space({f"option {i}": range(2 + i % 3) for i in range(16)})
    rows = covering_array(space)
    figure(f"16 options, {2**6 * 3**5 * 4**5} combinations, {len(rows)} rows cover all pairs")
    assert len(rows) <= 30


def test_rules_that_nothing_satisfies_are_refused():
    with pytest.raises(ValueError, match="no row satisfies all rules"):
        covering_array(Space({"a": (1, 2)}, [Rule(("a",), lambda a: a > 2)]))
