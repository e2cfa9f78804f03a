"""The command line: `minimegatron <command> ...`, or `python -m minimegatron <command> ...`.

It imports only the module of the command that is named, so that commands which need no torch start
at once, also where torch is absent. Megatron has no such module. Training is not a command here:
`torchrun -m minimegatron.pretrain_gpt`.

A command is a module with `add_arguments(parser)`, `run(args)` and `EXAMPLES`, and a row in
`COMMANDS`. `run` returns an exit code (None for 0); a ValueError or OSError it raises ends in one line
and exit code 2, as do arguments that do not parse. A command that needs arguments and is given none
prints its usage and the examples; where it has many options, `USAGE` says what is needed.
"""

import argparse
import difflib
import errno
import importlib
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from minimegatron import __version__
from minimegatron.commands.help_text import with_examples
from minimegatron.core.output import open_streams

COMMANDS = {
    "convert": "import or export Hugging Face weights",
    "exercises": "write pieces of the chain; checked on ranks",
    "groups": "print every process group of a parallel layout",
    "layout": "print which rank holds which layers",
    "notebooks": "put the notebooks into a folder of yours",
    "plan": "show what every stage does when in a step",
    "preprocess": "turn text into a dataset to train on",
    "trace": "show what a recorded run did, beside its plan",
}
"""Command -> what it does. Its module is `commands/NAME_command.py`."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage above it."""

    is_empty = False
    """Whether the command was given no argument at all; then its usage and examples help more."""

    def error(self, message: str) -> NoReturn:
        if self.is_empty:
            print(f"{self.format_usage()}\n{self.epilog}", file=sys.stderr)
        if message.endswith("expected one argument"):
            flag = message.removeprefix("argument ").partition(":")[0]
            message += f"; one that begins with - is given as {flag}=-..."
        raise SystemExit(_refuse(self.prog, message))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Without arguments, prints the commands."""
    open_streams()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output, `head` perhaps, has seen enough.
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        return _refuse("minimegatron", f"standard output: {error.strerror}")
    return code


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    if argv == ["--version"]:
        print(_versions())
        return 0
    name = argv[0]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"use one of: {', '.join(COMMANDS)}"
        return _refuse("minimegatron", f"there is no command {name!r}; {advice}")
    module = importlib.import_module(f"minimegatron.commands.{name}_command")
    program = f"minimegatron {name}"
    usage = getattr(module, "USAGE", None)
    parser = _Parser(
        prog=program,
        usage=usage and f"{program} {usage}",
        description=COMMANDS[name],
        allow_abbrev=False,
        **with_examples(program, module.EXAMPLES),
    )
    parser.is_empty = len(argv) == 1
    module.add_arguments(parser)
    arguments = parser.parse_args(argv[1:])
    try:
        return module.run(arguments) or 0
    except (ValueError, OSError) as error:
        is_of_output = isinstance(error, OSError) and error.filename is None
        if is_of_output and error.errno in (errno.ENOSPC, errno.EPIPE):
            raise
        return _refuse(parser.prog, str(error))


def _drop_output() -> None:
    """What is still to be printed goes nowhere; else Python would try again at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        ["usage: minimegatron <command> [options]", "", "commands:", *lines, ""]
        + ["`minimegatron <command> --help` lists a command's options."]
        + ["`minimegatron --version` prints what a report of a mistake needs."]
    )


def _versions() -> str:
    """Of the package and of what it runs on, in one line; torch's from its metadata, unimported."""
    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "no torch"
    python = f"Python {platform.python_version()}"
    return f"minimegatron {__version__}, {torch}, {python}, {platform.system()}"


def _refuse(program: str, message: str) -> int:
    print(f"{program}: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
