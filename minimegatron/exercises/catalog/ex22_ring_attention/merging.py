"""The first part: two partial results become one.

Megatron has no counterpart.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from minimegatron.exercises.bench.known_mistakes import check_known
from minimegatron.exercises.check import Case, Result, Wrong

EQUAL, FAR, NOTHING = "moderate", "very large and very small", "-inf among the"
NUM_QUERIES = 6


def given_parts(case: Case) -> list[torch.Tensor]:
    """output [a, q, d], lse [a, q], and the second pair."""
    draw = torch.Generator().manual_seed(1000 * case.seed + 1)
    shape = (case.heads, NUM_QUERIES, case.width)
    output, output2 = torch.randn(2, *shape, generator=draw, dtype=torch.float64)
    lse, lse2 = torch.randn(2, *shape[:2], generator=draw, dtype=torch.float64)
    if case.kind == FAR:
        # Queries 0 and 1: near each other, far from 0. Then: one of the two decides.
        base = torch.tensor([1000.0, -1000.0, 2000.0, -900.0, 800.0, -750.0], dtype=torch.float64)
        apart = torch.tensor([0.0, 0.0, 900.0, 1700.0, -1600.0, 0.0], dtype=torch.float64)
        lse, lse2 = lse + base, lse2 + base + apart
    if case.kind == NOTHING:
        # Queries 0 and 3 have seen nothing on the first side, 1 and 3 nothing on the second.
        for part, part_lse, queries in ((output, lse, [0, 3]), (output2, lse2, [1, 3])):
            part[:, queries], part_lse[:, queries] = 0.0, -torch.inf
    return [output, lse, output2, lse2]


def run_merge(student: ModuleType, case: Case) -> dict[str, Any]:
    """Once as it is, and once with the sides in each other's place."""
    output, lse, output2, lse2 = given_parts(case)
    found = {}
    for name, arguments in (
        ("first", [output, lse, output2, lse2]),
        ("turned", [output2, lse2, output, lse]),
    ):
        kept = [argument.clone() for argument in arguments]
        returned = student.merge(*kept)
        if not isinstance(returned, tuple) or len(returned) != 2:
            kind = "None (was `return` forgotten?)" if returned is None else type(returned).__name__
            raise Wrong(f"merge returned {kind}; (output, lse) is expected")
        for what, one, given in zip(("output", "lse"), returned, arguments[:2], strict=True):
            if not isinstance(one, torch.Tensor) or one.shape != given.shape:
                shape = list(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
                raise Wrong(f"merge's {what} is {shape}; a tensor {list(given.shape)} is expected")
        if not all(map(torch.equal, kept, arguments)):
            raise Wrong("merge has changed what it was given; make new tensors")
        found[name] = [one.detach() for one in returned]
    return found


def judge_merge(case: Case, answers: Sequence[dict[str, Any]]) -> Result | None:
    """Every row by the definition, shifted so that no exp is far from 1."""
    output, lse, output2, lse2 = given_parts(case)
    largest = torch.maximum(lse, lse2)
    seen = largest > -torch.inf
    base = torch.where(seen, largest, 0.0)
    powers, powers2 = (lse - base).exp(), (lse2 - base).exp()
    total = torch.where(seen, powers + powers2, 1.0)
    share, share2 = (powers / total).unsqueeze(2), (powers2 / total).unsqueeze(2)
    right = output * share + output2 * share2
    right_lse = torch.where(seen, base + total.log(), -torch.inf)
    for answer in answers:
        for name in ("first", "turned"):
            found, found_lse = answer[name]
            _judge_unseen(found, found_lse, seen)
            _judge_finite(found, found_lse, seen, lse, lse2)
            known = [
                (
                    largest,
                    "That is the larger of the two: exp(lse) is a sum, and both are terms of it.",
                ),
                (
                    lse + lse2,
                    "The two were added up. exp(lse) is a sum, and lse is the log of one.",
                ),
                (lse, "That is the lse of one side."),
                (lse2, "That is the lse of one side."),
            ]
            check_known(
                "merge's lse", found_lse[seen], right_lse[seen], [(x[seen], w) for x, w in known]
            )
            check_known("merge's output", found, right, _known(output, output2, share, share2))
    return None


def _judge_unseen(found: torch.Tensor, found_lse: torch.Tensor, seen: torch.Tensor) -> None:
    """Rows that have seen nothing on either side."""
    if seen.all():
        return
    query = int((~seen)[0].nonzero()[0])
    why = (
        "It has seen nothing on either side, so there is still nothing: output 0, lse -inf. What "
        "is -inf less -inf, and what makes exp of it?"
    )
    if found[~seen].isnan().any():
        raise Wrong(f"merge's output is nan for query {query}\n{why}")
    if found[~seen].any():
        raise Wrong(f"merge's output is not 0 for query {query}\n{why}")
    if (found_lse[~seen] != -torch.inf).any():
        raise Wrong(f"merge's lse is {float(found_lse[0, query]):g} for query {query}\n{why}")


def _judge_finite(
    found: torch.Tensor,
    found_lse: torch.Tensor,
    seen: torch.Tensor,
    lse: torch.Tensor,
    lse2: torch.Tensor,
) -> None:
    """Rows that have seen something have finite numbers."""
    is_bad = seen & ~(torch.isfinite(found).all(dim=2) & torch.isfinite(found_lse))
    if is_bad.any():
        head, query = (int(i) for i in is_bad.nonzero()[0])
        pair = f"{float(lse[head, query]):.6g} and {float(lse2[head, query]):.6g}"
        row, one = found[head, query].tolist(), float(found_lse[head, query])
        raise Wrong(
            f"merge gives output {[round(x, 4) for x in row]} and lse {one:g} for a query whose lse "
            f"are {pair}\nexp of 1000 is inf, and exp of -1000 is 0; then come inf / inf, 0 / 0 and "
            "log 0. Subtract a number near the larger one before each exp."
        )


def _known(
    output: torch.Tensor, output2: torch.Tensor, share: torch.Tensor, share2: torch.Tensor
) -> list[tuple[torch.Tensor, str]]:
    weighed = (
        "Each is divided by its own sum, so each must be weighed by its share of the common sum."
    )
    return [
        (output + output2, f"The outputs were added up. {weighed}"),
        ((output + output2) / 2, f"That is the mean of the outputs. {weighed}"),
        (output, "That is the output of one side alone."),
        (output2, "That is the output of one side alone."),
        (output * share2 + output2 * share, "The weights are in each other's place."),
        (output * share / share2 + output2, "One weight is missing: both outputs need one."),
        (output + output2 * share2 / share, "One weight is missing: both outputs need one."),
    ]
