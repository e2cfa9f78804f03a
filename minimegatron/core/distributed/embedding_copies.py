"""Gradients of an embedding's copies, where a rank has none, or has the whole model, or two stacks do.

Megatron has no module of this kind; it sums over the embedding groups in `finalize_model_grads` alone.
"""

from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import all_reduce
from minimegatron.core.distributed.data_parallel_base import get_main_grad
from minimegatron.core.utils import get_model_config, unwrap_model


def copies_on_odd_rank(
    model: list[torch.nn.Module], copies: list[torch.nn.Parameter], pp_group: dist.ProcessGroup
) -> list[torch.nn.Parameter]:
    """What counts as a copy of the word embedding where copies and embedding group do not fit.

    `copies` are those of a rank that is not in the group: it gets RuntimeError. A rank of the group has
    given none. If there are copies at all, the embedding of a whole model counts; a rank without such
    a model gets RuntimeError.
    """
    if copies:
        raise RuntimeError(
            f"rank {pp_group.rank()} of the pipeline has a copy of the word embedding, but is not "
            "in the embedding group; give initialize_model_parallel a get_embedding_ranks with it"
        )
    chunks = unwrap_model(list(model))
    is_copied = getattr(get_model_config(model[0]), "mtp_num_layers", None) is not None or any(
        getattr(chunk, "share_embeddings_and_output_weights", False) for chunk in chunks
    )
    if not is_copied:
        return []
    whole = [chunk for chunk in chunks if _is_whole(chunk)]
    if not whole:
        raise RuntimeError(
            f"rank {pp_group.rank()} of the pipeline is in the embedding group, but none of its "
            f"{len(model)} chunks has a copy of the word embedding; choose other embedding ranks"
        )
    return [chunk.word_embedding_weight() for chunk in whole]


def _is_whole(chunk: Any) -> bool:
    return all(getattr(chunk, end, False) for end in ("pre_process", "post_process"))


def sum_position_embeddings(model: list[torch.nn.Module], pos_emb_group: dist.ProcessGroup) -> None:
    """Sums the gradients of position embeddings that several stages hold."""
    for chunk in unwrap_model(list(model)):
        if getattr(chunk, "embedding", None) is None:
            continue
        grad = get_main_grad(chunk.embedding.position_embeddings.weight)
        if grad is not None:
            all_reduce(grad, pos_emb_group)
