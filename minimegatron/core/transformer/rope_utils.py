"""Rotating queries and keys by their positions.

Counterpart: `megatron.core.models.common.embeddings.rope_utils`; attention stands below the models, so
it is here, and can be imported from there too.
"""

import torch

from minimegatron.core.transformer.layer_checks import refuse_angles
from minimegatron.exports import lazily

# Megatron has it here too.
_OF_RANK = "minimegatron.core.transformer.zigzag:get_pos_emb_on_this_cp_rank"
__getattr__, __dir__ = lazily(__name__, {"get_pos_emb_on_this_cp_rank": _OF_RANK})


def apply_rotary_pos_emb(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Turns feature pair k of position i by the angle `freqs[i, ..., k]`.

    Su et al. 2021, https://arxiv.org/abs/2104.09864: the product of a query and a key turned so
    depends on their distance only.

    Args:
        t: [s, b, heads, d]. Features k and d'/2 + k are a pair.
        freqs: [s, 1, 1, d'], angles in radians, d' <= d; features beyond d' are left alone.

    Returns:
        As `t`, in its dtype. Sine and cosine are taken in `freqs`' dtype.

    Raises:
        ValueError: the angles are not those of `t`'s positions.
    """
    if freqs.dim() != 4 or freqs.size(0) != t.size(0):
        refuse_angles(freqs, t)
    width = freqs.size(-1)
    t, rest = t[..., :width], t[..., width:]
    cos, sin = freqs.cos().to(t.dtype), freqs.sin().to(t.dtype)
    # (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). The sign goes to the sine, which is small.
    first, second = sin.chunk(2, dim=-1)
    turned = t * cos + t.roll(width // 2, dims=-1) * torch.cat((-first, second), dim=-1)
    return torch.cat((turned, rest), dim=-1) if rest.size(-1) else turned
