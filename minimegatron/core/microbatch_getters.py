"""What a program may ask of the run's calculator of microbatches, and no step does.

Torch-free. Counterpart: `megatron.core.num_microbatches_calculator`.
"""

from minimegatron.core import num_microbatches_calculator


def destroy_num_microbatches_calculator() -> None:
    """Forgets the run's calculator."""
    num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None


def unset_num_microbatches_calculator() -> None:
    """The same: Megatron has two names for it."""
    destroy_num_microbatches_calculator()


def get_micro_batch_size() -> int:
    """Samples per microbatch."""
    return num_microbatches_calculator._calculator().get_micro_batch_size()


def get_current_running_global_batch_size() -> int:
    """Samples in the current step that the data-parallel ranks share out evenly."""
    return num_microbatches_calculator._calculator().get_current_running_global_batch_size()
