"""The real function beside the student's, once the student's is right.

Reads source files only: torch-free. Megatron has no counterpart.
"""

import ast
import importlib.util
from itertools import zip_longest
from pathlib import Path

from minimegatron.exercises.exercise import Exercise

MOST_LINES = 45
"""Of a real function that is shown; of a longer one, its place is said."""
GAP = "  |  "


def beside(exercise: Exercise, path: Path, width: int = 100) -> str:
    """Both, in two columns where they fit into `width`; and one question. "" if there is neither."""
    parts = [_pair(symbol, path, width) for symbol in exercise.real]
    if exercise.question:
        parts.append(f"A question: {exercise.question}")
    return "\n\n".join(parts)


def _pair(symbol: str, path: Path, width: int) -> str:
    file, real = _found(symbol)
    name = symbol.rpartition(".")[2]
    where = f"{symbol}, {file.name}:{real.lineno}"
    theirs = _lines(file, real)
    mine = _definition(ast.parse(path.read_text(encoding="utf-8", errors="replace")), [name])
    if len(theirs) > MOST_LINES:
        return f"The real one has {len(theirs)} lines: {where}"
    own = [] if mine is None else _lines(path, mine)
    column = max((len(line) for line in own), default=0)
    if own and column + len(GAP) + max(map(len, theirs)) <= width:
        rows = zip_longest(own, theirs, fillvalue="")
        heads = f"{'yours'.ljust(column)}{GAP}{where}"
        return "\n".join(
            [heads, *(f"{left.ljust(column)}{GAP}{right}".rstrip() for left, right in rows)]
        )
    return "\n".join([f"The real one, {where}:", *(f"    {line}".rstrip() for line in theirs)])


def _found(symbol: str) -> tuple[Path, ast.AST]:
    """The file that defines `symbol`, and its definition. Raises ValueError if there is none."""
    words = symbol.split(".")
    for number in range(len(words) - 1, 0, -1):
        file = _file_of(words[:number])
        if file is not None:
            node = _definition(ast.parse(file.read_text(encoding="utf-8")), words[number:])
            if node is not None:
                return file, node
    raise ValueError(f"{symbol} is not defined in the package")


def _file_of(words: list[str]) -> Path | None:
    # From the package's folder on, since to look for a module would import what is around it.
    (top,) = importlib.util.find_spec(words[0]).submodule_search_locations
    folder = Path(top, *words[1:])
    for file in (folder.with_suffix(".py"), folder / "__init__.py"):
        if file.is_file():
            return file
    return None


def _definition(tree: ast.AST, names: list[str]) -> ast.AST | None:
    for name in names:
        inside = (node for node in tree.body if getattr(node, "name", None) == name)
        tree = next(inside, None)
        if tree is None:
            return None
    return tree


def _lines(file: Path, node: ast.AST) -> list[str]:
    """The definition's lines without its docstring, moved to the left."""
    source = file.read_text(encoding="utf-8", errors="replace").splitlines()
    first = node.body[0]
    skipped: set[int] = set()
    if len(node.body) > 1 and ast.get_docstring(node) is not None:
        skipped = set(range(first.lineno, first.end_lineno + 1))
    numbers = [n for n in range(node.lineno, node.end_lineno + 1) if n not in skipped]
    return [source[n - 1][node.col_offset :] for n in numbers]
