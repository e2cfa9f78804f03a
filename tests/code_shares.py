"""Which lines of a Python file a run has executed: a record of `code_recorder` beside the source.

A *line* is a line of code: no blank line, comment or docstring. Each belongs to the innermost function
around it, from its first decorator on, or to none. A statement is executed as a whole: all its lines,
if Python has reported one of them. An `else:` or a `finally:` is executed if what follows is.
"""

import ast
import importlib
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "tools"))
code_lines = cache(importlib.import_module("source.code_count").code_lines)

Lines = frozenset[int]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Shares:
    """Lines of one file or of several: each line of a file is in one of the first four."""

    executed: int = 0
    """With the signatures of functions that were entered."""
    dead: int = 0
    """Never executed, of functions that were entered."""
    never_entered: int = 0
    """Of functions that were never entered, with their signatures."""
    rest: int = 0
    """Outside functions: imports, fields, tables."""
    signatures: int = 0
    """Of all functions, with decorators; they are in `executed` and `never_entered` too."""
    num_functions: int = 0
    unused: list[str] = field(default_factory=list)
    """Names of the functions that were never entered."""

    @property
    def num_lines(self) -> int:
        return self.executed + self.dead + self.never_entered + self.rest

    def add(self, other: "Shares") -> None:
        """Takes the lines of other files too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Part(NamedTuple):
    """A statement; or of one that has others in it, what is before them."""

    lines: Lines
    told_by: Lines
    """Lines that tell that it was executed, each for itself."""


class _Function(NamedTuple):
    name: str
    first_line: int
    signature: Lines
    parts: list[Part]
    lines: Lines


def shares_of(
    source: str, entered: Set[int], executed: Set[int], whole: Set[str] = Lines()
) -> Shares:
    """The lines of one file, by what a record says of it.

    Args:
        entered: first lines of functions.
        executed: lines that Python has reported.
        whole: names of functions whose lines all count as executed.
    """
    functions = functions_of(source)
    shares = Shares(num_functions=len(functions))
    shares.rest = len(code_lines(source).difference(*(one.lines for one in functions)))
    for function in functions:
        shares.signatures += len(function.signature)
        if function.name.rpartition(".")[2] in whole:
            shares.executed += len(function.lines)
        elif function.first_line not in entered:
            shares.never_entered += len(function.lines)
            shares.unused.append(function.name)
        else:
            done = function.signature.union(
                *(part.lines for part in function.parts if executed & part.told_by)
            )
            shares.executed += len(done)
            shares.dead += len(function.lines - done)
    return shares


@cache
def functions_of(source: str) -> list[_Function]:
    """All functions of a file, those in classes and in other functions too."""
    code = code_lines(source)
    return [_function(node, name, code) for name, node in _named(ast.parse(source))]


def num_statements(source: str) -> int:
    """All statements of a file, also those inside others; without docstrings."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return sum(not _is_text(node) for node in nodes)


def _is_text(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def _named(node: ast.AST, inside: str = "") -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{inside}{child.name}"
            if isinstance(child, Function):
                yield name, child
            yield from _named(child, f"{name}.")
        else:
            yield from _named(child, inside)


def _function(node: Function, name: str, code: Lines) -> _Function:
    first, end = _first_line(node), node.end_lineno + 1
    body = max(node.lineno + 1, _first_line(node.body[0]))
    inner = [range(_first_line(child), child.end_lineno + 1) for _, child in _named(node)]
    signature = code.intersection(range(first, body))
    lines = code.intersection(range(first, end)).difference(*inner)
    of_body = lines - signature
    parts = [Part(part.lines & of_body, part.told_by) for part in _parts(node.body, body)]
    return _Function(name, first, signature, parts, lines)


def _parts(statements: list[ast.AST], begin: int) -> list[Part]:
    """Of statements that follow each other, each with those inside it after it.

    Lines from `begin` to the first statement, such as an `else:`, belong to the first. So does a
    statement that Python compiles to nothing to the next one: nothing would tell of it.
    """
    parts: list[Part] = []
    for statement in statements:
        if _is_without_code(statement):
            continue
        first, blocks = _first_line(statement), _blocks(statement)
        end = _first_line(blocks[0][0]) - 1 if blocks else statement.end_lineno
        end = max(first, end)
        own, inner = Lines(range(first, end + 1)), []
        for block in blocks:
            inner += _parts(block, end + 1)
            end = _last_line(block[-1])
        # Python need not report a `try:` or a `case _:`, but what is in it.
        told_by = own.union(*(part.told_by for part in inner[:1]))
        parts += [Part(own.union(range(begin, first)), told_by), *inner]
        begin = end + 1
    return parts


def _blocks(statement: ast.AST) -> list[list[ast.AST]]:
    if isinstance(statement, Function):
        return []
    names = ("body", "handlers", "orelse", "finalbody", "cases")
    return [block for name in names if (block := getattr(statement, name, []))]


def _first_line(node: ast.AST) -> int:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])


def _last_line(node: ast.AST) -> int:
    return _last_line(node.body[-1]) if isinstance(node, ast.match_case) else node.end_lineno


def _is_without_code(statement: ast.AST) -> bool:
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, ast.Global | ast.Nonlocal)
