"""Which knobs of data parallelism exclude each other.

Megatron has no counterpart: it asserts the same where it reads them.
"""

from typing import Any


def check_gathering(ddp_config: Any) -> None:
    """Raises ValueError, with the remedy, for `overlap_param_gather` without what it needs."""
    if ddp_config.overlap_param_gather and not ddp_config.use_distributed_optimizer:
        raise ValueError(
            "overlap_param_gather needs use_distributed_optimizer: "
            "without it every rank updates every parameter, and there is nothing to gather"
        )
    if ddp_config.overlap_param_gather and not ddp_config.overlap_grad_reduce:
        raise ValueError("overlap_param_gather needs overlap_grad_reduce; turn both on")


def check_divided_once(config: Any, ddp_config: Any) -> None:
    """With `calculate_per_token_loss`: ValueError where the collective would divide too."""
    if config.calculate_per_token_loss and ddp_config.average_in_collective:
        raise ValueError(
            "average_in_collective divides by the number of ranks, calculate_per_token_loss by the "
            "number of tokens; turn one of them off"
        )
