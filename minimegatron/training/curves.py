"""TensorBoard's curves, where a run has them, and the writers of Megatron's that no run has.

Counterpart: `megatron.training.global_vars`.
"""

from collections.abc import Mapping
from typing import Any

from minimegatron.core.datasets import atomic_file


class _Writer:
    """Of this process: a `SummaryWriter` on the last rank with `--tensorboard-dir`, else None."""

    now: Any = None


def open_writer(args: Any) -> None:
    """On the last rank, as in Megatron, if there is a folder."""
    if args.tensorboard_dir is not None and args.rank == args.world_size - 1:
        from torch.utils.tensorboard import SummaryWriter  # optional, and takes a second to import

        with atomic_file.writing(args.tensorboard_dir):
            _Writer.now = SummaryWriter(args.tensorboard_dir)


def close_writer() -> None:
    """So that another run may begin in this process."""
    if _Writer.now is not None:
        _Writer.now.close()
        _Writer.now = None


def write_curves(values: Mapping[str, float], iteration: int) -> None:
    """One point per curve, on disk at once: a run may be killed. Nothing without TensorBoard.

    Raises CannotWrite, which names the folder.
    """
    writer = _Writer.now
    if writer is not None:
        with atomic_file.writing(writer.log_dir):
            for name, value in values.items():
                writer.add_scalar(name, value, iteration)
            writer.flush()


def get_tensorboard_writer() -> Any:
    """TensorBoard's `SummaryWriter`: on the last rank with `--tensorboard-dir`, else None."""
    return _Writer.now


def get_wandb_writer() -> None:
    """None, as in Megatron without a project on Weights & Biases: nothing here writes to it."""


def get_one_logger() -> None:
    """None, as in Megatron without NVIDIA's one_logger: nothing here writes to it."""


def get_adlr_autoresume() -> None:
    """None, as in Megatron outside NVIDIA's cluster: a signal ends a run here, and `--load` resumes."""
