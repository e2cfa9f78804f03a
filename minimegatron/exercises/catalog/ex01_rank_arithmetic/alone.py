"""Checks `coordinates` and `get_ranks`: alone, then inside `all_groups` of whole jobs."""

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Iterator
from math import prod
from types import ModuleType
from typing import Any

from minimegatron.core.rank_generator import DEFAULT_ORDER, RankGenerator, all_groups
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.check import Case, Result, Wrong, check_value, installed, wrong_value
from minimegatron.exercises.room.stand_ins import stood_for, used_words

GENERATOR = "minimegatron.core.rank_generator.RankGenerator."
REPLACES = tuple(GENERATOR + name for name in ("coordinates", "get_ranks", "_walk"))
COORDINATES, GET_RANKS = RankGenerator.coordinates, RankGenerator.get_ranks
NAMES = ("tp", "ep", "dp", "pp", "cp")
ATTRIBUTES = ("order", "name_to_size", "world_size", "rank_offset")
"""Of a grid: what the stub names."""
ALSO = ("tp", "dp", "pp", "tp-pp", "pp-tp", "dp-cp", "tp-dp-cp", "tp-dp-pp", "ep", "tp-ep")


def cases(seed: int) -> list[Case]:
    """Jobs to take apart; the seed draws the sizes of the last ones."""
    jobs = [
        {"tp": 2, "dp": 2, "pp": 4, "order": "tp-dp-pp"},
        {"tp": 3, "dp": 2, "pp": 2, "order": "pp-dp-tp"},
        {"dp": 4, "order": "dp"},
        {"tp": 2, "ep": 3, "pp": 2, "order": "tp-ep-dp-pp"},
        {"tp": 2, "cp": 2, "dp": 3, "pp": 2, "order": DEFAULT_ORDER, "rank_offset": 8},
    ]
    draw = random.Random(seed)
    for order, rank_offset in (("pp-cp-tp-dp", 5), ("dp-tp-pp-cp", 0)):
        sizes = {word: draw.choice([2, 3, 4]) for word in order.split("-")} | {"cp": 1}
        jobs.append({**sizes, "order": order, "rank_offset": rank_offset})
    return [Case(_words(job), **job) for job in jobs]


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """The positions of all ranks, every kind of group, and all groups through the real code."""
    # Both at once: a method of theirs that calls the other one finds theirs.
    with (
        installed(student.coordinates, GENERATOR + "coordinates"),
        installed(student.get_ranks, GENERATOR + "get_ranks"),
    ):
        return _asked(student, _grid(case))


def _asked(student: ModuleType, grid: RankGenerator) -> dict[str, Any]:
    ranks = range(grid.rank_offset, grid.rank_offset + grid.world_size)
    found: dict[str, Any] = {"positions": [], "groups": {}}
    with _unchanged(grid, "coordinates"):
        for rank in ranks:
            answer = student.coordinates(grid, rank)
            found["positions"].append(_plain("coordinates(...)", answer))
    with _unchanged(grid, "get_ranks"):
        for token in ALSO:
            answer = student.get_ranks(grid, token)
            found["groups"][token] = _plain(f'get_ranks("{token}")', answer)
    # With a value of another kind all_groups would fail; `judge` says what is wrong with it.
    is_groups = all(map(_is_lists, found["groups"].values()))
    is_positions = all(isinstance(position, dict) for position in found["positions"])
    if is_groups and is_positions and (sizes := _sizes_of_job(grid)) is not None:
        found["all groups"] = all_groups(grid.world_size, **sizes)
    return found


@contextlib.contextmanager
def _unchanged(grid: RankGenerator, name: str) -> Iterator[None]:
    """Raises Wrong at the end if the grid is another one than before."""
    before = copy.deepcopy({of: getattr(grid, of) for of in ATTRIBUTES})
    yield
    for of, value in before.items():
        if (now := getattr(grid, of)) != value:
            raise Wrong(
                f"{name} changed self.{of} from {value!r} to {now!r}\nThe grid is the caller's, and is "
                "asked again. Where else can your function keep what it works with?"
            )


