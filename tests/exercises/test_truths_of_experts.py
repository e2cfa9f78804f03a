"""What the checks of exercises about experts take for right is what the package computes.

A check works out its own truth, so that it and the package can be wrong apart; here they meet.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from minimegatron.core.parameter_marks import mark_expert_parameters
from minimegatron.core.transformer.moe import moe_utils
from minimegatron.exercises.catalog.ex19_router import check as router_check
from minimegatron.exercises.catalog.ex19_router import truth
from minimegatron.exercises.catalog.ex19_router.data import given_logits
from minimegatron.exercises.catalog.ex20_all_to_all.data import Tokens
from minimegatron.exercises.catalog.ex21_expert_gradients import check as gradient_check
from minimegatron.exercises.catalog.ex21_expert_gradients import solution as gradient_solution
from minimegatron.exercises.catalog.ex21_expert_gradients.places import WORLD, Places
from minimegatron.exercises.check import Case

CHOICES = [case for case in router_check.cases(0) if case.part == router_check.CHOICE]


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_routing_and_its_loss(case):
    logits, bias = given_logits(case)
    options = {"use_pre_softmax": case.pre, "scaling_factor": case.scaling, "expert_bias": bias}
    ours = moe_utils.topk_routing_with_score_function(
        logits, case.topk, score_function=case.score, **options
    )
    for found, right in zip(ours, truth.right_route(case, logits, bias), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    if case.is_far:  # scores that are 0 are all alike: nobody says which of them a loss counts
        return
    chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, case.topk, case.score)
    right = truth.scores_for_loss(case, logits)
    torch.testing.assert_close(scores, right, rtol=1e-12, atol=1e-12)
    counts = truth.counts_for_loss(case, logits)
    assert torch.equal(chosen.sum(dim=0), counts.long())
    loss = moe_utils.switch_load_balancing_loss_func(
        scores, counts, len(logits), case.topk, case.experts, 0.3
    )
    wanted = truth.right_loss(case, right, counts, 0.3)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)


def test_the_order_of_tokens():
    case = Case("", ep=1, local=4, chosen=[[[0, 2], [], [2, 3]]], seed=3)
    given = Tokens(case, 0)
    tokens, probs, numbers = moe_utils.permute(given.hidden, given.map, given.probs)
    assert numbers.tolist() == [0, 0, 2, 2]
    assert torch.equal(probs, given.probs[numbers, torch.tensor([0, 2, 2, 3])])
    total = moe_utils.unpermute(tokens, numbers, given.hidden.shape)
    assert torch.equal(total, given.hidden * given.map.sum(dim=1, keepdim=True))


def test_the_mark():
    """Where the check accepts one answer only, it is the package's."""
    (marks,) = (case for case in gradient_check.cases(0) if case.part == gradient_check.MARK)
    for t, e, etp in marks.sizes:
        sizes = {"expert_model_parallel_size": e, "expert_tensor_parallel_size": etp}
        layer = torch.nn.Linear(1, 1)
        layer.config = SimpleNamespace(tensor_model_parallel_size=t, **sizes)
        mark_expert_parameters(layer, True)
        mark = getattr(layer.weight, "allreduce", True)
        gradient_check._judge_mark(SimpleNamespace(sizes=[(t, e, etp)]), [[True, mark]])


def test_contributions_of_all_tokens_meet():
    """Whatever the layout: what ranks with the same parameter have seen is every token once."""
    layouts = [case for case in gradient_check.cases(0) if case.part == gradient_check.GRADIENTS]
    for case in layouts:
        places = Places(case)
        for rank in range(WORLD):
            for one in places.held(rank).values():
                kind = "expt_dp" if one.is_expert else "dp_cp"
                holders = places.group(kind, rank)
                if not one.is_expert and not one.is_cut:
                    holders = [r for h in holders for r in places.group("tp", h)]
                seen = [source for holder in holders for source in places.seen_by(holder, one)]
                assert sorted(seen) == places.stage(rank)


def test_the_mark_is_enough_in_every_layout():
    """What the solution sums by the mark alone is every token once, in whatever layout of 4 ranks.

    Where e = 1 and t = etp > 1 an expert has the mark of dense parameters; it must not have biases.
    """
    num_layouts = 0
    for tp, pp, cp, ep, etp in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2, 4), (1, 2, 4)):
        if WORLD % (tp * pp * cp) or WORLD % (ep * etp * pp):
            continue
        num_layouts += 1
        places = Places(Case("", tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, seed=0))
        for rank in range(WORLD):
            for name, one in places.held(rank).items():
                param = SimpleNamespace()
                gradient_solution.set_allreduce(param, one.is_expert, tp, ep, etp)
                holders = places.group("dp_cp" if param.allreduce else "expt_dp", rank)
                if param.allreduce and not one.is_cut:
                    holders = [r for h in holders for r in places.group("tp", h)]
                seen = [source for holder in holders for source in places.seen_by(holder, one)]
                assert sorted(seen) == places.stage(rank), (name, tp, pp, cp, ep, etp)
    assert num_layouts == 39
