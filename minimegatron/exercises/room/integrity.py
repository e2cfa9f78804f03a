"""Notices when a student's file changes what checks it.

Megatron has no counterpart.

Answers are judged in another process, so nobody gains by changing the package here; but a student who
does so is told. `Seal` remembers every function of the package, and those of torch that compare
values, before the student's file is loaded, and looks at them again after each case.
"""

import builtins
import sys
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType)
COMPARING = (
    "allclose",
    "equal",
    "isclose",
    "isfinite",
    "all",
    "any",
    "as_tensor",
    "sort",
    "eq",
    "ne",
)


class Seal:
    """Every function as it is now."""

    def __init__(self):
        self._known = [
            (holder, name, value, getattr(value, "__code__", None))
            for holder in _holders()
            for name, value in list(vars(holder).items())
            if type(value) in FUNCTIONS
        ]
        if (torch := _torch()) is not None:
            self._known += [(torch, name, getattr(torch, name), None) for name in COMPARING]
        self._tables = [
            (f"{_name_of(holder)}.{name}", value, list(value.items()))
            for holder in _holders()
            for name, value in list(vars(holder).items())
            if type(value) is dict and any(map(_has_function, value.values()))
        ]

    def broken(self) -> str | None:
        """The dotted path of a function that is another one now; None if all are the same."""
        for holder, name, value, code in self._known:
            is_same = vars(holder).get(name) is value
            if not is_same or getattr(value, "__code__", None) is not code:
                return f"{_name_of(holder)}.{name}"
        for name, table, known in self._tables:
            now = list(table.items())
            if len(now) != len(known) or any(
                a[1] is not b[1] for a, b in zip(now, known, strict=True)
            ):
                return name
        return None


def _holders() -> Iterator[Any]:
    """Modules and classes whose functions are watched."""
    yield builtins
    if (torch := _torch()) is not None:
        yield from (torch.distributed, torch.Tensor, torch.testing)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "minimegatron" or module is None:
            continue
        yield module
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module_name:
                yield value


def _has_function(value: Any) -> bool:
    values = value if type(value) is tuple else (value,)
    return any(type(one) in FUNCTIONS for one in values)


def _torch() -> Any:
    """The module, where it is there; not what stands for it (`stand_ins`)."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "__version__") else None


def _name_of(holder: Any) -> str:
    if isinstance(holder, type):
        return f"{holder.__module__}.{holder.__qualname__}"
    return holder.__name__
