"""What functions take and what classes offer, read off source text and never by importing it.

Called by: `rosetta` (for this package), `megatron_core` and tests/conformance (for an installed
megatron-core). Calls nothing.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Found = tuple[str, ast.stmt]
"""(module, the statement that defines a name there)."""


@dataclass(frozen=True)
class Signature:
    """Of a function its parameters; of a class those of its constructor, and its public methods; of an
    enumeration its members."""

    kind: str
    """`function`, `class`, `record` (a dataclass, made with keywords), `enum` or `variable`."""
    file: str
    line: int
    parameters: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


@dataclass(frozen=True)
class Argument:
    """One argument of a function or constructor."""

    name: str
    default: str | None
    """Its source text; None for an argument that is required."""
    by_position: bool


class Source:
    """The modules below a folder, read when they are asked for."""

    def __init__(self, root: Path):
        self.root = root
        self.tree = cache(lambda module: ast.parse(self.path(module).read_text()))

    def path(self, module: str) -> Path | None:
        """The file of a module; None if there is no such module."""
        base = self.root.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return path
        return None

    def find(self, dotted: str) -> Signature | None:
        """The signature of a function or class, through re-exports; None if there is none."""
        found = self._definition(dotted)
        if found is None:
            return None
        module, node = found
        place = (self.path(module).relative_to(self.root).as_posix(), node.lineno)
        if isinstance(node, ast.ClassDef):
            lineage = self._lineage(module, node, set())
            if is_enum(node):
                return Signature("enum", *place, members(node), public_methods(lineage))
            kind = "record" if is_record(node) else "class"
            return Signature(kind, *place, constructor(lineage), public_methods(lineage))
        if isinstance(node, Definition):
            return Signature("function", *place, parameters_of(node))
        return Signature("variable", *place)

    def arguments(self, dotted: str) -> list[Argument] | None:
        """What a function, method or constructor takes; None if there is none of this name."""
        found = self._definition(dotted)
        if found is not None:
            module, node = found
            if isinstance(node, ast.ClassDef):
                return self._constructor_arguments(self._lineage(module, node, set()))
            return arguments_of(node) if isinstance(node, Definition) else None
        owner, _, name = dotted.rpartition(".")
        found = self._definition(owner)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        for node in self._lineage(*found, set()):
            for method in statements(node.body):
                if isinstance(method, ast.FunctionDef) and method.name == name:
                    return arguments_of(method)
        return None

    def _constructor_arguments(self, lineage: list[ast.ClassDef]) -> list[Argument]:
        for node in lineage:
            if is_record(node):
                return fields_of(lineage)
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__new__"):
                    return arguments_of(method)
        return []

    def _definition(self, dotted: str, depth: int = 0) -> Found | None:
        module, _, name = dotted.rpartition(".")
        if depth > 8 or not module or self.path(module) is None:
            return None
        target = None
        for node in statements(self.tree(module).body):
            if isinstance(node, Definition) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign):
                names = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(x, ast.Name) and x.id == name for x in names):
                    return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        target = f"{self._origin(module, node)}.{alias.name}"
        return self._definition(target, depth + 1) if target else None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import names, where it is relative too."""
        if not node.level:
            return node.module
        parts = module.split(".")
        is_package = self.path(module).name == "__init__.py"
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _lineage(self, module: str, node: ast.ClassDef, seen: set[str]) -> list[ast.ClassDef]:
        """The class, then those of its bases that are below the folder."""
        lineage = [node]
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0]
            found = self._definition(f"{module}.{name}") if "." not in name else None
            if found and isinstance(found[1], ast.ClassDef) and name not in seen:
                seen.add(name)
                lineage += self._lineage(*found, seen)
        return lineage


def statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Those of a module or class, also what stands under `if` and `try`.

    >>> [x.name for x in statements(ast.parse("if 1:\\n  def f(): ...\\nclass C: ...").body)]
    ['f', 'C']
    """
    found = []
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            parts = [*node.body, *node.orelse, *getattr(node, "finalbody", [])]
            handlers = [x for handler in getattr(node, "handlers", []) for x in handler.body]
            found += statements([*parts, *handlers])
        else:
            found.append(node)
    return found


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """Names in order, with the stars of `*args` and `**kwargs`, without self and cls.

    >>> parameters_of(ast.parse("def f(self, a, *rest, b=1, **more): ...").body[0])
    ('a', '*rest', 'b', '**more')
    """
    a = node.args
    names = [x.arg for x in (*a.posonlyargs, *a.args)]
    names += [f"*{a.vararg.arg}"] if a.vararg else []
    names += [x.arg for x in a.kwonlyargs]
    names += [f"**{a.kwarg.arg}"] if a.kwarg else []
    return tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def constructor(lineage: list[ast.ClassDef]) -> tuple[str, ...]:
    """What makes an instance: the nearest `__init__`, or the fields of all dataclasses."""
    for node in lineage:
        if is_record(node):
            break
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__new__"):
                return parameters_of(method)
    fields = [
        x.target.id
        for node in filter(is_record, reversed(lineage))
        for x in node.body
        if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
        if "ClassVar" not in ast.unparse(x.annotation)
        if x.target.id[0] != "_"
    ]
    return tuple(dict.fromkeys(fields)) if any(map(is_record, lineage)) else ()


def is_record(node: ast.ClassDef) -> bool:
    """True for a dataclass and for a named tuple."""
    words = [ast.unparse(x) for x in (*node.decorator_list, *node.bases)]
    return any("dataclass" in word or word == "NamedTuple" for word in words)


def is_enum(node: ast.ClassDef) -> bool:
    """True for an enumeration.

    >>> is_enum(ast.parse("class A(enum.Enum): ...").body[0])
    True
    """
    return any(ast.unparse(base).rpartition(".")[2] in ("Enum", "IntEnum") for base in node.bases)


def members(node: ast.ClassDef) -> tuple[str, ...]:
    """Of an enumeration.

    >>> members(ast.parse("class A(Enum):\\n  b = 1\\n  c = 2").body[0])
    ('b', 'c')
    """
    assigned = [x for x in node.body if isinstance(x, ast.Assign)]
    return tuple(x.targets[0].id for x in assigned if isinstance(x.targets[0], ast.Name))


def public_methods(lineage: list[ast.ClassDef]) -> tuple[str, ...]:
    """Of the class itself and of its bases in the package; `forward` among them, properties too."""
    members = [x for node in lineage for x in statements(node.body)]
    names = [x.name for x in members if isinstance(x, ast.FunctionDef)]
    return tuple(dict.fromkeys(name for name in names if name[0] != "_"))


# -- Defaults --


def arguments_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Argument]:
    """In order, without self and cls, and without `*args` and `**kwargs`.

    >>> [(x.name, x.default) for x in arguments_of(ast.parse("def f(self, a, *, b=1): ...").body[0])]
    [('a', None), ('b', '1')]
    """
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    padding = [None] * (len(positional) - len(a.defaults))
    found = [
        Argument(x.arg, None if default is None else ast.unparse(default), True)
        for x, default in zip(positional, [*padding, *a.defaults], strict=True)
    ]
    found += [
        Argument(x.arg, None if default is None else ast.unparse(default), False)
        for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    return found[1:] if found and found[0].name in ("self", "cls", "ctx") else found


def fields_of(lineage: list[ast.ClassDef]) -> list[Argument]:
    """The fields of a dataclass, those of its bases first; a subclass may set another default.

    A name that a base annotates is a field if that base is a dataclass too. A field with `init=False`
    cannot be given, and does not count.
    """
    found: dict[str, Argument] = {}
    for node in filter(is_record, reversed(lineage)):
        for x in node.body:
            is_field = isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
            is_given = is_field and "init=False" not in ast.unparse(x).replace(" ", "")
            if is_given and "ClassVar" not in ast.unparse(x.annotation):
                found[x.target.id] = Argument(x.target.id, _field_default(x.value), True)
    return list(found.values())


def _field_default(value: ast.expr | None) -> str | None:
    """The text of a field's default; of `field(default_factory=f)` it is `f()`.

    >>> _field_default(ast.parse("field(default_factory=list)").body[0].value)
    'list()'
    """
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
        if "default_factory" in given:
            return f"{given['default_factory']}()"
        return given.get("default")
    return None if value is None else ast.unparse(value)
