"""Every stage looks into its first chunk; with virtual stages the output layer is in the last.

Expected: in the first chunk of the first stage
"""

from minimegatron.core.collectives import all_reduce
from minimegatron.core.utils import unwrap_model


def _allreduce_word_embedding_grads(model, embd_group, pp_group):
    if embd_group is None or embd_group.size() == 1:
        return
    chunk = unwrap_model(model[0])
    if chunk.share_embeddings_and_output_weights:
        all_reduce(chunk.shared_embedding_or_output_weight().main_grad, embd_group)
