"""Memory that ranks of one machine share, as a backend of `torch.distributed`, for any program:

    import minimegatron.backend
    torch.distributed.init_process_group("cpu:shm")

Megatron has no counterpart: NCCL moves tensors between GPUs.

In the order to read it: `slots` (who may write where), `handshake` (who is there), `backlog` (what a
full socket does not take), `incoming`, `channels` (tensors between two ranks), `waiting` (who reads),
`mesh` (between all ranks of a group), `works` (handles), `gloo_works`, `gloo_inside` (what is large),
`group` (what torch calls, and the name by which it knows all this).
"""

from minimegatron.backend.group import NAME, SharedMemoryGroup, in_place_of, is_available
from minimegatron.backend.incoming import WireError
from minimegatron.backend.mesh import get_timeout
from minimegatron.backend.torch_names import METHODS
from minimegatron.backend.works import SharedMemoryWork

__all__ = [
    "METHODS",
    "NAME",
    "SharedMemoryGroup",
    "SharedMemoryWork",
    "WireError",
    "get_timeout",
    "in_place_of",
    "is_available",
]
