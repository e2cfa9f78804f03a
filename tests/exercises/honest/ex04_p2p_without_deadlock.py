"""P2P without deadlock: the order in which a stage starts its messages.

`_start` is missing. It is given up to four messages of one exchange, by name:

    "send_next"   an activation to the next stage         "recv_prev"   one from the previous stage
    "send_prev"   a gradient to the previous stage        "recv_next"   one from the next stage

At the ends of the pipeline, and in some calls, only some of the four are there. With interleaving the
stages form a ring: the last one's next stage is stage 0.

`self.transport.start(message)` starts one message and returns a handle. It returns only when the
other stage has started the other end. (NCCL's call returns at once, and the GPU's stream waits.) As on
NCCL, messages have no tags: the n-th send from one stage to another meets the n-th receive.

    self.curr_rank_in_pg   this stage's number       self.world_size   the number of stages
"""

from minimegatron.core.pipeline_parallel.p2p_communication import Message, P2PCommunicator, Work


def _start(self: P2PCommunicator, parts: dict[str, Message]) -> dict[str, Work]:
    """Even stages send first, odd ones receive first; activations before gradients."""
    sends_first = self.curr_rank_in_pg % 2 == 0
    order = []
    for send, receive in (("send_next", "recv_prev"), ("send_prev", "recv_next")):
        order += [send, receive] if sends_first else [receive, send]
    handles = {}
    for what in order:
        if what in parts:
            handles[what] = self.transport.start(parts[what])
    return handles


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
