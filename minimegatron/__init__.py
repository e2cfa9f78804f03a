"""minimegatron: Megatron's training step, small enough to read.

`minimegatron.core` and `minimegatron.training` mirror `megatron.core` and `megatron.training`.
The torch-free parts (planner, rank arithmetic, layouts) load where torch does not exist, so this file
imports nothing that needs it. `launch`, `trace` and `pace` are looked up on first use.
"""

import importlib
import sys

from minimegatron.moved import OldPaths

__version__ = "0.1.0"

if OldPaths not in sys.meta_path:
    sys.meta_path.append(OldPaths)

_LAZY = {
    "launch": "minimegatron.launching.launcher",
    "trace": "minimegatron.tracing.recorder",
    "pace": "minimegatron.tracing.pace",
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'minimegatron' has no attribute {name!r}")
