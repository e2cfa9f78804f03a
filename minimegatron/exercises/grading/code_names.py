"""What a Python file names: modules that it imports, what it reaches from there, texts, variables.

Reads code, and runs none. Megatron has no counterpart.
"""

import ast
import contextlib
import importlib
import os
import threading
import warnings
from collections.abc import Iterator
from functools import cache
from types import ModuleType

HARMLESS = (
    *("__future__", "abc", "argparse", "array", "bisect", "cmath", "collections", "contextlib"),
    *("copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "graphlib"),
    *("heapq", "itertools", "json", "logging", "math", "numbers", "numpy", "operator", "os"),
    *("pdb", "pprint", "random", "re", "statistics", "string", "struct", "sys", "textwrap"),
    *("time", "timeit", "torch", "traceback", "types", "typing", "warnings"),
)
"""Modules that any exercise may import. Any other is remarked on, unless stub or solution has it."""
_parsing = threading.Lock()


def paths_of(tree: ast.Module) -> set[str]:
    """The dotted path of everything that the code imports, or reaches from there."""
    imported, bound = imports_of(tree)
    found = set(imported)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (path := _path(node, bound)):
            found.add(path)
    return set(map(resolved, found))


@cache
def resolved(path: str) -> str:
    """Where it leads: Python's own modules have other modules in them.

    >>> resolved("json.codecs.open"), resolved("random._os.system"), resolved("os.path.join")
    ('codecs.open', 'os.system', 'os.path.join')
    """
    names = path.split(".")
    # Nothing else is imported: that would run it.
    if names[0] not in HARMLESS or names[0] in ("numpy", "torch", "__future__"):
        return path
    module = importlib.import_module(names[0])
    for place, name in enumerate(names[1:], 1):
        inner = getattr(module, name, None)
        if not isinstance(inner, ModuleType) or (module is os and name == "path"):
            return ".".join([module.__name__, *names[place:]])
        module = inner
    return module.__name__


def imports_of(tree: ast.Module) -> tuple[list[str], dict[str, str]]:
    """The dotted path of everything that the code imports; and what each name means by it."""
    found: list[str] = []
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append(alias.name)
                first = alias.name.partition(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            module = "a relative import" if node.level else node.module
            for alias in node.names:
                path = f"{module}.{alias.name}"
                found.append(path)
                bound[alias.asname or alias.name] = path
    for node in ast.walk(tree):
        # Another name for what is imported.
        if isinstance(node, ast.Assign) and (path := _path(node.value, bound)):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    bound.setdefault(target.id, path)
    return found, bound


def _path(node: ast.expr, bound: dict[str, str]) -> str | None:
    """What `a.b.c` means, if `a` was imported."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return None
    return ".".join([bound[node.id], *reversed(names)])


def strings_of(tree: ast.Module) -> set[str]:
    """Every text in the code. Docstrings may say what they like."""
    docstrings = {id(node.body[0].value) for node in with_docstring(tree)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    }


def own_names(tree: ast.AST) -> set[str]:
    """Every variable that it sets, every argument and function."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def with_docstring(tree: ast.AST) -> Iterator[ast.AST]:
    """Every part of the code that has a docstring."""
    kinds = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            yield node


def parse(source: str) -> ast.Module:
    """The code as a tree. Raises SyntaxError, and what else Python's parser may."""
    with quiet():
        return ast.parse(source)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that Python prints of odd code."""
    # Python warns of a student's odd strings in the teacher's terminal; the switch is for all threads.
    with _parsing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
