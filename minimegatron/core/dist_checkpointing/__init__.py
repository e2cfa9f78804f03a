"""Saving and loading a checkpoint that any layout can read: `save`, `load`, and what one holds.

Counterpart: `megatron.core.dist_checkpointing`.

These names load `serialization` and others when first used: what it imports,
`torch.distributed.checkpoint`, takes half a second, and many runs neither save nor load.
"""

from minimegatron.exports import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {
        "LocalNonpersistentObject": (
            "minimegatron.core.dist_checkpointing.mapping:LocalNonpersistentObject"
        ),
        "ShardedTensor": "minimegatron.core.dist_checkpointing.mapping:ShardedTensor",
        "check_is_distributed_checkpoint": (
            "minimegatron.core.dist_checkpointing.core:check_is_distributed_checkpoint"
        ),
        "load": "minimegatron.core.dist_checkpointing.serialization:load",
        "load_common_state_dict": (
            "minimegatron.core.dist_checkpointing.core:load_common_state_dict"
        ),
        "load_plain_tensors": (
            "minimegatron.core.dist_checkpointing.serialization:load_plain_tensors"
        ),
        "load_tensors": "minimegatron.core.dist_checkpointing.serialization:load_tensors",
        "load_tensors_metadata": (
            "minimegatron.core.dist_checkpointing.serialization:load_tensors_metadata"
        ),
        "save": "minimegatron.core.dist_checkpointing.serialization:save",
        "save_tensors": "minimegatron.core.dist_checkpointing.serialization:save_tensors",
    },
)
