"""What a configuration says of state-space layers; `TransformerConfig` has all of it too.

Megatron writes these fields in `TransformerConfig` itself, under the same names. Here they are apart:
a reader without such layers need not see them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from minimegatron.core import knobs

compared = partial(knobs.knob, section="mamba", compared=True)


@dataclass
class MambaConfig:
    """Sizes of a Mamba-2 mixer. Whoever builds one checks them: other models do not use them."""

    mamba_state_dim: int = compared(128, minimum=1)
    """N: columns of a head's state."""
    mamba_head_dim: int = compared(64, minimum=1)
    """P: rows of a head's state."""
    mamba_num_groups: int = compared(8, minimum=1)
    """G: groups of heads that share B and C."""
    mamba_num_heads: int | None = compared(minimum=1)
    """Heads; by default 2 x hidden size / head size."""


def check_mamba(config: Any) -> None:
    """Raises ValueError, with the numbers and the remedy, for sizes that no mixer could have."""
