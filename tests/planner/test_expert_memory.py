"""Layers of experts: counts and bytes against what real layers hold."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from minimegatron.core.transformer.spec_utils import build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.planner.expert_memory import (
    LayerParameters,
    all_to_all_bytes,
    expert_activation_bytes,
    expert_layer_activation_bytes,
    expert_model_state_bytes,
    num_expert_layer_parameters,
)
from minimegatron.planner.memory import activation_bytes_per_layer
from minimegatron.tracing.activation_meter import ActivationMeter
from tests.core.transformer.moe.test_moe_layer import groups

h, f, E = 64, 96, 8
LLAMA = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
SHARED = {**LLAMA, "moe_shared_expert_intermediate_size": 32}


def config_of(**options) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": h,
            "num_attention_heads": 4,
            "ffn_hidden_size": 4 * h,
            "moe_ffn_hidden_size": f,
            "num_moe_experts": E,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "params_dtype": torch.bfloat16,
            "bf16": True,
            **options,
        }
    )


def layer(pg_collection=None, **options) -> torch.nn.Module:
    config = config_of(**options)
    (spec,) = get_gpt_decoder_layer_specs(config)
    pg = pg_collection or groups()
    return build_module(spec, config=config, layer_number=1, pg_collection=pg).to(torch.bfloat16)


# -- Parameters --


@pytest.mark.parametrize(
    "options", [{}, LLAMA, {**SHARED, "moe_shared_expert_gate": True}, {"num_query_groups": 2}]
)
@pytest.mark.parametrize(("e", "etp", "t"), [(1, 1, 1), (2, 1, 1), (4, 2, 1), (2, 2, 2)])
def test_parameters_of_a_rank(options, e, etp, t):
    # Experts that are cut have no biases, and tensor parallelism needs sequence parallelism.
    if etp > 1 and options.get("add_bias_linear", True):
        options = options | {"add_bias_linear": False}
    sizes = {
        "expert_model_parallel_size": e,
        "expert_tensor_parallel_size": etp,
        "tensor_model_parallel_size": t,
    }
    places = {name: (0, size) for name, size in (("ep", e), ("expt_tp", etp), ("tp", t))}
    made = layer(groups(**places), sequence_parallel=t > 1, **sizes, **options)
    counted = {"dense": 0, "expert": 0}
    for name, param in made.named_parameters():
        counted["expert" if ".local_experts." in name else "dense"] += param.numel()
    names = ("gated_linear_unit", "add_bias_linear", "num_query_groups", *SHARED)
    same = {k: v for k, v in options.items() if k in names and k != "activation_func"}
    same["moe_shared_expert_gate"] = options.get("moe_shared_expert_gate", False)
    found = num_expert_layer_parameters(h, f, E, e, etp, t, num_attention_heads=4, **same)
    assert found == LayerParameters(counted["dense"], counted["expert"])


def test_known_models():
    # Mixtral 8x7B: 32 layers, 8 experts of 14336, 8 query groups, 32000 tokens.
    options = {"gated_linear_unit": True, "add_bias_linear": False, "norm_has_bias": False}
    sizes = {"num_attention_heads": 32, "num_query_groups": 8}
    total = sum(num_expert_layer_parameters(4096, 14336, 8, **sizes, **options))
    assert 32 * total + 2 * 32000 * 4096 + 4096 == 46_702_792_704
    # Of 16 ranks with e = 8, each holds one expert of each layer.
    mine = num_expert_layer_parameters(4096, 14336, 8, 8, **sizes, **options)
    assert mine.experts == 3 * 4096 * 14336


def test_state_is_cut_over_each_kinds_own_ranks():
    parameters = LayerParameters(1000, 4000)
    dense, experts = expert_model_state_bytes(parameters, 8, 2, use_distributed_optimizer=True)
    assert (dense.total, experts.total) == (6000 + 12000 // 8, 24000 + 48000 // 2)
    dense, experts = expert_model_state_bytes(parameters, 8, 2)
    assert (dense.total, experts.total) == (18_000, 72_000)


# -- Activations --


@pytest.mark.parametrize("topk", [2, 4])
@pytest.mark.parametrize(
    "options", [{"add_bias_linear": False}, LLAMA, SHARED], ids=["plain", "llama", "shared"]
)
def test_activations_are_those_of_a_real_layer(kind, topk):
    options = {"plain": {"add_bias_linear": False}, "llama": LLAMA, "shared": SHARED}[kind]
    s, b = 32, 4
    moe = layer(moe_router_topk=topk, **options).mlp
    x = torch.randn(s, b, h, dtype=torch.bfloat16, requires_grad=True)
    with ActivationMeter(moe) as meter:
        output, _ = moe(x * 1)
    expected = expert_activation_bytes(
        s * b,
        h,
        f,
        E,
        topk,
        moe_shared_expert_intermediate_size=options.get("moe_shared_expert_intermediate_size", 0),
        gated_linear_unit=options.get("gated_linear_unit", False),
    )
    assert meter.now == expected
    output.sum().backward()


def test_a_layer_is_the_dense_one_with_its_mlp_exchanged():
    sizes = (1024, 2, 512, 8)
    T = 2048
    dense = activation_bytes_per_layer(*sizes, sequence_parallel=True)
    found = expert_layer_activation_bytes(*sizes, 768, 8)
    assert found == dense - 18 * T * 512 + expert_activation_bytes(T, 512, 768, 8)
    quarter = expert_layer_activation_bytes(*sizes, 768, 8, 2, 2, 2)
    assert quarter == Fraction(found, 4)
    full = expert_layer_activation_bytes(*sizes, 768, 8, recompute="full")
    assert full == 2 * T * 512


# -- What is sent --


def test_all_to_alls_send_what_other_ranks_experts_need():
    T, k = 1024, 2
    assert all_to_all_bytes(T, 512, k, 1) == 0
    assert all_to_all_bytes(T, 512, k, 2) == T * k // 2 * (4 * 512 + 2) * 2
    # With many ranks nearly everything leaves.
    assert all_to_all_bytes(T, 512, k, 64) < T * k * (4 * 512 + 2) * 2
