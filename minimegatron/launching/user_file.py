"""A Python file that the user has written, outside any package, run as a module.

Torch-free. Megatron has no counterpart.
"""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType


def load_user_file(path: Path, name: str) -> ModuleType:
    """Runs the file as module `name`, always as it is now.

    An import would take Python's compiled copy of the file, if there is one, and counts it as
    current when the file has changed within the same second and kept its length; it would also
    leave a folder beside the file.

    Raises whatever the file raises, SyntaxError included.
    """
    loader = SourceFileLoader(name, os.fspath(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module
    exec(loader.source_to_code(path.read_bytes(), loader.path), vars(module))
    return module


def load_user_function(where: str, flag: str, name: str) -> Callable:
    """The function that FILE.py:FUNCTION names; the file runs as module `name`.

    Raises ValueError, with `flag` and the line at fault, where there is none.
    """
    path, _, function_name = where.rpartition(":")
    if not path or not function_name:
        raise ValueError(f"{flag} {where!r}: write FILE.py:FUNCTION")
    if not Path(path).is_file():
        raise ValueError(f"{flag}: there is no file {path}")
    if not path.endswith(".py"):
        raise ValueError(f"{flag}: {path} is no Python file (.py)")
    try:
        module = load_user_file(Path(path), name)
    except Exception as error:
        raise ValueError(
            f"{place_in(error, where) or path}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{flag}: {path} has no function {function_name!r}")
    return function


def place_in(error: Exception, where: str | None) -> str | None:
    """FILE:LINE of the last line of the user's file (`where`: FILE:FUNCTION) on the error's way."""
    if where is None:
        return None
    path = Path(where.rpartition(":")[0]).resolve()
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path
    ]
    return f"{path.name}:{lines[-1]}" if lines else None
