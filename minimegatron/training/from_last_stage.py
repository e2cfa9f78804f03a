"""Numbers of the last stage on every rank.

Megatron has no counterpart; its last rank prints what it knows.
"""

import json

import torch

from minimegatron.core import collectives, parallel_state
from minimegatron.core.utils import get_device

MESSAGE_BYTES = 4096
"""Length of what `broadcast_from_last_stage` sends: one message, whose size all ranks know."""


def broadcast_from_last_stage(values: dict[str, float]) -> dict[str, float]:
    """The last stage's `values` on every rank: losses exist there, but rank 0 prints them."""
    text = json.dumps(values).encode().ljust(MESSAGE_BYTES)
    if len(text) > MESSAGE_BYTES:
        raise ValueError(f"{len(values)} logged values take over {MESSAGE_BYTES} bytes; log fewer")
    message = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(get_device())
    group = parallel_state.get_pipeline_model_parallel_group()
    collectives.broadcast(message, parallel_state.get_pipeline_placement().last_rank, group)
    return json.loads(bytes(message.tolist()))
