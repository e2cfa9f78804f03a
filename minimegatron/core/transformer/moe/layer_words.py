"""Which layers have experts, as a word of the command line.

Megatron has no such file; `moe_freq_type` of its arguments lets Python evaluate the word.
"""

import argparse
import ast
import contextlib
import operator
from typing import Any

LONGEST_LIST = 10_000


def number_or_list(word: str) -> int | list[int]:
    """A whole number, or a list of them as Python writes it, with + and *; nothing else is run.

    Raises ArgumentTypeError for another word.

    >>> number_or_list("2"), number_or_list("[0,0,1,1]"), number_or_list("([0]*1+[1]*3)*2")
    (2, [0, 0, 1, 1], [0, 1, 1, 1, 0, 1, 1, 1])
    """
    with contextlib.suppress(ValueError):
        return int(word)
    try:
        return _value(ast.parse(word.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        raise argparse.ArgumentTypeError(
            f"{word!r:.80} is no whole number, and no list such as [0,1,1] or ([0]*1+[1]*3)*2, of "
            f"at most {LONGEST_LIST} numbers; put a list in quotes"
        ) from None


_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.List(elts=elements):
            return [operator.index(_value(element)) for element in elements]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operation, right=right):
            left, right = _value(left), _value(right)
            if isinstance(operation, ast.Mult) and _length(left) * _length(right) > LONGEST_LIST:
                raise ValueError
            return _OPERATORS[type(operation)](left, right)
    raise TypeError


def _length(value: int | list[int]) -> int:
    return len(value) if isinstance(value, list) else value
