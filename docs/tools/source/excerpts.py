"""Which lines a page quotes: whole statements, of one definition, with the words that it claims.

Called by: `quotes`, `macros`. Calls nothing.
"""

import ast
from collections.abc import Iterator, Sequence

Span = tuple[int, int]
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


class ExcerptError(ValueError):
    """The page asks for something that is not there, or is there more than once."""


def num_definitions(tree: ast.Module, symbol: str) -> int:
    """How often a qualified name is defined in a module.

    >>> tree = ast.parse("def f(): ...\\nclass A:\\n  def f(self): ...\\n  def f(self): ...")
    >>> num_definitions(tree, "f"), num_definitions(tree, "A.f")
    (1, 2)
    """
    found: list[ast.AST] = [tree]
    for part in symbol.split("."):
        found = [
            node
            for owner in found
            for node in ast.walk(owner)
            if node is not owner and part in _names(node) and _is_in(node, owner)
        ]
    return len(found)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = {ast.Assign: "targets", ast.AnnAssign: "target"}.get(type(node))
    found = getattr(node, targets, []) if targets else []
    return [t.id for t in (found if isinstance(found, list) else [found]) if hasattr(t, "id")]


def _is_in(node: ast.AST, owner: ast.AST) -> bool:
    """Whether it stands in the owner itself, not in a function or class inside it."""
    for child in ast.iter_child_nodes(owner):
        if child is node:
            return True
        opens = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not opens and isinstance(child, ast.stmt) and _is_in(node, child):
            return True
    return False


def cut_out(lines: Sequence[str], numbers: Sequence[int], start: str, end: str | None) -> list[int]:
    """Those of `numbers` from the statement with `start` to the end of the one with `end`.

    A comment counts as a statement. Raises ExcerptError if no line, or more than one, begins with the
    words (or has them), and if a statement would be cut.

    >>> source = ["def f():", "    g(", "        1", "    )", "    if x:", "        return"]
    >>> cut_out(source, range(1, 7), "1", None), cut_out(source, range(1, 7), "g(", "if x")
    ([2, 3, 4], [2, 3, 4, 5, 6])
    """
    whole = (numbers[0], numbers[-1])
    statements = [
        node
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, ast.stmt) and _contains(whole, _span(node))
    ]
    first, _ = _statement_at(_line_with(lines, numbers, start), statements, lines)
    _, last = _statement_at(_line_with(lines, numbers, end or start), statements, lines)
    if last < first:
        raise ExcerptError(f"{end!r} comes before {start!r}")
    for node in statements:
        span = _span(node)
        is_apart = span[1] < first or last < span[0]
        inside = any(_contains(block, (first, last)) for block in _blocks(node, lines))
        if not (is_apart or inside or _contains((first, last), span)):
            words = lines[span[0] - 1].strip()
            raise ExcerptError(f"it cuts the statement {words!r}, lines {span[0]} to {span[1]}")
    return [number for number in numbers if first <= number <= last]


def _line_with(lines: Sequence[str], numbers: Sequence[int], words: str) -> int:
    found = [n for n in numbers if lines[n - 1].strip().startswith(words)]
    found = found or [n for n in numbers if words in lines[n - 1]]
    if len(found) != 1:
        raise ExcerptError(f"{len(found) or 'no'} lines have {words!r}")
    return found[0]


def _span(node: ast.stmt) -> Span:
    decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
    return min([node.lineno, *decorators]), node.end_lineno


def _contains(outer: Span, inner: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _statement_at(number: int, statements: Sequence[ast.stmt], lines: Sequence[str]) -> Span:
    if lines[number - 1].strip().startswith("#"):
        return number, number
    around = [span for node in statements if _contains(span := _span(node), (number, number))]
    return min(around, key=lambda span: span[1] - span[0])


def _blocks(node: ast.AST, lines: Sequence[str]) -> Iterator[Span]:
    """The statements inside a compound one, block by block, with the comments above them."""
    for name in BLOCKS:
        block = getattr(node, name, None) or []
        for part in block:
            if not isinstance(part, ast.stmt):  # except ...:, case ...:
                yield from _blocks(part, lines)
        if block and isinstance(block[0], ast.stmt):
            first = _span(block[0])[0]
            while lines[first - 2].strip().startswith("#"):
                first -= 1
            yield first, _span(block[-1])[1]
