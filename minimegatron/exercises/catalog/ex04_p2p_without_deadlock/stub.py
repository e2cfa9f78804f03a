"""P2P without deadlock: the order in which a stage starts its messages.

`_start` is missing. It is given up to four messages of one exchange, by name:

    "send_next"   an activation to the next stage         "recv_prev"   one from the previous stage
    "send_prev"   a gradient to the previous stage        "recv_next"   one from the next stage

At the ends of the pipeline, and in some calls, only some of the four are there. With interleaving the
stages form a ring: the last one's next stage is stage 0.

`self.start(message)` starts one message and returns a handle. It returns only when the
other stage has started the other end. (NCCL's call returns at once, and the GPU's stream waits.) As on
NCCL, messages have no tags: the n-th send from one stage to another meets the n-th receive.

    self.curr_rank_in_pg   this stage's number       self.world_size   the number of stages
"""

from minimegatron.core.pipeline_parallel.p2p_communication import (
    Handle,
    P2PCommunicator,
    TensorMessage,
)


def _start(self: P2PCommunicator, parts: dict[str, TensorMessage]) -> dict[str, Handle]:
    """Starts every message of `parts` once. Returns the handles, by the same names.
    The caller waits for them, when it needs what comes; `_start` does not.

    `parts` has its names in the order above, on every stage. An exchange of all four, over any even
    number of stages, takes no longer than four messages one after the other.
    """
    raise NotImplementedError("Write _start: who sends first, and who receives first?")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
