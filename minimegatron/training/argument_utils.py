"""Dataclass in, command-line flags out.

Counterpart: `ArgumentGroupFactory` of `megatron.training.argument_utils`.

Everything a user can get wrong here raises ValueError with one line; nothing prints or exits.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable

from minimegatron.training import older_arguments
from minimegatron.training.config import SECTIONS


class OneLineParser(argparse.ArgumentParser):
    """argparse, except that an error is a ValueError of one line instead of a page of usage.

    `checks`: who adds flags may append functions `(args)`, which raise ValueError for values that
    cannot work; they are called when all else is right.
    """

    def __init__(self, *args: typing.Any, **kwargs: typing.Any):
        super().__init__(*args, **kwargs)
        self.checks: list[Callable[[typing.Any], None]] = []

    def error(self, message: str) -> typing.NoReturn:
        """Raises ValueError(message)."""
        flag, _, problem = message.removeprefix("argument ").partition(": ")
        if problem == "expected one argument":
            problem += f"; one that begins with - is given as {flag}=-..."
        raise ValueError(f"{flag}: {problem}" if problem else flag)


class ArgumentGroupFactory:
    """Makes the argparse group of one config dataclass."""

    def __init__(self, config: type):
        self.config = config
        self.types = typing.get_type_hints(config)

    def build_group(self, parser: argparse.ArgumentParser) -> None:
        """Adds one flag per field; derived fields get none."""
        group = parser.add_argument_group(self.config.__doc__)
        for field in dataclasses.fields(self.config):
            if not field.metadata["knob"].is_derived:
                group.add_argument(
                    flag_name(field), dest=field.name, default=field.default, **self._options(field)
                )

    def _options(self, field: dataclasses.Field) -> dict[str, typing.Any]:
        annotation = _without_none(self.types[field.name])
        options: dict[str, typing.Any] = {"help": self.help(field).replace("%", "%%")}
        if annotation is bool:
            if field.default is None:
                return options | {"action": argparse.BooleanOptionalAction}
            return options | {"action": "store_false" if field.default else "store_true"}
        if typing.get_origin(annotation) is typing.Literal:
            choices = typing.get_args(annotation)
            return options | {"choices": choices, "type": type(choices[0])}
        if typing.get_origin(annotation) is list:
            about = field.metadata["knob"]
            kind = about.reads or typing.get_args(annotation)[0]
            return options | {"type": kind, "nargs": about.nargs}
        return options | {"type": annotation}

    def help(self, field: dataclasses.Field) -> str:
        """The words of the field's flag."""
        config, name = field.metadata.get("core", (self.config, field.name))
        return field.metadata["knob"].help or _field_docstrings(config)[name]


def flag_name(field: dataclasses.Field) -> str:
    """`--num-layers` for the field `num_layers`, unless the field names its flag itself."""
    return field.metadata["knob"].name or "--" + field.name.replace("_", "-")


def _without_none(annotation: typing.Any) -> typing.Any:
    """Where core takes several types, the command line gives the first."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation)[0] if is_union else annotation


@functools.cache
def _field_docstrings(config: type) -> dict[str, str]:
    """The string below each field up to the first empty line, which Python itself throws away."""
    bases = [base for base in reversed(config.__mro__) if dataclasses.is_dataclass(base)]
    body = [node for base in bases for node in ast.parse(inspect.getsource(base)).body[0].body]
    return {
        field.target.id: " ".join(text.value.value.partition("\n\n")[0].split())
        for field, text in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


@functools.cache
def flags_by_name() -> dict[str, str]:
    """Field name to flag, also for the names that core's own checks use in their messages."""
    return {
        name: flag_name(field)
        for config in SECTIONS.values()
        for field in dataclasses.fields(config)
        for name in (field.name, *field.metadata.get("core", ())[1:])
        if field.metadata["knob"].name or not field.metadata["knob"].is_derived
    }


def in_flags(message: str) -> str:
    """Core's message in the user's words: every `field_name` in it becomes its `--flag-name`."""
    for phrase, flags in PHRASES.items():
        message = message.replace(phrase, flags)
    names = flags_by_name()
    word = r"(?<![-\w])[A-Za-z]+(?:_[A-Za-z]+)+\b"
    return re.sub(word, lambda match: names.get(match[0], match[0]), message)


PHRASES = {
    "fp16 and bf16 are": "--fp16 and --bf16 are",
    "is for fp16 or bf16": "is for --fp16 or --bf16",
    "set add_bias_linear=False": "add --disable-bias-linear",
    "data path: ": "--data-path: ",
    "pipeline layout: ": "--pipeline-model-parallel-layout: ",
    "split '": "--split '",
    "num_layers_in_first/last_pipeline_stage": (
        "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
    ),
    "account_for_embedding/loss_in_pipeline_split": (
        "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split"
    ),
}
"""Where core names two fields at once, or no field at all."""


def refuse_unknown(words: list[str], parser: argparse.ArgumentParser) -> None:
    """Raises ValueError for arguments the parser did not take, with the nearest flag if one is near."""
    if not words:
        return
    flag = words[0].split("=")[0]
    older = older_arguments.advice_for(flag)
    if older is not None:
        raise ValueError(f"{flag}: {older}")
    for action in parser._actions:
        if action.nargs == 0 and action.const is False and flag == f"--{_in_dashes(action.dest)}":
            raise ValueError(
                f"{flag}: it is on, unless {action.option_strings[0]} is given; drop it"
            )
    known = [flag for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
    advice = f"did you mean {near[0]}?" if near else "--help lists all flags"
    raise ValueError(f"unknown argument {words[0]}; {advice}")


def _in_dashes(dest: str) -> str:
    return dest.replace("_", "-")
