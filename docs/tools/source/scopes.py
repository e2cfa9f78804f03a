"""What binds each name of a module, scope by scope, and where objects are used in its code.

Called by: `receivers`. Calls: `ast`; no name is looked up here.
"""

import ast
from typing import NamedTuple

from source.kinds import Symbol

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Binding(NamedTuple):
    """One way in which a name gets its value."""

    how: str
    """value, element, entered, annotation, caught, own, class of own, import or unknown."""
    node: ast.AST | str | None = None
    scope: "Scope | None" = None
    """Where `node` is to be read."""
    path: tuple[int, ...] = ()
    """Places in the tuples that it is unpacked from."""


UNKNOWN = Binding("unknown")


class Scope:
    """A module, a class's body, a function, a lambda or a comprehension."""

    def __init__(self, what: str, module: str, owner: str = "", outer: "Scope | None" = None):
        self.what, self.module, self.owner, self.outer = what, module, owner, outer
        """`owner`: the innermost class, qualified; "" outside of classes."""
        self.names: dict[str, list[Binding]] = {}
        self.globals: set[str] = set()

    def bind(self, name: str, binding: Binding) -> None:
        self.names.setdefault(name, []).append(binding)


class Uses:
    """Attributes that one module reads, its calls and `with` statements, each with its scope."""

    def __init__(self, module: str, tree: ast.Module):
        self.module = module
        self.attributes: list[tuple[ast.Attribute, Scope]] = []
        self.calls: list[tuple[ast.Call, Scope]] = []
        self.managers: list[tuple[ast.expr, Scope]] = []
        self.marks: set[tuple[int, int]] = set()
        """Line and column of the names that definitions are decorated with."""
        self.on_self: dict[tuple[Symbol, str], list[Binding]] = {}
        """(class, attribute) -> what its methods assign to it."""
        self.top = Scope("module", module)
        self._visitors = {
            ast.FunctionDef: self._function,
            ast.AsyncFunctionDef: self._function,
            ast.Lambda: self._lambda,
            ast.ClassDef: self._class,
            ast.ListComp: self._comprehension,
            ast.SetComp: self._comprehension,
            ast.DictComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.Assign: self._assign,
            ast.AnnAssign: self._annotated,
            ast.AugAssign: self._changed,
            ast.NamedExpr: self._named,
            ast.For: self._loop,
            ast.AsyncFor: self._loop,
            ast.With: self._with,
            ast.AsyncWith: self._with,
            ast.ExceptHandler: self._caught,
            ast.Import: self._import,
            ast.ImportFrom: self._import,
            ast.Global: self._global,
            ast.Nonlocal: self._nonlocal,
            ast.MatchAs: self._captured,
            ast.MatchStar: self._captured,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
        }
        self._all(tree.body, self.top)

    # -- Walking --

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        visitor = self._visitors.get(type(node))
        if visitor is None:
            self._children(node, scope)
        else:
            visitor(node, scope)

    def _all(self, nodes: list, scope: Scope) -> None:
        for node in nodes:
            if node is not None and type(node) not in (ast.Name, ast.Constant):
                self._visit(node, scope)

    def _children(self, node: ast.AST, scope: Scope) -> None:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                for one in value:
                    if isinstance(one, ast.AST):
                        self._visit(one, scope)
            elif isinstance(value, ast.AST) and type(value) not in (ast.Name, ast.Constant):
                self._visit(value, scope)

    # -- Scopes --

    def _decorated(self, node: ast.AST, scope: Scope) -> None:
        for mark in node.decorator_list:
            mark = mark.func if isinstance(mark, ast.Call) else mark
            name = getattr(mark, "attr", getattr(mark, "id", ""))
            self.marks.add((mark.end_lineno, mark.end_col_offset - len(name)))
        self._all(node.decorator_list, scope)

    def _function(self, node: ast.AST, scope: Scope) -> None:
        self._decorated(node, scope)
        scope.bind(node.name, UNKNOWN)  # one of a module or class is found by its definition
        inner = Scope("function", self.module, scope.owner, scope)
        is_method = scope.what == "class"
        marks = {getattr(mark, "id", "") for mark in node.decorator_list}
        self._parameters(node.args, scope, inner)
        first = [*node.args.posonlyargs, *node.args.args][:1]
        if is_method and first and "staticmethod" not in marks:
            how = "class of own" if "classmethod" in marks else "own"
            inner.names[first[0].arg] = [Binding(how)]
        self._all(node.body, inner)

    def _parameters(self, arguments: ast.arguments, scope: Scope, inner: Scope) -> None:
        for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            inner.bind(one.arg, Binding("annotation", one.annotation, inner))
        for one in (arguments.vararg, arguments.kwarg):
            if one is not None:
                inner.bind(one.arg, UNKNOWN)
        self._all([*arguments.defaults, *arguments.kw_defaults], scope)

    def _lambda(self, node: ast.Lambda, scope: Scope) -> None:
        inner = Scope("lambda", self.module, scope.owner, scope)
        self._parameters(node.args, scope, inner)
        self._all([node.body], inner)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        self._decorated(node, scope)
        scope.bind(node.name, UNKNOWN)
        self._all([*node.bases, *node.keywords], scope)
        # A class within a function has no name that is known elsewhere: nothing is said of it.
        is_known = scope.what in ("module", "class")
        owner = f"{scope.owner}.{node.name}" if scope.owner else node.name
        self._all(node.body, Scope("class", self.module, owner if is_known else "", scope))

    def _comprehension(self, node: Comprehension, scope: Scope) -> None:
        inner = Scope("comprehension", self.module, scope.owner, scope)
        for place, part in enumerate(node.generators):
            # The first iterable is read outside.
            self._bind(part.target, Binding("element", part.iter, inner if place else scope), inner)
            self._all([part.iter], inner if place else scope)
            self._all(part.ifs, inner)
        is_dict = isinstance(node, ast.DictComp)
        self._all([node.key, node.value] if is_dict else [node.elt], inner)
        node.scope = inner

    # -- Bindings --

    def _bind(self, target: ast.AST, binding: Binding, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.bind(target.id, binding)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, UNKNOWN, scope)
        elif isinstance(target, ast.Tuple | ast.List):
            has_star = any(isinstance(part, ast.Starred) for part in target.elts)
            for place, part in enumerate(target.elts):
                inside = binding._replace(path=(*binding.path, place))
                self._bind(part, UNKNOWN if has_star else inside, scope)
        elif isinstance(target, ast.Attribute):
            value = target.value
            if isinstance(value, ast.Name) and self._is_own(value.id, scope):
                cls = (self.module, scope.owner)
                self.on_self.setdefault((cls, target.attr), []).append(binding)
            self._all([value], scope)
        else:
            self._all([target], scope)

    def _is_own(self, name: str, scope: Scope) -> bool:
        """Whether the name is the object of a method; a function inside may use it too."""
        while scope is not None and name not in scope.names:
            scope = scope.outer
        return scope is not None and scope.names[name][0].how == "own" and bool(scope.owner)

    def _assign(self, node: ast.Assign, scope: Scope) -> None:
        for target in node.targets:
            self._bind(target, Binding("value", node.value, scope), scope)
        self._all([node.value], scope)

    def _annotated(self, node: ast.AnnAssign, scope: Scope) -> None:
        self._bind(node.target, Binding("annotation", node.annotation, scope), scope)
        if node.value is not None:
            self._bind(node.target, Binding("value", node.value, scope), scope)
            self._all([node.value], scope)

    def _changed(self, node: ast.AugAssign, scope: Scope) -> None:
        # A list stays a list; of a name alone, what the operator makes of it is not known.
        if isinstance(node.target, ast.Name):
            scope.bind(node.target.id, Binding("value", node.target, scope))
        else:
            self._all([node.target], scope)
        self._all([node.value], scope)

    def _named(self, node: ast.NamedExpr, scope: Scope) -> None:
        outside = scope
        while outside.what == "comprehension":
            outside = outside.outer
        self._bind(node.target, Binding("value", node.value, scope), outside)
        self._all([node.value], scope)

    def _loop(self, node: ast.For, scope: Scope) -> None:
        self._bind(node.target, Binding("element", node.iter, scope), scope)
        self._all([node.iter, *node.body, *node.orelse], scope)

    def _with(self, node: ast.With, scope: Scope) -> None:
        for item in node.items:
            self.managers.append((item.context_expr, scope))
            if item.optional_vars is not None:
                self._bind(item.optional_vars, Binding("entered", item.context_expr, scope), scope)
            self._all([item.context_expr], scope)
        self._all(node.body, scope)

    def _caught(self, node: ast.ExceptHandler, scope: Scope) -> None:
        if node.name:
            scope.bind(node.name, Binding("caught", node.type, scope))
        self._all([node.type, *node.body], scope)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            scope.bind(name, Binding("import", name, scope))

    def _global(self, node: ast.Global, scope: Scope) -> None:
        for name in node.names:
            self.top.bind(name, UNKNOWN)
            scope.globals.add(name)

    def _nonlocal(self, node: ast.Nonlocal, scope: Scope) -> None:
        for name in node.names:
            scope.bind(name, UNKNOWN)

    def _captured(self, node: ast.MatchAs | ast.MatchStar, scope: Scope) -> None:
        if node.name:
            scope.bind(node.name, UNKNOWN)
        self._children(node, scope)

    # -- Uses --

    def _attribute(self, node: ast.Attribute, scope: Scope) -> None:
        if isinstance(node.ctx, ast.Load):
            self.attributes.append((node, scope))
        if type(node.value) is not ast.Name:
            self._visit(node.value, scope)

    def _call(self, node: ast.Call, scope: Scope) -> None:
        self.calls.append((node, scope))
        self._children(node, scope)
