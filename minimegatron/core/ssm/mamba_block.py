"""The layers of one chunk of a hybrid model: a block whose layers are not all of one kind.

Counterpart: `megatron.core.ssm.mamba_block`.
"""

from dataclasses import dataclass
from typing import Any

from minimegatron.core.process_groups_config import ProcessGroupCollection, stage_of
from minimegatron.core.ssm.mamba_hybrid_layer_allocation import Symbols, allocate_layers
from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm
from minimegatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.transformer_layer import get_transformer_layer_offset


@dataclass
class MambaStackSubmodules:
    """The spec of each kind of layer."""

    mamba_layer: ModuleSpec | type | None = None
    attention_layer: ModuleSpec | type | None = None
    mlp_layer: ModuleSpec | type | None = None


class MambaStack(TransformerBlock):
    """A `TransformerBlock` whose layers a pattern chooses; all else is the same.

    In Megatron it is a block of its own, with a loop of its own over the layers.

    Args:
        submodules: what each letter means.
        hybrid_override_pattern: a letter for each layer of the whole model; None for Mamba layers.
        post_layer_norm, pre_process, post_process, pg_collection, vp_stage: as the block's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaStackSubmodules,
        *,
        pre_process: bool = True,
        hybrid_override_pattern: str | None = None,
        post_layer_norm: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ):
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        kinds: dict[str, Any] = {
            Symbols.MAMBA: submodules.mamba_layer,
            Symbols.ATTENTION: submodules.attention_layer,
            Symbols.MLP: submodules.mlp_layer,
        }
        letters = allocate_layers(config.num_layers, override_pattern=hybrid_override_pattern)
        stage = stage_of(pg_collection.pp)
        first = get_transformer_layer_offset(config, vp_stage, stage)
        last = first + get_num_layers_to_build(config, vp_stage, stage)
        specs = [kinds[letter] for letter in letters[first:last]]
        super().__init__(
            config,
            TransformerBlockSubmodules(specs, WrappedTorchNorm),
            post_layer_norm,
            pre_process,
            post_process,
            pg_collection,
            vp_stage,
        )
