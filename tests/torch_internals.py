"""Which of torch's internals the package uses, and whether the installed torch has them.

Read by: test_torch_internals.py; `torch_check`, which notes it for each version. The table is
docs/torch_internals.toml.
"""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.distributed_c10d

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "torch_internals.toml"
PACKAGE = ROOT / "minimegatron"
LISTS_OF_FORBIDDEN = {"exercises/grading/tools.py"}
"""Names there are what an exercise may not use."""

OWNERS = {
    "torch.nn.Module": torch.nn.Module,
    "torch.Tensor": torch.Tensor,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.UntypedStorage": torch.UntypedStorage,
    "torch.distributed.ProcessGroup": torch.distributed.ProcessGroup,
    "torch.distributed.Store": torch.distributed.Store,
    "torch.distributed.Work": torch.distributed.Work,
}
"""Classes of torch whose private attributes are looked for, whatever stands before the dot. Of several
that have one, the last one counts."""

PRIVATE = re.compile(r"_[A-Za-z]\w*")
IN_A_STRING = re.compile(r"torch(\.\w+)*\._[A-Za-z]\w*(\.\w+)*")
HELD_IN = {"torch": "torch", "dist": "torch.distributed", "c10d": "torch._C._distributed_c10d"}
"""Names of variables that hold a module of torch, where one is asked for a name by `getattr`."""
ALIASES = {"torch": "torch", "dist": "torch.distributed"}


def table() -> list[dict[str, str]]:
    """The rows, in the order of the file."""
    return tomllib.loads(TABLE.read_text())["internal"]


def listed() -> set[tuple[str, str]]:
    """(file, name) of each row."""
    return {(row["file"], row["name"]) for row in table()}


def used() -> set[tuple[str, str]]:
    """(file, name) of each use in the package."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file not in LISTS_OF_FORBIDDEN:
            found |= {(file, name) for name in names_in(path.read_text())}
    return found


def names_in(text: str) -> set[str]:
    """
    >>> sorted(names_in("import torch; torch._foreach_norm(x); y._base; z._own; z._own = 1"))
    ['torch.Tensor._base', 'torch._foreach_norm']
    >>> sorted(names_in("from torch.utils._pytree import tree_leaves; f(dist._hidden, 'torch._C._x')"))
    ['torch._C._x', 'torch.distributed._hidden', 'torch.utils._pytree.tree_leaves']
    """
    tree = ast.parse(text)
    own = {node.attr for node in ast.walk(tree) if _is_stored(node)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found = {name for node in ast.walk(tree) for name in _names_of(node, own)}
    # `torch._C._name` holds `torch._C` too.
    return {name for name in found if not any(other.startswith(f"{name}._") for other in found)}


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _names_of(node: ast.AST, own: set[str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        for alias in node.names:
            if "._" in (name := f"{node.module}.{alias.name}"):
                yield name
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if IN_A_STRING.fullmatch(node.value):
            yield node.value
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
        asked, name = ast.unparse(node.args[0]), getattr(node.args[1], "value", "")
        if asked in HELD_IN and PRIVATE.fullmatch(str(name)):
            yield f"{HELD_IN[asked]}.{name}"
    elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
        dotted = ast.unparse(node)
        first, _, rest = dotted.partition(".")
        if first in ALIASES and re.fullmatch(r"[\w.]+", rest):
            name = f"{ALIASES[first]}.{rest}"
            yield name.replace("torch.distributed.distributed_c10d.", _C10D)
        elif first not in ("self", "cls") and node.attr not in own:
            yield from [f"{name}.{node.attr}" for name in OWNERS if _has(name, node.attr)][-1:]


_C10D = "torch.distributed.distributed_c10d."


def _has(owner: str, attribute: str) -> bool:
    # Where it was defined: a class of torch that inherits it is not a further owner.
    return attribute in vars(OWNERS[owner]) or any(
        attribute in vars(base) for base in OWNERS[owner].__mro__[1:] if base is not object
    )


def is_there(name: str) -> bool:
    """
    >>> is_there("torch._foreach_norm"), is_there("torch._no_such_name")
    (True, False)
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return _reaches(found, parts[count:])
    return False


def _reaches(found: Any, parts: list[str]) -> bool:
    for part in parts:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def missing() -> list[str]:
    """The listed names that this torch has not."""
    return sorted({row["name"] for row in table() if not is_there(row["name"])})
