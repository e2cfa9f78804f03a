"""What a router computes, on numbers that one can work out by hand."""

import math

import pytest
import torch

from minimegatron.core.transformer.moe import moe_utils
from minimegatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    get_capacity,
    get_tokens_per_expert_and_token_count,
    group_limited_topk,
    router_gating_linear,
    sinkhorn,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    z_loss_func,
)
from tests.groups import PretendGroup

E = math.e


def tensor(*rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + E**-x)


# -- Scores and choice --

LOGITS = [1.0, 3.0, 0.0, 2.0]
SUM = E + E**3 + 1 + E**2
THREE, TWO = sigmoid(3), sigmoid(2)
CHOICES = {
    "softmax over the chosen": ({}, {1: E / (1 + E), 3: 1 / (1 + E)}),
    "softmax over all": ({"use_pre_softmax": True}, {1: E**3 / SUM, 3: E**2 / SUM}),
    "one of all": ({"topk": 1, "use_pre_softmax": True}, {1: E**3 / SUM}),
    "scaled": ({"scaling_factor": 2.5}, {1: 2.5 * E / (1 + E), 3: 2.5 / (1 + E)}),
    "sigmoids to a sum of 1": (
        {"score_function": "sigmoid"},
        {1: THREE / (THREE + TWO), 3: TWO / (THREE + TWO)},
    ),
    "one sigmoid as it is": ({"score_function": "sigmoid", "topk": 1}, {1: THREE}),
    # Groups 01 and 23 count 3 and 2 with one place each, 4 and 2 with two.
    "one group": ({"num_groups": 2, "group_topk": 1}, {0: 1 / (1 + E**2), 1: E**2 / (1 + E**2)}),
    "two groups": ({"num_groups": 2, "group_topk": 2}, {1: E / (1 + E), 3: 1 / (1 + E)}),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choice_and_weights(case):
    options, expected = CHOICES[case]
    probs, routing_map = topk_routing_with_score_function(tensor(LOGITS), **{"topk": 2, **options})
    assert routing_map.dtype == torch.bool
    assert routing_map[0].nonzero().flatten().tolist() == list(expected)
    wanted = torch.zeros(4, dtype=torch.float64)
    for expert, weight in expected.items():
        wanted[expert] = weight
    torch.testing.assert_close(probs[0], wanted, rtol=1e-14, atol=0)


def test_a_bias_changes_the_choice_and_not_the_weights():
    bias = torch.tensor([1.0, 0.0, 0.0, 0.0])
    probs, routing_map = topk_routing_with_score_function(
        tensor(LOGITS), 2, score_function="sigmoid", expert_bias=bias
    )
    assert routing_map.tolist() == [[True, True, False, False]]
    one, three = sigmoid(1), sigmoid(3)
    expected = tensor([one / (one + three), three / (one + three), 0.0, 0.0])
    torch.testing.assert_close(probs, expected, rtol=1e-14, atol=0)


def test_only_the_weights_have_a_gradient():
    logits = tensor(LOGITS).requires_grad_()
    topk_routing_with_score_function(logits, 2)[0][0, 1].backward()
    slope = E / (1 + E) ** 2
    torch.testing.assert_close(logits.grad, tensor([0.0, slope, 0.0, -slope]), rtol=1e-14, atol=0)


def test_sixteen_bits_come_back_but_are_computed_in_float32():
    logits = torch.linspace(-2.0, 2.0, 24, dtype=torch.bfloat16).view(4, 6)
    for options in ({}, {"use_pre_softmax": True}, {"score_function": "sigmoid"}):
        probs, _ = topk_routing_with_score_function(logits, 3, **options)
        exact, _ = topk_routing_with_score_function(logits.float(), 3, **options)
        assert torch.equal(probs, exact.bfloat16())
    assert compute_routing_scores_for_aux_loss(logits, 2, "softmax")[1].dtype == torch.float32
    assert z_loss_func(logits, 1.0).dtype == torch.float32


def test_a_group_counts_what_its_best_sum_to():
    scores = tensor([5.0, 0.0, 4.0, 3.0, 1.0, 1.0])
    for topk, expected in ((1, [0]), (2, [2, 3])):  # 5 against 4, then 5 + 0 against 4 + 3
        _, chosen = group_limited_topk(scores, topk, 1, 6, 3, 1)
        assert chosen.tolist() == [expected]


def test_what_the_losses_look_at_knows_no_bias_and_no_groups():
    chosen, scores = compute_routing_scores_for_aux_loss(tensor(LOGITS), 2, "softmax")
    assert chosen.tolist() == [[False, True, False, True]]
    torch.testing.assert_close(scores, tensor([E / SUM, E**3 / SUM, 1 / SUM, E**2 / SUM]))
    chosen, scores = compute_routing_scores_for_aux_loss(tensor([0.0, 0.0, 2.0]), 1, "sigmoid")
    assert chosen.tolist() == [[False, False, True]]
    torch.testing.assert_close(scores, tensor([0.5, 0.5, TWO]) / (1 + TWO))


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (topk_routing_with_score_function, {"score_function": "tanh"}, "'tanh'; use 'softmax'"),
        (topk_routing_with_score_function, {"expert_bias": torch.zeros(4)}, "goes with"),
        (compute_routing_scores_for_aux_loss, {"score_function": "tanh"}, "'tanh'; use"),
    ],
)
def test_what_is_refused(function, arguments, words):
    with pytest.raises(ValueError, match=words):
        function(tensor(LOGITS), 2, **arguments)


