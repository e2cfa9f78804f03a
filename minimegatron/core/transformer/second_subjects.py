"""What a transformer's configuration says beside sizes and kinds: fields of several subjects.

Megatron writes all of them in `TransformerConfig` itself, under the same names. Here each subject has
a base of its own: a reader without it need not see its fields.
"""

from minimegatron.core.ssm.mamba_config import MambaConfig
from minimegatron.core.transformer.context_parallel_config import (
    ContextParallelConfig,
    check_context_parallel,
)
from minimegatron.core.transformer.moe.moe_config import MoEConfig
from minimegatron.core.transformer.mtp_loss import MTPConfig, check_mtp
from minimegatron.core.transformer.recompute_config import RecomputeConfig, check_recompute
from minimegatron.core.transformer.stages_as_told import StagesConfig


class SecondSubjects(
    MambaConfig, MoEConfig, RecomputeConfig, MTPConfig, ContextParallelConfig, StagesConfig
):
    """A base of `TransformerConfig`: uneven stages, shared sequences, further tokens, and so on."""

    def check_subjects(self) -> None:
        """Raises ValueError, with numbers and remedy, for what cannot be; enters hooks of a step."""
        check_recompute(self)
        self.check_experts()
        check_context_parallel(self)
        check_mtp(self)
