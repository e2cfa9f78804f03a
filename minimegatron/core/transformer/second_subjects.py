"""What a transformer's configuration says beside sizes and kinds: fields of several subjects.

Megatron writes all of them in `TransformerConfig` itself, under the same names. Here each subject has
a base of its own: a reader without it need not see its fields. Fields that are set late are here too.
"""

from typing import Any

from minimegatron.core.ssm.mamba_config import MambaConfig
from minimegatron.core.transformer.activation_config import (
    ContextParallelConfig,
    RecomputeConfig,
    check_context_parallel,
    check_recompute,
)
from minimegatron.core.transformer.moe.moe_config import MoEConfig
from minimegatron.core.transformer.mtp_loss import MTPConfig, check_mtp
from minimegatron.core.transformer.stages_as_told import StagesConfig

# -- Fields that are set after the construction: they take effect, or are refused --
# In Megatron some fields are read in each step and the others once; a late change of one of those does
# nothing, or half of what it says, without a word.
#
# | what is set late               | before a model is built      | after                        |
# |--------------------------------|------------------------------|------------------------------|
# | a hook, a timer, recompute     | takes effect, as in Megatron | takes effect, as in Megatron |
# | a field of `DECIDE_HOOKS`      | hooks are chosen again       | the same, if it may be set   |
# | a field of `READ_ONCE`         | takes effect                 | ValueError                   |
# | one that a default was made of | the default stays, as in     | see above                    |
# |                                | Megatron: kv_channels, ...   |                              |
#
# `calculate_per_token_loss` may be set until the model is wrapped for data parallelism: the wrapper has
# read it, and says so (`data_parallel_base`).


DECIDE_HOOKS = (
    "calculate_per_token_loss",
    "num_moe_experts",
    "mtp_num_layers",
    "pipeline_model_parallel_layout",
)
"""What is entered in the hooks of a step, or derived for it, depends on them."""

READ_ONCE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "kv_channels",
    "num_attention_heads",
    "num_query_groups",
    "normalization",
    "layernorm_epsilon",
    "qk_layernorm",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "hidden_dropout",
    "attention_dropout",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_topk",
    "moe_router_load_balancing_type",
    "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_token_dispatcher_type",
    "mtp_num_layers",
    "pipeline_model_parallel_layout",
)
"""Modules read them when they are built, and some of them again later."""


class LateFields:
    """A base of `TransformerConfig`. `copy` and `dataclasses.replace` make one without a model."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises ValueError for a field that a built model has read, and for what cannot be."""
        known = vars(self)
        matters = name in READ_ONCE or name in DECIDE_HOOKS
        if not (matters and known.get("_is_made")) or known[name] == value:
            object.__setattr__(self, name, value)
            return
        if name in READ_ONCE and known.get("_is_built"):
            raise ValueError(
                f"{name} is set to {value!r}, but a model has been built with this configuration, and "
                f"with {name} {known[name]!r}; set it before, or build the model anew with "
                f"dataclasses.replace(config, {name}={value!r})"
            )
        before = dict(known)
        object.__setattr__(self, name, value)
        if name in DECIDE_HOOKS:
            try:
                self._decide_again()
            except ValueError:
                known.clear()
                known.update(before)
                raise

    def _decide_again(self) -> None:
        if self.num_moe_experts is None:
            self.moe_ffn_hidden_size = None  # made of the MLP's, when there were experts
        self.check_experts()
        check_mtp(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_is_built"}


def note_made(config: LateFields) -> None:
    """At the end of the construction: from now on a field is set late."""
    vars(config)["_is_made"] = True


def note_built(config: Any) -> None:
    """By each module that is built with `config`."""
    if isinstance(config, LateFields):
        vars(config)["_is_built"] = True


# -- All of them --


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
