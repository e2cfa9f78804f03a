"""Any schedule, drawn at random: legal ones deliver every message, the others are refused.

Beside `test_order.py`, whose grid is fixed: here sizes, group size and P2P mode are drawn, legal and
not, and what the runtime refuses must be what the planner refuses.
"""

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minimegatron.planner.plan_check import require_valid
from tests.core.pipeline_parallel.fake_step import Case, run_case
from tests.core.pipeline_parallel.test_order import check, legal_groups

P2P_MODES = {
    "batched": {"batched": True, "overlap": False},
    "unbatched": {"batched": False, "overlap": False},
    "overlap": {"batched": False, "overlap": True},
}


@st.composite
def cases(draw) -> Case:
    p = draw(st.sampled_from([2, 2, 3, 4, 5, 6, 8]), label="p")
    M = draw(st.integers(1, 14), label="M")
    v = draw(st.sampled_from([None, None, 1, 2, 3, 4]), label="v")
    mode = draw(st.sampled_from(list(P2P_MODES)), label="mode")
    G = None
    if v is not None:
        legal = legal_groups(p, M)
        anything = st.integers(1, 16)
        G = draw(st.sampled_from(legal) | anything if legal else anything, label="G")
    flags = {"forward_only": draw(st.booleans()), "deallocate": draw(st.booleans())}
    return Case(p, M, v, G, **flags, **P2P_MODES[mode])


def may_cross(case: Case) -> bool:
    """Over two stages a batch can take a gradient for an activation; in most steps, not in all."""
    return case.v is not None and case.v > 1 and case.p == 2 and case.batched


def is_legal(case: Case) -> bool:
    if case.v is None:
        return not case.overlap
    return case.G in legal_groups(case.p, case.M) and not may_cross(case)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cases())
def test_legal_schedules_deliver_everything_and_others_are_refused(case: Case):
    if is_legal(case):
        event("legal")
        require_valid(case.plan())
        check(case)
        return
    event("refused")
    with pytest.raises(ValueError, match=r"\d|overlap"):
        run_case(case)
    if may_cross(case):
        return  # the planner, which knows the step, refuses it only where tensors do cross
    with pytest.raises(ValueError, match=r"\d|overlap"):
        require_valid(case.plan())
