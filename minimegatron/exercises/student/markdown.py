"""A page or a hint for the terminal: wrapped, with headings, lists and code told apart.

Torch-free. Megatron has no counterpart.
"""

import shutil
import sys

from rich.console import Console
from rich.markdown import Markdown

from minimegatron.exercises.room import plain_text

MOST_WIDTH = 96
"""Longer lines are hard to read, however wide the terminal is."""


def print_markdown(text: str) -> None:
    """Prints it as wide as the terminal allows, in colours on a terminal that has them."""
    width = min(shutil.get_terminal_size((MOST_WIDTH, 24)).columns, MOST_WIDTH)
    console = Console(width=width)
    with console.capture() as captured:
        console.print(Markdown(text, code_theme="ansi_dark", hyperlinks=False))
    lines = (line.rstrip() for line in captured.get().splitlines())
    print(plain_text.for_stream("\n".join(lines).strip("\n"), sys.stdout))
