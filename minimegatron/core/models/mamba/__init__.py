"""Mamba-2, and hybrids of it with attention.

Counterpart: `megatron.core.models.mamba`.
"""

from minimegatron.exports import lazily

__getattr__, __dir__ = lazily(
    __name__, {"MambaModel": "minimegatron.core.models.mamba.mamba_model:MambaModel"}
)
