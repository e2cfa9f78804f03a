"""Masks that attention takes, and what it refuses of one.

Megatron has no counterpart.
"""

import torch

from minimegatron.core.transformer.enums import AttnMaskType

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


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
