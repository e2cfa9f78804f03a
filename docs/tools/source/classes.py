"""The classes and functions of the package as the source declares them: bases, annotations, results.

Called by: `receivers`. Calls: `package`, `kinds`.

An annotation is read as a type checker would; one that allows several classes says nothing here.
"""

import ast
from collections.abc import Iterator
from functools import cache

from source.kinds import (
    NOTHING,
    ClassOf,
    Entered,
    Instance,
    Kind,
    Many,
    Several,
    Symbol,
    Table,
    joined,
)
from source.package import Package

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

MANY = frozenset(
    [
        "list",
        "List",
        "Sequence",
        "MutableSequence",
        "Iterable",
        "Iterator",
        "Generator",
        "Collection",
        "set",
        "Set",
        "frozenset",
        "FrozenSet",
        "AbstractSet",
        "deque",
    ]
)
TABLES = frozenset(["dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"])
WRAPPERS = frozenset(["Optional", "ClassVar", "Final", "Annotated"])
MANAGERS = frozenset(["AbstractContextManager", "ContextManager"])
SAME_RESULT = frozenset(
    [
        "traced",
        "staticmethod",
        "classmethod",
        "abstractmethod",
        "property",
        "cached_property",
        "cache",
        "lru_cache",
        "no_grad",
        "inference_mode",
        "register_order",
        "written_as",
    ]
)
"""Decorators that leave alone what a call returns."""
PLAIN_BASES = frozenset(["object", "ABC", "Protocol", "Generic", "NamedTuple", "Exception"])
"""Bases outside the package without methods that may hide those of the bases after them."""


