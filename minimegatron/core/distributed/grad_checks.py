"""What is wrong with the gradients of a bucket, in words: not finite, not there, or too many.

Megatron has no counterpart: a few of these are assertions there. `param_and_grad_buffer` finds out that
something is wrong, or cannot tell without waiting, and asks here.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.rerun_state_machine import RerunMode
from minimegatron.core.tensor_parallel.weight_grad_store import is_owed
from minimegatron.core.words import first_few

GRADIENT_TOLERANCE = 0.001
"""Relative difference of two runs' gradients that is none: sums over threads vary."""

# -- Gradients that are not finite --


def judge_bucket(bucket: Any, machine: Any, is_asynchronous: bool) -> None:
    """RuntimeError that names rank, bucket and parameters if the gradients are not finite.

    On a GPU, to look at a number would stop the program in the middle of backward. There the numbers
    are noted, and `check_noted_grads` looks at them later; unless a bad result has the step run
    again, which is decided before that.

    Args:
        bucket: one stretch of a buffer, before its gradients are summed over ranks.
        machine: the process's `RerunStateMachine`.
        is_asynchronous: whether this rank's device is a GPU.
    """
    if is_asynchronous and machine.mode is RerunMode.DISABLED:
        grads = [param.main_grad for param in bucket.params]
        bucket.noted = torch.stack(torch._foreach_norm(grads, math.inf))
        return
    machine.validate_result(
        bucket.grad_data.sum(),
        partial(_is_of_bad, bucket.grad_data),
        "gradients are not finite",
        tolerance=GRADIENT_TOLERANCE,
        describe=partial(words_of, bucket, map(_count_of_bad, bucket.params)),
    )


def check_noted_grads(groups: Iterable[Any]) -> None:
    """Raises what `judge_bucket` raises, for what it has noted of the buckets of these groups."""
    buckets = [bucket for group in groups for bucket in group.buckets]
    noted = [bucket.noted for bucket in buckets if bucket.noted is not None]
    if not (noted and bool(torch.cat(noted).isfinite().logical_not().any())):
        return
    for bucket in buckets:
        kinds = [] if bucket.noted is None else [*map(_kind_of_bad, bucket.noted.tolist())]
        if any(kinds):
            raise RuntimeError(words_of(bucket, kinds))


def words_of(bucket: Any, words: Iterable[str]) -> str:
    """The message; `words` say of each parameter what is bad, "" where nothing is."""
    named = zip(bucket.params.values(), words, strict=True)
    culprits = [f"{name} ({what})" for name, what in named if what]
    return (
        f"rank {dist.get_rank()}: gradients are not finite in bucket "
        f"{bucket.bucket_id}, before data-parallel summation: {first_few(culprits)}; "
        "look at this rank's batch, lower the learning rate, or clip harder"
    )


def _is_of_bad(grads: torch.Tensor, total: torch.Tensor) -> bool:
    """Whether `total`, the sum of `grads`, has a bad term. One number says so while all is well: a
    finite sum has only finite terms."""
    return not (math.isfinite(total) or bool(grads.isfinite().all()))


def _count_of_bad(param: torch.nn.Parameter) -> str:
    """ "1 NaN, 0 Inf of 576"; nothing where all elements are finite."""
    num_nan, num_inf = int(param.main_grad.isnan().sum()), int(param.main_grad.isinf().sum())
    return f"{num_nan} NaN, {num_inf} Inf of {param.numel()}" if num_nan or num_inf else ""


def _kind_of_bad(largest: float) -> str:
    """
    >>> _kind_of_bad(math.nan), _kind_of_bad(math.inf), _kind_of_bad(3.0)
    ('NaN', 'Inf', '')
    """
    if math.isfinite(largest):
        return ""
    return "NaN" if math.isnan(largest) else "Inf"


# -- Gradients that came too often, or not at all --


def refuse_another_grad(name: str) -> None:
    """Raises RuntimeError: the bucket of this parameter was launched, and a gradient came."""
    raise RuntimeError(
        f"rank {dist.get_rank()}: another gradient of {name} came after its "
        "bucket was launched, and would be lost; run every microbatch but the last within "
        "no_sync(), and call zero_grad_buffer() before each step"
    )


def refuse_owed_grads(params: dict[torch.nn.Parameter, str]) -> None:
    """Raises RuntimeError where backward has left a weight gradient of these for later."""
    owed = [name for param, name in params.items() if is_owed(param)]
    if owed:
        raise RuntimeError(
            f"rank {dist.get_rank()}: weight gradients of {first_few(owed)} are still "
            "owed, and the sum would lack them; call backward_dw() of the model once for each "
            "microbatch (delay_wgrad_compute), or finish_embedding_wgrad_compute "
            "(defer_embedding_wgrad_compute) first"
        )


def check_launched(group: Any, force_all_reduce: bool) -> None:
    """RuntimeError for weight gradients of a group that are owed.

    With overlap, likewise for one that lacks gradients, and so was never launched; ValueError where
    `force_all_reduce` asks for another collective than was launched.
    """
    refuse_owed_grads(group.params)
    if not group.ddp_config.overlap_grad_reduce:
        return
    missing = [name for param, name in group.params.items() if param not in group.params_with_grad]
    if group.grad_reduce_handles is None and missing:
        raise RuntimeError(
            f"rank {dist.get_rank()}: no gradient came in the last microbatch for "
            f"{first_few(missing)}, so {len(group.params)} gradients were never summed over "
            f"{group.data_parallel_group.size()} data-parallel ranks; use each of them in every "
            "forward, set requires_grad=False on it, or turn overlap_grad_reduce off"
        )
    if force_all_reduce and group.ddp_config.use_distributed_optimizer:
        raise ValueError(
            "force_all_reduce came after the reduce-scatters were launched; "
            "turn overlap_grad_reduce off to use it"
        )
