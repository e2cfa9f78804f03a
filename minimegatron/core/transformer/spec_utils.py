"""A module to build, as data: its class, its options and the specs of its parts.

Counterpart: `megatron.core.transformer.spec_utils`.

A layer written against specs says "then comes some norm, some attention, some MLP"; which ones is
decided in one place (`gpt_layer_specs`), and swapping one needs no subclass.
"""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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


def takes(spec_or_module: Any, argument: str) -> bool:
    """Whether the class that is described has a parameter of this name."""
    module = getattr(spec_or_module, "module", spec_or_module)
    return module is not None and argument in inspect.signature(module).parameters


def import_module(module_path: tuple[str, str]) -> Any:
    """The name `module_path[1]` of the module `module_path[0]`; raises ImportError without either.

    Source: `megatron.core.transformer.spec_utils.import_module`, which returns None instead.

    >>> import_module(("minimegatron.core.enums", "ModelType")).__name__
    'ModelType'
    """
    module_name, name = module_path
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise ImportError(f"module {module_name} has no {name}; check both names")
    return getattr(module, name)
