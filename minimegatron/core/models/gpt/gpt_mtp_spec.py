"""What GPT's layers for further tokens are made of.

Counterpart: `megatron.core.models.gpt.gpt_layer_specs`.
"""

from typing import Any

from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from minimegatron.core.transformer import multi_token_prediction as mtp
from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.transformer_block import TransformerBlockSubmodules
from minimegatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["get_gpt_mtp_block_spec"]


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    use_transformer_engine: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> "mtp.MultiTokenPredictionBlockSubmodules | None":
    """The layers for further tokens of one chunk; None for a chunk that predicts none.

    Args:
        spec: a layer's, or `get_gpt_decoder_block_spec(...)` for the chunk. Each further layer is of
            the kind of its last one; on a chunk without layers, of the model's last one.
        use_transformer_engine: must be False.
        vp_stage, pp_rank: as for `get_gpt_decoder_block_spec`.
    """
    if config.mtp_num_layers is None:
        return None
    num_layers = mtp.get_mtp_num_layers_to_build(config, vp_stage, pp_rank)
    if num_layers == 0:
        return None
    if isinstance(spec, TransformerBlockSubmodules):
        spec = (spec.layer_specs or get_gpt_decoder_layer_specs(config))[-1]
    layer_spec = mtp.get_mtp_layer_spec(spec, use_transformer_engine)
    return mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer_spec] * num_layers)


def build_mtp_block_of(model: Any, spec: Any) -> "mtp.MultiTokenPredictionBlock | None":
    """The layers for further tokens of the chunk `model`, a `GPTModel`; None without any.

    Raises as `build_mtp_block`, also for a model that predicts them and has no `spec`.
    """
    if spec is None and model.config.mtp_num_layers is None:
        return None
    return mtp.build_mtp_block(model, spec)
