"""Sizes of a batch: which cannot be, what else one may ask a calculator of microbatches, and growth.

Torch-free. Megatron has this in `NumMicroBatchesCalculator` and in
`RampupBatchsizeNumMicroBatchesCalculator`, which inherit it here.
"""

import logging
from abc import ABC, abstractmethod
from typing import NoReturn

logger = logging.getLogger(__name__)


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


# -- A global batch that grows: its size after so many samples --


class BatchRampup:
    """What a calculator of the number of microbatches has more where the batch grows.

    It stands before `NumMicroBatchesCalculator` among the bases of a class.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        *,
        start_global_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
    ):
        super().__init__(
            global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed
        )
        start, increment = start_global_batch_size, batch_size_increment
        if start < 1 or increment < 1 or ramup_samples < 0:
            raise ValueError(
                f"rampup_batch_size is {start} {increment} {ramup_samples}; start and increment "
                "must be 1 or more, samples 0 or more"
            )
        if start > global_batch_size or (global_batch_size - start) % increment:
            raise ValueError(
                f"rampup_batch_size starts at {start} and grows by {increment}, which never meets "
                f"global_batch_size {global_batch_size}; the difference {global_batch_size - start} "
                f"must be a multiple of {increment}"
            )
        for size in range(start, global_batch_size + 1, increment):
            self._check_divisible(size, "rampup_batch_size reaches the batch size")
        self.start_global_batch_size = start
        self.batch_size_increment = increment
        self.ramup_samples = ramup_samples
        self.num_increments = (global_batch_size - start) // increment
        self.update(0, consistency_check=False)

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """`consistency_check` asserts that the size divides, which the constructor made sure of."""
        before = self.current_global_batch_size
        if consumed_samples > self.ramup_samples or self.ramup_samples == 0:
            size = self.global_batch_size
        else:
            # Integers throughout: at n = k * ramup_samples / num_increments exactly, a quotient of
            # floats may fall just short of k.
            num_steps = consumed_samples * self.num_increments // self.ramup_samples
            size = self.start_global_batch_size + num_steps * self.batch_size_increment
        if consistency_check and not self.decrease_batch_size_if_needed:
            assert size % self.micro_batch_times_data_parallel_size == 0
        self._set_global_batch_size(size)
        if verbose and before != size:
            logger.info("global batch size grows from %d to %d", before, size)


def rampup_arguments(rampup_batch_size: list[int]) -> dict[str, int]:
    """`rampup_batch_size`, [start batch size, increment, ramp-up samples], as arguments by name.

    Raises ValueError for another number of numbers.
    """
    if len(rampup_batch_size) != 3:
        raise ValueError(
            f"rampup_batch_size has {len(rampup_batch_size)} numbers; "
            "give 3: start batch size, increment, ramp-up samples"
        )
    names = ("start_global_batch_size", "batch_size_increment", "ramup_samples")
    return dict(zip(names, map(int, rampup_batch_size), strict=True))
