"""What the teacher is told to look at in a student's file: found by reading it, not by running it.

Torch-free. Megatron has no counterpart.

A remark is no proof. What the stub or the reference solution itself does is never remarked on.
"""

import ast
import io
import tokenize
from functools import cache

from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.grading.code_names import (
    own_names,
    parse,
    paths_of,
    strings_of,
    with_docstring,
)
from minimegatron.exercises.grading.tools import ROOT, tools_of
from minimegatron.exercises.room.reading import wanted_names

SAME_CODE = "the same code as the reference solution"
CATALOG = "minimegatron.exercises.catalog"
TOO_DEEP = "its code is nested too deep to be looked at"
MOST_SOURCE = 200_000
"""Characters; the longest solution has a few thousand."""
MOST_COMMON = 3
"""So many names of one's own may be the same by chance."""
MOST_LISTED = 10


def remarks_on(exercise: Exercise, source: str) -> tuple[str, ...]:
    """What a look at the code suggests to have a look at. Never fails."""
    if len(source) > MOST_SOURCE:
        return (f"it has {len(source)} characters, and was not looked at",)
    try:
        code = parse(source)
        is_copied = _is_copied(exercise, code, source)
        same = (SAME_CODE,) if is_copied else _copies_of_ours(exercise, code)
        return same + remarks_on_names(exercise, code) + remarks_on_tools(exercise, code, source)
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
    if _bare(code) != _bare(parse(solution)):
        return False
    own_words = _words(solution) - _words(stub)
    names = own_names(parse(solution)) - own_names(parse(stub))
    return len(names) > MOST_COMMON or bool(own_words & _words(source))


def _copies_of_ours(exercise: Exercise, code: ast.Module) -> tuple[str, ...]:
    """Which of its functions are the package's, word for word, and not by chance."""
    ours, theirs = _functions(_ours(exercise)), _functions(code)
    same = [
        name
        for name in wanted_names(exercise)
        if name in ours and name in theirs and _bare(ours[name]) == _bare(theirs[name])
    ]
    names = set().union(*(own_names(ours[name]) for name in same))
    return tuple(f"{name} is the package's own code" for name in same if len(names) > MOST_COMMON)


def _ours(exercise: Exercise) -> ast.Module:
    """The file of the package that holds what the student writes again."""
    names = exercise.mirrors.split(".")
    for length in range(len(names), 1, -1):
        file = ROOT.joinpath(*names[:length]).with_suffix(".py")
        if file.is_file():
            return parse(file.read_text(encoding="utf-8"))
    return ast.Module([], [])


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _bare(tree: ast.AST) -> str:
    """The code without comments, docstrings and layout."""
    for node in with_docstring(tree):
        node.body = node.body[1:]
    return ast.dump(tree)


def _words(source: str) -> set[str]:
    """The lines of its comments and docstrings, as far as they say something."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = [token.string.strip("# ") for token in tokens if token.type == tokenize.COMMENT]
    for node in with_docstring(parse(source)):
        lines += [line.strip() for line in ast.get_docstring(node, clean=False).splitlines()]
    return {line for line in lines if len(line) > 20}


# -- Names of the package --


def remarks_on_names(exercise: Exercise, code: ast.Module) -> tuple[str, ...]:
    """Which of the package's names it uses, though it was to write them."""
    remarks = []
    if any(_is_in_catalog(name) for name in _used(code) - _allowed(exercise)):
        remarks.append("it imports from the catalogue, where the solutions are")
    remarks += [f"it uses {name}, which it was to write" for name in _used_ours(exercise, code)]
    return tuple(remarks)


def _is_in_catalog(name: str) -> bool:
    return f"{name}.".startswith(f"{CATALOG}.")


def _used_ours(exercise: Exercise, code: ast.Module) -> list[str]:
    """What it uses of what it was to write."""
    used = _used(code) - _allowed(exercise)
    return [
        name
        for name in _to_write(exercise)
        if name in used or f"{name.rpartition('.')[0]}.*" in used
    ]


def remarks_on_tools(exercise: Exercise, code: ast.Module, source: str) -> tuple[str, ...]:
    """Which means it uses that no exercise needs: it may read what it should not, or change it."""
    given = [_text(exercise, name) for name in ("stub", "solution")]
    known = {name for text in given for name in tools_of(parse(text), text)}
    known.update(_used_ours(exercise, code), exercise.older_imports)
    found = [name for name in tools_of(code, source) if not (name in known or _is_in_catalog(name))]
    if len(found) > MOST_LISTED:
        found[MOST_LISTED:] = [f"{len(found) - MOST_LISTED} more"]
    return (f"it uses {', '.join(found)}, which this exercise does not need",) if found else ()


@cache
def _allowed(exercise: Exercise) -> frozenset[str]:
    """What the stub and the solution use."""
    given = [_used(parse(_text(exercise, name))) for name in ("stub", "solution")]
    return frozenset().union(*given)


def _to_write(exercise: Exercise) -> list[str]:
    """The dotted paths of what the student writes again, without what the stub gives them."""
    mirrors = exercise.mirrors
    if not mirrors:
        return []
    paths = [mirrors, *(f"{mirrors}.{name}" for name in wanted_names(exercise))]
    return [path for path in paths if path not in _allowed(exercise)]


def _used(tree: ast.Module) -> set[str]:
    """The dotted path of everything that the code imports, reaches from there, or names in a string."""
    return paths_of(tree) | strings_of(tree)


# -- Reading --


def _text(exercise: Exercise, name: str) -> str:
    return (exercise.folder / f"{name}.py").read_text(encoding="utf-8")
