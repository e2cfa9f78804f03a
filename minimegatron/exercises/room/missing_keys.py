"""A KeyError in words: which dict of the student's line has no such key, and which keys it has.

Torch-free. Megatron has no counterpart.
"""

import ast
import linecache
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

MOST_KEYS, MOST_KEY = 12, 60
"""Keys that are shown, and characters of each."""


def missing_key_words(error: KeyError, path: str) -> str:
    """What to say of a KeyError that a line of the file at `path` raised; "" if nothing is known.

    Only names, and attributes of names, are looked at: nothing is called.
    """
    frame, number = _last_in(error.__traceback__, path)
    if frame is None or len(error.args) != 1:
        return ""
    key = error.args[0]
    for expression in _looked_up(linecache.getline(path, number).strip()):
        holder = _value(expression, frame)
        if type(holder) is dict and key not in holder:
            there = [_short(one) for one in list(holder)[:MOST_KEYS]]
            more = ", ..." if len(holder) > MOST_KEYS else ""
            has = f"it has {', '.join(there)}{more}" if there else "it is empty"
            return f"`{ast.unparse(expression)}` has no {_short(key)} here; {has}"
    return ""


def _last_in(trace: TracebackType | None, path: str) -> tuple[FrameType | None, int]:
    """The innermost frame of the file, and its line."""
    found: tuple[FrameType | None, int] = (None, 0)
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            found = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    return found


def _looked_up(line: str) -> Iterator[ast.expr]:
    """`x` of each `x[...]` in a line, also where a statement goes on in the next one."""
    for text in (line, f"{line} pass", line.removeprefix("el") + " pass", line.rstrip(",")):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        yield from (node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript))
        return


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """The value of a name or of a name's attribute, in the frame; None for anything else."""
    if isinstance(expression, ast.Name):
        name = expression.id
        return frame.f_locals.get(name, frame.f_globals.get(name))
    if isinstance(expression, ast.Attribute):
        holder = _value(expression.value, frame)
        # Not `getattr`: a property would run.
        return getattr(holder, "__dict__", {}).get(expression.attr)
    return None


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | tuple) else f"a {type(value).__name__}"
    return text if len(text) <= MOST_KEY else f"{text[:MOST_KEY]}..."