def test_the_gate_is_computed_in_the_routers_dtype():
    x, weight = torch.full((2, 1, 3), 1 / 3).bfloat16(), torch.full((4, 3), 0.3).bfloat16()
    bias = torch.tensor([0.0, 1.0, 2.0, 3.0]).bfloat16()
    logits = router_gating_linear(x, weight, None, torch.float32)
    assert logits.shape == (2, 1, 4) and logits.dtype == torch.float32
    assert torch.equal(logits, x.float() @ weight.float().t())
    torch.testing.assert_close(router_gating_linear(x, weight, bias, torch.float32), logits + bias)


# -- Sinkhorn and capacity --


def test_sinkhorn_gives_each_token_and_each_expert_its_share():
    matrix = sinkhorn(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), tol=1e-7)
    torch.testing.assert_close(matrix.sum(dim=1), torch.full((12,), 1 / 12))
    torch.testing.assert_close(matrix.sum(dim=0), torch.full((4,), 1 / 4))


def test_room_of_an_expert():
    assert get_capacity(10, 4, 1.0) == 3
    assert get_capacity(10, 4, 1.5) == 4
    assert get_capacity(10, 4, 0.1, min_capacity=4) == 4


PROBS = tensor([0.2, 0.8], [0.9, 0.0], [0.5, 0.0], [0.6, 0.4])
KEPT = {  # T k / E = 2 for k = 1
    "probs": [[0, 1], [1, 0], [0, 0], [1, 1]],
    "position": [[1, 1], [1, 0], [0, 0], [0, 1]],
}


@pytest.mark.parametrize("policy", KEPT)
def test_an_expert_keeps_what_it_has_room_for(policy):
    kept = torch.tensor(KEPT[policy]).bool()
    probs, routing_map = apply_router_token_dropping(PROBS, PROBS > 0, 1, 1.0, policy)
    assert torch.equal(routing_map, kept)
    assert torch.equal(probs, PROBS * kept)


@pytest.mark.parametrize("policy", KEPT)
def test_places_that_are_left_are_filled_with_probability_zero(policy):
    chosen = torch.tensor([[1, 0], [1, 0], [1, 0], [1, 1]]).bool()
    probs, routing_map = apply_router_token_dropping(
        PROBS * chosen, chosen, 1, 1.0, policy, pad_to_capacity=True
    )
    assert routing_map.sum(dim=0).tolist() == [2, 2]
    assert routing_map[:, 1].tolist() == [True, False, False, True]  # the first of the others
    assert probs[:, 1].tolist() == [0.0, 0.0, 0.0, 0.4]


