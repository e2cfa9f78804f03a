"""The few objects that a user's `forward_step` may ask for by name instead of being given them.

`core` never asks it. Counterpart: `megatron.training.global_vars`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from minimegatron.core.datasets.atomic_file import writing
from minimegatron.core.datasets.megatron_tokenizer import MegatronTokenizer
from minimegatron.core.full_cuda_graph import destroy_full_cuda_graphs
from minimegatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from minimegatron.core.rerun_state_machine import destroy_rerun_state_machine
from minimegatron.core.timers import Timers
from minimegatron.training.config import Arguments
from minimegatron.training.tokenizer.tokenizer import build_tokenizer
from minimegatron.training.train_state import TrainState


@dataclass
class _Globals:
    args: Arguments | None = None
    tokenizer: MegatronTokenizer | None = None
    timers: Timers | None = None
    train_state: TrainState = field(default_factory=TrainState)
    tensorboard_writer: Any = None


_globals = _Globals()


def set_global_variables(args: Arguments) -> None:
    """Builds them all from the arguments. Raises RuntimeError if they are set already."""
    if _globals.args is not None:
        raise RuntimeError("initialize_megatron was called twice; call destroy_global_vars between")
    set_args(args)
    _globals.tokenizer = build_tokenizer(args)
    _globals.timers = Timers(args.timing_log_level, "minmax")
    _globals.tensorboard_writer = _build_tensorboard_writer(args)
    init_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
    )


def set_args(args: Any) -> None:
    """What `get_args` returns from now on, for a program that initialises the rest itself."""
    _globals.args = args


def _build_tensorboard_writer(args: Arguments) -> Any:
    """A `SummaryWriter` on the last rank, as in Megatron; None on others, and without a folder."""
    if args.tensorboard_dir is None or args.rank != args.world_size - 1:
        return None
    from torch.utils.tensorboard import SummaryWriter  # optional, and takes a second to import

    with writing(args.tensorboard_dir):
        return SummaryWriter(args.tensorboard_dir)


def write_curves(values: Mapping[str, float], iteration: int) -> None:
    """One point per curve, on disk at once: a run may be killed. Nothing without TensorBoard.

    Raises CannotWrite, which names the folder.
    """
    writer = _globals.tensorboard_writer
    if writer is not None:
        with writing(writer.log_dir):
            for name, value in values.items():
                writer.add_scalar(name, value, iteration)
            writer.flush()


def destroy_global_vars() -> None:
    """Forgets them, so that another run may begin in this process."""
    global _globals
    if _globals.tensorboard_writer is not None:
        _globals.tensorboard_writer.close()
    destroy_rerun_state_machine()
    destroy_full_cuda_graphs()
    _globals = _Globals()
    unset_num_microbatches_calculator()


def get_args() -> Arguments:
    """The run's arguments, frozen."""
    if _globals.args is None:
        _refuse("args")
    return _globals.args


def get_tokenizer() -> MegatronTokenizer:
    """The run's tokenizer."""
    if _globals.tokenizer is None:
        _refuse("tokenizer")
    return _globals.tokenizer


def get_timers() -> Timers:
    """The run's timers."""
    if _globals.timers is None:
        _refuse("timers")
    return _globals.timers


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"the global {name} is not set yet; call pretrain or initialize_megatron first"
    )


def get_train_state() -> TrainState:
    """The run's progress."""
    return _globals.train_state


def get_tensorboard_writer() -> Any:
    """TensorBoard's `SummaryWriter`: on the last rank with `--tensorboard-dir`, else None."""
    return _globals.tensorboard_writer


def get_wandb_writer() -> None:
    """None, as in Megatron without a project on Weights & Biases: nothing here writes to it."""


def get_one_logger() -> None:
    """None, as in Megatron without NVIDIA's one_logger: nothing here writes to it."""


def get_adlr_autoresume() -> None:
    """None, as in Megatron outside NVIDIA's cluster: a signal ends a run here, and `--load` resumes."""
