"""The sum is made in a copy; the buffer that the optimizer reads is left as it was.

Expected: Your function left this gradient as it was
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
        weight.grad = get_main_grad(weight).clone()
        all_reduce(weight.grad, embd_group)
