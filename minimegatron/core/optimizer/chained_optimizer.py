"""Megatron's optimizer of optimizers, as a name.

Counterpart: `megatron.core.optimizer.optimizer`, from where it is importable here too.
"""

from collections.abc import Sequence

from minimegatron.core.optimizer.optimizer import MegatronOptimizer

__all__ = ["ChainedOptimizer"]


class ChainedOptimizer(MegatronOptimizer):
    """Megatron's optimizer of optimizers, one of dense parameters and one of the experts'.

    No optimizer is one here: a single one has parameters of all kinds. `isinstance` may be asked all
    the same. Making one raises ValueError.
    """

    def __new__(cls, chained_optimizers: Sequence[MegatronOptimizer]) -> "ChainedOptimizer":
        raise ValueError(
            f"ChainedOptimizer of {len(chained_optimizers)} optimizers: here one optimizer has dense "
            "parameters and experts' alike; call get_megatron_optimizer with all model chunks"
        )
