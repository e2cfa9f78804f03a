"""The package's classes and functions: which classes are above and below one, and where a member is.

Called by: `object_names`, `links`, `callers`. Calls: `package`; reads hooks.toml.
"""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from source.package import Package

Symbol = tuple[str, str]
"""Module and qualified name."""
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
HOOKS = Path(__file__).with_name("hooks.toml")
PLAIN_BASES = frozenset(["object", "ABC", "Protocol", "Generic", "NamedTuple", "Exception"])
"""Bases outside the package without methods that may hide those of the bases after them."""
OBJECT, CLASS, MODULE, PARENT = "object", "class", "module", "parent"
CALLED, ENTERED = "()", "with"
"""What stands for a member's name where an object is called, or entered."""


class Thing(NamedTuple):
    """What stands before a dot, is called or is entered."""

    what: str
    """object (of the class, or of one below it), class, module, or parent (of the class: `super()`)."""
    symbol: Symbol


class Families:
    """All of a package."""

    def __init__(self, package: Package):
        self.package = package
        self.nodes: dict[Symbol, ast.AST] = {}
        """Of each class and function that is not inside a function; the first one of a name."""
        for module, page in package.pages.items():
            for name, node in _declared(page.tree.body, ""):
                self.nodes.setdefault((module, name), node)
        self.find = cache(self._find)
        self.line_of = cache(self._line_of)
        self.is_property = cache(self._is_property)
        self._below: dict[Symbol, set[Symbol]] = {}
        for symbol, node in self.nodes.items():
            for base in self.line_of(symbol)[1:] if isinstance(node, ast.ClassDef) else ():
                if isinstance(base, tuple):
                    self._below.setdefault(base, set()).add(symbol)
        self._forms = {
            self.find(form["name"]): self.find(form["classes"][0])
            for form in tomllib.loads(HOOKS.read_text())["form"]
        }

    def _find(self, dotted: str) -> Symbol | None:
        place = self.package.find(dotted)
        return (place.page.module, place.symbol) if place else None

    def is_class(self, symbol: Symbol) -> bool:
        return isinstance(self.nodes.get(symbol), ast.ClassDef)

    def is_function(self, symbol: Symbol | None) -> bool:
        """Whether a call runs it; of a property, a call runs what it gives."""
        return isinstance(self.nodes.get(symbol), FunctionNode) and not self.is_property(symbol)

    def _is_property(self, symbol: Symbol) -> bool:
        node = self.nodes.get(symbol)
        names = [ast.unparse(mark) for mark in getattr(node, "decorator_list", ())]
        return any(name.endswith("property") for name in names)

    def fields(self, symbol: Symbol) -> list[str]:
        """Of a NamedTuple, in order; of anything else none."""
        if not self.is_class(symbol) or "NamedTuple" not in self.line_of(symbol):
            return []
        body = self.nodes[symbol].body
        return [ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)]

    # -- Above and below --

    def _line_of(self, cls: Symbol) -> tuple[Symbol | str, ...]:
        """The class and all above it, in the order in which Python looks for a name.

        Of a class outside the package, the last name.
        """
        found: list[Symbol | str] = []
        for node in self.nodes[cls].bases:
            words = ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
            head, dot, rest = words.partition(".")
            aliases = self.package.pages[cls[0]].aliases
            base = self.find(aliases.get(head, f"{cls[0]}.{head}") + dot + rest)
            is_ours = self.is_class(base) and base != cls
            found += self.line_of(base) if is_ours else [words.rpartition(".")[2]]
        # A class that several have in common comes after all of them.
        last = {one: place for place, one in enumerate(found)}
        return (cls, *(one for place, one in enumerate(found) if last[one] == place))

    def below(self, cls: Symbol) -> set[Symbol]:
        """All classes derived from it."""
        return self._below.get(cls, set())

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

    # -- What a thing's name leads to --

    def target(self, thing: Thing, name: str) -> Symbol | None:
        """What `thing.name` is; of CALLED and ENTERED, the method that runs."""
        what, symbol = thing
        if what == MODULE:
            return self.find(f"{symbol[0]}.{name}")
        if name in (CALLED, ENTERED) and what != OBJECT or not self.is_class(symbol):
            return None
        if name == ENTERED:
            return self.member(symbol, "__enter__")
        if name == CALLED:
            is_layer = "Module" in self.line_of(symbol)  # of torch, which calls `forward`
            called = self.member(symbol, "__call__")
            return self.member(symbol, "forward") if called is None and is_layer else called
        if name == "apply" and what == CLASS and "Function" in self.line_of(symbol):
            return self.member(symbol, "forward")  # of one of autograd's
        found = self.member(symbol, name, above=what == PARENT)
        if found is None and what == OBJECT and self._forms.get(symbol):
            return self.member(self._forms[symbol], name)
        return found


@lru_cache(maxsize=8)
def families_of(package: Package) -> Families:
    """The package's, read once."""
    return Families(package)


def _declared(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    """As `annotate` finds definitions."""
    for node in body:
        if isinstance(node, FunctionNode | ast.ClassDef):
            yield f"{prefix}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _declared(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _declared(node.body + node.orelse, prefix)
