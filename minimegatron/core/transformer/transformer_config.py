"""The shape of a transformer, on top of how it is cut over ranks.

Counterpart: `megatron.core.transformer.transformer_config.TransformerConfig`, under the same field
names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from minimegatron.core import knobs, schedule_of_config  # noqa: F401  the second enters its check
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.ssm.mamba_config import MambaConfig
from minimegatron.core.transformer.context_parallel_config import check_context_parallel
from minimegatron.core.transformer.enums import AttnBackend  # noqa: F401  in a field that is left out
from minimegatron.core.transformer.late_fields import LateFields, note_made
from minimegatron.core.transformer.moe.moe_config import MoEConfig
from minimegatron.core.transformer.mtp_loss import check_mtp


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """N(0, sigma^2), in place. The generator is chosen by whoever initialises the weight."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable:
    """N(0, sigma^2 / 2L): each layer adds twice to the residual stream, so its writes shrink."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma / (2.0 * num_layers) ** 0.5)


knob = partial(knobs.knob, section="model")
compared = partial(knob, compared=True)
place = partial(knobs.knob, section="parallel")


@dataclass
class TransformerConfig(LateFields, MambaConfig, MoEConfig, ModelParallelConfig):
    """Sizes, activation, normalisation, dropout and recompute of one transformer.

    `MoEConfig` has what concerns experts, `MambaConfig` state-space layers. A field that is set later
    takes effect or is refused; see `late_fields`.
    """

    # -- Sizes --
    num_layers: int = compared(0, required=True, minimum=1)
    """Transformer layers in all, over all stages."""
    hidden_size: int = compared(0, required=True, may_be_unset=True, minimum=1)
    """Width of the residual stream."""
    num_attention_heads: int = compared(0, required=True, minimum=1)
    """Query heads."""
    ffn_hidden_size: int | None = compared(minimum=1)
    """Width of the MLP; by default 4 x hidden size, or 8/3 of it with --swiglu.

    None is 4 x hidden_size here, with gated_linear_unit too."""
    kv_channels: int | None = knob(minimum=1, compared=("kv_channels", None))
    """Width of one head; by default hidden size / heads."""
    num_query_groups: int | None = knob(
        given=1, minimum=1, compared=("group_query_attention", False)
    )
    """Key/value heads with --group-query-attention.

    None for one per query head."""

    # -- Layer placement --
    num_layers_in_first_pipeline_stage: int | None = place(
        dest="decoder_first_pipeline_num_layers", minimum=1
    )
    """Layers on the first stage, where it should hold another number than the rest."""
    num_layers_in_last_pipeline_stage: int | None = place(
        dest="decoder_last_pipeline_num_layers", minimum=1
    )
    """Layers on the last stage, likewise."""
    account_for_embedding_in_pipeline_split: bool = place(False)
    """Count the embedding as a layer when layers are divided over stages."""
    account_for_loss_in_pipeline_split: bool = place(False)
    """Count the loss as a layer when layers are divided over stages."""
    pipeline_model_parallel_layout: str | list | None = place()
    """Which stage holds which layer, such as "Et*3|(tt|)*29,m|L".

    Overrides the even division."""

    # -- What a layer is made of --
    normalization: Literal["LayerNorm", "RMSNorm"] = compared("LayerNorm")
    """Normalisation before each sublayer."""
    layernorm_epsilon: float = compared(1e-5, dest="norm_epsilon", above=0.0)
    """Added to the variance."""
    qk_layernorm: bool = compared(False)
    """Normalise queries and keys per head."""
    gated_linear_unit: bool = compared(False, dest="swiglu")
    """Gated MLP with SiLU instead of GELU.

    Two projections into the MLP, one gating the other; SiLU is the activation_func to set beside."""
    activation_func: Callable[[torch.Tensor], torch.Tensor] = F.gelu
    add_bias_linear: bool = compared(
        True, name="--disable-bias-linear", help="Turn off the biases of the linear layers."
    )
    add_qkv_bias: bool = compared(False)
    """Keep the bias of the query/key/value projection with --disable-bias-linear."""
    hidden_dropout: float = knob(0.1, minimum=0.0, below=1.0)
    """Dropout probability of the residual stream."""
    attention_dropout: float = knob(0.1, minimum=0.0, below=1.0)
    """Dropout probability of the attention weights."""
    fp32_residual_connection: bool = False

    # -- Initial weights --
    init_method: Callable | None = None
    output_layer_init_method: Callable | None = None
    """For the two projections that write to the residual stream."""
    init_method_std: float = knob(0.02, above=0.0)
    """Standard deviation of the initial weights."""
    init_seed: int = knobs.knob(1234, section="rng", dest="seed", minimum=1)
    """Seed of weights, data order and dropout.

    Each weight is drawn from a generator seeded by this and its global name, then sliced, so the full
    model is the same for every tp x pp x vp x dp."""

    # -- A sequence over several ranks --
    cp_comm_type: list[str] | str | None = knobs.knob(None, section="parallel", nargs="+")
    """How attention reaches the whole sequence with --context-parallel-size: p2p, all_gather or a2a.

    One for all layers, or one for each layer of the model; by default p2p, a ring."""

    # -- Several tokens ahead --
    mtp_num_layers: int | None = compared(minimum=1)
    """Tokens to predict beyond the next one, each by a layer of its own; by default none."""
    mtp_loss_scaling_factor: float = knob(0.1, minimum=0.0)
    """Weight of their losses, over all of them, beside the main loss."""

    # -- Activation recompute --
    recompute_granularity: Literal["selective", "full"] | None = knob()
    """Recompute in backward: attention's core only, or whole layers."""
    recompute_method: Literal["uniform", "block"] | None = knob()
    """full: groups of layers, or the first layers of each chunk."""
    recompute_num_layers: int | None = knob(minimum=1)
    """full: layers per group, or how many."""

    def __post_init__(self) -> None:
        """Fills defaults; raises ValueError with the numbers and the remedy for what cannot be."""
        super().__post_init__()
        h, a, t = self.hidden_size, self.num_attention_heads, self.tensor_model_parallel_size
        if self.kv_channels is None:
            if h % a:
                raise ValueError(
                    f"hidden_size {h} is not divisible by num_attention_heads {a}; "
                    f"try {h // a * a or a}, or set kv_channels"
                )
            self.kv_channels = h // a
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * h
        if self.num_query_groups is None:
            self.num_query_groups = a
        self._check_divisible(t)
        self._check_recompute()
        self.check_experts()
        check_context_parallel(self)
        check_mtp(self)
        if self.init_method is None:
            self.init_method = init_method_normal(self.init_method_std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = scaled_init_method_normal(
                self.init_method_std, self.num_layers
            )
        note_made(self)

    def _check_divisible(self, t: int) -> None:
        a, g, f = self.num_attention_heads, self.num_query_groups, self.ffn_hidden_size
        if g < 1 or a % g:
            raise ValueError(
                f"num_attention_heads {a} is not divisible by num_query_groups {g}; "
                "every group serves the same number of heads"
            )
        for name, size in (
            ("num_attention_heads", a),
            ("num_query_groups", g),
            ("ffn_hidden_size", f),
        ):
            # A configuration without a hidden size has an MLP of width 0.
            if size % t or size < 1 and self.hidden_size:
                raise ValueError(
                    f"{name} {size} is not divisible by tensor_model_parallel_size {t}; "
                    f"make {name} a multiple of {t}"
                )

    def _check_recompute(self) -> None:
        granularity, method = self.recompute_granularity, self.recompute_method
        if granularity == "full" and method is None:
            raise ValueError(
                "recompute_granularity='full' needs recompute_method 'uniform' or 'block', not None"
            )
        if granularity == "full" and self.recompute_num_layers is None:
            raise ValueError(
                "recompute_granularity='full' needs recompute_num_layers of 1 or more, not None"
            )
        if granularity == "selective" and method is not None:
            raise ValueError(
                f"recompute_method {method!r} goes with recompute_granularity='full'; drop it"
            )
