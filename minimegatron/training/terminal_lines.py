"""Lines of the log that fit the terminal they are read on; a file gets them as they are.

Torch-free. Megatron has no counterpart.
"""

import shutil
import sys


def fitted(message: str) -> str:
    """`message` for standard output: there, if it is a terminal, no line is wider than it."""
    if sys.stdout is None or not sys.stdout.isatty():
        return message
    return fit(message, shutil.get_terminal_size().columns)


def fit(message: str, columns: int) -> str:
    """The message, with lines of more than `columns` characters broken.

    A line of figures is broken between two of them, any other between two words; a rule is cut.
    What follows stands three characters further in than the line itself.

    >>> print(fit(" iteration 10/60 | lm loss 5.2456 | 77 ms/step", 40))
     iteration 10/60 | lm loss 5.2456
        | 77 ms/step
    >>> fit("-" * 50, 40) == "-" * 40
    True
    """
    return "\n".join(_broken(line, columns) for line in message.split("\n"))


def _broken(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    if not line.strip("-"):
        return line[:columns]
    indent = " " * (len(line) - len(line.lstrip()))
    separator = " | " if " | " in line else " "
    first, *others = line.lstrip().split(separator)
    lines = [indent + first]
    for piece in others:
        if len(lines[-1]) + len(separator) + len(piece) <= columns:
            lines[-1] += separator + piece
        else:
            lines.append(f"{indent}   {(separator + piece).lstrip()}")
    return "\n".join(lines)
