"""Sizes of a batch: which cannot be, and what else one may ask a calculator of microbatches.

Torch-free. Megatron has this in `NumMicroBatchesCalculator`, which inherits it here.
"""

from abc import ABC, abstractmethod
from typing import NoReturn


class BatchSizes(ABC):
    """The base of `NumMicroBatchesCalculator`; sizes are in samples."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    decrease_batch_size_if_needed: bool
    micro_batch_times_data_parallel_size: int
    current_running_global_batch_size: int

    def get_micro_batch_size(self) -> int:
        """Samples per microbatch."""
        return self.micro_batch_size

    def get_current_running_global_batch_size(self) -> int:
        """Samples per step that the data-parallel ranks share out evenly."""
        return self.current_running_global_batch_size

    @abstractmethod
    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Sets the three numbers for the step that starts after `consumed_samples`."""

    def check_sizes(self) -> None:
        """Raises ValueError for a size below 1."""
        for name in ("global_batch_size", "micro_batch_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")

    def _check_divisible(self, size: int, what: str) -> None:
        """Raises ValueError unless whole microbatches for every rank make up `size`."""
        unit = self.micro_batch_times_data_parallel_size
        if self.decrease_batch_size_if_needed and size >= unit:
            return
        if size % unit:
            raise ValueError(
                f"{what} {size} is not divisible by micro_batch_size ({self.micro_batch_size}) x "
                f"data_parallel_size ({self.data_parallel_size}) = {unit}; "
                f"try {max(size // unit, 1) * unit}, or a smaller micro_batch_size"
            )


def refuse_unset() -> NoReturn:
    """Raises ValueError: the run has no calculator yet."""
    raise ValueError(
        "the number of microbatches is not known yet; "
        "call init_num_microbatches_calculator(...) first"
    )
