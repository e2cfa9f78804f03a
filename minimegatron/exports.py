"""Names that a package or a module offers and looks up on first use, in the module that has them.

Torch-free. Megatron has no counterpart: it imports everything at once.

A name of Megatron's may stand in a package whose import must stay cheap, or in a module that may not
import the module where the name lives here. `lazily` gives such a place the two functions that Python
asks for names (PEP 562).
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazily(
    place: str, table: dict[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of the module `place`, for the names of `table`.

    `table` says where each name is found: "package.module" is a module, "package.module:attribute"
    is an attribute of one. In the module:

        __getattr__, __dir__ = lazily(__name__, {"pace": "minimegatron.tracing.pace:pace"})

    What is found is not kept: a test that puts another function in the module that has it sees that
    function here too, and the next look-up costs about a microsecond. `__getattr__` raises
    AttributeError for other names, and what the import of the module raises.

    >>> __getattr__, __dir__ = lazily("minimegatron", {"root": "math:sqrt", "text": "json"})
    >>> __getattr__("root")(9.0), __getattr__("text").__name__
    (3.0, 'json')
    >>> "root" in __dir__()
    True
    >>> __getattr__("log")
    Traceback (most recent call last):
    AttributeError: module 'minimegatron' has no attribute 'log'
    """

    def __getattr__(name: str) -> Any:
        if name not in table:
            # With the module and the name, Python adds "Did you mean ...?".
            module = sys.modules.get(place)
            raise AttributeError(
                f"module {place!r} has no attribute {name!r}", name=name, obj=module
            )
        module_name, _, attribute = table[name].partition(":")
        module = importlib.import_module(module_name)
        return getattr(module, attribute) if attribute else module

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[place]), *table})

    return __getattr__, __dir__


def all_of(place: str, module_name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """As `lazily`, for all names that the module `module_name` has in its `__all__`."""

    def __getattr__(name: str) -> Any:
        module = importlib.import_module(module_name) if not name.startswith("__") else None
        if module is None or name not in module.__all__:
            raise AttributeError(
                f"module {place!r} has no attribute {name!r}",
                name=name,
                obj=sys.modules.get(place),
            )
        return getattr(module, name)

    def __dir__() -> list[str]:
        names = importlib.import_module(module_name).__all__
        return sorted({*vars(sys.modules[place]), *names})

    return __getattr__, __dir__
