"""The sum runs over all ranks, and so over replicas, which hold the same already.

Expected: x copies of the embedding, or dp (2) That is the whole gradient, two times. Either the sum
    also ran over the 2 data-parallel ranks
"""

import torch.distributed as dist

from minimegatron.core.distributed.data_parallel_base import get_main_grad
from minimegatron.core.utils import unwrap_model


def _allreduce_word_embedding_grads(model, embd_group, pp_group):
    chunk = unwrap_model(model[0] if pp_group.rank() == 0 else model[-1])
    if chunk.share_embeddings_and_output_weights:
        dist.all_reduce(get_main_grad(chunk.shared_embedding_or_output_weight()))