def test_nothing_is_dropped_where_there_is_room():
    probs, routing_map = apply_router_token_dropping(PROBS, PROBS > 0, 1, 9.0)
    assert torch.equal(probs, PROBS) and torch.equal(routing_map, PROBS > 0)
    with pytest.raises(ValueError, match="'random'; use 'probs'"):
        apply_router_token_dropping(PROBS, PROBS > 0, 1, 1.0, "random")


def test_among_equals_the_first_stay():
    probs = torch.full((64, 1), 0.5)
    kept = apply_router_token_dropping(probs, probs > 0, 1, 0.25)[1]
    assert kept.flatten().nonzero().flatten().tolist() == list(range(16))


# -- Losses --


def test_the_switch_loss_is_its_coefficient_if_all_is_even():
    probs, counts = torch.full((6, 3), 1 / 3), torch.tensor([4, 4, 4])
    loss = switch_load_balancing_loss_func(probs, counts, 6, 2, 3, 0.25)
    torch.testing.assert_close(loss, torch.tensor(0.25))


def test_the_switch_loss_pulls_tokens_off_the_busy_expert():
    # 4 tokens, one choice each: 3 of expert 0, 1 of expert 1.
    probs = tensor([0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]).requires_grad_()
    loss = switch_load_balancing_loss_func(probs, torch.tensor([3, 1]), 4, 1, 2, 0.1)
    torch.testing.assert_close(loss.item(), 0.1 * 2 / 16 * (3 * 2.8 + 1 * 1.2))
    loss.backward()
    expected = torch.tensor([[3.0, 1.0]], dtype=torch.float64) * 0.1 * 2 / 16
    torch.testing.assert_close(probs.grad, expected.expand(4, 2))


def test_the_z_loss_is_the_mean_square_of_logsumexp():
    loss = z_loss_func(tensor([0.0, 0.0], [1.0, 1.0]), 0.5)
    two = math.log(2)
    torch.testing.assert_close(loss.item(), 0.5 * (two**2 + (1 + two) ** 2) / 2)


def test_tokens_are_counted_over_the_group(monkeypatch):
    routing_map = torch.tensor([[1, 0, 1], [0, 0, 1]]).bool()
    counts, mine, total = get_tokens_per_expert_and_token_count(routing_map, PretendGroup())
    assert (counts.tolist(), counts.dtype, mine, total) == ([1, 0, 2], torch.int64, 2, 2)
    monkeypatch.setattr(
        moe_utils, "reduce_from_tensor_model_parallel_region", lambda x, group: x + group.size()
    )
    counts, mine, total = get_tokens_per_expert_and_token_count(routing_map, PretendGroup(0, 4))
    assert (counts.tolist(), mine, total) == ([5, 4, 6], 2, 8)


@pytest.mark.parametrize("scale", [None, torch.ones(1) * 3, torch.tensor(3.0).double()])
def test_a_loss_on_an_activation_has_the_scale_for_gradient(scale, monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", scale)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    output = MoEAuxLossAutoScaler.apply(x * 5, (y * y).sum())
    assert torch.equal(output, x * 5)
    output.sum().backward()
    assert x.grad.tolist() == [5.0, 5.0]
    assert y.grad.tolist() == ([2.0, 2.0] if scale is None else [6.0, 6.0])


def test_a_third_is_a_third(monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    moe_utils.scale_as_mean(torch.ones(1) * 4, 3, 2)
    assert MoEAuxLossAutoScaler.main_loss_backward_scale.item() == 4 * 2 / 3
    moe_utils.scale_as_sum(torch.ones(1) * 4, 3, 2)
    assert MoEAuxLossAutoScaler.main_loss_backward_scale.item() == 4.0
