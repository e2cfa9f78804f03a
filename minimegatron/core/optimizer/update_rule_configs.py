"""An optimizer's configuration, under a name that says the update rule.

Counterpart: `megatron.core.optimizer.AdamOptimizerConfig` and its like. They are importable from
`minimegatron.core.optimizer.optimizer_config` too, where Megatron has them.
"""

from dataclasses import dataclass
from typing import Literal

from minimegatron.core.optimizer.optimizer_config import OptimizerConfig, knob

__all__ = ["AdamOptimizerConfig", "SGDOptimizerConfig"]


@dataclass(frozen=True)
class AdamOptimizerConfig(OptimizerConfig):
    """`OptimizerConfig`, under the name that Megatron gives it where Adam is meant."""


@dataclass(frozen=True)
class SGDOptimizerConfig(OptimizerConfig):
    """`OptimizerConfig` whose update rule is sgd unless another is given."""

    optimizer: Literal["adam", "sgd"] = knob("sgd")
    """Update rule."""
