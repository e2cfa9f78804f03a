"""Kinds of layers and masks, by name. Torch-free.

Counterpart: `megatron.core.transformer.enums`.
"""

import enum

from minimegatron.core.enums import ModelType

__all__ = ["AttnBackend", "AttnMaskType", "LayerType", "ModelType"]


class LayerType(enum.Enum):
    """What one letter of a pipeline layout stands for."""

    embedding = 1
    loss = 2
    decoder = 4
    mtp = 5


class AttnBackend(enum.Enum):
    """Which kernel computes attention. Megatron asks Transformer Engine for it; here torch chooses, and
    a configuration takes `auto`."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5


class AttnMaskType(enum.Enum):
    """Which positions attention must not see."""

    padding = 1
    """Those the given mask says."""
    causal = 2
    """Those after the query, and those the given mask says, if one is given."""
    no_mask = 3
    """None at all."""
    padding_causal = 4
    """Those after the query and those the given mask says."""


CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
"""Those under which no token sees a later one."""
