"""Tied embeddings: the first stage looks tokens up in a weight, the last stage multiplies by it.

Started by: you, and `minimegatron exercises check`. It is one weight of the model, but with a
pipeline it lies in two places, and backward gives each place a part of its gradient. Write the
function that `finalize_model_grads` calls to put the parts together. The check puts it in place of
ours, runs the real training step on 4 ranks and compares every gradient with one process.

Useful here:

    get_main_grad(param)               the accumulated gradient, a view into a buffer; or None
    unwrap_model(model[i])             the GPTModel inside the data-parallel wrapper
    chunk.share_embeddings_and_output_weights       True for tied embeddings
    chunk.shared_embedding_or_output_weight()       the chunk's copy of the weight; None elsewhere
    all_reduce(tensor, group)          the sum over the group's ranks, in place
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
    """Adds up the two gradients of a tied embedding, on both ranks that hold a copy.

    Args:
        model: this stage's chunks, in order; a list of one without virtual stages.
        embd_group: the first stage's and the last stage's rank of one pipeline. None on the stages
            between them; a group of one where there is one stage.
        pp_group: all stages of the pipeline; `pp_group.rank()` is this one's number.
    """
    nobody_to_ask = embd_group is None or embd_group.size() < 2
    if nobody_to_ask:
        return
    for wrapped in model:
        gpt = unwrap_model(wrapped)
        if not gpt.share_embeddings_and_output_weights:
            continue
        table = gpt.shared_embedding_or_output_weight()
        if table is None:  # a chunk in the middle
            continue
        part = get_main_grad(table)
        if part is not None:
            all_reduce(part, embd_group)


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
