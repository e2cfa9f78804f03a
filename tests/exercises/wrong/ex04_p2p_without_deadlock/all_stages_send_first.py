"""Every stage sends first: around the ring, each waits for a receiver.

Expected: stage 3 starts send_next: it waits until stage 0 starts recv_prev Each waits for another.
"""

from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.transport import Message, Work


def _start(self: P2PCommunicator, parts: dict[str, Message]) -> dict[str, Work]:
    """Starts every message of `parts` once. Returns the handles, by the same names."""
    order = ["send_next", "recv_prev", "send_prev", "recv_next"]
    return {name: self.transport.start(parts[name]) for name in order if name in parts}
