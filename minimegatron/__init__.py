"""minimegatron: Megatron's training step, small enough to read.

`minimegatron.core` and `minimegatron.training` mirror `megatron.core` and `megatron.training`.
This file imports nothing of ours, so that the torch-free parts (planner, rank arithmetic, layouts) load
where torch does not exist. `launch`, `trace` and `pace` are looked up on first use.
"""

import importlib

__version__ = "0.1.0"


_LAZY = {
    "launch": "minimegatron.launcher",
    "trace": "minimegatron.tracing.recorder",
    "pace": "minimegatron.tracing.pace",
}


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'minimegatron' has no attribute {name!r}")
