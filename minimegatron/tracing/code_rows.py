"""A function's text in rows: lines that ran, and folds of lines that did not, each with a word on them.

Torch-free. Megatron has no counterpart.

A statement ran if any of its lines did. A comment goes with the statement below it. Of a signature the
first and the last line are shown; arguments and docstring are folds.
"""

import ast
import textwrap
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

RAN, NOT_RUN, DOCSTRING, ARGUMENTS = "ran", "not run", "docstring", "arguments"
PLAIN = (DOCSTRING, ARGUMENTS)
MOST_WORDS = 44
"""Characters said of a fold."""

FEW = 2
"""So few lines of arguments are not worth a fold."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


class Fold(NamedTuple):
    """Lines of a function that one step did not run; counted from 1 within its text."""

    first: int
    last: int
    words: str

    @property
    def num_lines(self) -> int:
        return self.last - self.first + 1


class CodeRows(NamedTuple):
    """All lines that are in no fold are shown."""

    num_lines: int
    folds: tuple[Fold, ...]
    counts: dict[int, int]
    """Of statements that not every call ran: their first line -> how many did."""
    ends: dict[int, int]
    """Line -> the last one of its statement, where that is another: there stands what it calls."""
    exits: dict[int, int]
    """Line of a `with` -> the last one of its block: there stands what its end calls."""
    loops: dict[int, int]
    """Line within a loop -> the line at which the innermost one begins."""

    def shown(self) -> list[int]:
        """Numbers of the lines that are in no fold."""
        folded = {n for fold in self.folds for n in range(fold.first, fold.last + 1)}
        return [n for n in range(1, self.num_lines + 1) if n not in folded]


def rows_of(text: str, ran: dict[int, int], num_calls: int) -> CodeRows:
    """A function's rows.

    Args:
        text: of the function, from its first decorator on, indented as it stands.
        ran: line of the text -> number of calls that ran it.
        num_calls: how often it was called.

    >>> text = "def f(x):\\n    if x:\\n        raise ValueError(x)\\n    return x\\n"
    >>> rows_of(text, {2: 3, 4: 3}, 3).folds
    (Fold(first=3, last=3, words='raise ValueError'),)
    """
    statements = _read(text)
    lines = text.rstrip("\n").split("\n")
    states = [""] * (len(lines) + 1)
    counts: dict[int, int] = {}
    for statement in statements:
        most = max((ran.get(n, 0) for n in statement.lines), default=0)
        if statement.state or most:
            state = statement.state or RAN
        else:
            state = RAN if any(n in ran for n in statement.inside) else NOT_RUN
        for n in statement.lines:
            states[n] = state
        if 0 < most < num_calls and state == RAN:
            counts[statement.lines[0]] = most
    _fill(states)
    folds = []
    for state, run in groupby(range(1, len(states)), key=states.__getitem__):
        numbers = list(run)
        if state != RAN:
            words = state if state in PLAIN else _words(statements, numbers, lines)
            folds.append(Fold(numbers[0], numbers[-1], words))
    ends = {n: s.lines[-1] for s in statements for n in s.lines if n != s.lines[-1]}
    exits = {n: s.inside[-1] for s in statements if s.is_with for n in s.lines}
    # What is nested comes later, and counts.
    loops = {n: s.lines[0] for s in statements if s.is_loop for n in s.inside}
    return CodeRows(len(lines), tuple(folds), counts, ends, exits, loops)


class _Statement(NamedTuple):
    """A simple statement, or the head of a compound one."""

    lines: tuple[int, ...]
    inside: tuple[int, ...] = ()
    """Lines of its blocks: what has no line of its own ran if these did."""
    state: str = ""
    """Where it does not depend on what ran."""
    words: str = ""
    is_with: bool = False
    is_loop: bool = False


@lru_cache(maxsize=1024)
def _read(text: str) -> tuple[_Statement, ...]:
    try:
        (function,) = ast.parse(textwrap.dedent(text)).body
    except (SyntaxError, ValueError):
        function = None
    if not isinstance(function, FUNCTIONS):  # a lambda; or not Python at all
        lines = range(1, 1 + text.rstrip("\n").count("\n") + 1)
        return tuple(_Statement((n,), words="…") for n in lines)
    first = function.body[0]
    body = function.body
    found = list(_of_head(range(1, _first(first)), function.lineno))
    if _is_text(first):
        found.append(_Statement(_lines_of(first), state=DOCSTRING))
        body = body[1:]
    return (*found, *_of_block(body))


def _of_head(head: range, at: int) -> Iterator[_Statement]:
    """The signature, whose `def` is line `at`: up to its first line, arguments, the last line."""
    arguments = tuple(range(at + 1, head[-1]))
    is_folded = len(arguments) > FEW
    yield _Statement(tuple(range(1, at + 1)) if is_folded else tuple(head), state=RAN)
    if is_folded:
        yield _Statement(arguments, state=ARGUMENTS)
        yield _Statement((head[-1],), state=RAN)


def _of_block(block: Iterable[ast.AST]) -> Iterator[_Statement]:
    for node in block:
        yield from _of_node(node)


def _of_node(node: ast.AST) -> Iterator[_Statement]:
    blocks = [block for name in BLOCKS if (block := getattr(node, name, None))]
    if not blocks:
        # No code stands for these, so nothing is ever reported of them.
        if not isinstance(node, ast.Global | ast.Nonlocal) and not _is_text(node):
            yield _Statement(_lines_of(node), words=_words_of(node))
        return
    first, last = _first(node), _first(blocks[0][0]) - 1
    inside = tuple(range(last + 1, _end(node) + 1))
    own = tuple(range(first, max(first, last) + 1))
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        yield _Statement(own, words=f"def {node.name}")
        words = f"the lines of {node.name}: they stand where it is called"
        yield _Statement(inside, state=NOT_RUN, words=words)
        return
    is_with = isinstance(node, ast.With | ast.AsyncWith)
    is_loop = isinstance(node, ast.For | ast.AsyncFor | ast.While)
    yield _Statement(own, inside, words=_words_of(node), is_with=is_with, is_loop=is_loop)
    for before, block in zip([None, *blocks], blocks, strict=False):
        keyword = _end(before[-1]) + 1 if before else 0
        begins = _first(block[0])
        # `else:` and `finally:` are lines of their own; an `elif` or `except` is a statement.
        if before and keyword < begins and not isinstance(block[0], ast.ExceptHandler):
            lines = tuple(range(keyword, begins))
            yield _Statement(lines[-1:], tuple(range(begins, _end(block[-1]) + 1)))
        yield from _of_block(block)


def _first(node: ast.AST) -> int:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def _end(node: ast.AST) -> int:
    return _end(node.body[-1]) if isinstance(node, ast.match_case) else node.end_lineno


def _lines_of(node: ast.AST) -> tuple[int, ...]:
    return tuple(range(node.lineno, node.end_lineno + 1))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _fill(states: list[str]) -> None:
    """Comments and blank lines go with what follows them, the last with what they follow."""
    following = ""
    for n in range(len(states) - 1, 0, -1):
        following = states[n] = states[n] or following
    before = RAN
    for n in range(1, len(states)):
        before = states[n] = states[n] or before


# -- Words --


def _words(statements: Iterable[_Statement], numbers: list[int], lines: list[str]) -> str:
    """Of a fold: what its first statement does."""
    for statement in statements:
        if statement.lines and statement.lines[0] in numbers and statement.words:
            return _short(statement.words)
    return _short(lines[numbers[0] - 1].strip())


def _words_of(node: ast.AST) -> str:
    if isinstance(node, ast.Raise) and node.exc is not None:
        return f"raise {_called(node.exc) or ast.unparse(node.exc)}"
    if isinstance(node, ast.If | ast.While):
        return f"{type(node).__name__.lower()} {ast.unparse(node.test)}"
    if isinstance(node, ast.With):
        return f"with {ast.unparse(node.items[0].context_expr)}"
    if isinstance(node, ast.Try):
        return "try"
    if isinstance(node, ast.match_case):
        return f"case {ast.unparse(node.pattern)}"
    if isinstance(node, ast.ExceptHandler):
        return f"except {ast.unparse(node.type) if node.type else ''}".strip()
    value = getattr(node, "value", None)
    if not isinstance(node, ast.Return) and (name := _called(value)):
        return f"{name}()"
    return ast.unparse(node).partition("\n")[0]


def _called(node: ast.AST | None) -> str:
    """The name of what an expression calls, without arguments; "" if it is no call."""
    if not isinstance(node, ast.Call):
        return ""
    name = ast.unparse(node.func)
    return name if len(name) <= MOST_WORDS else name.rpartition(".")[2]


def _short(words: str) -> str:
    return words if len(words) <= MOST_WORDS else f"{words[: MOST_WORDS - 1].rstrip()}…"
