"""Collectives of `core` over memory that ranks of one machine share, behind one door.

Others import from this file alone. Megatron needs no such package: NCCL moves tensors between GPUs.
What moves the bytes is `minimegatron.backend`; `local_collectives` has the ranks of a group.
"""

from minimegatron.backend.channels import LENT, Connection
from minimegatron.backend.connecting import connect, get_timeout
from minimegatron.core.local_host.local_collectives import (
    abandon,
    begin_step,
    count_over_gloo,
    end_step,
    get_mesh,
    new_lane,
)

__all__ = [
    "LENT",
    "Connection",
    "abandon",
    "begin_step",
    "connect",
    "count_over_gloo",
    "end_step",
    "get_mesh",
    "get_timeout",
    "new_lane",
]
