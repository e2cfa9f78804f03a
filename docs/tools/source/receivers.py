"""Which definition an attribute leads to: `chunk.backward_step`, `self._p2p.send_forward`, `x.config`.

Called by: `code_html` for links, `callers` for who calls what. Calls: `scopes`, `classes`, `kinds`.

The object's class is read off the source: an annotation of a parameter, a result or an attribute; a
constructor's call; what `self.name` is assigned in methods; loops, `with`, tuples. A name that may be
of two classes is of none. What is not known is not linked, rather than guessed.
"""

import ast
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from source.annotate import AnnotatedPage
from source.classes import Classes, FunctionNode, decorators
from source.kinds import (
    ITSELF,
    NOTHING,
    ClassOf,
    Entered,
    Function,
    Instance,
    Kind,
    Many,
    ModuleOf,
    Parent,
    Several,
    Symbol,
    Table,
    element_of,
    joined,
)
from source.package import Package
from source.scopes import Binding, Scope, Uses

HOOKS = Path(__file__).with_name("hooks.toml")
COPIES = frozenset(["list", "tuple", "sorted", "reversed", "iter", "set", "frozenset", "deque"])
SAME = frozenset(["replace", "copy", "deepcopy"])
"""They give another object of their first argument's class."""


class Use(NamedTuple):
    """A place in the code where an object's method or field is named, or its class is called."""

    line: int
    column: int
    """In characters, from 0; of the name."""
    name: str
    """As it stands there."""
    target: Symbol
    receiver: Symbol | None
    """The class that the object is known to be of; None where no other method can be meant."""
    how: str
    """call, named, with, applied, or object: an object is called like a function."""


