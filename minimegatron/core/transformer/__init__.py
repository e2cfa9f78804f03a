"""Layers: what every model is made of.

Counterpart: `megatron.core.transformer`. What places layers on stages loads without torch.
"""

from minimegatron.exports import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "MegatronModule": "minimegatron.core.transformer.module:MegatronModule",
        "ModuleSpec": "minimegatron.core.transformer.spec_utils:ModuleSpec",
        "TransformerConfig": "minimegatron.core.transformer.transformer_config:TransformerConfig",
        "TransformerLayer": "minimegatron.core.transformer.transformer_layer:TransformerLayer",
        "TransformerLayerSubmodules": (
            "minimegatron.core.transformer.transformer_layer:TransformerLayerSubmodules"
        ),
        "build_module": "minimegatron.core.transformer.spec_utils:build_module",
    },
)