class Classes:
    """What is declared where."""

    def __init__(self, package: Package):
        self.package = package
        self.nodes: dict[Symbol, ast.AST] = {}
        for name, page in package.pages.items():
            for symbol, node in _declared(page.tree.body, ""):
                # As for links, the first definition of a name counts.
                self.nodes.setdefault((name, symbol), node)
        self.find = cache(self._find)
        self.bases = cache(self._bases)
        self.line_of = cache(self._line_of)
        self._below: dict[Symbol, set[Symbol]] = {}
        for symbol, node in self.nodes.items():
            if isinstance(node, ast.ClassDef):
                for base in self.line_of(symbol):
                    if isinstance(base, tuple):
                        self._below.setdefault(base, set()).add(symbol)

    def _find(self, dotted: str) -> Symbol | None:
        place = self.package.find(dotted)
        return (place.page.module, place.symbol) if place else None

    # -- Names --

    def named(self, node: ast.AST, module: str, owner: str = "") -> Symbol | None:
        """What a name, or a name after a module's, means outside of functions; None if not ours."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        page = self.package.pages[module]
        if owner and f"{owner}.{node.id}" in page.definitions:
            head = f"{module}.{owner}.{node.id}"
        elif node.id in page.aliases:
            head = page.aliases[node.id]
        elif node.id in page.definitions:
            head = f"{module}.{node.id}"
        else:
            return None
        return self.find(".".join([head, *reversed(parts)]))

    # -- Bases --

    def _bases(self, cls: Symbol) -> tuple[Symbol | str, ...]:
        """The direct ones; of those outside the package the last name."""
        found: list[Symbol | str] = []
        for base in self.nodes[cls].bases:
            node = base.value if isinstance(base, ast.Subscript) else base
            symbol = self.named(node, cls[0])
            if isinstance(self.nodes.get(symbol), ast.ClassDef):
                found.append(symbol)
            else:
                found.append(getattr(node, "attr", getattr(node, "id", "?")))
        return tuple(found)

    def _line_of(self, cls: Symbol) -> tuple[Symbol | str, ...]:
        """The class and all above it, in the order in which Python looks for a name."""
        found: list[Symbol | str] = []
        for base in self.bases(cls):
            found += self.line_of(base) if isinstance(base, tuple) else [base]
        # A class that several have in common comes after all of them.
        last = {one: place for place, one in enumerate(found)}
        return (cls, *(one for place, one in enumerate(found) if last[one] == place))

    def below(self, cls: Symbol) -> set[Symbol]:
        """All classes derived from it."""
        return self._below.get(cls, set())

    def is_derived(self, cls: Symbol, outside: str) -> bool:
        """Whether a class outside the package with this last name is above it."""
        return outside in self.line_of(cls)

    def member(self, cls: Symbol, name: str, above: bool = False) -> Symbol | None:
        """Where the class, or the first above it that does, defines the name in its body.

        `above` leaves the class itself out. None if a class outside the package may define it first.
        """
        for one in self.line_of(cls)[1 if above else 0 :]:
            if not isinstance(one, tuple):
                if one not in PLAIN_BASES:
                    return None
            elif f"{one[1]}.{name}" in self.package.pages[one[0]].definitions:
                return (one[0], f"{one[1]}.{name}")
        return None

    def fields(self, cls: Symbol) -> list[str]:
        """The annotated names of the class's body, in order."""
        body = self.nodes[cls].body
        return [node.target.id for node in body if isinstance(node, ast.AnnAssign)]

    # -- Annotations --

    def annotated(self, node: ast.AST | None, module: str, owner: str = "") -> Kind | None:
        """The kind that an annotation says. `owner`: the class that it stands in, or ""."""
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return self.annotated(ast.parse(node.value, mode="eval").body, module, owner)
            return NOTHING if node.value is None else None
        if isinstance(node, ast.BinOp):
            sides = [self.annotated(side, module, owner) for side in (node.left, node.right)]
            return joined(sides)
        if isinstance(node, ast.Subscript):
            return self._generic(node, module, owner)
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        if isinstance(node, ast.Name) and node.id == "Self" and owner:
            return Instance((module, owner))
        symbol = self.named(node, module, owner)
        found = self.nodes.get(symbol)
        if isinstance(found, ast.ClassDef):
            return Instance(symbol)
        if isinstance(found, ast.Assign):  # a name for a longer annotation
            return self.annotated(found.value, symbol[0])
        return None

    def _generic(self, node: ast.Subscript, module: str, owner: str) -> Kind | None:
        name = getattr(node.value, "attr", getattr(node.value, "id", ""))
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]

        def kind(place: int) -> Kind | None:
            return self.annotated(parts[place], module, owner) if place < len(parts) else None

        if name in MANY:
            return Many(kind(0))
        if name in TABLES:
            return Table(kind(0), kind(1))
        if name in WRAPPERS:
            return kind(0)
        if name in MANAGERS:
            return Entered(kind(0))
        if name == "tuple":
            if isinstance(parts[-1], ast.Constant) and parts[-1].value is ...:
                return Many(kind(0))
            return Several(tuple(kind(place) for place in range(len(parts))))
        if name == "type":
            instance = kind(0)
            return ClassOf(instance.cls) if isinstance(instance, Instance) else None
        return self.annotated(node.value, module, owner)

    def returned(self, symbol: Symbol, receiver: Symbol | None = None) -> Kind | None:
        """What a call of the function gives."""
        node, (module, name) = self.nodes.get(symbol), symbol
        if not isinstance(node, FunctionNode) or isinstance(node, ast.AsyncFunctionDef):
            return None
        marks = set(decorators(node))
        is_manager = "contextmanager" in marks
        if marks - SAME_RESULT - {"contextmanager"}:
            return None
        owner = name.rpartition(".")[0]
        kind = self.annotated(node.returns, module, owner)
        is_own = isinstance(node.returns, ast.Name) and node.returns.id == "Self"
        if is_own and receiver:
            kind = Instance(receiver)
        if is_manager:
            return Entered(kind.element if isinstance(kind, Many) else None)
        return kind


def decorators(node: ast.AST) -> Iterator[str]:
    """The last names of what a definition is marked with."""
    for mark in node.decorator_list:
        mark = mark.func if isinstance(mark, ast.Call) else mark
        yield getattr(mark, "attr", getattr(mark, "id", "?"))


def _declared(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """As `annotate` finds definitions."""
    for node in body:
        if isinstance(node, FunctionNode | ast.ClassDef):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _declared(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield f"{prefix}{target.id}", node
        elif isinstance(node, ast.If | ast.Try):
            yield from _declared(node.body + node.orelse, prefix)
