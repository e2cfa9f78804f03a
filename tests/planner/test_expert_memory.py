"""Layers of experts: counts and bytes against what real layers hold."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from minimegatron.core import parallel_state
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from minimegatron.core.pipeline_parallel.schedule_table import count_rank_microbatches
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.spec_utils import build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.planner.actions import FORWARD, parts_of
from minimegatron.planner.expert_memory import (
    LayerParameters,
    all_to_all_bytes,
    expert_activation_bytes,
    expert_layer_activation_bytes,
    expert_model_state_bytes,
    num_expert_layer_parameters,
)
from minimegatron.planner.memory import activation_bytes_per_layer, peak_activation_bytes
from minimegatron.planner.plan import Plan, plan
from minimegatron.tracing.activation_meter import ActivationMeter
from tests import parity
from tests.core.models.test_schedule_plan import EXPERTS, build, run_step
from tests.core.transformer.moe.test_moe_layer import groups
from tests.ranks import run_ranks

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
@pytest.mark.parametrize("kind", ["plain", "llama", "shared"])
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


# -- Activations of combined 1F1B, measured beside its plan --


def held_by(step: Plan, rank: int, sizes: dict[tuple, int]) -> list[int]:
    """What the plan says is held after each piece of work; `sizes` by (microbatch, chunk)."""
    held, found = 0, []
    for action in step.work(rank):
        for part in parts_of(action):
            size = sizes[part.microbatch, part.chunk]
            held += size if part.kind == FORWARD else -size
        found.append(held)
    return found


@pytest.mark.parametrize("delay", [False, True])
def test_one_stage_holds_a_layer_more_at_most(delay):
    """Between two steps one microbatch, as if they were ordinary; within a pair less than two."""
    M, sizes = 3, {}
    for L in (2, 3):
        meters = {}
        for combined in (False, True):
            late = {"delay_wgrad_compute": delay and combined}
            model = build(combined, num_layers=L, **EXPERTS, **late)
            with ActivationMeter(model) as meters[combined]:
                run_step(model, M)
        sizes[L] = meters[False].peak
    microbatch, one_layer = sizes[3], sizes[3] - sizes[2]
    step = plan("combined", 1, M)
    expected = held_by(step, 0, {(i, 0): microbatch for i in range(M)})
    assert meters[True].after_each == expected == [microbatch] * M + [0]
    planned = peak_activation_bytes(step, 0, microbatch, bytes_per_layer=one_layer)
    assert microbatch < meters[True].peak <= planned == microbatch + one_layer


TWO_STAGES = parity.Case(pp=2, dp=2, ep=2, vp=2, G=2, experts=4, num_layers=8, batched=False)


def measure(case: parity.Case) -> tuple[int, dict[bool, tuple]]:
    """In a rank: its stage, and (peak, held after each piece of work) without and with pairs."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp,
        expert_model_parallel_size=case.ep,
    )
    pg = ProcessGroupCollection.use_mpu_process_groups()
    data, found = parity.batches(case.M * case.dp)[pg.dp.rank() :: case.dp], {}
    for combined in (False, True):
        one = replace(case, combined=combined)
        chunks, _ = parity.build(one, pg)
        with ActivationMeter(chunks) as meter:
            parity.run_step(one, pg, chunks, [iter(data) for _ in chunks], False)
        found[combined] = meter.peak, meter.after_each
    return pg.pp.rank(), found


def test_stages_hold_w_plus_one_chunks_and_a_layer_at_most():
    """Chunks of two layers; tokens choose experts, so each microbatch has sizes of its own."""
    case = TWO_STAGES
    step, ordinary = (plan(way, case.pp, case.M, case.vp) for way in ("combined", "interleaved"))
    for rank, found in run_ranks(measure, case.world, case):
        (_, after_each), (peak, pairs_after_each) = found[False], found[True]
        sizes, before = {}, 0
        for action, now in zip(ordinary.work(rank), after_each, strict=True):
            if action.kind == FORWARD:
                sizes[action.microbatch, action.chunk] = now - before
            before = now
        assert after_each == held_by(ordinary, rank, sizes)
        assert pairs_after_each == held_by(step, rank, sizes)
        # At most the largest chunk of each; a chunk has two layers, and ends beside them.
        largest = max(sizes.values())
        planned = peak_activation_bytes(step, rank, largest, bytes_per_layer=Fraction(largest, 2))
        warmup = count_rank_microbatches(case.pp, rank, case.M, case.vp, case.G).num_warmup
        assert planned == (warmup + 1) * largest + Fraction(largest, 2)
        assert max(pairs_after_each) < peak <= planned
        assert peak <= max(pairs_after_each) + Fraction(min(sizes.values()), 2)


# -- What is sent --


def test_all_to_alls_send_what_other_ranks_experts_need():
    T, k = 1024, 2
    assert all_to_all_bytes(T, 512, k, 1) == 0
    assert all_to_all_bytes(T, 512, k, 2) == T * k // 2 * (4 * 512 + 2) * 2
    # With many ranks nearly everything leaves.
    assert all_to_all_bytes(T, 512, k, 64) < T * k * (4 * 512 + 2) * 2
