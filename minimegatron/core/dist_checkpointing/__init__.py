"""Saving and loading a checkpoint that any layout can read: `save`, `load`, and what one holds.

Counterpart: `megatron.core.dist_checkpointing`.

These names load `serialization` when first used: what it imports, `torch.distributed.checkpoint`, takes
half a second, and many runs neither save nor load.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors, and for the links of the annotated source
    from minimegatron.core.dist_checkpointing.serialization import (
        load,
        load_plain_tensors,
        load_tensors_metadata,
        save,
    )

__all__ = ["load", "load_plain_tensors", "load_tensors_metadata", "save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.serialization"), name)
