"""Every stage receives first: nobody ever sends.

Expected: stage 0 starts recv_prev: it waits until stage 3 starts send_next
"""

from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.transport import Message, Work


def _start(self: P2PCommunicator, parts: dict[str, Message]) -> dict[str, Work]:
    """Starts every message of `parts` once. Returns the handles, by the same names."""
    order = ["recv_prev", "send_next", "recv_next", "send_prev"]
    return {name: self.transport.start(parts[name]) for name in order if name in parts}
