"""Rotating queries and keys by their positions.

Called by: attention. Calls nothing. Megatron keeps it in
`megatron.core.models.common.embeddings.rope_utils`; attention stands below the models, so it is here
and `rotary_pos_embedding` re-exports it.
"""

import torch


def _rotate_half(t: torch.Tensor) -> torch.Tensor:
    """(x1, x2) -> (-x2, x1): the halves of the last dimension are the pairs' two coordinates."""
    first, second = t.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Turns feature pair k of position i by the angle `freqs[i, ..., k]`.

    Su et al. 2021, https://arxiv.org/abs/2104.09864: the product of a query and a key turned so
    depends on their distance only.

    Args:
        t: [s, b, heads, d].
        freqs: [s, 1, 1, d'], angles in radians, d' <= d; features beyond d' are left alone.

    Returns:
        As `t`, in its dtype. Sine and cosine are taken in `freqs`' dtype.
    """
    rotated, kept = t[..., : freqs.size(-1)], t[..., freqs.size(-1) :]
    cos, sin = freqs.cos().to(t.dtype), freqs.sin().to(t.dtype)
    rotated = rotated * cos + _rotate_half(rotated) * sin
    return torch.cat((rotated, kept), dim=-1) if kept.size(-1) else rotated
