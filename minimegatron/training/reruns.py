"""A training run with steps that may be run again, or skipped: the machine, and what it puts back.

Counterpart: what `megatron.training` does around `megatron.core.rerun_state_machine`, in several files.
What a resumed run must know is in `rerun_state`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
)
from minimegatron.core.pipeline_parallel.failed_step import StateOfStep
from minimegatron.core.rerun import data_iterator as replay
from minimegatron.core.rerun.states import read_iterations_to_skip
from minimegatron.core.rerun_state_machine import (
    RerunErrorInjector,
    RerunMode,
    RerunStateMachine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from minimegatron.core.tensor_parallel import recompute
from minimegatron.training.config import Arguments
from minimegatron.training.global_vars import get_train_state
from minimegatron.training.utils import print_rank_0

MODES = {"report_stats": RerunMode.REPORT_DETERMINISM_STATS}
"""What Megatron's flag calls otherwise than its machine does."""

# -- The machine --


def make_rerun_state_machine(args: Arguments, job_id: str) -> None:
    """The machine of this run, unless the program has put one of its own class in its place.

    Raises ValueError where the tracker's file cannot be appended to.
    """
    if type(get_rerun_state_machine()) is RerunStateMachine:
        initialize_rerun_state_machine(
            mode=MODES.get(args.rerun_mode, args.rerun_mode),
            error_injector=RerunErrorInjector(args.error_injection_rate, args.error_injection_type),
            result_rejected_tracker_filename=args.result_rejected_tracker_filename,
            job_id=job_id,
        )


def keep_state_for_reruns(config: ModelParallelConfig, model: list[torch.nn.Module]) -> None:
    """A repeated step begins with the buffers, counts and random numbers that its first run began with.

    The machine asks for them before a step that may be repeated. After a failed step the frame puts
    back the same.
    """

    def keep() -> tuple[Callable[[], None], ...]:
        return StateOfStep(config, model).put_back, recompute.keep_rng_states(model)

    def put_back(kept: tuple[Callable[[], None], ...]) -> None:
        for undo in kept:
            undo()

    machine = get_rerun_state_machine()
    machine.state_save_func, machine.state_restore_func = keep, put_back


def with_replay(iterator: Iterator) -> Iterator:
    """What training reads from. Where a step may be repeated, it gives the microbatches again."""
    is_off = get_rerun_state_machine().get_mode() is RerunMode.DISABLED
    return iterator if is_off else replay.RerunDataIterator(iterator)


@contextlib.contextmanager
def not_rerun() -> Iterator[None]:
    """Around what is no training, such as an evaluation: results are judged, nothing is run again."""
    machine = get_rerun_state_machine()
    mode = machine.get_mode()
    machine.set_mode(RerunMode.DISABLED)
    try:
        yield
    finally:
        machine.set_mode(mode)


# -- Iterations that are skipped --


def iterations_to_skip(args: Arguments) -> frozenset[int]:
    """Those of `--iterations-to-skip`, and those that the tracker's file says to skip.

    Rank 0 reads the file and tells all: other ranks may have another file, or append to it by now.
    """
    found: list[Any] = [[]]
    if args.result_rejected_tracker_filename is not None:
        if dist.get_rank() == 0:
            found = [read_iterations_to_skip(args.result_rejected_tracker_filename)]
        dist.broadcast_object_list(found, src=0)
    skipped = frozenset([*(args.iterations_to_skip or ()), *found[0]])
    if skipped:
        print_rank_0(f"> iterations that are skipped: {sorted(skipped)}")
    return skipped


def dummy_train_step(data_iterator: Iterator | list[Iterator] | None) -> None:
    """Reads the microbatches of one step, and computes nothing."""
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    for iterator in iterators:
        for _ in range(get_num_microbatches() if iterator is not None else 0):
            next(iterator)


def skip_iteration(data_iterator: Iterator | list[Iterator] | None) -> bool:
    """Whether the next iteration is one of those; then it has been gone over.

    Its samples count as consumed, and the learning rate stays.
    """
    state = get_train_state()
    if state.iteration + 1 not in state.iterations_to_skip:
        return False
    dummy_train_step(data_iterator)
    state.iteration += 1
    state.consumed_train_samples += get_current_global_batch_size()
    state.skipped_train_samples += get_current_global_batch_size()
    print_rank_0(f" iteration {state.iteration} is skipped")
    return True
