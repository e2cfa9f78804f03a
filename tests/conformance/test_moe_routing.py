"""Against megatron-core: how tokens are routed, what the losses of balance are, and their gradients.

One process; the counterparts of several ranks are in tests/core/transformer/moe. Where 0.16.1 is known
to be wrong, its figure stands beside ours.
"""

import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.core.transformer.moe import moe_utils as ours
from minimegatron.core.transformer.moe.expert_bias import get_updated_expert_bias, update_biases
from minimegatron.core.transformer.moe.router import TopKRouter
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.conformance.megatron import cuda_calls_on_cpu, megatron_module
from tests.core.transformer.moe.thread_ranks import one_rank
from tests.groups import PretendGroup

theirs = megatron_module("transformer.moe.moe_utils")
their_router = megatron_module("transformer.moe.router")
their_config = megatron_module("transformer.transformer_config")
pytestmark = pytest.mark.filterwarnings("ignore")

T, EXPERTS, HIDDEN, SEQUENCE, BATCH = 24, 8, 6, 8, 3
CLOSE = {"rtol": 1e-6, "atol": 1e-7}
"""Both compute in float32."""


def logits_of(seed: int = 1) -> torch.Tensor:
    """[T, E], all distinct: which of two equal ones is chosen is nobody's promise."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, EXPERTS, generator=generator) + torch.linspace(0, 1, EXPERTS)
    assert logits.unique().numel() == logits.numel()
    return logits


def both(name: str, logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[list, list]:
    """For us and for them: the results, and the gradient of a sum that weighs all of them."""
    results, grads = [], []
    for module in (ours, theirs):
        leaf = logits.clone().requires_grad_()
        found = getattr(module, name)(leaf, *args, **kwargs)
        found = found if isinstance(found, tuple) else (found,)
        results.append(found)
        smooth = [x for x in found if x.requires_grad]
        sum((x * torch.arange(1.0, x.numel() + 1).view(x.shape)).sum() for x in smooth).backward()
        grads.append(leaf.grad)
    return results, grads


def assert_same(results: list, grads: list = ()) -> None:
    for mine, their in zip(*results, strict=True):
        if mine.dtype == torch.bool:
            assert torch.equal(mine, their)
        else:
            torch.testing.assert_close(mine, their, **CLOSE)
    if grads:
        torch.testing.assert_close(*grads, **CLOSE)


# -- Functions --

BIAS = torch.linspace(-0.3, 0.3, EXPERTS).flip(0)
GROUPS = {"num_groups": 4, "group_topk": 2}
CHOICES = {
    "default": {},
    "pre-softmax": {"use_pre_softmax": True},
    "groups": GROUPS,
    "pre-softmax, groups, scaled": {"use_pre_softmax": True, "scaling_factor": 2.5, **GROUPS},
    "sigmoid": {"score_function": "sigmoid"},
    "sigmoid, scaled": {"score_function": "sigmoid", "scaling_factor": 2.5},
    "sigmoid, bias": {"score_function": "sigmoid", "expert_bias": BIAS},
    "sigmoid, bias, groups": {"score_function": "sigmoid", "expert_bias": BIAS, **GROUPS},
}


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("choice", CHOICES)
def test_choice_and_weights(choice, topk):
    options = CHOICES[choice]
    if topk < options.get("group_topk", 0):
        topk = 2
    assert_same(*both("topk_routing_with_score_function", logits_of(), topk, **options))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_what_the_losses_look_at(score_function):
    assert_same(*both("compute_routing_scores_for_aux_loss", logits_of(), 3, score_function))


def test_a_group_is_chosen_alike():
    assert_same(*both("group_limited_topk", logits_of(), 4, T, EXPERTS, 4, 2))


def test_losses():
    counts = torch.arange(EXPERTS) * 2
    arguments = (counts, T, 2, EXPERTS, 0.01)
    assert_same(*both("switch_load_balancing_loss_func", logits_of().softmax(dim=-1), *arguments))
    assert_same(*both("z_loss_func", logits_of(), 0.01))


@pytest.mark.parametrize("tol", [1e-4, 1e-6])
def test_sinkhorn(tol):
    cost = logits_of().double()
    torch.testing.assert_close(
        ours.sinkhorn(cost, tol), theirs.sinkhorn(cost, tol), rtol=1e-12, atol=0
    )


def test_capacity():
    for arguments in ((48, 8, 1.0), (49, 8, 1.25), (3, 8, 0.5), (3, 8, 0.5, 4)):
        assert ours.get_capacity(*arguments) == theirs.get_capacity(*arguments)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_dropping_by_probability(factor, pads):
    """Where padding has a choice among tokens of probability 0, we take the first: no promise."""
    probs, routing_map = ours.topk_routing_with_score_function(logits_of(), 2)
    results = [
        module.apply_router_token_dropping(probs, routing_map, 2, factor, "probs", pads)
        for module in (ours, theirs)
    ]
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(*(kept.sum(dim=0) for _, kept in results))
    if not pads:
        assert torch.equal(results[0][1], results[1][1])


def test_dropping_by_position():
    """They take the largest of zeros and ones, whose order among equals torch leaves open."""
    probs, routing_map = ours.topk_routing_with_score_function(logits_of(), 2)
    results = [
        module.apply_router_token_dropping(probs, routing_map, 2, 0.5, "position")[1]
        for module in (ours, theirs)
    ]
    assert torch.equal(*(kept.sum(dim=0) for kept in results))
    assert not (results[0] & ~routing_map).any() and not (results[1] & ~routing_map).any()
    first = routing_map & (routing_map.cumsum(dim=0) <= 3)
    assert torch.equal(results[0], first)


def test_the_gate():
    x, weight = torch.randn(SEQUENCE, BATCH, HIDDEN), torch.randn(EXPERTS, HIDDEN)
    for dtype in (torch.float32, torch.float64):
        results, grads = [], []
        for module in (ours, theirs):
            leaves = [t.bfloat16().requires_grad_() for t in (x, weight)]
            results.append((module.router_gating_linear(*leaves, None, dtype),))
            results[-1][0].sin().sum().backward()
            grads.append([leaf.grad for leaf in leaves])
        assert results[0][0].dtype == dtype
        assert_same(results)
        for mine, their in zip(*grads, strict=True):
            assert mine.dtype == torch.bfloat16
            torch.testing.assert_close(mine, their)


def test_biases_after_a_step():
    counts, bias = torch.randint(0, 50, (3, EXPERTS)), torch.randn(3, EXPERTS)
    with (
        mock.patch.object(theirs.parallel_state, "get_tensor_and_data_parallel_group"),
        mock.patch.object(torch.distributed, "all_reduce"),
    ):
        expected = theirs.get_updated_expert_bias(counts.float(), bias, 1e-3)
    assert torch.equal(get_updated_expert_bias(counts, bias, 1e-3, PretendGroup()), expected)


# -- The router --

SIGMOID = {"moe_router_score_function": "sigmoid"}
AUX = {"moe_aux_loss_coeff": 0.02}
ROUTERS = {
    "none": {"moe_router_load_balancing_type": "none"},
    "aux_loss": AUX,
    "aux_loss of sigmoids": {**AUX, **SIGMOID},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", **AUX},
    "global_aux_loss": {"moe_router_load_balancing_type": "global_aux_loss", **AUX},
    "all of them": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.01, 0.02, 0.03],
        "moe_z_loss_coeff": 0.04,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "sinkhorn, one expert": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "z-loss": {"moe_z_loss_coeff": 0.04},
    "per token": {**AUX, "moe_z_loss_coeff": 0.04, "calculate_per_token_loss": True},
    "capacity": {**AUX, "moe_expert_capacity_factor": 0.7},
    "capacity, padded": {
        "moe_expert_capacity_factor": 0.7,
        "moe_pad_expert_input_to_capacity": True,
    },
    "pre-softmax in float64": {
        **AUX,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 1.5,
        "moe_router_dtype": "fp64",
    },
    "bias and groups": {
        **SIGMOID,
        **AUX,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
}
BASE = {
    "num_layers": 2,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_moe_experts": EXPERTS,
    "add_bias_linear": False,
    "init_method_std": 0.4,
}


@pytest.fixture(autouse=True)
def without_scale_and_gpu() -> Iterator[None]:
    """No run of ours or theirs before has left a scale or losses.

    Without Transformer Engine, 0.16.1 asks for a name that it has not defined.
    """
    scalers = [module.MoEAuxLossAutoScaler for module in (ours, theirs)]
    undefined = mock.patch.object(theirs, "te_general_gemm", None, create=True)
    alone = mock.patch.object(theirs, "reduce_from_tensor_model_parallel_region", lambda x, _: x)
    with cuda_calls_on_cpu(), undefined, alone, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for scaler in scalers:
        scaler.main_loss_backward_scale = None
    theirs.get_moe_layer_wise_logging_tracker().clear()


def two_routers(**options: Any) -> list[torch.nn.Module]:
    """Ours and theirs, of one weight, the same every time."""
    options = {**BASE, **options}
    torch.manual_seed(2)
    mine = TopKRouter(TransformerConfig(**options), one_rank())
    their = their_router.TopKRouter(
        their_config.TransformerConfig(**options, use_cpu_initialization=True), one_rank()
    )
    for router in (mine, their):
        router.set_layer_number(1)
    with torch.no_grad():
        their.weight.copy_(mine.weight)
        if mine.expert_bias is not None:
            for router in (mine, their):
                router.expert_bias.copy_(BIAS)
    return [mine, their]


def inputs(num_microbatches: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (SEQUENCE, BATCH, HIDDEN)
    return [torch.randn(shape, generator=generator) + 0.2 for _ in range(num_microbatches)]


def run(router: torch.nn.Module, num_microbatches: int = 2) -> tuple[list, list]:
    """(probabilities and maps, gradients) of some microbatches."""
    results, grads = [], []
    for x in inputs(num_microbatches):
        x.requires_grad_()
        probs, routing_map = router(x)
        results += [probs.detach(), routing_map]
        (probs * torch.arange(1.0, probs.numel() + 1).view(probs.shape)).sin().sum().backward()
        grads.append(x.grad)
    return results, [*grads, router.weight.grad]


@pytest.mark.parametrize("case", ROUTERS)
def test_a_router_forward_and_backward(case):
    options = ROUTERS[case]
    mine, their = two_routers(**options)
    found, expected = run(mine), run(their)
    if "padded" in case:  # another token of probability 0 may fill a place
        found, expected = ((results[::2], grads) for results, grads in (found, expected))
    assert_same([found[0], expected[0]])
    # With logits in float64 they still have weights in float32.
    limit = 1e-3 if "float64" in case else 1e-6
    for grad, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(grad, other, rtol=10 * limit, atol=limit)
    if mine.expert_bias is not None:
        assert mine.local_tokens_per_expert.tolist() == their.local_tokens_per_expert.tolist()


@pytest.mark.parametrize("case", ["all of them", "z-loss", "aux_loss"])
def test_the_losses_in_the_log(case):
    mine, their = two_routers(**ROUTERS[case])
    run(mine), run(their)
    tracked = theirs.get_moe_layer_wise_logging_tracker()
    assert mine.losses.keys() == tracked.keys()
    for name, loss in mine.losses.items():
        torch.testing.assert_close(loss, tracked[name]["values"][0], rtol=1e-5, atol=0)


def test_evaluation_is_the_same_without_losses():
    mine, their = two_routers(**ROUTERS["all of them"])
    for router in (mine.eval(), their.eval()):
        router(inputs(1)[0])
    assert not mine.losses and not theirs.get_moe_layer_wise_logging_tracker()
    assert_same([router(inputs(1)[0]) for router in (mine, their)])


# -- Where 0.16.1 is wrong --


def gradient_of_losses(router: torch.nn.Module, num_tokens: int) -> torch.Tensor:
    """Of the weight, from losses of balance alone, divided by tokens as `finalize_model_grads` does."""
    (router(inputs(1)[0])[0] * 0.0).sum().backward()
    return router.weight.grad / num_tokens


def test_their_seq_aux_loss_per_token_is_b_times_too_weak():
    options = ROUTERS["seq_aux_loss"]
    means = gradient_of_losses(two_routers(**options)[0], 1)
    mine, their = two_routers(**options, calculate_per_token_loss=True)
    torch.testing.assert_close(gradient_of_losses(mine, T), means)
    torch.testing.assert_close(gradient_of_losses(their, T) * BATCH, means)


def test_their_losses_per_token_are_t_c_times_too_weak(monkeypatch):
    """A rank of two has half of the tokens, the counts of both are as its own are, twice."""
    for name in ("aux_loss", "z-loss"):
        halves = []
        for per_token in (False, True):
            mine, their = two_routers(**ROUTERS[name], calculate_per_token_loss=per_token)
            for router, module in ((mine, ours), (their, theirs)):
                router.tp_cp_group = PretendGroup(0, 2)
                double = lambda x, group: x * group.size()  # noqa: E731
                monkeypatch.setattr(module, "reduce_from_tensor_model_parallel_region", double)
                halves.append(gradient_of_losses(router, 2 * T if per_token else 1))
        means, their_means, mine, their = halves
        torch.testing.assert_close(means, their_means, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(mine, means, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(their * 2, means, rtol=1e-5, atol=1e-8)


def test_their_global_aux_loss_is_d_times_too_weak(monkeypatch):
    """Two data-parallel ranks with the same tokens: each must have what one has alone."""
    alone = gradient_of_losses(two_routers(**ROUTERS["global_aux_loss"])[0], 1)
    grads = []
    for router, module in zip(
        two_routers(**ROUTERS["global_aux_loss"]), (ours, theirs), strict=True
    ):
        router.tp_dp_cp_group = PretendGroup(0, 2)
        double = lambda x, group: x * group.size()  # noqa: E731
        monkeypatch.setattr(module, "reduce_from_tensor_model_parallel_region", double)
        grads.append(gradient_of_losses(router, 1))
    torch.testing.assert_close(grads[0], alone)
    torch.testing.assert_close(grads[1] * 2, alone, rtol=1e-5, atol=1e-8)


def test_their_counts_round_in_a_16_bit_model():
    """An expert with 257 tokens, one with 255: the first's bias has to go down, the second's up."""
    options = {**SIGMOID, "moe_router_enable_expert_bias": True, "moe_router_topk": 1}
    options |= {"num_moe_experts": 3, "moe_router_bias_update_rate": 1.0}
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([257, 255, 256]))
    logits = torch.nn.functional.one_hot(numbers, 3).bfloat16().unsqueeze(1)
    mine, their = (router.bfloat16() for router in two_routers_without_bias(options))
    for router in (mine, their):
        for part in (logits[::2], logits[1::2]):
            router.routing(part)
    assert mine.local_tokens_per_expert.tolist() == [257, 255, 256]
    assert their.local_tokens_per_expert.tolist() == [256.0, 255.0, 256.0]
    model = torch.nn.Sequential(mine)
    model.config = mine.config
    update_biases([model], one_rank())
    assert mine.expert_bias.tolist() == [-1.0, 1.0, 0.0]


def two_routers_without_bias(options: dict[str, Any]) -> list[torch.nn.Module]:
    with mock.patch(f"{__name__}.BIAS", torch.zeros(3)):
        return two_routers(**options)


def test_their_counts_of_padded_tokens_never_move_a_bias():
    """With a capacity and padding each expert has as many places; what counts is tokens."""
    options = {**SIGMOID, "moe_router_enable_expert_bias": True}
    options |= {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    mine, their = two_routers(**options)
    run(mine), run(their)
    assert their.local_tokens_per_expert.unique().numel() == 1
    assert mine.local_tokens_per_expert.unique().numel() > 1
