"""Notices when a student's file changes what checks it.

Megatron has no counterpart.

Answers are judged in another process, so nobody gains by changing the package here; but a student who
does so is told. `Seal` remembers every function of the package, and those of torch that compare
values, before the student's file is loaded, and looks at them again after each case.
"""

import builtins
import operator
import sys
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType
from typing import Any, NamedTuple

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


ALL, MAP, IS, CODE_OF = all, map, operator.is_, operator.attrgetter("__code__")
"""Taken before the student's file is loaded, which may change what `builtins` has."""


class Watched(NamedTuple):
    """A module's or a class's functions, as they were; and those of them that have code."""

    holder: Any
    names: list[str]
    values: list[Any]
    with_code: list[FunctionType]
    codes: list[CodeType]

    def is_same(self) -> bool:
        """Whether each name still has its function, and each function its code."""
        return ALL(MAP(IS, MAP(vars(self.holder).get, self.names), self.values)) and ALL(
            MAP(IS, MAP(CODE_OF, self.with_code), self.codes)
        )

    def first_changed(self) -> str:
        """The name of a function that is another one now."""
        codes = dict(zip(MAP(id, self.with_code), self.codes, strict=True))
        for name, value in zip(self.names, self.values, strict=True):
            is_there = vars(self.holder).get(name) is value
            if not is_there or getattr(value, "__code__", None) is not codes.get(id(value)):
                break
        return name


class Seal:
    """Every function as it is now.

    `broken` is asked after each case: it compares the functions of a module in one call.
    """

    def __init__(self):
        holders = list(_holders())
        self._known = [
            _watched(
                holder, [name for name, value in vars(holder).items() if type(value) in FUNCTIONS]
            )
            for holder in holders
        ]
        if (torch := _torch()) is not None:
            self._known.append(_watched(torch, COMPARING))
        self._tables = [
            (f"{_name_of(holder)}.{name}", value, list(value.values()))
            for holder in holders
            for name, value in list(vars(holder).items())
            if type(value) is dict and _has_functions(value)
        ]

    def broken(self) -> str | None:
        """The dotted path of a function that is another one now; None if all are the same."""
        for watched in self._known:
            if not watched.is_same():
                return f"{_name_of(watched.holder)}.{watched.first_changed()}"
        for name, table, known in self._tables:
            now = list(table.values())
            if len(now) != len(known) or not ALL(MAP(IS, now, known)):
                return name
        return None


def _watched(holder: Any, names: Iterable[str]) -> Watched:
    values = [vars(holder)[name] for name in names]
    with_code = [value for value in values if type(value) is FunctionType]
    return Watched(holder, list(names), values, with_code, [one.__code__ for one in with_code])


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


def _has_functions(table: dict) -> bool:
    """Whether values are functions, or tuples with one in them."""
    types = set(map(type, table.values()))
    if tuple in types:
        types.update(*(map(type, value) for value in table.values() if type(value) is tuple))
    return not types.isdisjoint(FUNCTIONS)


def _torch() -> Any:
    """The module, where it is there; not what stands for it (`stand_ins`)."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "__version__") else None


def _name_of(holder: Any) -> str:
    if isinstance(holder, type):
        return f"{holder.__module__}.{holder.__qualname__}"
    return holder.__name__
