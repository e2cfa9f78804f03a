"""Odd stages begin with gradients, even ones with activations.

Expected: stage 0 starts send_next: it waits until stage 1 starts recv_prev
"""

from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.transport import Message, Work


def _start(self: P2PCommunicator, parts: dict[str, Message]) -> dict[str, Work]:
    """Starts every message of `parts` once. Returns the handles, by the same names."""
    order = ["send_next", "recv_prev", "send_prev", "recv_next"]
    if self.curr_rank_in_pg % 2:
        order = ["recv_next", "send_prev", "recv_prev", "send_next"]
    return {name: self.transport.start(parts[name]) for name in order if name in parts}
