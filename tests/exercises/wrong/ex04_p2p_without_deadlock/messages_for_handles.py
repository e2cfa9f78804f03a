"""Messages are returned, and not their handles.

Expected: returned a Message as the handle of
"""

from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.transport import Message, Work


def _start(self: P2PCommunicator, parts: dict[str, Message]) -> dict[str, Work]:
    """Starts every message of `parts` once. Returns the handles, by the same names."""
    order = ["send_next", "recv_prev", "send_prev", "recv_next"]
    if self.curr_rank_in_pg % 2:
        order = ["recv_prev", "send_next", "recv_next", "send_prev"]
    return {name: parts[name] for name in order if name in parts}


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
