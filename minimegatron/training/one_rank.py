"""What one rank says, the first or the last, of all ranks.

Counterpart: `megatron.training.utils`; the names can be imported from
`training.utils` too.
"""

import torch.distributed as dist
from tqdm import tqdm

from minimegatron.core.output import fitted
from minimegatron.exports import lazily

__all__ = [
    "average_losses_across_data_parallel_group",  # noqa: F822  looked up below
    "calc_params_l2_norm",  # noqa: F822
    "is_last_rank",
    "print_rank_0",
    "print_rank_last",
]
"""What `training.utils` offers too."""

_AVERAGE = "minimegatron.training.loss_average"
__getattr__, __dir__ = lazily(
    __name__,
    {
        "average_losses_across_data_parallel_group": (
            f"{_AVERAGE}:average_losses_across_data_parallel_group"
        ),
        "calc_params_l2_norm": "minimegatron.training.params_norm:calc_params_l2_norm",
    },
)


def print_rank_0(message: str) -> None:
    """Prints on rank 0 only, above the progress bar if there is one."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tqdm.write(fitted(message))


def is_last_rank() -> bool:
    """True on the rank with the highest number. As usually placed, the model ends there."""
    return dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """Prints on the last rank only."""
    if not dist.is_initialized() or is_last_rank():
        tqdm.write(fitted(message))
