"""Which lines of an excerpt the page speaks of; the others are folded. And which comments stand beside.

Called by: `quotes`. Calls: `ast` and `tokenize`.
"""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

SHORT = 12
"""An excerpt of so many lines is shown as a whole."""
LONG = 6
"""A statement of more lines is not shown as a whole."""
FEWEST = 4
"""So few lines are not worth a fold: they stay."""


class Part(NamedTuple):
    """Lines that stand together: shown, or folded."""

    is_folded: bool
    numbers: list[int]


class Row(NamedTuple):
    """Comments, and the lines of code that they stand above."""

    comments: list[int]
    code: list[int]


def parts_of(lines: Sequence[str], numbers: Sequence[int], words: Iterable[str]) -> list[Part]:
    """The excerpt in parts: shown where it speaks of `words`, else folded.

    >>> source = ["def f(", "    a,", "    b,", "    c,", "    d,", "):", *["    a()"] * 9, "    b()"]
    >>> [(part.is_folded, len(part.numbers)) for part in parts_of(source, range(1, 17), ["b()"])]
    [(False, 1), (True, 4), (False, 1), (True, 9), (False, 1)]
    """
    if _num_full(lines, numbers) <= SHORT:
        return [Part(False, list(numbers))]
    shown = _spoken_of(lines, numbers, list(words))
    merged: list[Part] = []
    for is_shown, run in _runs(lines, numbers, shown):
        is_folded = not is_shown and _num_full(lines, run) >= FEWEST
        if merged and merged[-1].is_folded == is_folded:
            merged[-1].numbers.extend(run)
        else:
            merged.append(Part(is_folded, run))
    return merged


def _runs(
    lines: Sequence[str], numbers: Sequence[int], shown: set[int]
) -> Iterator[tuple[bool, list[int]]]:
    # A blank line goes with the line before it.
    belongs, last = {}, numbers[0]
    for n in numbers:
        last = n if lines[n - 1].strip() else last
        belongs[n] = last in shown
    for is_shown, run in groupby(numbers, key=belongs.get):
        yield is_shown, list(run)


def _num_full(lines: Sequence[str], numbers: Iterable[int]) -> int:
    return sum(bool(lines[n - 1].strip()) for n in numbers)


def _spoken_of(lines: Sequence[str], numbers: Sequence[int], words: list[str]) -> set[int]:
    """Statements that have one of the words, what encloses them, and the comments above these."""
    inside = set(numbers)
    source = "\n".join(lines)
    comments, statements = own_comments(source), _statements_of(source)
    shown: set[int] = set()
    for n in numbers:
        if not any(word in lines[n - 1] for word in words):
            continue
        shown.add(n)
        for node in statements:
            if _first(node) <= n <= node.end_lineno:
                head = _head(node, n, comments)
                shown.update(head, _branch(node, n, lines))
                shown.update(_above(min(head), comments))
        if n in comments:
            shown.update(_above(n, comments), _below(n, comments))
    return shown & inside


@lru_cache(maxsize=4)
def _statements_of(source: str) -> list[ast.AST]:
    every = ast.walk(ast.parse(source))
    return [node for node in every if isinstance(node, ast.stmt | ast.ExceptHandler)]


def _first(node: ast.AST) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def _head(node: ast.AST, n: int, comments: set[int]) -> set[int]:
    """A simple statement; of a compound one what stands before its body.

    Of a definition the decorators, the name, the end of the signature, and line `n` of it. Of a
    statement of many lines the first, and line `n`.
    """
    body = getattr(node, "body", None)
    if not body:
        every = range(node.lineno, node.end_lineno + 1)
        return set(every) if len(every) <= LONG else {every[0], n}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        last = _end_of_signature(node)
        return {*range(_first(node), node.lineno + 1), last} | ({n} if n <= last else set())
    last = max(node.lineno, _first(body[0]) - 1)
    return set(range(node.lineno, last + 1)) - comments


def _end_of_signature(node: ast.AST) -> int:
    arguments = getattr(node, "args", None)
    if arguments is None:
        return node.lineno
    inner = [a.end_lineno for a in ast.walk(arguments) if hasattr(a, "end_lineno")]
    returns = getattr(node, "returns", None)
    last = max([node.lineno, *inner])
    # The closing bracket stands in a line of its own where each argument does.
    closing = last + 1 if inner and last > node.lineno else last
    return max(closing, returns.end_lineno if returns else closing)


def _branch(node: ast.AST, n: int, lines: Sequence[str]) -> set[int]:
    """The `else:` or `finally:` of the block that line `n` is in."""
    for name in ("orelse", "finalbody"):
        block = getattr(node, name, None)
        if block and _first(block[0]) <= n <= block[-1].end_lineno:
            number = _first(block[0]) - 1
            while not lines[number - 1].strip().startswith(("else", "finally")):
                if number <= node.lineno:
                    return set()  # an `elif`, which is a statement of its own
                number -= 1
            return {number}
    return set()


@lru_cache(maxsize=4)
def own_comments(source: str) -> set[int]:
    """Numbers of the lines that hold a comment and nothing else."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#")
    }


def _above(n: int, comments: set[int]) -> Iterator[int]:
    while n - 1 in comments:
        n -= 1
        yield n


def _below(n: int, comments: set[int]) -> Iterator[int]:
    while n + 1 in comments:
        n += 1
        yield n


def rows_of(numbers: Sequence[int], comments: set[int]) -> list[Row]:
    """The lines in rows: each begins with the comments that its code stands under.

    >>> rows_of([1, 2, 3, 4, 5], {2, 4})
    [Row(comments=[], code=[1]), Row(comments=[2], code=[3]), Row(comments=[4], code=[5])]
    """
    rows: list[Row] = []
    for n in numbers:
        if not rows or (n in comments and rows[-1].code):
            rows.append(Row([], []))
        (rows[-1].comments if n in comments else rows[-1].code).append(n)
    return rows
