"""Drawn calls of every function of `torch.distributed`: over shared memory what gloo gives."""

import hashlib
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.backend.cases import TOLERANCES, Case, draw_case, give, is_exact
from tests.backend.operations import MESSAGES, OPERATIONS, gloo_dies
from tests.backend.shm_groups import make_group, run_case
from tests.ranks import has_shared_memory

SUBSETS = {
    2: [(0, 1)],
    3: [(0, 1, 2), (0, 2)],
    4: [(0, 1, 2, 3), (1, 3), (0, 2, 3), (2,)],
    8: [tuple(range(8)), (0, 3, 4, 6, 7), (1, 6)],
}
"""Size of the world -> members of the groups that cases are drawn on; each exists twice."""
REFUSED = "refused"


class Outcome:
    """What one case gave on one group: tensors, or the words of a refusal."""

    def __init__(self, case: Case, group: dist.ProcessGroup):
        self.case, self.handles, self.tensors, self.words = case, [], [], ""
        is_gloo = group.name() == "gloo" or case.name in MESSAGES and not has_shared_memory()
        if is_gloo and gloo_dies(case):
            self.words = "gloo would kill this process, or wait for ever"
        else:
            self.attempt(self._begin, group)

    def attempt(self, call, *args) -> None:
        try:
            call(*args)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            self.words = f"{type(error).__name__}: {error}"

    def _begin(self, group: dist.ProcessGroup) -> None:
        given = give(self.case, dist.get_rank(group))
        operation = OPERATIONS[self.case.name]
        self.handles, self.tensors = operation.call(self.case, group, given)

    def finish(self, by_future: bool) -> None:
        """Waits for all handles, or for the futures of those that have one."""
        for handle in self.handles:
            if by_future and self.case.name not in MESSAGES and isinstance(handle, dist.Work):
                self.attempt(handle.get_future().wait)
            else:
                self.attempt(handle.wait)

    def digest(self) -> str:
        """For ranks to compare; "" where members may have different results."""
        if self.words:
            return REFUSED
        if not OPERATIONS[self.case.name].is_same_everywhere:
            return ""
        parts = [torch.cat([tensor.reshape(-1)]).view(torch.uint8) for tensor in self.tensors]
        return hashlib.sha1(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def run_all(cases: list[Case], groups: dict, drawn: random.Random, futures: float) -> list[Outcome]:
    """Begins all cases in their order; waits for those under way in a drawn one.

    `futures` is the probability that a case's future is waited for, not its handle.
    """
    begun = [Outcome(case, groups[case.members]) for case in cases]
    for outcome in drawn.sample(begun, len(begun)):
        outcome.finish(by_future=drawn.random() < futures)
    return begun


def is_equal(case: Case, found: list, wanted: list, exactly: bool) -> bool:
    if len(found) != len(wanted):
        return False
    for one, other in zip(found, wanted, strict=True):
        if one.dtype != other.dtype or one.numel() != other.numel():
            return False
        one, other = one.reshape(-1), other.reshape(-1)
        if exactly:
            if not torch.equal(one, other):
                return False
        else:
            limit = TOLERANCES[case.dtype]
            if not torch.allclose(one, other, rtol=limit, atol=limit):
                return False
    return True


def check(case: Case, ours: Outcome, theirs: Outcome) -> str:
    """How gloo and the tested backend have done; raises AssertionError if they differ."""
    operation, me = OPERATIONS[case.name], case.members.index(dist.get_rank())
    wanted = operation.expect(case, [give(case, member) for member in range(case.size)], me)
    has_one_result = is_exact(case, operation.is_reduction)
    gloo_is_right = not theirs.words and is_equal(case, theirs.tensors, wanted, has_one_result)
    is_plain = case.layout in ("contiguous", "offset")
    assert gloo_is_right or theirs.words or not is_plain, f"gloo is wrong, or this test: {case}"
    if ours.words:
        assert not gloo_is_right, f"{ours.words}; gloo does it: {case}"
        assert len(ours.words.split()) > 4, f"not a sentence: {ours.words}"
        return REFUSED
    if gloo_is_right:
        # Two numbers have one sum.
        exactly = has_one_result or case.size == 2 and case.op == "SUM"
        assert is_equal(case, ours.tensors, theirs.tensors, exactly), f"not what gloo gives: {case}"
        return "same"
    assert is_equal(case, ours.tensors, wanted, has_one_result), f"wrong: {case}"
    return "right where gloo is not"


def play(seed: int, num_batches: int, subsets: list[tuple[int, ...]]) -> dict[str, int]:
    """Batches of drawn cases, on both groups; how often each came out how."""
    drawn = random.Random(seed)
    own_order = random.Random(f"{seed} {dist.get_rank()}")
    ours = {members: make_group(list(members)) for members in subsets}
    theirs = {members: make_group(list(members), backend="gloo") for members in subsets}
    counts: Counter[str] = Counter()
    each = one_of_each(drawn, subsets) if dist.get_world_size() < 8 else []
    for batch in [*each, *draw_batches(drawn, num_batches, subsets)]:
        cases = [case for case in batch if is_possible(case) and case.is_for(dist.get_rank())]
        found = run_all(cases, ours, own_order, futures=0.3)
        wanted = run_all(cases, theirs, own_order, futures=0)
        counts.update(check(*three) for three in zip(cases, found, wanted, strict=True))
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {one.case.seed: one.digest() for one in found})
        for one in found:
            digests = {of_rank[one.case.seed] for of_rank in everyone if one.case.seed in of_rank}
            assert len(digests) == 1, f"ranks have not the same: {one.case}"
    return dict(counts)


def draw_batches(drawn: random.Random, num: int, subsets: list) -> list[list[Case]]:
    """In each, up to six cases that may be under way at once."""
    names = list(OPERATIONS)
    return [
        [draw_case(drawn, names, subsets) for _ in range(drawn.randint(1, 6))] for _ in range(num)
    ]


def one_of_each(drawn: random.Random, subsets: list) -> list[list[Case]]:
    """Every function with nothing, with one number, and with what goes another way than small ones."""
    shapes = [(0,), (1,), (), (5, 3), (400_000,)]
    everyone = [subset for subset in subsets if len(subset) == max(map(len, subsets))]
    return [
        [replace(draw_case(drawn, [name], everyone), shape=shape) for shape in shapes]
        for name in OPERATIONS
    ]


def is_possible(case: Case) -> bool:
    """A message needs two ranks, and gloo sends nothing that is not contiguous."""
    if case.name in MESSAGES:
        return case.size > 1 and case.layout in ("contiguous", "offset")
    return not (case.name.endswith("uneven") and not case.shape)


@pytest.mark.parametrize(("size", "num_batches"), [(2, 60), (3, 40), (4, 40), (8, 12)])
def test_drawn_calls_give_what_gloo_gives(size, num_batches):
    for counts in run_case(play, size, 7 * size, num_batches, SUBSETS[size]):
        assert counts["same"] > num_batches, counts
