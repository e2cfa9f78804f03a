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
from pathlib import Path

from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.source import wanted_names

SAME_CODE = "the same code as the reference solution"
CATALOG = "minimegatron.exercises.catalog"
TOO_DEEP = "its code is nested too deep to be looked at"
MOST_SOURCE = 200_000
"""Characters; the longest solution has a few thousand."""
UNUSUAL = (
    *("exec", "eval", "compile", "open", "__import__", "__builtins__"),
    *(
        "builtins",
        "ctypes",
        "gc",
        "importlib",
        "inspect",
        "linecache",
        "pickle",
        "pkgutil",
        "runpy",
    ),
    *("socket", "subprocess", "io.open", "os.fork", "os.open", "os.popen", "os.system", "os._exit"),
    *("os.kill", "pathlib", "sys.modules", "sys.setprofile", "sys.settrace", "sys._getframe"),
    *("threading.setprofile", "threading.settrace", "torch.load", "types.CodeType"),
    "types.FunctionType",
)
"""Names that no exercise needs, and by which a file can look at what it should not."""
UNUSUAL_ATTRIBUTES = (
    *("__builtins__", "__closure__", "__code__", "__globals__", "__subclasses__", "__wrapped__"),
    *("f_back", "f_globals", "f_locals"),
)
MOST_COMMON = 3
"""So many names of one's own may be the same by chance."""
_parsing = threading.Lock()


def remarks_on(exercise: Exercise, source: str) -> tuple[str, ...]:
    """What a look at the code suggests to have a look at. Never fails."""
    if len(source) > MOST_SOURCE:
        return (f"it has {len(source)} characters, and was not looked at",)
    try:
        code = _parse(source)
        is_copied = _is_copied(exercise, code, source)
        same = (SAME_CODE,) if is_copied else _copies_of_ours(exercise, code)
        return same + remarks_on_names(exercise, code) + remarks_on_tools(exercise, code)
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


def _copies_of_ours(exercise: Exercise, code: ast.Module) -> tuple[str, ...]:
    """Which of its functions are the package's, word for word, and not by chance."""
    ours, theirs = _functions(_ours(exercise)), _functions(code)
    same = [
        name
        for name in wanted_names(exercise)
        if name in ours and name in theirs and _bare(ours[name]) == _bare(theirs[name])
    ]
    own_names = set().union(*(_names(ours[name]) for name in same))
    return tuple(
        f"{name} is the package's own code" for name in same if len(own_names) > MOST_COMMON
    )


def _ours(exercise: Exercise) -> ast.Module:
    """The file of the package that holds what the student writes again."""
    names = exercise.mirrors.split(".")
    for length in range(len(names), 1, -1):
        file = Path(__file__).parents[3].joinpath(*names[:length]).with_suffix(".py")
        if file.is_file():
            return _parse(file.read_text(encoding="utf-8"))
    return ast.Module([], [])


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _bare(tree: ast.AST) -> str:
    """The code without comments, docstrings and layout."""
    for node in _with_docstring(tree):
        node.body = node.body[1:]
    return ast.dump(tree)


def _with_docstring(tree: ast.AST) -> Iterator[ast.AST]:
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


def _names(tree: ast.AST) -> set[str]:
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


def remarks_on_tools(exercise: Exercise, code: ast.Module) -> tuple[str, ...]:
    """Which means it uses that no exercise needs: it may read what it should not, or change it."""
    allowed = set().union(*(_tools(_parse(_text(exercise, name))) for name in ("stub", "solution")))
    tools = _tools(code)
    found = [
        name for name in dict.fromkeys(UNUSUAL + UNUSUAL_ATTRIBUTES) if name in tools - allowed
    ]
    return (f"it uses {', '.join(found)}, which this exercise does not need",) if found else ()


def _tools(tree: ast.Module) -> set[str]:
    """Those of the unusual names that the code uses."""
    paths = {f"{path}." for path in _paths(tree)}
    words = _strings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            paths.add(f"{node.id}.")
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
    found = {name for name in UNUSUAL if any(path.startswith(f"{name}.") for path in paths)}
    return found | words.intersection(UNUSUAL_ATTRIBUTES)


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
    """The dotted path of everything that the code imports, reaches from there, or names in a string."""
    return _paths(tree) | _strings(tree)


def _paths(tree: ast.Module) -> set[str]:
    """The dotted path of everything that the code imports, or reaches from there."""
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
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (path := _path(node, bound)):
            found.add(path)
    return found


def _strings(tree: ast.Module) -> set[str]:
    """Every text in the code. Docstrings may say what they like."""
    docstrings = {id(node.body[0].value) for node in _with_docstring(tree)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    }


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