def _plain(call: str, value: Any) -> Any:
    """A value that can be told to the judge. Raises Wrong for a generator, a dict's values, ..."""
    kind = "dict" if call.startswith("coordinates") else "list of lists"
    if value is None and kind == "dict":  # get_ranks would fail, and be blamed for it
        raise Wrong(f"{call} returned None (was `return` forgotten?); a {kind} is expected")
    if value is None or isinstance(value, bool | int | float | str | list | tuple | dict):
        return value
    if name := stood_for(value):
        raise Wrong(f"{call} returned what {name} gives; a {kind} is expected\n{used_words(name)}")
    raise Wrong(f"{call} returned a {type(value).__name__}; a {kind} is expected")


def _is_lists(groups: Any) -> bool:
    return isinstance(groups, list) and all(isinstance(group, list) for group in groups)


def judge(case: Case, found: dict[str, Any]) -> Result:
    """Positions first, then groups, then whole jobs."""
    grid = _grid(case)
    for number, position in enumerate(found["positions"]):
        check_coordinates(grid, grid.rank_offset + number, position)
    what = f"the order of the keys of coordinates(...) {_of(grid)}"
    check_value(what, list(found["positions"][0]), grid.order.split("-"))
    for token in ALSO:
        check_groups(grid, token, found["groups"][token])
    if (sizes := _sizes_of_job(grid)) is None:
        return Result({"groups": f"every kind is right ({num_of(grid.world_size, 'rank')})"})
    expected = all_groups(grid.world_size, **sizes)
    groups = found["all groups"]
    for kind in expected:
        check_value(f"kind {kind!r} of all_groups(...) {_of(grid)}", groups[kind], expected[kind])
    distinct = {tuple(group) for kind in groups.values() for group in kind}
    return Result({"process groups": f"{len(distinct)} ({num_of(grid.world_size, 'rank')})"})


def _grid(case: Case) -> RankGenerator:
    sizes = {name: case.values.get(name, 1) for name in NAMES}
    return RankGenerator(**sizes, order=case.order, rank_offset=case.values.get("rank_offset", 0))


def _sizes_of_job(grid: RankGenerator) -> dict[str, Any] | None:
    """What `all_groups` is called with; None where the grid is not one of a whole job."""
    # The experts' grid has another shape; only with pp last do both have the same pipelines.
    if grid.rank_offset or not grid.order.endswith("pp-ep-cp"):
        return None
    tp, pp = grid.name_to_size["tp"], grid.name_to_size["pp"]
    return {"tp": tp, "pp": pp, "order": grid.order.removesuffix("-ep-cp")}


# -- Coordinates --


def check_coordinates(grid: RankGenerator, rank: int, found: Any) -> None:
    """Raises Wrong unless `found` are the coordinates of `rank`."""
    expected = COORDINATES(grid, rank)
    if found != expected:
        what = f"coordinates({rank}) {_of(grid)}"
        raise wrong_value(what, found, expected, _why_coordinates(grid, rank, found))


def _why_coordinates(grid: RankGenerator, rank: int, found: Any) -> str:
    words = grid.order.split("-")
    if found is None:
        return ""
    if not isinstance(found, dict):
        return f"A dict is expected: the place by the name of each coordinate, {', '.join(words)}."
    if left_out := [word for word in words if word not in found]:
        several = len(left_out) > 1
        short = [word for word in left_out if grid.name_to_size[word] == 1]
        text = f"{' and '.join(left_out)} {'are' if several else 'is'} left out."
        if short == left_out:
            text += " self.order also names coordinates of size 1; there the place is always 0."
        return text
    if found == _digits(grid, rank - grid.rank_offset, words[::-1]):
        return (
            f"That is right for the order {'-'.join(reversed(words))!r}. In {grid.order!r} the "
            f"first word changes fastest: ranks {grid.rank_offset} and {grid.rank_offset + 1} "
            f"differ in {_long(grid)[0]}."
        )
    if grid.rank_offset and found == _digits(grid, rank, words):
        return (
            f"This grid begins at rank {grid.rank_offset} (self.rank_offset): rank {rank} is its "
            f"cell number {rank - grid.rank_offset}. And which cell is rank {grid.rank_offset}?"
        )
    return f"Read it as a number: {_sum_words(grid, rank)}."


def _digits(grid: RankGenerator, number: int, words: list[str]) -> dict[str, int]:
    digits = {}
    for word in words:
        number, digits[word] = divmod(number, grid.name_to_size[word])
    return digits


