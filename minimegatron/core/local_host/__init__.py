"""Memory that ranks of one machine share, behind one door: others import from this file alone.

Megatron needs no such package: NCCL moves tensors between GPUs.

In the order to read it: `shared_memory`, `slots` (who may write where), `handshake` (who is there),
`backlog` (what a full socket does not take), `channels` (tensors between two ranks),
`local_collectives` (between all ranks of a group).
"""

from minimegatron.core.local_host.channels import LENT, Connection, connect, get_timeout
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
