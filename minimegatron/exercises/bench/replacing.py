"""A student's function in the place of ours, and ours out of reach meanwhile.

Megatron has no counterpart.
"""

import contextlib
import importlib
import inspect
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minimegatron.exercises.bench.cases import Wrong


@contextlib.contextmanager
def installed(function: Callable, symbol: str) -> Iterator[None]:
    """For the length of the block, `function` stands wherever ours, at dotted path `symbol`, does."""
    holder, name = locate(symbol)
    original = getattr(holder, name)
    as_it_lies = inspect.getattr_static(holder, name)
    replacement = _traced_like(original, function)
    places = [(holder, name)]
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("minimegatron.") or module is holder:
            continue
        # All modules are asked for each function of each case; most do not have it.
        if any(map(operator.is_, list(vars(module).values()), itertools.repeat(original))):
            places += [(module, key) for key, value in vars(module).items() if value is original]
    for place, key in places:
        setattr(place, key, replacement)
    try:
        yield
    finally:
        for place, key in places:
            setattr(place, key, as_it_lies if place is holder else original)


def locate(symbol: str) -> tuple[Any, str]:
    """The module or class that holds `symbol`, and its name there."""
    path, _, name = symbol.rpartition(".")
    try:
        holder = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, class_name = path.rpartition(".")
        holder = getattr(importlib.import_module(module), class_name)
    if not hasattr(holder, name):
        raise ValueError(f"{symbol} does not exist")
    return holder, name


def _traced_like(original: Callable, function: Callable) -> Callable:
    """`function`, seen by observers as `original` is."""
    decorate = getattr(original, "decorate", None)
    return function if decorate is None else decorate(function)


# -- Ours, out of reach --


def withhold(symbols: Sequence[str]) -> None:
    """Empties our own functions that a student is to write, for the rest of this process.

    The functions themselves, not their names: whoever finds one by another way finds it empty. Who
    calls one hears so, as Wrong.
    """
    for symbol in symbols:
        holder, name = locate(symbol)
        for function in functions_of(inspect.getattr_static(holder, name)):
            _empty(function, symbol)


@contextlib.contextmanager
def withheld(symbols: Sequence[str]) -> Iterator[None]:
    """For the length of the block, who calls one of our own `symbols` hears so, as Wrong.

    For what the package needs outside the block, such as a layer's own product.
    """
    with contextlib.ExitStack() as stack:
        for symbol in symbols:
            stack.enter_context(installed(_refusal(symbol), symbol))
        yield


def functions_of(value: Any) -> list[types.FunctionType]:
    """The Python functions behind a function, a method, a traced link or a class."""
    if isinstance(value, type):
        members = [member for member in vars(value).values() if not isinstance(member, type)]
        return [one for member in members for one in functions_of(member)]
    found = []
    for inner in (value, getattr(value, "__func__", None)):
        while isinstance(inner, types.FunctionType):
            found.append(inner)
            inner = getattr(inner, "__wrapped__", None)
    # The wrappers around the innermost one go on working: they find it empty.
    return found[-1:]


def _empty(function: types.FunctionType, symbol: str) -> None:
    if function.__code__.co_freevars:
        raise ValueError(f"{symbol} is a closure; withhold the function that makes it")

    refuse = _refusal(symbol)
    function.__code__ = refuse.__code__
    function.__defaults__, function.__kwdefaults__ = None, refuse.__kwdefaults__


def _refusal(symbol: str) -> types.FunctionType:
    def refuse(*_: Any, _symbol: str = symbol, _wrong: type = Wrong, **__: Any) -> Any:
        raise _wrong(
            f"your code calls {_symbol}: that is what you are to write, and it is not there while "
            "your code is checked"
        )

    return refuse
