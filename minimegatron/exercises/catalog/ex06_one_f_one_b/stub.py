"""The 1F1B loop: warm-up, one forward and one backward in turn, cool-down.

Two holes: the number of warm-up forwards, and the loop of three phases. The step that runs your loop is
the real one, as for the package's own `loops.one_f_one_b`. Your tools:

    chunk.forward_step(i, input_tensor)     forward of microbatch i; returns the output, keeps both
    chunk.free_output(output_tensor)        after sending it: its memory is not needed any more
    chunk.backward_step(grad)               backward of the oldest microbatch whose forward is done;
                                            returns the gradient of its input
    chunk.num_in_flight()                   forwards done whose backward is not

    p2p.recv_forward(recv_shapes, is_first_stage)              an input (None on the first stage)
    p2p.send_forward(output_tensor, is_last_stage)             (nothing on the last stage)
    p2p.recv_backward(send_shapes, is_last_stage)              a gradient (None on the last stage)
    p2p.send_backward(input_grad, is_first_stage)              (nothing on the first stage)
    p2p.send_forward_recv_backward(output_tensor, send_shapes, is_last_stage)     both in one exchange
    p2p.send_backward_recv_forward(input_grad, recv_shapes, is_first_stage)       both in one exchange

A send waits until the other stage takes it. (On NCCL the GPU's stream waits.) That is why the last two
exist: two neighbours that both send first would wait for each other. Where two messages cross,
use them, and not two separate calls in a clever order: those take turns.
"""

from typing import Any

from minimegatron.core.pipeline_parallel.loops import Chunk, Communicator


def get_num_warmup_microbatches(pp_size: int, pp_rank: int, num_microbatches: int) -> int:
    """How many forwards stage `pp_rank` of `pp_size` does before it begins to take turns."""
    raise NotImplementedError("Write get_num_warmup_microbatches: how many stages follow?")


def one_f_one_b(chunk: Chunk, p2p: Communicator, recv_shapes: Any, send_shapes: Any) -> None:
    """One step of plain 1F1B on this stage. With `forward_only` there is no backward at all."""
    # -- Given: who this stage is, and how many microbatches it has --
    stage, num_stages = p2p.pp_group.rank(), p2p.pp_group.size()
    is_first_stage, is_last_stage = stage == 0, stage == num_stages - 1  # noqa: F841  for your loop
    num_microbatches = chunk.num_microbatches
    num_warmup_microbatches = get_num_warmup_microbatches(num_stages, stage, num_microbatches)
    if chunk.forward_only:  # nothing to wait for: every forward is a warm-up forward
        num_warmup_microbatches = num_microbatches  # noqa: F841

    raise NotImplementedError("Write the three phases: warm-up, steady, cool-down")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
