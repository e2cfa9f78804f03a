"""A Python file that the user has written, outside any package, run as a module.

Called by: `exercises.rank_side`, for a student's file; `commands.plan`, for a user's schedule. Calls:
`importlib`. Torch-free. Megatron has no counterpart.
"""

import importlib.util
import os
import sys
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