class Receivers:
    """Reads all modules of a package."""

    def __init__(self, package: Package):
        self.package, self.classes = package, Classes(package)
        self._forms = dict(self._form_and_class())
        self.code = {name: Uses(name, page.tree) for name, page in package.pages.items()}
        self._known: dict[int, Kind | None] = {}
        self._asked: list[tuple] = []
        self._attributes: dict[tuple[Symbol, str], Kind | None] = {}
        self._uses: dict[str, list[Use]] = {}

    def _form_and_class(self) -> Iterator[tuple[Symbol, Symbol]]:
        """Of hooks.toml, the forms that do not write out their methods, and a class that has them."""
        for form in tomllib.loads(HOOKS.read_text())["form"]:
            found = [self.classes.find(name) for name in (form["name"], form["classes"][0])]
            if None not in found:
                yield found[0], found[1]

    def uses(self, module: str) -> list[Use]:
        """What the module's code names of objects, as far as it is known."""
        if module not in self._uses:
            self._uses[module] = list(self._read(module))
        return self._uses[module]

    def _read(self, module: str) -> Iterator[Use]:
        code, page = self.code[module], self.package.pages[module]
        called = {id(call.func) for call, _ in code.calls}
        for node, scope in code.attributes:
            target, receiver, how = self._target(node, scope)
            if target is None:
                continue
            if how == "named" and (id(node) in called or self._is_property(target)):
                how = "call"
            yield _use(page, node, target, receiver, how)
        for call, scope in code.calls:
            yield from self._called_object(page, call, scope)
        for manager, scope in code.managers:
            yield from self._entered_object(manager, scope)

    def _target(
        self, node: ast.Attribute, scope: Scope
    ) -> tuple[Symbol | None, Symbol | None, str]:
        base = self.infer(node.value, scope)
        match base:
            case Instance(cls):
                if found := self.classes.member(cls, node.attr):
                    return found, cls, "named"
                cls = self._forms.get(cls, cls)
                return self.classes.member(cls, node.attr), cls, "named"
            case Parent(cls):
                return self.classes.member(cls, node.attr, above=True), None, "named"
            case ClassOf(cls):
                if node.attr == "apply" and self.classes.is_derived(cls, "Function"):
                    return self.classes.member(cls, "forward"), None, "applied"
                return self.classes.member(cls, node.attr), None, "named"
            case ModuleOf(name):
                return self.classes.find(f"{name}.{node.attr}"), None, "named"
        return None, None, ""

    def _is_property(self, symbol: Symbol) -> bool:
        node = self.classes.nodes.get(symbol)
        marks = set(decorators(node)) if isinstance(node, FunctionNode) else set()
        return bool(marks & {"property", "cached_property"})

    def _called_object(self, page: AnnotatedPage, call: ast.Call, scope: Scope) -> Iterator[Use]:
        """`model(tokens)`: its `__call__`, or the `forward` of a module of torch."""
        kind, name = self.infer(call.func, scope), call.func
        if not isinstance(kind, Instance) or not isinstance(name, ast.Name | ast.Attribute):
            return
        target = self.classes.member(kind.cls, "__call__")
        if target is None and "Module" in self.classes.line_of(kind.cls):
            target = self.classes.member(kind.cls, "forward")
        if target:
            yield _use(page, name, target, kind.cls, "object")

    def _entered_object(self, manager: ast.expr, scope: Scope) -> Iterator[Use]:
        """`with frame:` calls its `__enter__` and its `__exit__`."""
        kind = self.infer(manager, scope)
        if isinstance(kind, Instance):
            for name in ("__enter__", "__exit__"):
                if target := self.classes.member(kind.cls, name):
                    yield Use(manager.lineno, manager.col_offset, "with", target, kind.cls, "with")

    # -- What an expression is --

    def infer(self, node: ast.AST, scope: Scope) -> Kind | None:
        """The kind of its value."""
        if isinstance(node, ast.Name):
            return self._named(node.id, scope)
        known = self._known.get(id(node), self)
        if known is self:
            reader = READERS.get(type(node))
            known = reader(self, node, scope) if reader else None
            self._known[id(node)] = known
        return known

    def _named(self, name: str, scope: Scope) -> Kind | None:
        here: Scope | None = scope
        if name in scope.globals:
            here = self.code[scope.module].top
        while here is not None:
            # Functions do not see the names of the class that they stand in.
            if name in here.names and (here.what != "class" or here is scope):
                break
            here = here.outer
        if here is None or here.what in ("module", "class"):
            owner = here.owner if here is not None else ""
            symbol = self.classes.named(ast.Name(name), scope.module, owner)
            kind = self._of_symbol(symbol)
            if kind is not None or here is None:
                return kind
        return self._bound((id(here), name), here.names[name], here)

    def _of_symbol(self, symbol: Symbol | None) -> Kind | None:
        if symbol is None:
            return None
        module, name = symbol
        if not name:
            return ModuleOf(module)
        node = self.classes.nodes.get(symbol)
        if isinstance(node, ast.ClassDef):
            return ClassOf(symbol)
        if isinstance(node, FunctionNode):
            return Function(symbol)
        if "." in name:
            owner, _, last = name.rpartition(".")
            return self._attribute((module, owner), last)
        top = self.code[module].top
        return self._bound((id(top), name), top.names[name], top) if name in top.names else None

    def _bound(self, key: tuple, bindings: list[Binding], scope: Scope) -> Kind | None:
        if key in self._attributes:
            return self._attributes[key]
        if key in self._asked:
            return ITSELF if self._asked[-1] == key else None
        self._asked.append(key)
        declared = [self._binding(one, scope) for one in bindings if one.how == "annotation"]
        given = [self._binding(one, scope) for one in bindings if one.how != "annotation"]
        self._asked.pop()
        self._attributes[key] = self._agreed(declared, given)
        return self._attributes[key]

    def _agreed(self, declared: list[Kind | None], given: list[Kind | None]) -> Kind | None:
        """An annotation counts for everything that fits it; without one, all values must agree."""
        said = joined(declared) if declared else None
        if said is None or said is NOTHING:
            return joined([*declared, *given])
        for kind in given:
            fits = kind in (said, None, NOTHING, ITSELF) or not isinstance(said, Instance)
            if not fits and isinstance(kind, Instance):
                fits = said.cls in self.classes.line_of(kind.cls)
            if not fits:
                return None
        return said

    def _binding(self, one: Binding, scope: Scope) -> Kind | None:
        cls = (scope.module, scope.owner)
        match one.how:
            case "own":
                return Instance(cls) if scope.owner else None
            case "class of own":
                return ClassOf(cls) if scope.owner else None
            case "import":
                return self._of_symbol(self.classes.named(ast.Name(one.node), scope.module))
            case "annotation":
                kind = self.classes.annotated(one.node, one.scope.module, one.scope.owner)
            case "value":
                kind = self.infer(one.node, one.scope)
            case "element":
                kind = self._element(self.infer(one.node, one.scope))
            case "entered":
                kind = self._entered(self.infer(one.node, one.scope))
            case "caught":
                kind = None if one.node is None else self.infer(one.node, one.scope)
                kind = Instance(kind.cls) if isinstance(kind, ClassOf) else None
            case _:
                return None
        for place in one.path:
            kind = self._part(kind, place)
        return kind

    # -- Parts of a value --

    def _part(self, kind: Kind | None, place: int) -> Kind | None:
        match kind:
            case Several(parts):
                return parts[place] if -len(parts) <= place < len(parts) else None
            case Many(element):
                return element
            case Instance(cls) if self.classes.is_derived(cls, "NamedTuple"):
                fields = self.classes.fields(cls)
                return self._attribute(cls, fields[place]) if place < len(fields) else None
        return None

    def _element(self, kind: Kind | None) -> Kind | None:
        if isinstance(kind, Instance):
            target = self.classes.member(kind.cls, "__iter__")
            kind = self.classes.returned(target, kind.cls) if target else None
        return element_of(kind)

    def _entered(self, kind: Kind | None) -> Kind | None:
        if isinstance(kind, Entered):
            return kind.value
        if isinstance(kind, Instance) and (target := self.classes.member(kind.cls, "__enter__")):
            return self.classes.returned(target, kind.cls)
        return None

    def _attribute(self, cls: Symbol, name: str) -> Kind | None:
        """An attribute of an object: of all its classes, and those below, what they assign to it."""
        key = (cls, name)
        if key in self._attributes:
            return self._attributes[key]
        symbol = self.classes.member(cls, name)
        node = self.classes.nodes.get(symbol)
        if isinstance(node, FunctionNode):
            if self._is_property(symbol):
                return self.classes.returned(symbol, cls)
            return Function(symbol, cls)
        if isinstance(node, ast.ClassDef):
            return ClassOf(symbol)
        if symbol and "Enum" in self.classes.line_of(symbol_owner := _owner(symbol)):
            return Instance(symbol_owner)
        family = [one for one in self.classes.line_of(cls) if isinstance(one, tuple)]
        family += sorted(self.classes.below(cls) - {cls})
        bindings = [binding for one in family for binding in self._bindings_of(one, name)]
        return self._bound(key, bindings, self.code[cls[0]].top) if bindings else None

    def _bindings_of(self, cls: Symbol, name: str) -> list[Binding]:
        code, found = self.code[cls[0]], []
        for node in self.classes.nodes[cls].body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if any(isinstance(one, ast.Name) and one.id == name for one in targets):
                scope = Scope("class", *cls, code.top)
                if isinstance(node, ast.AnnAssign):
                    found.append(Binding("annotation", node.annotation, scope))
                elif isinstance(node, ast.Assign):
                    found.append(Binding("value", node.value, scope))
        return found + code.on_self.get((cls, name), [])

    # -- Expressions --

    def _read_attribute(self, node: ast.Attribute, scope: Scope) -> Kind | None:
        match self.infer(node.value, scope):
            case Instance(cls):
                return self._attribute(cls, node.attr)
            case Parent(cls):
                target = self.classes.member(cls, node.attr, above=True)
                return self._of_symbol(target)
            case ClassOf(cls):
                target = self.classes.member(cls, node.attr)
                return self._of_symbol(target)
            case ModuleOf(name):
                return self._of_symbol(self.classes.find(f"{name}.{node.attr}"))
        return None

    def _read_call(self, node: ast.Call, scope: Scope) -> Kind | None:
        match self.infer(node.func, scope):
            case ClassOf(cls):
                return Instance(cls)
            case Function(symbol, receiver):
                return self.classes.returned(symbol, receiver)
            case Instance(cls):
                target = self.classes.member(cls, "__call__")
                return self.classes.returned(target, cls) if target else None
        if isinstance(node.func, ast.Attribute):
            return self._read_method(node.func, node, scope)
        if isinstance(node.func, ast.Name):
            return self._read_builtin(node.func.id, node, scope)
        return None

    def _read_method(self, func: ast.Attribute, node: ast.Call, scope: Scope) -> Kind | None:
        """Of lists and dicts."""
        match self.infer(func.value, scope), func.attr:
            case Table(_, value), "values":
                return Many(value)
            case Table(key, value), "items":
                return Many(Several((key, value)))
            case Table(key, _), "keys":
                return Many(key)
            case Table(_, value), "get" | "pop" | "setdefault":
                others = [self.infer(one, scope) for one in node.args[1:]]
                return joined([value, *others])
            case Many(element), "pop" | "popleft":
                return element
            case (Many() | Table()) as kind, "copy":
                return kind
        return self._read_builtin(func.attr, node, scope) if func.attr in SAME else None

    def _read_builtin(self, name: str, node: ast.Call, scope: Scope) -> Kind | None:
        if name == "super" and not node.args:
            return Parent((scope.module, scope.owner)) if scope.owner else None
        if any(isinstance(one, ast.Starred) for one in node.args) or not node.args:
            return None
        kinds = [self.infer(one, scope) for one in node.args]
        match name:
            case "cast":
                return self.classes.annotated(node.args[0], scope.module, scope.owner)
            case "next":
                return joined([self._element(kinds[0]), *kinds[1:]])
            case "min" | "max":
                return self._element(kinds[0]) if len(kinds) == 1 else joined(kinds)
            case "enumerate":
                return Many(Several((None, self._element(kinds[0]))))
            case "zip":
                return Many(Several(tuple(map(self._element, kinds))))
            case "type" if isinstance(kinds[0], Instance) and len(kinds) == 1:
                return ClassOf(kinds[0].cls)
        if name in COPIES:
            return Many(self._element(kinds[0]))
        return kinds[0] if name in SAME else None

    def _read_subscript(self, node: ast.Subscript, scope: Scope) -> Kind | None:
        kind = self.infer(node.value, scope)
        if isinstance(node.slice, ast.Slice):
            return kind if isinstance(kind, Many) else None
        if isinstance(kind, Table):
            return kind.value
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
            return self._part(kind, node.slice.value)
        return kind.element if isinstance(kind, Many) else None

    def _read_either(self, node: ast.IfExp | ast.BoolOp, scope: Scope) -> Kind | None:
        is_if = isinstance(node, ast.IfExp)
        return joined(
            [self.infer(one, scope) for one in ([node.body, node.orelse] if is_if else node.values)]
        )

    def _read_list(self, node: ast.List | ast.Set, scope: Scope) -> Kind | None:
        has_star = any(isinstance(one, ast.Starred) for one in node.elts)
        # What is put in later is not seen, so an empty list says nothing of what it holds.
        return Many(None if has_star else joined([self.infer(one, scope) for one in node.elts]))

    def _read_tuple(self, node: ast.Tuple, scope: Scope) -> Kind | None:
        if any(isinstance(one, ast.Starred) for one in node.elts):
            return None
        return Several(tuple(self.infer(one, scope) for one in node.elts))

    def _read_dict(self, node: ast.Dict, scope: Scope) -> Kind | None:
        if None in node.keys:
            return None
        sides = ([self.infer(one, scope) for one in side] for side in (node.keys, node.values))
        return Table(*map(joined, sides))

    def _read_comprehension(self, node: ast.ListComp, scope: Scope) -> Kind | None:
        return Many(self.infer(node.elt, node.scope))

    def _read_dict_comprehension(self, node: ast.DictComp, scope: Scope) -> Kind | None:
        return Table(self.infer(node.key, node.scope), self.infer(node.value, node.scope))

    def _read_named(self, node: ast.NamedExpr, scope: Scope) -> Kind | None:
        return self.infer(node.value, scope)

    def _read_constant(self, node: ast.Constant, scope: Scope) -> Kind | None:
        return NOTHING if node.value is None else None


