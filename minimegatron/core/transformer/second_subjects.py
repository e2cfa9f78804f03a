"""What a transformer's configuration says beside sizes and kinds: fields of several subjects.

Megatron writes all of them in `TransformerConfig` itself, under the same names. Here each subject has
a base of its own: a reader without it need not see its fields. The bases of small subjects are in this
file, and fields that are set late.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from minimegatron.core import knobs
from minimegatron.core.subject_fields import enter_hooks
from minimegatron.core.transformer import mtp_loss, pipeline_parallel_layer_layout
from minimegatron.core.transformer.activation_config import (
    ContextParallelConfig,
    RecomputeConfig,
    check_context_parallel,
    check_recompute,
)
from minimegatron.core.transformer.enums import LayerType
from minimegatron.core.transformer.moe_config import MoEConfig
from minimegatron.core.transformer.stages_as_told import StagesConfig, placement_of

model = partial(knobs.knob, section="model")
mamba = partial(knobs.knob, section="mamba", compared=True)

# -- State-space layers --


@dataclass
class MambaConfig:
    """Sizes of a Mamba-2 mixer. Whoever builds one checks them: other models do not use them."""

    mamba_state_dim: int = mamba(128, minimum=1)
    """N: columns of a head's state."""
    mamba_head_dim: int = mamba(64, minimum=1)
    """P: rows of a head's state."""
    mamba_num_groups: int = mamba(8, minimum=1)
    """G: groups of heads that share B and C."""
    mamba_num_heads: int | None = mamba(minimum=1)
    """Heads; by default 2 x hidden size / head size."""


# -- Further tokens --


@dataclass
class MTPConfig:
    """Further tokens: how many, and the weight of their losses."""

    mtp_num_layers: int | None = model(minimum=1, compared=True)
    """Tokens to predict beyond the next one, each by a layer of its own; by default none."""
    mtp_loss_scaling_factor: float = model(0.1, minimum=0.0)
    """Weight of their losses, over all of them, beside the main loss."""


def check_mtp(config: Any) -> None:
    """Enters the hooks; raises ValueError, with numbers and remedy, for what cannot be."""
    wanted = config.mtp_num_layers is not None
    enter_hooks(config, wanted, lambda: mtp_loss.hooks_of_mtp(config))
    config.mtp_standalone = False
    if config.mtp_num_layers is not None:
        _check_options(config)
    text, p = config.pipeline_model_parallel_layout, config.pipeline_model_parallel_size
    if text is None:
        return
    if isinstance(text, pipeline_parallel_layer_layout.PipelineParallelLayerLayout):
        text = text.input_data
    has_depths = (
        LayerType.mtp
        in pipeline_parallel_layer_layout.PipelineParallelLayerLayout(text, p).flatten_layout
    )
    if has_depths or config.mtp_num_layers is not None:
        layout = pipeline_parallel_layer_layout.PipelineParallelLayerLayout(
            text, p, placement_of(config)
        )
        config.mtp_standalone = layout.validate_layer_layout(
            config.num_layers, config.mtp_num_layers
        )


def _check_options(config: Any) -> None:
    if config.fp32_residual_connection:
        raise ValueError(
            f"mtp_num_layers {config.mtp_num_layers} with fp32_residual_connection: a further layer "
            "begins with a projection in params_dtype, and has no such residual; drop one of them"
        )
    if config.overlap_moe_expert_parallel_comm:
        raise ValueError(
            f"mtp_num_layers {config.mtp_num_layers} with overlap_moe_expert_parallel_comm, which runs "
            "layers in pieces: those for further tokens run as a whole; drop one of them"
        )


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
