"""What is recorded of Megatron's arguments and fields that are left out, and what a call of it means.

Torch-free. Megatron has no counterpart. The record is left_out.json, beside this file (`make rosetta`).
"""

import dataclasses
import difflib
import functools
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("left_out.json")


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """One argument that is left out, and the values of it that are taken.

    Attributes:
        values: Megatron's default, and what means the same; for an argument that Megatron requires,
            what means the same as our body.
        any_value: every value means the same here, such as who logs.
        said: more to say where a value is refused.
    """

    values: tuple[Any, ...] = ()
    any_value: bool = False
    said: str = ""

    def takes(self, value: Any) -> bool:
        """Whether `value` is one of `values`. Enumerations and dtypes are recorded as text."""
        return self.any_value or any(_is_same(value, known) for known in self.values)


def _is_same(value: Any, known: Any) -> bool:
    if isinstance(known, str) and not isinstance(value, str):
        return str(value) == known
    if isinstance(value, tuple):  # the record has lists for both
        value = list(value)
    # Not `==` alone: that of a tensor gives a tensor, and False == 0, which may be a chunk's number.
    if type(value) not in (bool, int, float, str, list, dict):
        return value is known
    return value == known and isinstance(value, bool) == isinstance(known, bool)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What is recorded of one of our functions or classes."""

    order: tuple[str, ...]
    """All arguments of Megatron's that may be given by position, in Megatron's order."""
    left_out: dict[str, LeftOut]


@functools.cache
def record() -> dict[str, Recorded]:
    """By our own name, without the package's: `core.parallel_state.initialize_model_parallel`."""
    return {
        name: Recorded(
            tuple(about["order"]),
            {
                argument: _left_out(words, about.get("said", {}).get(argument, ""))
                for argument, words in about["left out"].items()
            },
        )
        for name, about in recorded_symbols().items()
    }


def _left_out(words: Any, said: str) -> LeftOut:
    if isinstance(words, dict):
        return LeftOut(tuple(words["any"]), any_value=True)
    return LeftOut(tuple(words), said=said)


@functools.cache
def names_by_module() -> dict[str, list[str]]:
    """What is recorded, by module; a method is `Class.method`."""
    found: dict[str, list[str]] = {}
    for name in recorded_symbols():
        module, symbol = split_name(name)
        found.setdefault(f"minimegatron.{module}", []).append(symbol)
    return found


@functools.cache
def recorded_symbols() -> dict[str, dict[str, Any]]:
    """By our own name, without the package's, what the file says of it; nothing without the file."""
    return json.loads(RECORD.read_text(encoding="utf-8"))["symbols"] if RECORD.exists() else {}


def split_name(name: str) -> tuple[str, str]:
    """The module of a recorded name, and the rest.

    >>> split_name("core.rerun_state_machine.RerunStateMachine.validate_result")
    ('core.rerun_state_machine', 'RerunStateMachine.validate_result')
    >>> split_name("core.utils.get_model_config")
    ('core.utils', 'get_model_config')
    """
    *path, owner, symbol = name.split(".")
    if owner[0].isupper():
        return ".".join(path), f"{owner}.{symbol}"
    return ".".join([*path, owner]), symbol


def name_of(target: Any) -> str:
    """Under which `target` is recorded."""
    return f"{target.__module__}.{target.__qualname__}".removeprefix("minimegatron.")


# -- Arguments --


def without_left_out(
    name: str, own: frozenset[str], args: tuple, given: dict[str, Any], num_bound: int
) -> tuple[tuple, dict[str, Any]]:
    """The call by names, without what is left out; a call that Megatron refuses too stays as it is."""
    about = record().get(name)
    if about is None:
        return args, given
    bound, positional = args[:num_bound], args[num_bound:]
    named = dict(zip(about.order, positional, strict=False))
    if len(positional) > len(about.order) or named.keys() & given.keys():
        return args, given
    named |= given
    for argument, value in named.items():
        if argument not in own and argument in about.left_out:
            check_left_out(_title(name), argument, value, about.left_out[argument])
    return bound, {x: value for x, value in named.items() if x in own or x not in about.left_out}


def _title(name: str) -> str:
    """What an error calls it: `get_model_config`, or `GPTModel.forward`."""
    return split_name(name)[1]


def check_left_out(owner: str, name: str, value: Any, left_out: LeftOut) -> None:
    """Raises ValueError for a value that is not taken."""
    if not left_out.takes(value):
        advice = " or ".join(repr(known) for known in left_out.values)
        raise ValueError(
            f"{owner}: {name} is {value!r:.80}, but it is Megatron's and not implemented here; "
            + (f"leave it at {advice}" if advice else "leave it out")
            + (f". {left_out.said}" if left_out.said else "")
        )


# -- Fields of configurations --


def known_fields(
    config: type, given: Mapping[str, Any], also: Iterable[str] = ()
) -> dict[str, Any]:
    """`given`, without the fields that are left out.

    Decides for everything that makes a configuration from names. A name is known if it is a field of
    `config`, or one of `also`, or recorded for `config` or a base of it.

    Raises:
        ValueError: a name is unknown; a field that is left out has a value that is not taken.
    """
    ours = {*also, *(field.name for field in dataclasses.fields(config))}
    left_out = _fields_left_out(config)
    for name, value in given.items():
        if name in ours:
            continue
        if name not in left_out:
            near = difflib.get_close_matches(name, ours | set(left_out), n=1)
            advice = f"did you mean {near[0]!r}?" if near else "remove it"
            raise ValueError(f"{config.__name__} has no field {name!r}; {advice}")
        check_left_out(config.__name__, name, value, left_out[name])
    return {name: value for name, value in given.items() if name in ours}


def _fields_left_out(config: type) -> dict[str, LeftOut]:
    found: dict[str, LeftOut] = {}
    for base in reversed(config.__mro__):
        if name_of(base) in record():
            found |= record()[name_of(base)].left_out
    return found


def default_of_field(self: Any, name: str) -> Any:
    """A configuration's `__getattr__`, for what nobody set: Megatron's default, of a field left out.

    Raises AttributeError for a name that Megatron does not have either.
    """
    about = _fields_left_out(type(self)).get(name)
    if about is None or not about.values:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    default = about.values[0]
    if isinstance(default, list):
        return list(default)
    # An enumeration or a dtype, recorded as text: the configuration's own file knows its first word.
    first, _, rest = default.partition(".") if isinstance(default, str) else ("", "", "")
    for base in type(self).__mro__:
        if rest and first in vars(sys.modules[base.__module__]):
            return getattr(vars(sys.modules[base.__module__])[first], rest)
    return default