READERS = {
    ast.Attribute: Receivers._read_attribute,
    ast.Call: Receivers._read_call,
    ast.Subscript: Receivers._read_subscript,
    ast.IfExp: Receivers._read_either,
    ast.BoolOp: Receivers._read_either,
    ast.List: Receivers._read_list,
    ast.Set: Receivers._read_list,
    ast.Tuple: Receivers._read_tuple,
    ast.Dict: Receivers._read_dict,
    ast.ListComp: Receivers._read_comprehension,
    ast.SetComp: Receivers._read_comprehension,
    ast.GeneratorExp: Receivers._read_comprehension,
    ast.DictComp: Receivers._read_dict_comprehension,
    ast.NamedExpr: Receivers._read_named,
    ast.Constant: Receivers._read_constant,
}


def _owner(symbol: Symbol) -> Symbol:
    return symbol[0], symbol[1].rpartition(".")[0]


def _use(
    page: AnnotatedPage,
    node: ast.Name | ast.Attribute,
    target: Symbol,
    receiver: Symbol | None,
    how: str,
) -> Use:
    name = node.id if isinstance(node, ast.Name) else node.attr
    # ast counts bytes of UTF-8.
    line = page.lines[node.end_lineno - 1].encode()[: node.end_col_offset].decode()
    return Use(node.end_lineno, len(line) - len(name), name, target, receiver, how)


@lru_cache(maxsize=8)
def receivers_of(package: Package) -> Receivers:
    """The package's, read once."""
    return Receivers(package)
