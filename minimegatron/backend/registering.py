"""Makes the backend known to `torch.distributed`, once, when `minimegatron.backend` is imported.

Megatron has no counterpart.
"""

from typing import Any

import torch.distributed as dist

from minimegatron.backend.group import SharedMemoryGroup

NAME = "shm"
"""For `init_process_group("cpu:shm")`."""


def _make(options: Any, _: Any) -> SharedMemoryGroup:
    return SharedMemoryGroup(options.store, options.group_rank, options.group_size, options.timeout)


def is_available() -> bool:
    """Whether this torch knows the backend by its name."""
    return hasattr(dist.Backend, NAME.upper())


if not is_available():
    dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
