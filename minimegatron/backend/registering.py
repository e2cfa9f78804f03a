"""Makes the backend known to `torch.distributed`, once, when `minimegatron.backend` is imported.

Megatron has no counterpart.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.backend.group import SharedMemoryGroup

NAME = "shm"
"""For `init_process_group("cpu:shm")`."""


def _make(options: Any, _: Any) -> SharedMemoryGroup | dist.ProcessGroupGloo:
    given = (options.store, options.group_rank, options.group_size, options.timeout)
    if reason := why_not():
        warnings.warn(f"{reason}; gloo carries everything in this group", stacklevel=2)
        return dist.ProcessGroupGloo(*given)
    return SharedMemoryGroup(*given)


def why_not() -> str | None:
    """Why this torch cannot have a group that is written in Python; None if it can."""
    needs = [(dist.ProcessGroup, name) for name in ("_register_backend", "_set_default_backend")]
    names = ("create_default_device", "create_device", "_Options")
    needs += [(dist.ProcessGroupGloo, name) for name in names]
    missing = [f"{cls.__name__}.{name}" for cls, name in needs if not hasattr(cls, name)]
    return f"torch {torch.__version__} has no {', '.join(missing)}" if missing else None


def in_place_of(name: str) -> str:
    """The backend for groups beside one of this name: shared memory in the place of gloo.

    >>> in_place_of("gloo"), in_place_of("nccl")
    ('shm', 'nccl')
    """
    return NAME if name == "gloo" and is_available() else name


def is_available() -> bool:
    """Whether this torch knows the backend by its name."""
    return hasattr(dist.Backend, NAME.upper())


if not is_available():
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
