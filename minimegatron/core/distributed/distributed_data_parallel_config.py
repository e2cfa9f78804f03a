"""The knobs of data parallelism.

Read by: `DistributedDataParallel` and the gradient buffers below it, the distributed optimizer.
Calls nothing. Counterpart: `megatron.core.distributed.DistributedDataParallelConfig`, under the
same field names.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class DistributedDataParallelConfig:
    """How gradients are stored, when they are summed over data-parallel ranks, and how."""

    grad_reduce_in_fp32: bool = False
    """Accumulate and sum the gradients of bf16 and fp16 parameters in fp32."""
    overlap_grad_reduce: bool = False
    """Launch each bucket during the last backward, as soon as its last gradient is in."""
    overlap_param_gather: bool = False
    """Distributed optimizer only: gather a bucket's parameters just before their first use, the next
    bucket's meanwhile."""
    use_distributed_optimizer: bool = False
    """Leave each rank only its shard of the summed gradients (reduce-scatter, not all-reduce)."""
    check_for_nan_in_grad: bool = False
    """Look for NaN and Inf before summing, when it can still be said which rank they came from."""
    bucket_size: int | None = None
    """Elements per bucket with overlap; None for max(40,000,000, 1,000,000 * ranks)."""
    average_in_collective: bool = False
    """Let the collective divide by the number of ranks, instead of scaling before a sum."""

    def __post_init__(self) -> None:
        """Raises ValueError, with the remedy, for knobs that exclude each other."""
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ValueError(f"bucket_size is {self.bucket_size}; give 1 or more elements, or None")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ValueError(
                "overlap_param_gather needs use_distributed_optimizer: "
                "without it every rank updates every parameter, and there is nothing to gather"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("overlap_param_gather needs overlap_grad_reduce; turn both on")
