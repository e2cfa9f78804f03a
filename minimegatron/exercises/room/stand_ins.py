"""Something that stands for torch where a student's file is loaded for a part that needs none.

Megatron has no counterpart.

To import torch takes seconds. A file whose functions count or order things needs it only to be
loaded: for annotations, base classes and decorators. `install` makes `import torch` give modules
whose every attribute is a class that can be used for all of these, and computes nothing. Once the
file is loaded (`loaded`), whatever needs a value of such a class says that there is none.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

STOOD_FOR = ("torch", "numpy")
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul")
BITS = ("and", "xor", "lshift", "rshift")
ONE_SIDED = ("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "round")
CONVERSIONS = (
    *("int", "float", "complex", "index", "trunc", "floor", "ceil"),
    *("len", "iter", "reversed", "contains", "setitem", "delitem"),
)


class _Loading:
    """Whether students' files are still being loaded."""

    is_over = False


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
        is_one = len(args) == 1 and not kwargs and stood_for(args[0]) is None
        if is_one and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return stand_in(f"{cls.__name__}()")

    def __or__(cls, other: Any) -> Any:
        cls._refuse_value()
        return Any

    __ror__ = __or__

    def __getitem__(cls, key: Any) -> Any:
        cls._refuse_value()
        return cls

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *_: Any) -> None:
        """`with torch.no_grad():` around plain Python changes nothing."""

    def __bool__(cls) -> bool:
        # A file may ask torch.cuda.is_available() while it is loaded.
        if _Loading.is_over and cls._is_stand_in():
            cls._refuse()
        return True

    def __eq__(cls, other: Any) -> Any:
        if isinstance(other, int | float | list | tuple):
            cls._refuse_value(is_number_too=True)
        elif cls is not other:
            cls._refuse_value()
        return type.__eq__(cls, other)

    __hash__ = type.__hash__

    def __repr__(cls) -> str:
        # Shown in messages, so it must not refuse.
        return f"<{cls.__name__}>" if cls._is_stand_in() else type.__repr__(cls)

    def __str__(cls) -> str:
        cls._refuse_value()
        return repr(cls)

    def __format__(cls, spec: str) -> str:
        cls._refuse_value()
        return repr(cls)

    def _is_stand_in(cls) -> bool:
        return "stands_for" in vars(cls)

    def _refuse(cls) -> None:
        name = stood_for(cls)
        # TypeError, as a class that is taken for a number raises it.
        raise TypeError(used_words(name) if name else f"{cls.__name__} is a class, not a value")

    def _refuse_value(cls, is_number_too: bool = False) -> None:
        """Refuses what a call has given. Attributes are needed as they are, in annotations."""
        is_value = is_number_too or cls.__name__.endswith("()")
        if _Loading.is_over and cls._is_stand_in() and is_value:
            cls._refuse()


def _computing(cls: _AnythingMeta, *_: Any) -> Any:
    if _Loading.is_over or not cls._is_stand_in():
        cls._refuse()
    return cls


def _converting(cls: _AnythingMeta, *_: Any) -> Any:
    cls._refuse()


def _define_refusals() -> None:
    for name in (*OPERATORS, *BITS):
        setattr(_AnythingMeta, f"__{name}__", _computing)
        setattr(_AnythingMeta, f"__r{name}__", _computing)
    for name in ONE_SIDED:
        setattr(_AnythingMeta, f"__{name}__", _computing)
    for name in CONVERSIONS:
        setattr(_AnythingMeta, f"__{name}__", _converting)


_define_refusals()


def stand_in(name: str) -> type:
    """A class that stands for `name`."""
    return _AnythingMeta(name, (), {"stands_for": name, "__init__": lambda *_, **__: None})


def stood_for(value: Any) -> str | None:
    """The name that `value` stands for, up to the first call: numpy.minimum. None for other values."""
    if not isinstance(value, _AnythingMeta) or not value._is_stand_in():
        return None
    return vars(value)["stands_for"].partition("()")[0]


def used_words(name: str) -> str:
    """What to say where a value of `name` would be needed."""
    return f"{name} is used: this part is checked without numpy and torch; use plain Python"


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


def loaded() -> None:
    """From now on stand-ins refuse to be values."""
    _Loading.is_over = True
