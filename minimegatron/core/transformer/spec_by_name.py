"""What a specification names by text: a module's path and a name in it.

Counterpart: `megatron.core.transformer.spec_utils`.
"""

import importlib
from typing import Any

__all__ = ["import_module"]


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
