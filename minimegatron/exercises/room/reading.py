"""What can be said of a student's file by reading it: before any process starts.

Torch-free. Megatron has no counterpart.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from minimegatron.exercises.exercise import Exercise
from minimegatron.exercises.room import verdict
from minimegatron.exercises.room.verdict import Verdict

MOST_BYTES = 1 << 20
CATALOG = "minimegatron.exercises.catalog"
MOST_SHOWN = 200
"""Characters of the line that Python cannot read."""


def check_source(exercise: Exercise, path: Path) -> Verdict | None:
    """Why the file cannot be run at all; None if it can."""
    try:
        source = path.read_bytes()
        if len(source) > MOST_BYTES:
            return _missing(f"{path.name} has {len(source)} bytes; no solution needs {MOST_BYTES}")
        tree = ast.parse(source, filename=str(path))
    except FileNotFoundError:
        return _missing(f"{path} does not exist; `minimegatron exercises start {exercise.number}`")
    except (OSError, ValueError) as error:
        return _missing(f"{path} cannot be read: {error}")
    except SyntaxError as error:
        return Verdict(verdict.SYNTAX, _syntax_words(error, path))
    if (taken := next(_from_catalog(tree), None)) is not None:
        return Verdict(verdict.FORGED, catalog_words(taken, path.name))
    defined, older = _defined(tree), dict(exercise.older_names)
    wanted = wanted_names(exercise)
    lost = [name for name in wanted if not {name, older.get(name)} & defined]
    if lost:
        names = " and ".join(f"`{name}`" for name in lost)
        return _missing(
            f"{path.name} no longer defines {names}. The check calls it by this name: keep the "
            f"stub's names. `minimegatron exercises reset {exercise.number}` brings the stub back."
        )
    return None


def wanted_names(exercise: Exercise) -> list[str]:
    """What the exercise's stub leaves to write."""
    return unwritten_names(exercise.folder / "stub.py")


def unwritten_names(stub: Path) -> list[str]:
    """The stub's functions and classes that raise NotImplementedError."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and _is_unwritten(node)]


def returning_names(stub: Path) -> list[str]:
    """What of the stub is to be written and must return something: `function`, `Class.method`."""
    found = []
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        is_class = isinstance(node, ast.ClassDef)
        for one in node.body if is_class else [node]:
            if isinstance(one, ast.FunctionDef) and _is_unwritten(one) and not _may_be_none(one):
                found.append(f"{node.name}.{one.name}" if is_class else one.name)
    return found


def _may_be_none(node: ast.FunctionDef) -> bool:
    returns = ast.unparse(node.returns) if node.returns else ""
    return returns == "None" or returns.endswith("| None")


def _is_unwritten(node: ast.AST) -> bool:
    raised = [inner.exc for inner in ast.walk(node) if isinstance(inner, ast.Raise)]
    return any(exc is not None and "NotImplementedError" in ast.unparse(exc) for exc in raised)


def _defined(tree: ast.Module) -> set[str]:
    """Every name that the file binds at its top level, also within an `if`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def _from_catalog(tree: ast.Module) -> Iterator[str]:
    """What it imports from the catalogue, by dotted path."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if f"{name}.".startswith(f"{CATALOG}."))


def catalog_words(name: str, file: str) -> str:
    """What is said of a file that takes an answer out of the catalogue."""
    return (
        f"{file} imports {name}, and in the catalogue are the solutions and what checks them. Write "
        f"it yourself, in {file}; `minimegatron exercises hint` helps."
    )


def _missing(text: str) -> Verdict:
    return Verdict(verdict.MISSING, text)


def _syntax_words(error: SyntaxError, path: Path) -> str:
    lines = [f"{path.name}:{error.lineno}: {error.msg}"]
    if error.text:
        text = error.text.rstrip("\n")
        lines += ["", f"    {text[:MOST_SHOWN]}"]
        if error.offset and error.offset <= MOST_SHOWN:
            lines.append("    " + " " * (error.offset - 1) + "^")
    return "\n".join(lines)
