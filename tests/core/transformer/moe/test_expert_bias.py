"""Around a step: hooks of a configuration, counts forgotten, biases moved, balance told."""

import dataclasses
import importlib
from functools import partial
from typing import Any

import pytest
import torch

from minimegatron.core.transformer.module import Float16Module, MegatronModule
from minimegatron.core.transformer.moe import expert_bias
from minimegatron.core.transformer.moe.expert_bias import (
    forget_step,
    get_updated_expert_bias,
    routers_of,
    update_biases,
)
from minimegatron.core.transformer.moe.moe_logging import balance_of_layers, describe_balance
from minimegatron.core.transformer.moe.moe_utils import scale_as_mean, scale_as_sum
from minimegatron.core.transformer.moe.router import TopKRouter
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.core.transformer.moe.thread_ranks import groups_of_all_ranks, one_rank, run_threads
from tests.groups import PretendGroup

EXPERTS = 3
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def make_config(**options: Any) -> TransformerConfig:
    base = {"num_layers": 4, "hidden_size": 4, "num_attention_heads": 2, "moe_router_topk": 1}
    base |= {"num_moe_experts": EXPERTS, "moe_router_pre_softmax": True}
    return TransformerConfig(**{**base, **options})


class Layers(MegatronModule):
    """Routers of some layers of the model, with nothing around them."""

    def __init__(self, groups: Any, numbers: tuple[int, ...], **options: Any):
        super().__init__(make_config(**options))
        self.rest = torch.nn.Linear(2, 2)
        self.routers = torch.nn.ModuleList(TopKRouter(self.config, groups) for _ in numbers)
        for router, number in zip(self.routers, numbers, strict=True):
            router.set_layer_number(number)


def send(router: TopKRouter, counts: list[int], times: int = 1) -> None:
    """A microbatch in which each expert is chosen so often."""
    numbers = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts))
    logits = torch.nn.functional.one_hot(numbers, EXPERTS).float().unsqueeze(1)
    for _ in range(times):
        router.routing(logits)


# -- Hooks --


def hooks(config: Any) -> tuple:
    return config.aux_loss_scale_funcs, config.before_step_funcs, config.after_grads_funcs


def test_a_configuration_of_experts_has_their_hooks_once():
    theirs = (print,)
    config = make_config(before_step_funcs=theirs, aux_loss_scale_funcs=theirs)
    expected = ((print, scale_as_mean), (print, forget_step), (update_biases,))
    assert hooks(config) == expected
    assert hooks(dataclasses.replace(config, hidden_size=8, ffn_hidden_size=16)) == expected
    per_token = dataclasses.replace(config, calculate_per_token_loss=True)
    assert hooks(per_token) == ((print, scale_as_sum), *expected[1:])
    assert hooks(dataclasses.replace(per_token, calculate_per_token_loss=False)) == expected
    dense = dataclasses.replace(config, num_moe_experts=None, moe_ffn_hidden_size=None)
    assert hooks(dense) == (theirs, theirs, ())
    assert hooks(make_config(num_moe_experts=None)) == ((), (), ())


def test_megatron_has_two_of_them_elsewhere():
    # The package has a function of the module's name.
    megatrons_place = importlib.import_module("minimegatron.core.distributed.finalize_model_grads")
    for name in ("_update_router_expert_bias", "reset_model_temporary_tensors"):
        assert getattr(megatrons_place, name) is getattr(expert_bias, name)


def test_what_a_failed_step_left_is_forgotten():
    model = Layers(one_rank(), (1, 3), **BIAS, moe_z_loss_coeff=0.1)
    for router in model.routers:
        send(router, [3, 1, 2])
    (forget,) = model.config.before_step_funcs
    wrapped = torch.nn.Sequential(model)
    wrapped.config = model.config
    forget([wrapped])
    assert routers_of([wrapped]) == list(model.routers)
    for router in model.routers:
        assert not router.local_tokens_per_expert.any()
        assert (router.losses, router.num_counted) == ({}, 0)


# -- Biases --


def test_a_bias_goes_up_for_experts_with_few_tokens():
    counts = torch.tensor([[5, 1, 3], [2, 2, 2]])
    bias = torch.tensor([[0.5, 0.0, -0.5], [0.1, 0.2, 0.3]])
    updated = get_updated_expert_bias(counts, bias, 0.25, PretendGroup())
    expected = torch.tensor([[0.25, 0.25, -0.5], [0.1, 0.2, 0.3]])
    assert torch.equal(updated, expected)
    assert counts.tolist() == [[5, 1, 3], [2, 2, 2]]


def test_a_bias_moves_once_per_step_by_what_all_microbatches_chose():
    """In a bfloat16 model too, where 257 would be counted as 256."""
    model = Layers(one_rank(), (1, 2), bf16=True, **BIAS)
    wrapped = Float16Module(model.config, model)
    first, second = model.routers
    send(first, [257, 0, 0])
    send(first, [0, 255, 256])
    send(second, [1, 2, 3], times=3)
    (update,) = model.config.after_grads_funcs
    update([wrapped], one_rank())
    assert first.expert_bias.tolist() == pytest.approx([-1e-3, 1e-3, 0.0])
    assert second.expert_bias.tolist() == pytest.approx([1e-3, 0.0, -1e-3])
    assert first.expert_bias.dtype == torch.float32
    # A thousandth is lost on a bias of 1 in bfloat16.
    first.expert_bias.fill_(1.0)
    update([wrapped], one_rank())
    assert first.expert_bias.tolist() == pytest.approx([0.999, 1.001, 1.0])


