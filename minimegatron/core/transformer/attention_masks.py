"""Masks that attention takes, and what it refuses of one.

Megatron has no counterpart.
"""

from typing import Any

import torch


def check_attention_mask(mask: torch.Tensor, sizes: tuple[int | None, ...]) -> None:
    """Raises ValueError unless `mask` has the four dimensions `sizes`, or 1 for any of the first three.

    `sizes`: sequences (None for any number), heads and queries of this rank, all keys. Where torch
    would broadcast another shape, its numbers would mean something else than their owner thinks.
    """
    *others, keys = sizes

    def fits(given: int, size: int | None) -> bool:
        return size is None or given in (1, size)

    if mask.dim() == 4 and mask.size(3) == keys and all(map(fits, mask.shape, others)):
        return
    wanted = ", ".join(f"{'any' if size is None else size} or 1" for size in others)
    raise ValueError(
        f"attention_mask is {list(mask.shape)}; give [{wanted}, {keys}]: sequences, heads and queries "
        "of this rank, and all keys (a padding mask [b, s] as mask[:, None, None])"
    )


def check_is_bool(mask: torch.Tensor) -> None:
    """Raises ValueError for a mask of numbers: torch would read any but 0 as True."""
    if mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask is {mask.dtype}; give torch.bool, True for what is not attended to (a "
            "mask with 1 for what is kept as mask == 0); numbers to be added to scores are not taken"
        )


def check_mask_of(core: Any, mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    """`check_attention_mask` for queries [s/c, b, heads, d] and keys [s/c, ...] of an attention."""
    ranks = 1 if core.cp_group is None else core.cp_group.size()
    s, b, heads = query.shape[:3]
    check_attention_mask(mask, (b, heads, s, len(key) * ranks))


def visible_places(mask: torch.Tensor, is_causal: bool, s_q: int, s_k: int) -> torch.Tensor:
    """True where attention may look: not `mask`, and if it is causal, not at what comes later.

    Raises ValueError for a mask that is not bool.
    """
    check_is_bool(mask)
    visible = mask.logical_not()
    if is_causal:
        visible = visible & torch.ones(s_q, s_k, dtype=torch.bool, device=mask.device).tril()
    return visible
