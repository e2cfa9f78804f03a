"""Megatron's arguments and fields that are left out here: taken at Megatron's default, else refused.

Torch-free. Megatron has no counterpart. A call written for Megatron may name an argument that our
function does not have. left_out.json, beside this file, records Megatron's arguments and their defaults
(`make rosetta`), by the names of our functions and classes. When Python has imported a module that has
recorded names, `accept_left_out` wraps them. Signatures and bodies then hold what is used, and nothing
else. A field of a configuration that is left out can still be read: it has Megatron's default.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from minimegatron.core.left_out_record import (
    default_of_field,
    known_fields,
    name_of,
    names_by_module,
    without_left_out,
)
from minimegatron.exports import put_stand_ins

# -- Modules --


class OurModules:
    """Finds this package's modules, as Python would, and does two things around their run.

    A package gets its stand-ins before; recorded names are wrapped after. An old name, of a module that
    has moved, leads to the new one.

    `minimegatron/__init__.py` puts it at the beginning of `sys.meta_path`.
    """

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Python asks this for every module; None for those of others."""
        if not fullname.startswith("minimegatron."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            return importlib.import_module("minimegatron.moved").spec_of_old(fullname)
        if type(spec.loader) is SourceFileLoader:
            spec.loader = _OurLoader(spec.loader.name, spec.loader.path)
        return spec


class _OurLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        put_stand_ins(module)
        super().exec_module(module)
        for symbol in names_by_module().get(module.__name__, ()):
            *owners, name = symbol.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, name, accept_left_out(getattr(owner, name)))


# -- Functions and constructors --


def accept_left_out(target: Any) -> Any:
    """Wraps a function, a method or a class: a call may then name arguments that are left out.

    A call that our own signature takes goes straight to it. In any other call, arguments by position
    have Megatron's order. What may be left out is looked up in such a call alone.

    Raises, in the call:
        ValueError: an argument that is left out has a value that is not taken.
        TypeError: as without this.
    """
    if getattr(target, "takes_left_out", False):  # it does the same itself, in one call less
        return target
    if not isinstance(target, type):
        return _with_left_out(target, name_of(target))
    if dataclasses.is_dataclass(target):
        target.__init__ = _with_known_fields(target)
        target.__getattr__ = default_of_field
    else:
        target.__init__ = _with_left_out(target.__init__, name_of(target))
    return target


def _with_left_out(function: Callable, name: str) -> Callable:
    code = inspect.unwrap(function).__code__
    own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    names, num_positional = frozenset(own), code.co_argcount
    num_bound = int(own[:1] in (("self",), ("cls",)))

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        if len(args) > num_positional or not given.keys() <= names:
            args, given = without_left_out(name, names, args, given, num_bound)
        return function(*args, **given)

    for asked in ("cache_clear", "cache_info", "cache_parameters"):  # of `functools.lru_cache`
        if hasattr(function, asked):
            setattr(call, asked, getattr(function, asked))
    return call


# -- Fields of configurations --


def _with_known_fields(config: type) -> Callable:
    """The constructor of a dataclass, whose fields are given by name."""
    init = config.__init__
    names = frozenset(field.name for field in dataclasses.fields(config) if field.init)

    @functools.wraps(init)
    def __init__(self: Any, *values: Any, **given: Any) -> None:
        known = given if given.keys() <= names else known_fields(config, given)
        init(self, *values, **known)
        for name in given.keys() - known.keys():  # nobody here reads it, but a client may
            object.__setattr__(self, name, given[name])

    return __init__
