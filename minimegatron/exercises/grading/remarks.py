"""What the teacher is told to look at in a student's file: found by reading it, not by running it.

Called by: `grade`. Torch-free. Megatron has no counterpart.

A remark is no proof. What the stub or the reference solution itself does is never remarked on.
"""

import ast
import io
import threading
import tokenize
import warnings
from collections.abc import Iterator
from functools import cache

from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.source import wanted_names

SAME_CODE = "the same code as the reference solution"
CATALOG = "minimegatron.exercises.catalog"
TOO_DEEP = "its code is nested too deep to be looked at"
MOST_SOURCE = 200_000
"""Characters; the longest solution has a few thousand."""
MOST_COMMON = 3
"""So many names of one's own may be the same by chance."""
_parsing = threading.Lock()


def remarks_on(exercise: Exercise, source: str) -> tuple[str, ...]:
    """What a look at the code suggests to have a look at. Never fails."""
    if len(source) > MOST_SOURCE:
        return (f"it has {len(source)} characters, and was not looked at",)
    try:
        code = _parse(source)
        same = (SAME_CODE,) if _is_copied(exercise, code, source) else ()
        return same + remarks_on_names(exercise, code)
    except (RecursionError, MemoryError):
        return (TOO_DEEP,)
    except (SyntaxError, ValueError):
        return ()
    except Exception as error:
        return (f"it could not be looked at: {type(error).__name__}",)


# -- The same code --


def _is_copied(exercise: Exercise, code: ast.Module, source: str) -> bool:
    """Whether it is the solution, and not by chance.

    Short answers are alike. So it takes a line of the solution's own comments, or several names that
    the stub does not have.
    """
    solution, stub = _text(exercise, "solution"), _text(exercise, "stub")
    if _bare(code) != _bare(_parse(solution)):
        return False
    own_words = _words(solution) - _words(stub)
    own_names = _names(_parse(solution)) - _names(_parse(stub))
    return len(own_names) > MOST_COMMON or bool(own_words & _words(source))


def _bare(tree: ast.Module) -> str:
    """The code without comments, docstrings and layout."""
    for node in _with_docstring(tree):
        node.body = node.body[1:]
    return ast.dump(tree)


def _with_docstring(tree: ast.Module) -> Iterator[ast.AST]:
    kinds = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            yield node


def _words(source: str) -> set[str]:
    """The lines of its comments and docstrings, as far as they say something."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = [token.string.strip("# ") for token in tokens if token.type == tokenize.COMMENT]
    for node in _with_docstring(_parse(source)):
        lines += [line.strip() for line in ast.get_docstring(node, clean=False).splitlines()]
    return {line for line in lines if len(line) > 20}


def _names(tree: ast.Module) -> set[str]:
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


# -- Names of the package --


def remarks_on_names(exercise: Exercise, code: ast.Module) -> tuple[str, ...]:
    """Which of the package's names it uses, though it was to write them."""
    used = _used(code) - _allowed(exercise)
    remarks = []
    if any(name == CATALOG or name.startswith(f"{CATALOG}.") for name in used):
        remarks.append("it imports from the catalogue, where the solutions are")
    remarks += [
        f"it uses {name}, which it was to write"
        for name in _to_write(exercise)
        if name in used or f"{name.rpartition('.')[0]}.*" in used
    ]
    return tuple(remarks)


@cache
def _allowed(exercise: Exercise) -> frozenset[str]:
    """What the stub and the solution use."""
    given = [_used(_parse(_text(exercise, name))) for name in ("stub", "solution")]
    return frozenset().union(*given)


def _to_write(exercise: Exercise) -> list[str]:
    """The dotted paths of what the student writes again, without what the stub gives them."""
    mirrors = exercise.mirrors
    if not mirrors:
        return []
    paths = [mirrors, *(f"{mirrors}.{name}" for name in wanted_names(exercise))]
    return [path for path in paths if path not in _allowed(exercise)]


def _used(tree: ast.Module) -> set[str]:
    """The dotted path of everything that the code imports, reaches from there, or names in a string.

    Docstrings may name what they like.
    """
    bound: dict[str, str] = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.add(alias.name)
                first = alias.name.partition(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                found.add(path)
                bound[alias.asname or alias.name] = path
    docstrings = {id(node.body[0].value) for node in _with_docstring(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (path := _path(node, bound)):
            found.add(path)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set() if id(node) in docstrings else {node.value}
    return found


def _path(node: ast.expr, bound: dict[str, str]) -> str | None:
    """What `a.b.c` means, if `a` was imported."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return None
    return ".".join([bound[node.id], *reversed(names)])


# -- Reading --


def _text(exercise: Exercise, name: str) -> str:
    return (exercise.folder / f"{name}.py").read_text(encoding="utf-8")


def _parse(source: str) -> ast.Module:
    # Python warns of a student's odd strings in the teacher's terminal; the switch is for all threads.
    with _parsing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)
