"""How many microbatches make one global batch, and how that number grows during batch ramp-up.

Counterpart: `megatron.core.num_microbatches_calculator`, under the same names.

    num_microbatches = global batch size / (micro batch size * data-parallel size)

Torch-free. The calculator is state of this module, as `parallel_state`'s groups are of that one: the
number is a fact of the whole run, which the schedule's caller and the data side both ask for.
"""

import logging

from minimegatron.core.batch_sizes import BatchRampup, BatchSizes, rampup_arguments, refuse_unset
from minimegatron.exports import lazily

logger = logging.getLogger(__name__)

_ON_DEMAND = "minimegatron.core.microbatch_getters"
__getattr__, __dir__ = lazily(
    __name__,
    {
        "destroy_num_microbatches_calculator": f"{_ON_DEMAND}:destroy_num_microbatches_calculator",
        "get_current_running_global_batch_size": f"{_ON_DEMAND}:get_current_running_global_batch_size",
        "get_micro_batch_size": f"{_ON_DEMAND}:get_micro_batch_size",
        "unset_num_microbatches_calculator": f"{_ON_DEMAND}:unset_num_microbatches_calculator",
    },
)


class NumMicroBatchesCalculator(BatchSizes):
    """The three numbers everybody asks for, and how they follow from consumed samples.

    Sizes are in samples. `current_running_global_batch_size` differs from
    `current_global_batch_size` only with `decrease_batch_size_if_needed`: it is what the ranks can
    actually run.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
    ):
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.decrease_batch_size_if_needed = decrease_batch_size_if_needed
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.num_micro_batches = 0
        self.current_global_batch_size = self.current_running_global_batch_size = 0
        self.check_sizes()

    def get(self) -> int:
        """Microbatches per data-parallel rank and step."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Samples per step, over all data-parallel ranks."""
        return self.current_global_batch_size

    def _set_global_batch_size(self, size: int) -> None:
        """Takes `size`; the caller has made sure that it divides, or may be rounded down."""
        unit = self.micro_batch_times_data_parallel_size
        self.current_global_batch_size = size
        self.current_running_global_batch_size = size // unit * unit
        self.num_micro_batches = size // unit


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """The same number at every step. Raises ValueError where the batch does not divide."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
    ):
        super().__init__(
            global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed
        )
        self._check_divisible(global_batch_size, "global_batch_size")
        self._set_global_batch_size(global_batch_size)

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Nothing changes."""


class RampupBatchsizeNumMicroBatchesCalculator(BatchRampup, NumMicroBatchesCalculator):
    """A batch that grows in equal steps, each held for an equal number of samples.

    From `start_global_batch_size` to `global_batch_size` in steps of `batch_size_increment`, reached
    after `ramup_samples` samples (Megatron's spelling):

        size(n) = start + increment * floor(n / (ramup_samples / number of steps)),  n <= ramup_samples

    Raises ValueError where the steps do not reach the final size, or where any size on the way does
    not divide into microbatches: an error now, not in the middle of the run.
    """


_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Sets up the run's calculator, once.

    Args:
        rank: only rank 0 logs.
        rampup_batch_size: None, or [start batch size, increment, ramp-up samples].

    Raises ValueError for sizes that do not divide, AssertionError when called a second time.
    """
    assert _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None, (
        "the number-of-microbatches calculator is already set up; call "
        "destroy_num_microbatches_calculator() or reconfigure_num_microbatches_calculator(...)"
    )
    sizes = (global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
    reconfigure_num_microbatches_calculator(rank, rampup_batch_size, *sizes)


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """As `init_num_microbatches_calculator`, replacing what is there."""
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    sizes = (global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = _build_num_microbatches_calculator(
        rank, rampup_batch_size, *sizes
    )


def _build_num_microbatches_calculator(
    rank: int, rampup_batch_size: list[int] | None, *sizes: int
) -> NumMicroBatchesCalculator:
    """The calculator for these sizes, without making it the run's."""
    ramp = {} if rampup_batch_size is None else rampup_arguments(rampup_batch_size)
    kind = RampupBatchsizeNumMicroBatchesCalculator if ramp else ConstantNumMicroBatchesCalculator
    calculator = kind(*sizes, **ramp)
    if rank == 0:
        logger.info("%d microbatches per step at first", calculator.get())
    return calculator


def _calculator() -> NumMicroBatchesCalculator:
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR or refuse_unset()


def get_num_microbatches() -> int:
    """Microbatches per data-parallel rank in the current step."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Samples in the current step, over all data-parallel ranks."""
    return _calculator().get_current_global_batch_size()


def update_num_microbatches(
    consumed_samples: int, consistency_check: bool = True, verbose: bool = False
) -> None:
    """Moves the ramp on to `consumed_samples`, the samples seen since the run began."""
    _calculator().update(consumed_samples, consistency_check, verbose)
