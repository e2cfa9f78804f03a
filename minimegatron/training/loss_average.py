"""Losses averaged over copies of the model, for a loss function that reports means.

Counterpart: `megatron.training.utils`; the name can be imported from `training.utils` too.
"""

import torch

from minimegatron.core import collectives, parallel_state


def average_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """Each loss averaged over all ranks with the same weights; float tensor [len(losses)].

    With context parallelism they have other tokens too. A loss that is a rank's part of a mean over
    all c of them, a sum over local tokens / their common number, comes out c times too small.
    """
    averaged = torch.stack([loss.clone().detach().reshape(()) for loss in losses])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    collectives.all_reduce(averaged, group)
    return averaged / group.size()