def _sum_words(grid: RankGenerator, rank: int) -> str:
    """The cell's number as the sum of its coordinates' strides."""
    terms = [
        f"{place} ({word}) x {grid.stride[word]}"
        for word, place in COORDINATES(grid, rank).items()
        if grid.name_to_size[word] > 1
    ]
    begin = f"{rank - grid.rank_offset} = " + " + ".join(terms)
    return begin + "; each step is as long as all sizes to the left of its word, multiplied"


# -- Groups --


def check_groups(grid: RankGenerator, token: str, groups: Any) -> None:
    """Raises Wrong unless `groups` is `get_ranks(token)`: first the invariants, then the order."""
    expected = GET_RANKS(grid, token)
    what = f'get_ranks("{token}") {_of(grid)}'
    if groups == expected:
        return
    if not _is_lists(groups):
        why = ""
        if isinstance(groups, list) and all(isinstance(group, tuple) for group in groups):
            why = "A list of lists is expected; these are tuples."
        elif groups is not None:
            why = "A list of lists is expected: one list of ranks for each group."
        raise wrong_value(what, groups, expected, why)
    if others := [rank for group in groups for rank in group if not isinstance(rank, int)]:
        raise wrong_value(what, groups, expected, f"Ranks are numbers (int); {others[0]!r} is not.")
    _check_partition(grid, what, groups)
    _check_members(grid, token, what, groups)
    why = (
        "The groups have the right members, in another order: ranks within a group ascend, and "
        "groups ascend by their first rank."
    )
    raise wrong_value(what, groups, expected, why)


def _check_partition(grid: RankGenerator, what: str, groups: list[list[int]]) -> None:
    times = Counter(rank for group in groups for rank in group)
    last = grid.rank_offset + grid.world_size - 1
    outside = sorted(rank for rank in times if not grid.rank_offset <= rank <= last)
    if outside:
        raise Wrong(
            f"{what} names rank {outside[0]}, but this grid's ranks are {grid.rank_offset} to "
            f"{last}\nself.rank_offset is {grid.rank_offset}: it is the number of the first rank."
        )
    for rank in range(grid.rank_offset, last + 1):
        if times[rank] != 1:
            raise Wrong(
                f"{what}: rank {rank} is in {times[rank]} groups; every rank is in exactly one "
                f"group of each kind\n  your groups: {groups}"
            )


def _check_members(grid: RankGenerator, token: str, what: str, groups: list[list[int]]) -> None:
    inside = token.split("-")
    for group in groups:
        for rank in group[1:]:
            one, other = COORDINATES(grid, group[0]), COORDINATES(grid, rank)
            for word in (word for word in one if word not in inside and one[word] != other[word]):
                raise Wrong(
                    f"{what}: the group {group} has ranks {group[0]} and {rank}, which differ in "
                    f"{word}: {one[word]} and {other[word]}\n"
                    f'A group "{token}" may differ in {" and ".join(inside)} only. Rank '
                    f"{group[0]} is {_position(grid, group[0])}; rank {rank} is "
                    f"{_position(grid, rank)}."
                )
    size = prod(grid.name_to_size[word] for word in inside)
    for group in groups:
        if len(group) != size:
            product = " x ".join(f"{word}={grid.name_to_size[word]}" for word in inside)
            raise Wrong(
                f"{what}: the group {group} has {num_of(len(group), 'rank')}, but {product} makes "
                f"{size}\n"
                "Ranks that agree in all other coordinates belong in one group, not in several."
            )


# -- Words --


def _position(grid: RankGenerator, rank: int) -> str:
    position = COORDINATES(grid, rank)
    return ", ".join(f"{word} {position[word]}" for word in _long(grid))


def _of(grid: RankGenerator) -> str:
    sizes = " ".join(f"{word}={grid.name_to_size[word]}" for word in _long(grid))
    offset = f", first rank {grid.rank_offset}" if grid.rank_offset else ""
    return f"of the grid {sizes} (order {grid.order!r}{offset})"


def _long(grid: RankGenerator) -> list[str]:
    """The coordinates with more than one place: the others are always 0."""
    return [word for word in grid.order.split("-") if grid.name_to_size[word] > 1]


def _words(job: dict[str, Any]) -> str:
    sizes = " ".join(f"{name}={job[name]}" for name in NAMES if job.get(name, 1) > 1)
    offset = f", ranks from {job['rank_offset']}" if job.get("rank_offset") else ""
    order = _grid(Case("", **job)).order
    return f"{sizes or 'one rank'}, order {order}{offset}"
