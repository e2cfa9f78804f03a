"""Which tokens of a sequence a context-parallel rank has.

The sequence is cut into 2c chunks. Rank r of c has chunks r and 2c - 1 - r, in this order: one from the
front, one from the back. A causal token looks at itself and at all before it, so every rank has equally
many pairs of tokens. With c = 2 and 16 tokens: rank 0 has 0-3 and 12-15, rank 1 has 4-11.

Ours: in Megatron each user of the split writes it out.
"""

import torch
import torch.distributed as dist


def chunks_of_rank(rank: int, num_ranks: int) -> tuple[int, int]:
    """The two chunks, of 2 x num_ranks, that context-parallel rank `rank` has."""
    return rank, 2 * num_ranks - 1 - rank


def positions_of_rank(
    length: int, rank: int, num_ranks: int, device: torch.device | None = None
) -> torch.Tensor:
    """Positions in the whole sequence of what the rank has; int64 [length / num_ranks].

    Args:
        length: of the whole sequence, in tokens.
        device: where the result is; None for the CPU.

    Raises:
        ValueError: 2 x num_ranks does not divide it.
    """
    if length % (2 * num_ranks):
        raise ValueError(
            f"a sequence of {length} tokens does not divide into 2 x {num_ranks} chunks, two for each "
            f"context-parallel rank; use a multiple of {2 * num_ranks}"
        )
    size = length // (2 * num_ranks)
    first, second = chunks_of_rank(rank, num_ranks)
    own = torch.arange(size, device=device)
    return torch.cat([own + first * size, own + second * size])


def take_part(tensor: torch.Tensor, dim: int, cp_group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of `tensor`, whose dimension `dim` is the whole sequence; a copy.

    Without context parallelism it is the tensor itself. Raises ValueError as `positions_of_rank`.
    """
    if cp_group.size() == 1:
        return tensor
    length, rank = tensor.size(dim), cp_group.rank()
    return tensor.index_select(dim, positions_of_rank(length, rank, cp_group.size(), tensor.device))


def part_of_fields(
    batch: dict[str, torch.Tensor | None], cp_group: dist.ProcessGroup
) -> dict[str, torch.Tensor | None]:
    """`take_part` of every field of a batch; see `get_batch_on_this_cp_rank`, which raises as this."""
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() != 4:
        raise ValueError(f"attention_mask is {list(mask.shape)}; give [b, 1, s, s] or [b, 1, 1, s]")
    return {
        name: tensor
        if tensor is None or (name == "attention_mask" and tensor.size(2) == 1)
        else take_part(tensor, 2 if name == "attention_mask" else 1, cp_group)
        for name, tensor in batch.items()
    }


def get_pos_emb_on_this_cp_rank(
    pos_emb: torch.Tensor, seq_dim: int, cp_group: dist.ProcessGroup
) -> torch.Tensor:
    """The angles of this rank's tokens, from those of the whole sequence along dimension `seq_dim`.

    A group of one rank has all. Raises ValueError if the sequence does not divide into 2c chunks.
    Source: `megatron.core.models.common.embeddings.rope_utils.get_pos_emb_on_this_cp_rank`.
    """
    return take_part(pos_emb, seq_dim, cp_group)


def places_of(tokens: torch.Tensor, cp_group: dist.ProcessGroup | None) -> torch.Tensor:
    """The positions of this rank's tokens [b, s/c] in their sequences, int64 [1, s/c], from 0 on."""
    length = tokens.size(1) * (1 if cp_group is None else cp_group.size())
    places = torch.arange(length, device=tokens.device)[None]
    return places if cp_group is None else take_part(places, 1, cp_group)
