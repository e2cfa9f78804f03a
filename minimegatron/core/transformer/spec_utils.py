"""A module to build, as data: its class, its options and the specs of its parts.

Counterpart: `megatron.core.transformer.spec_utils`.

A layer written against specs says "then comes some norm, some attention, some MLP"; which ones is
decided in one place (`gpt_layer_specs`), and swapping one needs no subclass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minimegatron.exports import all_of

# Megatron has `import_module` here.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.transformer.spec_by_name")


@dataclass
class ModuleSpec:
    """`module(**params, submodules=submodules, ...)`, not called yet."""

    module: Any
    """The class, or a function that returns a module."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Its keyword arguments that the recipe fixes."""
    submodules: Any = None
    """A dataclass of the specs of its parts, if it has any."""


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Builds what a `ModuleSpec`, or a class, describes; `kwargs` come from who builds it.

    Returns None for None, which stands for a part left out.
    """
    if spec_or_module is None:
        return None
    if not isinstance(spec_or_module, ModuleSpec):
        return spec_or_module(*args, **kwargs)
    options = {**spec_or_module.params, **kwargs}
    if spec_or_module.submodules is not None:
        options["submodules"] = spec_or_module.submodules
    return spec_or_module.module(*args, **options)
