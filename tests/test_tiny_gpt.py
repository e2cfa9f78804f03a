"""The lessons' GPT: however it is cut, the same losses and gradients; and the meter beside it."""

import pytest
import torch

from minimegatron.planner.plan import plan
from minimegatron.tiny_gpt import TinyGPT
from minimegatron.tracing.activation_meter import ActivationMeter
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
