"""Which tool the first word of a command means: what the doors `record` and `tell` have in common.

Called by: `record`, `tell`. Calls: the tool's `main`, with the words that are left in `sys.argv`.
"""

import ast
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

from source.places import TOOLS


def run_command(about: str, commands: Mapping[str, str]) -> int:
    """Runs the tool that the first word names; without a name that is known, prints all names.

    Args:
        about: the door's docstring; its first line heads the list.
        commands: word -> module, as `records.restart`.
    """
    door, *words = sys.argv
    if not words or words[0] not in commands:
        print("\n".join([about.splitlines()[0], "", *lines_of(commands)]))
        return 0 if words in (["-h"], ["--help"]) else 2
    name, *rest = words
    sys.argv = [f"{Path(door).name} {name}", *rest]
    return importlib.import_module(commands[name]).main() or 0


def lines_of(commands: Mapping[str, str]) -> list[str]:
    """Each word, and what its tool says of itself first."""
    width = max(map(len, commands))
    return [f"  {name:{width}}  {first_line(module)}" for name, module in commands.items()]


def first_line(module: str) -> str:
    """Of a tool's docstring, read and not imported."""
    path = TOOLS.joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
