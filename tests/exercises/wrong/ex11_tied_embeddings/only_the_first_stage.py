"""The last stage does not come. With two stages both groups have the same ranks.

Expected: of the pipeline and embedding group
"""

import torch
import torch.distributed as dist

from minimegatron.core.collectives import all_reduce
from minimegatron.core.distributed.data_parallel_base import get_main_grad
from minimegatron.core.utils import unwrap_model


def _allreduce_word_embedding_grads(
    model: list[torch.nn.Module],
    embd_group: dist.ProcessGroup | None,
    pp_group: dist.ProcessGroup,
) -> None:
    """Adds up the two gradients of a tied embedding, on both ranks that hold a copy."""
    # A stage between the two holds no copy. With one stage autograd has added both already.
    if embd_group is None or embd_group.size() == 1:
        return
    # With virtual stages the embedding is in the first chunk of all, the output layer in the last.
    chunk = unwrap_model(model[0] if pp_group.rank() == 0 else model[-1])
    if pp_group.rank() > 0:
        return
    if not chunk.share_embeddings_and_output_weights:
        return
    # Every data-parallel rank does the same with its own pipeline; they agree already.
    all_reduce(get_main_grad(chunk.shared_embedding_or_output_weight()), embd_group)
