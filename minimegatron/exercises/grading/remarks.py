"""What the teacher is told to look at in a student's file: found by reading it, not by running it.

Called by: `grade`. Torch-free. Megatron has no counterpart.

A remark is no proof. What the stub or the reference solution itself does is never remarked on.
"""

import ast
import contextlib
import io
import symtable
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
HARMLESS = (
    *("__future__", "abc", "bisect", "cmath", "collections", "contextlib", "copy", "dataclasses"),
    *("decimal", "enum", "fractions", "functools", "heapq", "itertools", "json", "logging", "math"),
    *(
        "numbers",
        "numpy",
        "operator",
        "os",
        "pprint",
        "random",
        "re",
        "statistics",
        "string",
        "sys",
    ),
    *("textwrap", "time", "torch", "types", "typing", "warnings"),
)
"""Modules that any exercise may import. Any other is remarked on, unless stub or solution has it."""
UNUSUAL_NAMES = (
    *("exec", "eval", "compile", "open", "__import__", "__builtins__", "__loader__", "__spec__"),
)
"""What is there without an import, and no exercise needs."""
UNUSUAL = (
    *("builtins", "ctypes", "gc", "importlib", "inspect", "linecache", "pickle", "pkgutil"),
    *("runpy", "socket", "subprocess", "pathlib", "io.open", "os.*", "os.execv", "os.execve"),
    *("os.fork", "os.kill", "os.open", "os.popen", "os.posix_spawn", "os.system", "os._exit"),
    *("sys.*", "sys.meta_path", "sys.modules", "sys.path", "sys.path_hooks", "sys.setprofile"),
    *("sys.settrace", "sys._getframe", "threading.setprofile", "threading.settrace", "torch.hub"),
    *("torch.load", "torch.multiprocessing", "torch.package", "torch.utils.cpp_extension"),
    *("types.*", "types.CodeType", "types.FunctionType"),
)
"""What no exercise needs of the harmless modules; and others, which these have imported."""
UNUSUAL_ATTRIBUTES = (
    *("__builtins__", "__closure__", "__code__", "__file__", "__globals__", "__loader__"),
    *("__path__", "__self__", "__spec__", "__subclasses__", "__wrapped__"),
    *("f_back", "f_globals", "f_locals"),
)
MOST_COMMON = 3
"""So many names of one's own may be the same by chance."""
MOST_LISTED = 10
ROOT = Path(__file__).parents[3]
_parsing = threading.Lock()


def remarks_on(exercise: Exercise, source: str) -> tuple[str, ...]:
    """What a look at the code suggests to have a look at. Never fails."""
    if len(source) > MOST_SOURCE:
        return (f"it has {len(source)} characters, and was not looked at",)
    try:
        code = _parse(source)
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
        file = ROOT.joinpath(*names[:length]).with_suffix(".py")
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
    known = {name for text in given for name in _tools(_parse(text), text)}
    known.update(_used_ours(exercise, code))
    found = [name for name in _tools(code, source) if not (name in known or _is_in_catalog(name))]
    if len(found) > MOST_LISTED:
        found[MOST_LISTED:] = [f"{len(found) - MOST_LISTED} more"]
    return (f"it uses {', '.join(found)}, which this exercise does not need",) if found else ()


def _tools(tree: ast.Module, source: str) -> list[str]:
    """The modules that the code uses and not every exercise may use, and the unusual names."""
    paths = [f".{path}.".replace("._", ".") for path in _paths(tree)]
    words = {word for text in _strings(tree) for word in text.split(".")}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = _names_of_others(tree, source)
    found = _modules(tree)
    found += [name for name in UNUSUAL_NAMES if name in names]
    for name in UNUSUAL:
        # Also in `dataclasses.inspect` and in `random._os.system`.
        path = f".{name}.".replace("._", ".")
        if name in names or any(path in one for one in paths):
            found.append(name)
    found += [name for name in UNUSUAL_ATTRIBUTES if name in words]
    return list(dict.fromkeys(found))


def _modules(tree: ast.Module) -> list[str]:
    """The modules that the code imports, or reaches from there; without the harmless ones."""
    imported, _ = _imports(tree)
    modules = [_module(path) for path in imported]
    reached = {_module(path) for path in _paths(tree)}
    # In `a.b.c`, `a` and `a.b` are only the way.
    ways = {one.rpartition(".")[0] for one in reached}
    while more := {way.rpartition(".")[0] for way in ways} - ways:
        ways |= more
    modules += sorted(reached - ways)
    return [one for one in modules if one not in HARMLESS]


def _module(path: str) -> str:
    """Which module a dotted path leads to: of the package's, the very module.

    >>> _module("os.path.join"), _module("minimegatron.planner.plan.plan")
    ('os', 'minimegatron.planner.plan')
    """
    names = path.split(".")
    if names[0] == "minimegatron":
        for length in range(2, len(names) + 1):
            place = ROOT.joinpath(*names[:length])
            if not place.is_dir():
                is_file = place.with_suffix(".py").is_file()
                return ".".join(names[: length if is_file else length - 1])
        return path
    return names[0]


def _names_of_others(tree: ast.Module, source: str) -> set[str]:
    """Those of the unusual names that are not the file's own: Python's, or from an `import *`."""
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found = read.intersection(UNUSUAL) - _names(tree)
    if suspect := read.intersection(UNUSUAL_NAMES):
        with _quiet():
            tables = list(_tables(symtable.symtable(source, "<student>", "exec")))
        found |= {
            name
            for name in suspect
            if any(_may_be_python_s(table, name) for table in tables)
            and not _is_bound_at_top(tree, name)
        }
    return found


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for inner in table.get_children():
        yield from _tables(inner)


def _may_be_python_s(table: symtable.SymbolTable, name: str) -> bool:
    """Whether the name, where it is read here, may mean Python's own.

    It cannot where it is a variable of a function: without a value, that is an error.
    """
    if name not in table.get_identifiers():
        return False
    symbol = table.lookup(name)
    is_variable = isinstance(table, symtable.Function) and not symbol.is_global()
    return symbol.is_referenced() and not is_variable


def _is_bound_at_top(tree: ast.Module, name: str) -> bool:
    """Whether the file gives the name its meaning before it is read anywhere, and for good."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    is_deleted = any(isinstance(node.ctx, ast.Del) for node in nodes) or any(
        isinstance(node, ast.ExceptHandler) and node.name == name for node in ast.walk(tree)
    )
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            # `_bare` has taken its docstring away.
            line = statement.body[0].lineno if statement.body else statement.end_lineno
        elif isinstance(statement, ast.Assign) and name in _names(ast.Tuple(statement.targets)):
            line = statement.end_lineno
        else:
            continue
        reads = [node.lineno for node in nodes if isinstance(node.ctx, ast.Load)]
        return not is_deleted and all(read > line for read in reads)
    return False


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
    imported, bound = _imports(tree)
    found = set(imported)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (path := _path(node, bound)):
            found.add(path)
    return found


def _imports(tree: ast.Module) -> tuple[list[str], dict[str, str]]:
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
    return found, bound


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
    with _quiet():
        return ast.parse(source)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Python warns of a student's odd strings in the teacher's terminal; the switch is for all threads.
    with _parsing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
