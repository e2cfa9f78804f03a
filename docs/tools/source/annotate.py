"""Source code as rows of prose beside code, from the source text alone.

Called by: `source_pages`, which renders the rows; `quotes`, for the code of one symbol; tests.
Calls: `ast` and `tokenize`. Nothing is imported, so documentation builds where torch is absent.

A row is a stretch of lines. Its prose is a docstring, or the comments under a note:

    # -- Clamp to the microbatch count --
    # A pipeline deeper than the batch never reaches steady state.
    depth = min(depth, m)

All its other lines are code, ordinary comments included. So each line stands in exactly one row,
and there exactly once. Anchors come from names (`Plan.warmup--clamp-to-the-microbatch-count`), not
from positions: inserting a line moves none.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath

NOTE = re.compile(r"#\s*-- (?P<title>.+?) --\s*$")
ANY_OTHER = "*"
"""In place of a name: all that a module does not have itself."""


@dataclass(frozen=True)
class Row:
    """A stretch of lines that is shown as one: prose on the left, code on the right."""

    anchor: str
    title: str
    kind: str
    """module, class, function, method or note."""
    prose: str
    """Markdown; empty where the author wrote none."""
    prose_lines: tuple[int, ...]
    code_lines: tuple[int, ...]
    symbol: str = ""
    """Qualified name inside the module; for a note, of the symbol it stands in."""


@dataclass(frozen=True)
class Definition:
    """Where a name of the module is defined."""

    line: int
    end_line: int
    anchor: str
    kind: str
    first_line: int = 0
    """With decorators and the comments right above."""


@dataclass(frozen=True)
class Reference:
    """A name in the code that means something defined in this package: what to link, and where to."""

    line: int
    column: int
    """In characters, from 0."""
    length: int
    target: str
    """Dotted, `module.symbol`; the module alone for an imported module."""
    is_call: bool = False
    is_import: bool = False
    """In an `import` statement."""


@dataclass(frozen=True)
class AnnotatedPage:
    """One module, ready to be rendered."""

    path: str
    module: str
    source: str
    rows: tuple[Row, ...]
    definitions: dict[str, Definition] = field(hash=False)
    references: tuple[Reference, ...]
    imports: frozenset[str]
    """Modules of this package that the module imports."""
    aliases: dict[str, str] = field(hash=False, default_factory=dict)
    """Imported name -> what it stands for, dotted."""
    looked_up: dict[str, str] = field(hash=False, default_factory=dict)
    """The same of names that the module looks up on first use (`exports.lazily`); of `ANY_OTHER` the
    module in which it looks all others up (`exports.all_of`)."""
    tree: ast.Module = field(hash=False, compare=False, default=None)
    """What `ast` makes of the source."""

    @cached_property
    def lines(self) -> list[str]:
        return self.source.split("\n")

    def symbol_at(self, line: int) -> str:
        """The function or method that the line is in, without those inside functions; "" if none."""
        inside = [
            name
            for name, one in self.definitions.items()
            if one.kind in ("function", "method") and one.first_line <= line <= one.end_line
        ]
        return max(inside, key=len, default="")


def module_name(path: str) -> str:
    """
    >>> module_name("minimegatron/core/optimizer/__init__.py")
    'minimegatron.core.optimizer'
    """
    parts = PurePath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def slug(words: str) -> str:
    """
    >>> slug("Where `p` > m: one per rank")
    'where-p-m-one-per-rank'
    """
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def annotate(path: str, source: str) -> AnnotatedPage:
    """The rows of a module. `path` is relative to the repository root.

    Raises SyntaxError for what Python cannot parse.
    """
    tree = ast.parse(source, filename=path)
    nodes = list(ast.walk(tree))
    definitions = _Definitions(source).of(tree)
    names = _Names(module_name(path), tree, nodes, definitions, source.split("\n"))
    return AnnotatedPage(
        path,
        module_name(path),
        source,
        tuple(_rows(path, source, nodes, definitions)),
        definitions,
        tuple(names.references()),
        frozenset(names.imports),
        dict(names.aliases),
        looked_up(tree),
        tree,
    )


# -- Definitions --


class _Definitions:
    """Every class, function, method and module-level or class-level variable, by qualified name."""

    def __init__(self, source: str):
        self.lines = source.split("\n")
        self.found: dict[str, Definition] = {}
        self.nodes: dict[str, ast.AST] = {}

    def of(self, tree: ast.Module) -> dict[str, Definition]:
        self._visit(tree.body, "")
        return self.found

    def _visit(self, body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._add_symbol(node, prefix)
                if isinstance(node, ast.ClassDef):
                    self._visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self._add(f"{prefix}{target.id}", node.lineno, node.end_lineno, "variable")
            elif isinstance(node, ast.If | ast.Try):
                self._visit(node.body + getattr(node, "orelse", []), prefix)

    def _add_symbol(self, node: ast.AST, prefix: str) -> None:
        kind = "class" if isinstance(node, ast.ClassDef) else "method" if prefix else "function"
        start = first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        while first > 1 and self._is_plain_comment(first - 1, node.col_offset):
            first -= 1
        if first > 1 and NOTE.match(self.lines[first - 2].strip()):
            first = start  # the comments are the note's
        self._add(f"{prefix}{node.name}", node.lineno, node.end_lineno, kind, first)

    def _is_plain_comment(self, number: int, column: int) -> bool:
        line = self.lines[number - 1]
        indent = len(line) - len(line.lstrip())
        return line.lstrip().startswith("#") and indent == column and not NOTE.match(line.strip())

    def _add(self, name: str, line: int, end: int, kind: str, first: int = 0) -> None:
        # A second definition of a name (a property's setter, the other branch of an `if`) gets
        # a number: anchors are unique.
        anchor, count = name, 1
        while anchor in self.found:
            count += 1
            anchor = f"{name}-{count}"
        self.found[anchor] = Definition(line, end, anchor, kind, first or line)


# -- Rows --


def _rows(path: str, source: str, nodes: list[ast.AST], definitions: dict) -> list[Row]:
    lines = source.split("\n")
    docstrings = _docstrings(nodes, lines)
    starts = {1: (module_name(path), module_name(path), "module", "")}
    for name, definition in definitions.items():
        if definition.kind != "variable":
            title = name.rpartition(".")[2]
            starts[definition.first_line] = (name, title, definition.kind, name)
    notes = _notes(source, definitions)
    for number, (title, symbol, _) in notes.items():
        anchor = f"{symbol}--{slug(title)}" if symbol else slug(title)
        starts[number] = (anchor, title, "note", symbol)
    rows, used = [], set()
    ordered = sorted(starts)
    for number, end in zip(ordered, [*ordered[1:], len(lines) + 1], strict=True):
        anchor, title, kind, symbol = starts[number]
        anchor = _unique(anchor, used)
        if kind == "note":
            prose_lines = notes[number][2]
            prose = "\n".join(lines[n - 1].strip().lstrip("#")[1:] for n in prose_lines[1:])
        else:
            line = definitions[symbol].line if symbol else 0
            prose, prose_lines = docstrings.get(line, ("", ()))
        code = [n for n in range(number, end) if n not in prose_lines]
        rows.append(Row(anchor, title, kind, prose, prose_lines, _trim(code, lines), symbol))
    return rows


def _unique(anchor: str, used: set[str]) -> str:
    candidate, count = anchor, 1
    while candidate in used:
        count += 1
        candidate = f"{anchor}-{count}"
    used.add(candidate)
    return candidate


def _trim(numbers: list[int], lines: list[str]) -> tuple[int, ...]:
    while numbers and not lines[numbers[0] - 1].strip():
        numbers = numbers[1:]
    while numbers and not lines[numbers[-1] - 1].strip():
        numbers = numbers[:-1]
    return tuple(numbers)


def _docstrings(nodes: list[ast.AST], lines: list[str]) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Line of the definition (0 for the module) -> its docstring, and the lines that it takes up."""
    found = {}
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        value = node.body[0]
        before = lines[value.lineno - 1][: value.col_offset]
        after = lines[value.end_lineno - 1].encode()[value.end_col_offset :]
        # One that shares its line with code stays in the code.
        if not before.strip() and not after.strip():
            numbers = tuple(range(value.lineno, value.end_lineno + 1))
            found[getattr(node, "lineno", 0)] = (text, numbers)
    return found


