"""What is said of one family of models before anything starts.

Megatron has no counterpart; see the package.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training.argument_checks import check_layers
from minimegatron.training.argument_utils import flags_by_name
from minimegatron.training.data_checks import check_data

Check = Callable[[argparse.Namespace], None]


@dataclass(frozen=True)
class FamilyChecks:
    """How the arguments of one family are checked."""

    program: str
    """What trains it, for messages."""
    sections: tuple[str, ...] = ()
    """Sections of `training.config` that are for it, of those that are not for all."""
    unused: tuple[str, ...] = ()
    """Arguments of these sections that are refused all the same, by one of the checks."""
    checks: tuple[Check, ...] = ()
    """Each raises ValueError with one sentence: the flags, the numbers, what to change."""
    check_layers: Callable[[argparse.Namespace, TransformerConfig], None] = check_layers
    """Whether every chunk gets a whole number of layers."""
    check_data: Check = check_data
    """Whether the data is there, and every split that the run asks for has some of it."""


def check_unused(unused: Mapping[str, tuple[Any, str]], args: argparse.Namespace) -> None:
    """Nothing is asked for that a family would not do.

    `unused` has for an argument the value that means nothing, and why no other can be used.
    """
    for name, (nothing, why) in unused.items():
        value = args.__dict__[name]
        if value != nothing:
            given = f"is {value}" if type(value) is not bool else "is given"
            raise ValueError(f"{flags_by_name()[name]} {given}, but {why}")