def test_b11_a_line_of_the_log_beside_a_chunk_without_parameters():
    """Was: the number of layers came with the device of the first chunk's first parameter."""
    groups = one_rank()
    empty, model = torch.nn.Module(), Layers(groups, (2,), **BIAS)
    empty.config = model.config
    send(model.routers[0], [3, 1, 2])
    for chunks in ([empty, model], [model, empty], [empty, model, empty]):
        (layer,) = balance_of_layers(chunks, groups)
        assert (layer.layer_number, layer.tokens_per_expert) == (2, [3, 1, 2])
    assert describe_balance([empty, empty], groups) == {}


def test_a_loop_without_a_schedule_counts_each_step_by_itself():
    """Nobody tells such a loop's routers that a step begins; the log may ask when it is over."""
    model = Layers(one_rank(), (1,), **BIAS)
    (router,) = model.routers
    (update,) = model.config.after_grads_funcs
    for counts in ([4, 1, 1], [2, 2, 5]):
        send(router, counts)
        update([model], one_rank())
        assert router.local_tokens_per_expert.tolist() == counts
    assert router.expert_bias.tolist() == pytest.approx([0.0, 2e-3, 0.0])


def test_a_bias_comes_through_a_model_without_memory():
    router = (
        Layers(one_rank(), (1,), bf16=True, **BIAS).to("meta").to_empty(device="cpu").routers[0]
    )
    assert router.expert_bias.dtype == torch.float32


def test_without_biases_nothing_is_sent():
    groups = groups_of_all_ranks(t=2)[0][1]  # the other rank never comes
    model = Layers(groups, (1,))
    update_biases([model], groups)
    expert_bias._update_router_expert_bias([Layers(groups, (), **BIAS)], model.config, groups.tp)


def one_stage(place: dict[str, int], groups: Any, model: Layers) -> tuple:
    """Rank (t, d) routes 1 + t + 2 d tokens to one expert: its layer's number, counted from there."""
    for router in model.routers:
        counts = [0] * EXPERTS
        counts[router.layer_number % EXPERTS] = 1 + place["t"] + 2 * place["d"]
        counts[0] += 1
        send(router, counts, times=2)
    update_biases([model], groups)
    biases = [router.expert_bias.tolist() for router in model.routers]
    return biases, balance_of_layers([model], groups), describe_balance([model], groups)


def test_biases_and_balance_are_those_of_all_ranks():
    ranks = groups_of_all_ranks(t=2, d=2, p=2)
    options = {**BIAS, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    options |= {"pipeline_model_parallel_size": 2, "add_bias_linear": False}
    # The first stage has two layers with experts, the second one.
    models = [Layers(groups, ((1, 2), (4,))[place["p"]], **options) for place, groups in ranks]
    functions = [
        partial(one_stage, place, groups, model)
        for (place, groups), model in zip(ranks, models, strict=True)
    ]
    results = run_threads(functions, [groups for _, groups in ranks])
    # Two microbatches on four ranks: 8 tokens for expert 0, and 2 (1 + 2 + 3 + 4) for another.
    rate = 1e-3
    expected = {1: [rate, -rate, rate], 2: [rate, rate, -rate], 4: [rate, -rate, rate]}
    counts = {1: [8, 20, 0], 2: [8, 0, 20], 4: [8, 20, 0]}
    for (place, _), (biases, layers, told) in zip(ranks, results, strict=True):
        mine = ((1, 2), (4,))[place["p"]]
        assert biases == [pytest.approx(expected[number]) for number in mine]
        assert {layer.layer_number: layer.tokens_per_expert for layer in layers} == counts
        assert told == {"load imbalance": pytest.approx(20 * 3 / 28)}


# -- What the log says --


def losses_of(place: dict[str, int], groups: Any, model: Layers) -> dict[str, float]:
    for router in model.routers:
        # On both tensor ranks the first data rank's tokens are even, the second's all to one expert.
        send(router, [2, 2, 2] if place["d"] == 0 else [6, 0, 0], times=3)
    return describe_balance([model], groups)


def test_losses_in_the_log_are_means_without_coefficients():
    ranks = groups_of_all_ranks(t=2, d=2)
    options = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    options |= {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.5, "add_bias_linear": False}
    functions = [
        partial(losses_of, place, groups, Layers(groups, (1, 2, 3, 4), **options))
        for place, groups in ranks
    ]
    results = run_threads(functions, [groups for _, groups in ranks])
    most, other = (torch.softmax(torch.tensor([1.0, 0.0, 0.0]), 0)[i].item() for i in (0, 1))
    even, uneven = 3 * (most + 2 * other) / 3, 3 * most
    z = torch.logsumexp(torch.tensor([1.0, 0.0, 0.0]), 0).item() ** 2
    for told in results:
        assert told == {
            "load imbalance": pytest.approx(8 * 3 / 12),
            "load balancing loss": pytest.approx((even + uneven) / 2),
            "z loss": pytest.approx(z),
        }


def test_there_is_nothing_to_tell_without_experts_or_without_a_step():
    assert describe_balance([Layers(one_rank(), ())], one_rank()) == {}
    assert describe_balance([Layers(one_rank(), (1,))], one_rank()) == {}
    dense = torch.nn.Linear(1, 1)
    dense.config = make_config(num_moe_experts=None)
    assert describe_balance([dense], None) == {}