def _notes(source: str, definitions: dict) -> dict[int, tuple[str, str, tuple[int, ...]]]:
    """First line of each note -> title, symbol it stands in, its lines."""
    # Most modules have none, and taking a module apart takes as long as parsing it.
    if not any(NOTE.match(line.strip()) for line in source.split("\n")):
        return {}
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }
    found = {}
    for number, text in comments.items():
        match = NOTE.match(text)
        if match is None:
            continue
        end = number + 1
        while end in comments and not NOTE.match(comments[end]):
            end += 1
        inside = [
            name
            for name, d in definitions.items()
            if d.kind != "variable" and d.line < number <= d.end_line
        ]
        # Names nest, so the longest is the innermost.
        symbol = max(inside, key=len, default="")
        found[number] = (match["title"], symbol, tuple(range(number, end)))
    return found


# -- What names mean --


def looked_up(tree: ast.Module) -> dict[str, str]:
    """`AnnotatedPage.looked_up`."""
    constants: dict[str, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = node.value.value
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in (
            "lazily",
            "all_of",
        ):
            given = eval(ast.unparse(node.value.args[1]), {}, dict(constants))
            if isinstance(given, str):
                return {ANY_OTHER: given}
            return {name: target.replace(":", ".") for name, target in given.items()}
    return {}


class _Names:
    """Resolves the names that one module uses, by reading its imports and definitions."""

    def __init__(
        self,
        module: str,
        tree: ast.Module,
        nodes: list[ast.AST],
        definitions: dict,
        lines: list[str],
    ):
        self.module, self.tree, self.definitions, self.lines = module, tree, definitions, lines
        self.package = module.partition(".")[0]
        self.imports: set[str] = set()
        self.called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        self.aliases = self._aliases(nodes)

    def _aliases(self, nodes: list[ast.AST]) -> dict[str, str]:
        aliases = {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and self._is_ours(node.module):
                self.imports.add(node.module)
                for alias in node.names:
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if self._is_ours(alias.name):
                        self.imports.add(alias.name)
                        aliases[alias.asname or self.package] = (
                            alias.name if alias.asname else self.package
                        )
        return aliases

    def _is_ours(self, module: str | None) -> bool:
        return module is not None and module.partition(".")[0] == self.package

    def references(self) -> list[Reference]:
        found: list[Reference] = []
        self._visit(self.tree, frozenset(), "", found)
        return sorted(found, key=lambda r: (r.line, r.column))

    def _visit(self, node: ast.AST, local: frozenset[str], owner: str, found: list) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            local = local | _local_names(node)
        if isinstance(node, ast.ClassDef):
            owner = f"{owner}.{node.name}" if owner else node.name
        if isinstance(node, ast.ImportFrom) and self._is_ours(node.module):
            for alias in node.names:
                reference = self._at(alias, len(alias.name), f"{node.module}.{alias.name}")
                found.append(replace(reference, is_import=True))
        elif isinstance(node, ast.Name | ast.Attribute):
            target = self._meaning(node, local, owner)
            is_self = isinstance(node, ast.Name) and node.id == "self"
            if target and isinstance(node.ctx, ast.Load) and not is_self:
                found.append(replace(self._at_end(node, target), is_call=id(node) in self.called))
        for child in ast.iter_child_nodes(node):
            self._visit(child, local, owner, found)

    def _meaning(self, node: ast.AST, local: frozenset[str], owner: str) -> str | None:
        """What a name or a dotted name stands for, dotted; None for what is not ours."""
        if isinstance(node, ast.Name):
            if node.id == "self" and owner:
                return f"{self.module}.{owner}"
            if node.id in local:
                return None
            if node.id in self.aliases:
                return self.aliases[node.id]
            return f"{self.module}.{node.id}" if node.id in self.definitions else None
        if isinstance(node, ast.Attribute):
            base = self._meaning(node.value, local, owner)
            return f"{base}.{node.attr}" if base else None
        return None

    def _at(self, node: ast.AST, length: int, target: str) -> Reference:
        return Reference(
            node.lineno, self._characters(node.lineno, node.col_offset), length, target
        )

    def _at_end(self, node: ast.AST, target: str) -> Reference:
        name = node.id if isinstance(node, ast.Name) else node.attr
        end = self._characters(node.end_lineno, node.end_col_offset)
        return Reference(node.end_lineno, end - len(name), len(name), target)

    def _characters(self, line: int, column: int) -> int:
        # ast counts bytes of UTF-8.
        return len(self.lines[line - 1].encode()[:column].decode())


def _local_names(function: ast.AST) -> frozenset[str]:
    """Parameters and everything the function assigns: they hide names of the module."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [a for a in (arguments.vararg, arguments.kwarg) if a]
    names = {a.arg for a in every} - {"self"}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)
