"""The shape of a transformer, on top of how it is cut over ranks.

Read by: every module under `core.transformer` and `core.models`. Calls nothing. Counterpart:
`megatron.core.transformer.transformer_config.TransformerConfig`, under the same field names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from minimegatron.core.model_parallel_config import ModelParallelConfig


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """N(0, sigma^2), in place. The generator is chosen by whoever initialises the weight."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable:
    """N(0, sigma^2 / 2L): each layer adds twice to the residual stream, so its writes shrink."""
    return partial(torch.nn.init.normal_, mean=0.0, std=sigma / (2.0 * num_layers) ** 0.5)


@dataclass
class TransformerConfig(ModelParallelConfig):
    """Sizes, activation, normalisation, dropout and recompute of one transformer."""

    # -- Sizes --
    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int | None = None
    """Key/value heads (grouped-query attention); None for one per query head."""
    ffn_hidden_size: int | None = None
    """Width of the MLP; None for 4 x hidden_size."""
    kv_channels: int | None = None
    """Width of one head; None for hidden_size / num_attention_heads."""

    # -- Layer placement --
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer when dividing layers over stages."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as one layer when dividing layers over stages."""
    pipeline_model_parallel_layout: str | list | None = None
    """A layout such as "Et*3|(tt|)*29,m|L"; overrides the even division."""

    # -- What a layer is made of --
    normalization: str = "LayerNorm"
    """"LayerNorm" or "RMSNorm"."""
    layernorm_epsilon: float = 1e-5
    qk_layernorm: bool = False
    """Normalise queries and keys per head."""
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    """A bias on the query/key/value projection even where `add_bias_linear` is off."""
    gated_linear_unit: bool = False
    """Two projections into the MLP, one gating the other (SwiGLU with activation silu)."""
    activation_func: Callable[[torch.Tensor], torch.Tensor] = F.gelu
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    fp32_residual_connection: bool = False

    # -- Initial weights --
    init_method: Callable | None = None
    output_layer_init_method: Callable | None = None
    """For the two projections that write to the residual stream."""
    init_method_std: float = 0.02
    init_seed: int = 1234
    """Each weight is drawn from a generator seeded by this and its global name, then sliced, so the
    full model is the same for every tp x pp x vp x dp."""

    # -- Activation recompute --
    recompute_granularity: str | None = None
    """None, "selective" (core attention only) or "full" (whole layers)."""
    recompute_method: str | None = None
    """For "full": "uniform" (groups of layers) or "block" (the first layers of each chunk)."""
    recompute_num_layers: int | None = None
    """Layers per group ("uniform") or layers recomputed ("block")."""

    def __post_init__(self) -> None:
        """Fills defaults; raises ValueError with the numbers and the remedy for what cannot be."""
        super().__post_init__()
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
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
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(
                f"normalization {self.normalization!r} is unknown; use 'LayerNorm' or 'RMSNorm'"
            )
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a value in [0, 1)")
        self._check_recompute()
        if self.init_method is None:
            self.init_method = init_method_normal(self.init_method_std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = scaled_init_method_normal(
                self.init_method_std, self.num_layers
            )

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
            if size < 1 or size % t:
                raise ValueError(
                    f"{name} {size} is not divisible by tensor_model_parallel_size {t}; "
                    f"make {name} a multiple of {t}"
                )

    def _check_recompute(self) -> None:
        granularity, method = self.recompute_granularity, self.recompute_method
        if granularity not in (None, "selective", "full"):
            raise ValueError(
                f"recompute_granularity {granularity!r} is unknown; use 'selective' or 'full'"
            )
        if granularity == "full" and method not in ("uniform", "block"):
            raise ValueError(
                f"recompute_granularity='full' needs recompute_method 'uniform' or 'block', "
                f"not {method!r}"
            )
        if granularity == "full" and (self.recompute_num_layers or 0) < 1:
            raise ValueError(
                f"recompute_granularity='full' needs recompute_num_layers of 1 or more, "
                f"not {self.recompute_num_layers}"
            )
        if granularity == "selective" and method is not None:
            raise ValueError(
                f"recompute_method {method!r} goes with recompute_granularity='full'; drop it"
            )
