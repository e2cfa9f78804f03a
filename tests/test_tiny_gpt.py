"""The lessons' GPT: however it is cut, the same losses and gradients; and the meter beside it."""

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.distributed import finalize_model_grads
from minimegatron.core.orders.orders import register_order, unregister
from minimegatron.core.orders.placement import V
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.utils import unwrap_model
from minimegatron.planner.plan import plan
from minimegatron.tracing.activation_meter import ActivationMeter
from minimegatron.training.tiny_gpt import TinyGPT
from tests.ranks import run_ranks

DOUBLE = {"num_layers": 4, "params_dtype": torch.float64}
CUTS = [
    {"pp": 4},
    {"pp": 2, "vp": 2},
    {"tp": 2, "pp": 2},
    {"pp": 2, "ddp": {"use_distributed_optimizer": True}},
    {"tp": 2, "sequence_parallel": True},
]


def train(cut: dict, num_microbatches: int) -> tuple[list[float], dict, int]:
    """Two steps: the second one's losses show whether the first one's update was right."""
    gpt = TinyGPT(**DOUBLE, **cut)
    optimizer = gpt.optimizer(adam_eps=1e-3)
    gpt.step(num_microbatches // gpt.groups.dp.size())
    gradients = gpt.gradients()
    optimizer.step()
    reports = gpt.step(num_microbatches // gpt.groups.dp.size())
    return [float(report["loss"]) for report in reports], gradients, gpt.groups.dp.rank()


def train_all(cuts: list[dict], num_microbatches: int) -> list:
    return [train(cut, num_microbatches) for cut in cuts]


def test_every_cut_is_the_same_model():
    losses, gradients, _ = run_ranks(train_all, 1, [{}], 8)[0][0]
    ranks = run_ranks(train_all, 4, CUTS, 8)
    for number, cut in enumerate(CUTS):
        for found, of_rank, copy in (results[number] for results in ranks):
            if found:
                copies = 4 // (cut.get("tp", 1) * cut.get("pp", 1))
                assert found == pytest.approx(losses[copy::copies], abs=1e-9)
            for name, grad in of_rank.items():
                if grad.shape == gradients[name].shape and "ddp" not in cut:
                    assert (grad - gradients[name]).abs().max() < 1e-10, (cut, name)


EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall"}


def test_ranks_that_share_experts_have_the_same_model():
    losses, gradients, _ = run_ranks(train_all, 1, [EXPERTS], 4)[0][0]
    ranks = run_ranks(train_all, 2, [{**EXPERTS, "expert_model_parallel_size": 2}], 4)
    names = set()
    for ((found, of_rank, copy),) in ranks:
        assert found == pytest.approx(losses[copy::2], abs=1e-9)
        names |= of_rank.keys()
        assert all((grad - gradients[name]).abs().max() < 1e-10 for name, grad in of_rank.items())
    assert names == gradients.keys()


TIED = "embedding.word_embeddings.weight"


def update_with_made_up_gradients(cut: dict) -> dict:
    """One update; the gradient of each parameter follows from its name, a tied one's in two halves."""
    register_order("v", placement=V)(update_with_made_up_gradients)
    gpt = TinyGPT(**DOUBLE, **cut)
    unregister("v")
    optimizer = gpt.optimizer(clip_grad=1e-3, log_num_zeros_in_grad=True)
    params = [
        (name, param)
        for chunk in gpt.chunks
        for name, param in named_global_parameters(unwrap_model(chunk))
    ]
    for name, param in params:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        grad = grad.where(grad.abs() > 0.1, 0.0)
        param.main_grad.copy_(grad / 2 if name == TIED and gpt.groups.pp.size() > 1 else grad)
    for chunk in gpt.chunks:
        chunk.start_grad_sync()
    finalize_model_grads(gpt.chunks, pg_collection=gpt.groups)
    _, norm, zeros = optimizer.step()
    placement = parallel_state.get_pipeline_placement()
    return {
        "norm, zeros": (norm, zeros),
        "stages": placement.stages[gpt.groups.pp.rank()],
        "layers": [len(unwrap_model(chunk).decoder.layers) for chunk in gpt.chunks],
        "buckets": [chunk.bucket_size is not None for chunk in gpt.chunks],
        "params": [(name, param.detach().clone()) for name, param in params],
    }


def test_a_v_is_the_whole_model_once():
    """Both copies of the tied embedding are on rank 0: one gradient, counted once, one update."""
    whole = run_ranks(update_with_made_up_gradients, 1, {})[0]
    expected = dict(whole["params"])
    for ddp in ({"overlap_grad_reduce": True}, {"use_distributed_optimizer": True}):
        ranks = run_ranks(
            update_with_made_up_gradients, 4, {"pp": 2, "pipeline_schedule": "v", "ddp": ddp}
        )
        for copy in (0, 1):  # with data-parallel ranks 0 and 1, ranks 0 and 2 are a pipeline
            pipeline = ranks[copy], ranks[copy + 2]
            assert [rank["stages"] for rank in pipeline] == [(0, 3), (1, 2)]
            assert [rank["layers"] for rank in pipeline] == [[1, 1], [1, 1]]
            names = [name for rank in pipeline for name, _ in rank["params"]]
            assert sorted(names) == sorted([*expected, TIED])
            for rank in pipeline:
                assert rank["norm, zeros"] == pytest.approx(whole["norm, zeros"], rel=1e-12)
                for name, found in rank["params"]:
                    assert (found - expected[name]).abs().max() < 1e-12, name
            copies = [found for name, found in pipeline[0]["params"] if name == TIED]
            assert len(copies) == 2 and torch.equal(*copies)
        if "overlap_grad_reduce" in ddp:
            assert [rank["buckets"] for rank in pipeline] == [[True, False], [False, False]]


def measure(num_microbatches: int, config: dict) -> tuple[list[int], int, int, int]:
    gpt = TinyGPT(pp=2, **config)
    with ActivationMeter(gpt.chunks) as alone:
        gpt.step(1)
    with ActivationMeter(gpt.chunks) as meter:
        gpt.step(num_microbatches)
    return meter.after_each, meter.peak, alone.peak, meter.now


def test_meter_counts_what_the_plan_says_is_held():
    done = plan("1f1b", 2, 4)
    for rank, (after_each, peak, one, left) in enumerate(run_ranks(measure, 2, 4, {})):
        assert one > 0
        assert after_each == [one * held for held in done.in_flight(rank)]
        assert (peak, left) == (one * done.peak_in_flight(rank), 0)


def test_meter_sees_that_recompute_keeps_less():
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    kept = [max(run_ranks(measure, 2, 4, config)[0][0]) for config in ({}, full)]
    assert kept[1] < kept[0] / 8


def look_inside() -> tuple[int, list, int]:
    weight = torch.nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4, requires_grad=True)
    with ActivationMeter(weight) as meter:
        y = weight(x).exp().sum()
        before, kept = meter.now, meter.kept()
        y.backward()
    return before, kept, meter.now


def test_meter_names_what_is_kept_and_leaves_parameters_out():
    before, kept, after = look_inside()
    assert [(k.shape, k.dtype, k.num_bytes) for k in kept] == [((2, 4), "float32", 32)] * 2
    assert (before, after) == (64, 0)
