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
from minimegatron.core.transformer import layer_checks
from minimegatron.core.transformer.enums import AttnBackend  # noqa: F401  in a field that is left out
from minimegatron.core.transformer.second_subjects import LateFields, SecondSubjects, note_made


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """N(0, sigma^2), in place. The generator is chosen by whoever initialises the weight."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable:
    """N(0, sigma^2 / 2L): each layer adds twice to the residual stream, so its writes shrink."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma / (2.0 * num_layers) ** 0.5)


knob = partial(knobs.knob, section="model")
compared = partial(knob, compared=True)


@dataclass
class TransformerConfig(LateFields, SecondSubjects, ModelParallelConfig):
    """Sizes, activation, normalisation and dropout of one transformer.

    `SecondSubjects` has what concerns recompute, experts, state-space layers, further tokens, sequences
    over several ranks and uneven stages. A field that is set later takes effect or is refused; see
    `second_subjects`.
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

    def __post_init__(self) -> None:
        """Fills defaults; raises ValueError with the numbers and the remedy for what cannot be."""
        super().__post_init__()
        if self.kv_channels is None:
            layer_checks.check_width_of_heads(self)
            self.kv_channels = self.hidden_size // self.num_attention_heads
        width, groups = self.ffn_hidden_size, self.num_query_groups
        self.ffn_hidden_size = 4 * self.hidden_size if width is None else width
        self.num_query_groups = self.num_attention_heads if groups is None else groups
        layer_checks.check_sizes(self)
        self.check_subjects()
        std, given = self.init_method_std, self.output_layer_init_method
        self.init_method = self.init_method or init_method_normal(std)
        self.output_layer_init_method = given or scaled_init_method_normal(std, self.num_layers)
        note_made(self)
