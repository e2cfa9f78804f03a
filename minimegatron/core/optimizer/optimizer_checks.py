"""What an optimizer refuses: settings that contradict each other, gradients that are not ready.

Megatron has no counterpart.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from minimegatron.core.utils import HALF_DTYPES

# -- Settings --


def check_config(config: Any) -> None:
    """Fields of an `OptimizerConfig` that do not go together."""
    if config.fp16 and config.bf16:
        raise ValueError("fp16 and bf16 are both on; choose one")
    if config.loss_scale is not None and not (config.fp16 or config.bf16):
        raise ValueError(
            f"loss_scale {config.loss_scale} is for fp16 or bf16; choose one or drop it"
        )
    if config.min_loss_scale > config.initial_loss_scale:
        raise ValueError(
            f"need 0 < min_loss_scale <= initial_loss_scale, but they are "
            f"{config.min_loss_scale}, {config.initial_loss_scale}"
        )
    if config.overlap_param_gather and not config.use_distributed_optimizer:
        raise ValueError("overlap_param_gather needs use_distributed_optimizer; turn it on")


def check_initial_scale(initial_scale: float) -> None:
    """A loss scale is positive."""
    if initial_scale <= 0.0:
        raise ValueError(f"initial loss scale is {initial_scale}; give a positive number")


def check_scale_moves(scaler: Any, initial_scale: float) -> None:
    """The scale of a `DynamicGradScaler` can fall and rise."""
    min_scale, growth_factor = scaler.min_scale, scaler.growth_factor
    backoff_factor, growth_interval = scaler.backoff_factor, scaler.growth_interval
    hysteresis = scaler.hysteresis
    if not (
        0.0 < min_scale <= initial_scale
        and growth_factor > 1.0
        and 0.0 < backoff_factor < 1.0
        and growth_interval >= 1
        and hysteresis >= 1
    ):
        raise ValueError(
            f"need 0 < min_scale <= initial_scale, growth_factor > 1, 0 < backoff_factor < 1, "
            f"growth_interval and hysteresis >= 1, but they are {min_scale}, {initial_scale}, "
            f"{growth_factor}, {backoff_factor}, {growth_interval}, {hysteresis}"
        )


# -- Parameters and gradients --


def refuse_second_preparation() -> NoReturn:
    """Gradients are unscaled already."""
    raise RuntimeError(
        "prepare_grads() twice in one step would divide by the loss scale twice; go on with "
        "clip_grad_norm() and step_with_ready_grads(), not with step()"
    )


def refuse_grads_of_frozen(names: Sequence[str]) -> NoReturn:
    """These parameters have been frozen after the optimizer was made, and have a gradient."""
    raise ValueError(
        f"{len(names)} parameters, such as {names[0]}, do not require a gradient, but "
        "have one, which may be zero: they would move by their moments and weight decay; "
        "freeze them before, or make wrapper and optimizer again"
    )


def refuse_unprepared_grads(num_waiting: int, num_shards: int) -> NoReturn:
    """The update rule would miss gradients, or see them scaled."""
    raise RuntimeError(
        f"gradients of {num_waiting} of {num_shards} parameters are not where the rule "
        "reads them, or are multiplied by the loss scale; ask for norms and zeros, and update, "
        "after prepare_grads(), or take what step() returns"
    )


def check_precision(name: str, dtype: torch.dtype) -> None:
    """Of a parameter that has no main copy."""
    if dtype in HALF_DTYPES:
        raise ValueError(
            f"{name} is {dtype}, in which small updates vanish; "
            "set bf16=True or fp16=True in OptimizerConfig for fp32 main parameters"
        )
