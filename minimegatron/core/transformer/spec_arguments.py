"""Which arguments a part of a layer is given, where its kinds take different ones.

Megatron has this in `megatron.core.transformer.transformer_layer`.
"""

import inspect
from typing import Any

import torch

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.spec_utils import build_module


def takes(spec_or_module: Any, argument: str) -> bool:
    """Whether the class that is described has a parameter of this name."""
    module = getattr(spec_or_module, "module", spec_or_module)
    return module is not None and argument in inspect.signature(module).parameters


def build_mlp(
    spec: Any, config: Any, layer_number: int, pg_collection: ProcessGroupCollection
) -> torch.nn.Module | None:
    """The MLP of a layer, or its experts; None for None.

    An MLP needs one group. What routes tokens to experts needs more of them, and the layer's number.
    """
    needs_all = takes(spec, "pg_collection")
    groups = {"pg_collection": pg_collection} if needs_all else {"tp_group": pg_collection.tp}
    mlp = build_module(spec, config=config, **groups)
    if hasattr(mlp, "set_layer_number"):
        mlp.set_layer_number(layer_number)
    return mlp
