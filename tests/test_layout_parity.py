"""Custom pipeline layouts, empty stages among them, equal one process; see tests/parity.py."""

import pytest

from tests.parity import Case, reference, run_cases
from tests.ranks import run_ranks

LAYOUTS = {
    # pipeline ranks: (layout, chunks per rank)
    2: [
        ("Ettt|L", None),
        ("E|tttL", None),
        ("E||ttt|L", 2),
        ("Et||tt|L", 2),
        ("E|t|||tt|L", 3),
        ("E(|t)*3||L", 3),
    ],
    4: [("E||ttt|L", None), ("Et||||t||t|L", 2), ("E|t|t||||t|L", 2)],
}


def _cases(p: int) -> list[Case]:
    cases = []
    for layout, vp in LAYOUTS[p]:
        case = Case(pp=p, vp=vp, M=2 * p, num_layers=3, layout=layout)
        if vp is None:
            cases += [case, Case(**vars(case) | {"llama": True, "deallocate": True})]
        else:
            cases.append(Case(**vars(case) | {"overlap": True, "deallocate": True, "G": p}))
            cases.append(Case(**vars(case) | {"batched": False, "llama": True, "G": p}))
    return cases


@pytest.mark.parametrize("p", LAYOUTS)
def test_layouts_equal_one_process(p: int, tmp_path_factory) -> None:
    folder = tmp_path_factory.getbasetemp()
    work = [(case, reference(case.serial(), folder)) for case in _cases(p)]
    results = run_ranks(run_cases, p, work, timeout=200)
    assert [problem for rank in results for *_, found in rank for problem in found] == []
    assert all(len(rank) == len(work) for rank in results)
