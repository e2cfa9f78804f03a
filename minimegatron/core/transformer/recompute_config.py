"""What a configuration says of activations that backward computes again.

Megatron writes these fields in `TransformerConfig` itself, under the same names.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from minimegatron.core import knobs

knob = partial(knobs.knob, section="model")


@dataclass
class RecomputeConfig:
    """What is recomputed, and of how many layers."""

    recompute_granularity: Literal["selective", "full"] | None = knob()
    """Recompute in backward: attention's core only, or whole layers."""
    recompute_method: Literal["uniform", "block"] | None = knob()
    """full: groups of layers, or the first layers of each chunk."""
    recompute_num_layers: int | None = knob(minimum=1)
    """full: layers per group, or how many."""


def check_recompute(config: Any) -> None:
    """Raises ValueError, with the remedy, for fields that do not go together."""
    granularity, method = config.recompute_granularity, config.recompute_method
    if granularity == "full" and method is None:
        raise ValueError(
            "recompute_granularity='full' needs recompute_method 'uniform' or 'block', not None"
        )
    if granularity == "full" and config.recompute_num_layers is None:
        raise ValueError(
            "recompute_granularity='full' needs recompute_num_layers of 1 or more, not None"
        )
    if granularity == "selective" and method is not None:
        raise ValueError(
            f"recompute_method {method!r} goes with recompute_granularity='full'; drop it"
        )
