"""Means that no exercise needs: what may read what it should not, or change it.

Torch-free. Megatron has no counterpart.
"""

import ast
import symtable
from collections.abc import Iterator
from pathlib import Path

from minimegatron.exercises.grading.code_names import (
    HARMLESS,
    imports_of,
    own_names,
    paths_of,
    quiet,
    strings_of,
)

HARMLESS_PARTS = {
    "os": ("cpu_count", "environ", "getcwd", "getenv", "getpid", "linesep", "name", "path", "sep"),
    "pdb": ("set_trace",),
    "sys": (
        *("argv", "byteorder", "exc_info", "exit", "float_info", "getrecursionlimit", "intern"),
        *("getsizeof", "hash_info", "implementation", "int_info", "maxsize", "platform"),
        *("setrecursionlimit", "stderr", "stdout", "version", "version_info"),
    ),
    "timeit": ("default_timer",),
}
"""Of these modules, what any exercise may use; no more of them."""
UNUSUAL_NAMES = (
    *("exec", "eval", "compile", "open", "__import__", "__builtins__", "__loader__", "__spec__"),
)
"""What is there without an import, and no exercise needs."""
UNUSUAL = (
    *("argparse.FileType", "builtins", "codecs", "ctypes", "gc", "importlib", "inspect"),
    *(
        "linecache",
        "logging.config",
        "marshal",
        "mmap",
        "numpy.ctypeslib",
        "numpy.f2py",
        "numpy.fromfile",
    ),
    *("numpy.genfromtxt", "numpy.lib", "numpy.load", "numpy.loadtxt", "numpy.memmap"),
    *("numpy.testing", "pickle", "pkgutil", "runpy", "shutil", "socket", "subprocess", "pathlib"),
    *("io.open", "threading.setprofile", "threading.settrace", "torch._C"),
    *("torch.distributed.FileStore", "torch.distributed.HashStore"),
    *("torch.distributed.PrefixStore", "torch.distributed.Store", "torch.distributed.TCPStore"),
    *("torch.distributed.distributed_c10d", "torch.distributed.rpc", "torch.from_file", "torch.fx"),
    *("torch.hub", "torch.load", "torch.multiprocessing", "torch.package", "torch.serialization"),
    *("torch.utils.cpp_extension", "torch.utils.data", "types.*", "types.CodeType"),
    *("types.FunctionType", "typing.ForwardRef", "typing.get_type_hints"),
)
"""What no exercise needs of the harmless modules; and others, which these have imported."""
UNUSUAL_ATTRIBUTES = (
    *("__base__", "__bases__", "__builtins__", "__closure__", "__code__", "__file__"),
    *("__globals__", "__loader__", "__mro__", "__path__", "__self__", "__spec__"),
    *("__subclasses__", "__wrapped__", "_get_backend", "_get_default_store", "ag_frame"),
    *("cr_frame", "f_back", "f_builtins", "f_globals", "f_locals", "gi_frame", "tb_frame"),
)
ROOT = Path(__file__).parents[3]


def tools_of(tree: ast.Module, source: str) -> list[str]:
    """The modules that the code uses and not every exercise may use, and the unusual names."""
    paths = [f".{path}.".replace("._", ".") for path in paths_of(tree)]
    words = {word for text in strings_of(tree) for word in text.split(".")}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = _names_of_others(tree, source)
    found = _modules(tree) + _as_values(tree) + _other_parts(tree)
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
    imported, _ = imports_of(tree)
    modules = [module_of(path) for path in imported]
    reached = {module_of(path) for path in paths_of(tree)}
    # In `a.b.c`, `a` and `a.b` are only the way.
    ways = {one.rpartition(".")[0] for one in reached}
    while more := {way.rpartition(".")[0] for way in ways} - ways:
        ways |= more
    modules += sorted(reached - ways)
    return [one for one in modules if one not in HARMLESS]


def _as_values(tree: ast.Module) -> list[str]:
    """The modules that go into a variable, a call or a list: what is done there, nobody sees."""
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    modules = {
        alias.asname or alias.name.partition(".")[0]: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    own = own_names(tree)
    found = {
        modules[node.id]
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in bases
        # A variable of its own may have a module's name; hardly that of one of these.
        if node.id in modules and (modules[node.id] in HARMLESS_PARTS or node.id not in own)
    }
    return [f"the module {name} as a value" for name in sorted(found)]


def _other_parts(tree: ast.Module) -> list[str]:
    """What it uses of the modules that are harmless in part, wherever it reaches them."""
    found, paths = [], sorted(paths_of(tree))
    ways = {path.rpartition(".")[0] for path in paths}
    for path in paths:
        names = path.split(".")
        parts = [
            f"{module}.{part}"
            for module, part in zip([name.lstrip("_") for name in names], names[1:], strict=False)
            if part not in HARMLESS_PARTS.get(module, (part,))
        ]
        if not parts and len(names) > 1 and names[-1] in HARMLESS_PARTS and path not in ways:
            parts = [names[-1]]
        if names[-1] == "__dict__" and not parts:
            parts = [path]
        found += parts
    return found


def module_of(path: str) -> str:
    """Which module a dotted path leads to: of the package's, the very module.

    >>> module_of("os.path.join"), module_of("minimegatron.planner.plan.plan")
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
    found = read.intersection(UNUSUAL) - own_names(tree)
    if suspect := read.intersection(UNUSUAL_NAMES):
        with quiet():
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
        elif isinstance(statement, ast.Assign) and name in own_names(ast.Tuple(statement.targets)):
            line = statement.end_lineno
        else:
            continue
        reads = [node.lineno for node in nodes if isinstance(node.ctx, ast.Load)]
        return not is_deleted and all(read > line for read in reads)
    return False
