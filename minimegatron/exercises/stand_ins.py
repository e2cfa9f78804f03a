"""Something that stands for torch where a student's file is loaded for a part that needs none.

Called by: `alone_side`. Megatron has no counterpart.

To import torch takes seconds. A file whose functions count or order things needs it only to be
loaded: for annotations, base classes and decorators. `install` makes `import torch` give modules
whose every attribute is a class that can be used for all of these, and computes nothing.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

STOOD_FOR = ("torch", "numpy")


class _AnythingMeta(type):
    """The class of stand-ins. A class that only derives from one is an ordinary class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or not cls._is_stand_in():
            raise AttributeError(name)
        return stand_in(f"{cls.__name__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls._is_stand_in():
            return super().__call__(*args, **kwargs)
        # A decorator gives back what it decorates; one with arguments is asked a second time.
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return stand_in(f"{cls.__name__}()")

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def _is_stand_in(cls) -> bool:
        return "stands_for" in vars(cls)


def stand_in(name: str) -> type:
    """A class that stands for `name`."""
    return _AnythingMeta(name, (), {"stands_for": name, "__init__": lambda *_, **__: None})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = stand_in(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in STOOD_FOR:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing has to run."""


def install() -> None:
    """From now on `import torch` gives a stand-in in this process."""
    sys.meta_path.insert(0, _Finder())
