"""The sum is right, but lies in a new tensor: the buffer keeps the part, and is what is cleared.

Expected: main_grad of embedding.word_embeddings.weight is another tensor than before
"""

from minimegatron.core.collectives import all_reduce
from minimegatron.core.distributed.data_parallel_base import get_main_grad
from minimegatron.core.utils import unwrap_model


def _allreduce_word_embedding_grads(model, embd_group, pp_group):
    if embd_group is None or embd_group.size() == 1:
        return
    chunk = unwrap_model(model[0] if pp_group.rank() == 0 else model[-1])
    if chunk.share_embeddings_and_output_weights:
        weight = chunk.shared_embedding_or_output_weight()
        grad = get_main_grad(weight).clone()
        all_reduce(grad, embd_group)
        weight.main_grad = grad
