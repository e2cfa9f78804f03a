"""The knobs of data parallelism.

Counterpart: `megatron.core.distributed.DistributedDataParallelConfig`, under the same field names.
"""

from dataclasses import dataclass
from functools import partial

from minimegatron.core import knobs
from minimegatron.core.distributed.ddp_config_checks import check_gathering

knob = partial(knobs.knob, section="gradients")


@dataclass(frozen=True)
class DistributedDataParallelConfig:
    """How gradients are stored, when they are summed over data-parallel ranks, and how."""

    grad_reduce_in_fp32: bool = knobs.knob(
        False, section="precision", dest="accumulate_allreduce_grads_in_fp32"
    )
    """Accumulate and reduce gradients in float32; always on with --bf16."""
    overlap_grad_reduce: bool = knob(False)
    """Reduce each bucket while backward goes on.

    During the last backward, as soon as its last gradient is in."""
    overlap_param_gather: bool = False
    """Distributed optimizer only: gather a bucket's parameters just before their first use, the next
    bucket's meanwhile."""
    use_distributed_optimizer: bool = False
    """Leave each rank only its shard of the summed gradients (reduce-scatter, not all-reduce)."""
    check_for_nan_in_grad: bool = knob(
        False,
        dest="check_for_nan_in_loss_and_grad",
        name="--no-check-for-nan-in-loss-and-grad",
        given=True,
        help="Go on with NaN or Inf in a loss or gradient; with a dynamic loss scale that is so "
        "anyway.",
    )
    """Look for NaN and Inf before summing, when it can still be said which rank they came from."""
    bucket_size: int | None = knob(dest="ddp_bucket_size", minimum=1)
    """Parameters per bucket.

    With overlap; None for max(40,000,000, 1,000,000 * ranks)."""
    average_in_collective: bool = knob(False, dest="ddp_average_in_collective")
    """Let the collective divide by the number of copies.

    Instead of scaling before a sum."""

    def __post_init__(self) -> None:
        """Raises ValueError, with the remedy, for knobs that exclude each other."""
        knobs.check_values(self)
        check_gathering(self)
