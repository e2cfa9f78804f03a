"""Small GPTs of every kind, for tests."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.groups import pretend_groups

VOCABULARY, SEQUENCE, BATCH = 64, 8, 3


@dataclass(frozen=True)
class Case:
    """One kind of GPT: options of its config, and of the model."""

    config: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    positions: str = "learned_absolute"
    rotary_percent: float = 1.0

    def make_config(self, **overrides: Any) -> TransformerConfig:
        """No dropout unless asked for; 8 heads so that 4 ranks can cut them."""
        options = {
            "num_layers": 3,
            "hidden_size": 32,
            "num_attention_heads": 8,
            "ffn_hidden_size": 48,
            "params_dtype": torch.float64,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            # Larger than usual, so that every part of the model matters to the loss.
            "init_method_std": 0.15,
        }
        return TransformerConfig(**{**options, **self.config, **overrides})

    def build(self, config: TransformerConfig, pg_collection=None, **options: Any) -> GPTModel:
        """The chunk that `pg_collection` and `options` say; by default the whole model."""
        return GPTModel(
            config,
            get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm),
            VOCABULARY,
            SEQUENCE,
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type=self.positions,
            rotary_percent=self.rotary_percent,
            pg_collection=pg_collection or pretend_groups(),
            **options,
        )


SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu}
CASES = {
    "gpt2: LayerNorm, GELU, learned, tied": Case(tied=True),
    "llama: RMSNorm, SwiGLU, rope, GQA, untied": Case(
        {"normalization": "RMSNorm", "num_query_groups": 4, "add_bias_linear": False, **SWIGLU},
        positions="rope",
    ),
    "qwen: qk_layernorm, qkv bias, half rope, tied": Case(
        {
            "normalization": "RMSNorm",
            "num_query_groups": 4,
            "add_bias_linear": False,
            "add_qkv_bias": True,
            "qk_layernorm": True,
            **SWIGLU,
        },
        tied=True,
        positions="rope",
        rotary_percent=0.5,
    ),
    "mixed: LayerNorm, SwiGLU with bias, learned, untied": Case(
        {"qk_layernorm": True, **SWIGLU},
    ),
    "odd: no positions, wide heads, RMSNorm, GELU": Case(
        {"normalization": "RMSNorm", "kv_channels": 6, "num_query_groups": 4},
        positions="none",
    ),
}
RECOMPUTE = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "uniform 1": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "uniform 2": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "block 2": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
    },
}


def sample(sequence: int = SEQUENCE, batch: int = BATCH) -> dict[str, torch.Tensor]:
    """Keyword arguments of `GPTModel.forward`: random ids, the next ones as labels."""
    generator = torch.Generator().manual_seed(42)
    text = torch.randint(VOCABULARY, (batch, sequence + 1), generator=generator)
    return {
        "input_ids": text[:, :-1].contiguous(),
        "position_ids": torch.arange(sequence).expand(batch, -1),
        "attention_mask": None,
        "labels": text[:, 1:].contiguous(),
    }


def token_weights() -> torch.Tensor:
    """Each token's share in the objective, all different, so that no mix-up cancels out."""
    return torch.linspace(0.5, 1.5, BATCH * SEQUENCE, dtype=torch.float64).view(BATCH, SEQUENCE)


def run_whole(case: Case, **overrides: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients of the model on one rank."""
    model = case.build(case.make_config(**overrides))
    losses = model(**sample())
    (losses * token_weights()).sum().backward()
    return losses.detach(), {name: param.grad for name, param in model.named_parameters()}
