"""The angles of rotary positions.

Counterpart: `megatron.core.models.common.embeddings.rotary_pos_embedding`.
"""

import functools

import torch

from minimegatron.core.transformer.layer_checks import turned_width
from minimegatron.core.transformer.rope_utils import apply_rotary_pos_emb  # noqa: F401  as in Megatron
from minimegatron.core.utils import get_device


class RotaryEmbedding(torch.nn.Module):
    """Angle of feature pair k at position i: i x base^(-2k/d') (Su et al. 2021).

    Args:
        kv_channels: width d of one head.
        rotary_percent: the share of d that is turned: d' = d x rotary_percent.
        rotary_base: the slowest pair takes about 2 pi x base positions for one turn.
        dtype: of the angles. float32 is enough for 16-bit models and too little for float64 ones.

    Raises:
        ValueError: d' is not an even number of 2 or more.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        *,
        rotary_base: float = 10000,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        width = turned_width(kv_channels, rotary_percent)
        # Plain attributes, not buffers: `module.bfloat16()` would round those.
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        self.inv_freq = 1.0 / rotary_base**exponents
        self.dtype = dtype

    # A step asks for the same length once per microbatch. RL frameworks call `forward.cache_clear()`.
    @functools.lru_cache(maxsize=32)  # noqa: B019
    def forward(self, max_seq_len: int, *, device: torch.device | None = None) -> torch.Tensor:
        """Angles [max_seq_len, 1, 1, d'] in radians, for positions from 0; kept for the next call.

        `device` None means the device of this process (`core.utils.get_device`).
        """
        # Kept for steps that train too, which may save it for backward: not one of `inference_mode`.
        with torch.inference_mode(False):
            positions = torch.arange(max_seq_len, dtype=torch.float64)
            # The halves hold the pairs' first and second coordinates: the same angles twice.
            angles = torch.outer(positions, self.inv_freq).repeat(1, 2)
            return angles[:, None, None, :].to(device=device or get_device(), dtype=self.dtype)
