"""What a configuration's field says of itself, once.

Torch-free. Megatron has no counterpart; it writes most knobs twice.

The string below a field is its flag's help, up to the first empty line.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

THE_SAME = object()
"""Stands for the field's default, which may be None."""


@dataclass(frozen=True, kw_only=True)
class Knob:
    """What is said of a field beside its type, default and text: limits, and how it is given.

    Attributes:
        name: replaces the usual name, `--` and `dest` with dashes. A boolean that is True by default
            needs one, since its flag turns it off.
        dest: the argument's name, `args.DEST`, where it is not the field's.
        section: of `training.config`, for a field of `core`. A field without a section has no flag.
        given: the command line's default, where it is not the field's. For a boolean None means that
            the flag has a twin, `--no-...`.
        help: the flag's words, where those below the field are not right for it.
        required: the command line has no default.
        may_be_unset: in core the default is taken although it is outside the limits; it means that
            nobody needs the field, and whoever does refuses it.
        minimum, above, below: limits; `minimum` is allowed, the open bounds are not.
        nargs: words that a list takes, as for `argparse`.
        reads: makes a value of one such word; None for the list's type.
        is_derived: an argument without a flag, worked out from others. `name` is for messages.
        compared: a checkpoint must have the same value; or (argument, value): unless that argument
            has that value.
    """

    name: str | None = None
    dest: str | None = None
    section: str | None = None
    given: Any = THE_SAME
    help: str | None = None
    required: bool = False
    may_be_unset: bool = False
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    nargs: int | str | None = None
    reads: Callable[[str], Any] | None = None
    is_derived: bool = False
    compared: bool | tuple[str, Any] = False


def knob(default: Any = None, **about: Any) -> Any:
    """A dataclass field with a `Knob`."""
    return dataclasses.field(default=default, metadata={"knob": Knob(**about)})


def derived(default: Any = None, **about: Any) -> Any:
    """An argument without a flag, worked out from the others before anything starts."""
    return knob(default, is_derived=True, **about)


# -- Values --


def check_limits(name: str, value: Any, limits: Knob) -> None:
    """Raises ValueError for a number outside its limits; None is within all."""
    if value is None:
        return
    if limits.minimum is not None and not value >= limits.minimum:
        raise ValueError(f"{name} is {value}; give {limits.minimum} or more")
    if limits.above is not None and not value > limits.above:
        raise ValueError(f"{name} is {value}; give more than {limits.above}")
    if limits.below is not None and not value < limits.below:
        raise ValueError(f"{name} is {value}; give less than {limits.below}")


def check_values(config: Any) -> None:
    """Raises ValueError for a field of `config` outside its limits, or none of its choices."""
    choices = _choices(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        limits = field.metadata.get("knob", Knob())
        if not (limits.may_be_unset and value == field.default):
            check_limits(field.name, value, limits)
        if field.name in choices and value not in choices[field.name]:
            words = " or ".join(repr(choice) for choice in choices[field.name] if choice)
            raise ValueError(f"{field.name} {value!r} is unknown; use {words}")


@functools.cache
def _choices(config: type) -> dict[str, tuple]:
    """By field, what a Literal allows."""
    found = {}
    for name, hint in typing.get_type_hints(config).items():
        kinds = (hint, *typing.get_args(hint))
        literals = [typing.get_args(k) for k in kinds if typing.get_origin(k) is typing.Literal]
        if literals:
            found[name] = (*literals[0], *([None] if type(None) in kinds else []))
    return found
