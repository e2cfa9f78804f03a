"""Loss scales, without processes."""

import pytest
import torch

from minimegatron.core.optimizer import ConstantGradScaler, DynamicGradScaler, OptimizerConfig


def make_dynamic(**kwargs):
    arguments = {
        "initial_scale": 1024.0,
        "min_scale": 1.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "hysteresis": 2,
    }
    return DynamicGradScaler(**{**arguments, **kwargs})


def test_halves_after_hysteresis_and_doubles_after_the_window():
    scaler = make_dynamic()
    history = []
    for found_inf in (True, True, True, False, False, False, True, True, False, False, True):
        scaler.update(found_inf)
        history.append(scaler.scale.item())
    # overflow forgiven, halved, halved; three good steps: doubled, and one overflow forgiven again
    assert history == [1024, 512, 256, 256, 256, 512, 512, 256, 256, 256, 128]


def test_never_below_the_minimum():
    scaler = make_dynamic(initial_scale=4.0, min_scale=2.0, hysteresis=1)
    for _ in range(5):
        scaler.update(True)
    assert scaler.scale.item() == 2.0


def test_an_overflow_restarts_the_window():
    scaler = make_dynamic(hysteresis=100)
    for found_inf in (False, False, True, False, False):
        scaler.update(found_inf)
    assert scaler.scale.item() == 1024.0
    scaler.update(False)
    assert scaler.scale.item() == 2048.0


def test_state_resumes_in_the_middle():
    scaler, resumed = make_dynamic(), make_dynamic(initial_scale=8.0)
    for found_inf in (True, False, False):
        scaler.update(found_inf)
    resumed.load_state_dict(scaler.state_dict())
    for found_inf in (False, True, True, False):
        scaler.update(found_inf)
        resumed.update(found_inf)
        assert resumed.state_dict() == scaler.state_dict()


def test_constant():
    scaler = ConstantGradScaler(128.0)
    scaler.update(True)
    assert scaler.scale.item() == 128.0
    assert scaler.inv_scale.item() == 1 / 128.0
    assert scaler.state_dict() == {}


def test_the_scale_does_not_change_the_losss_dtype():
    for dtype in (torch.float32, torch.float64):
        assert (ConstantGradScaler(2.0).scale * torch.tensor(1.0, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(
    "changes",
    [
        {"initial_scale": 0.0},
        {"min_scale": 2048.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
    ],
)
def test_bad_scalers_are_refused(changes):
    with pytest.raises(ValueError):
        make_dynamic(**changes)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"optimizer": "lion"}, "'lion' is unknown"),
        ({"fp16": True, "bf16": True}, "choose one"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"clip_grad": -1.0}, "clip_grad is -1.0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"adam_beta1": 1.0}, "adam_beta1 is 1.0"),
        ({"adam_beta2": -0.1}, "adam_beta2 is -0.1"),
        ({"sgd_momentum": 1.5}, "sgd_momentum is 1.5"),
        ({"adam_eps": -1.0}, "adam_eps is -1.0"),
        ({"loss_scale": 0.0, "fp16": True}, "loss_scale is 0.0"),
        ({"loss_scale": 8.0}, "for fp16 or bf16"),
        ({"min_loss_scale": 4.0, "initial_loss_scale": 2.0}, "4.0, 2.0"),
        ({"loss_scale_window": 0}, "loss_scale_window is 0"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"overlap_param_gather": True}, "use_distributed_optimizer"),
    ],
)
def test_bad_optimizer_configurations_are_refused(kwargs, words):
    with pytest.raises(ValueError) as error:
        OptimizerConfig(**kwargs)
    assert words in str(error.value)
