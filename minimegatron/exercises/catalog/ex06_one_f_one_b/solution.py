"""The 1F1B loop, solved.

Warm-up: as many forwards as stages follow. Steady: forward, backward, with one exchange between each
two; it moves an activation one way and a gradient the other, because both neighbours are ready to send
at that moment. Cool-down: the backwards of what the warm-up put in flight.
"""

from typing import Any

from minimegatron.core.pipeline_parallel.loops import Chunk, Communicator


def get_num_warmup_microbatches(pp_size: int, pp_rank: int, num_microbatches: int) -> int:
    """How many forwards stage `pp_rank` of `pp_size` does before it begins to take turns."""
    # The last stage follows no one: it can go back at once. Every stage before it waits one more.
    return min(pp_size - pp_rank - 1, num_microbatches)


def one_f_one_b(chunk: Chunk, p2p: Communicator, recv_shapes: Any, send_shapes: Any) -> None:
    """One step of plain 1F1B on this stage. With `forward_only` there is no backward at all."""
    # -- Given: who this stage is, and how many microbatches it has --
    stage, num_stages = p2p.pp_group.rank(), p2p.pp_group.size()
    is_first_stage, is_last_stage = stage == 0, stage == num_stages - 1
    num_microbatches = chunk.num_microbatches
    num_warmup_microbatches = get_num_warmup_microbatches(num_stages, stage, num_microbatches)
    if chunk.forward_only:  # nothing to wait for: every forward is a warm-up forward
        num_warmup_microbatches = num_microbatches

    # -- Warm-up: forwards only, until the last stage has its first microbatch --
    for i in range(num_warmup_microbatches):
        input_tensor = p2p.recv_forward(recv_shapes, is_first_stage)
        output_tensor = chunk.forward_step(i, input_tensor)
        p2p.send_forward(output_tensor, is_last_stage)
        chunk.free_output(output_tensor)

    # -- Steady: a forward, then the backward of the oldest microbatch in flight --
    if num_warmup_microbatches < num_microbatches:
        input_tensor = p2p.recv_forward(recv_shapes, is_first_stage)
    for i in range(num_warmup_microbatches, num_microbatches):
        output_tensor = chunk.forward_step(i, input_tensor)
        grad = p2p.send_forward_recv_backward(output_tensor, send_shapes, is_last_stage)
        chunk.free_output(output_tensor)
        input_grad = chunk.backward_step(grad)
        if i == num_microbatches - 1:  # nothing is left to receive
            p2p.send_backward(input_grad, is_first_stage)
        else:
            input_tensor = p2p.send_backward_recv_forward(input_grad, recv_shapes, is_first_stage)

    # -- Cool-down: the backwards that are left --
    while chunk.num_in_flight() > 0:
        grad = p2p.recv_backward(send_shapes, is_last_stage)
        input_grad = chunk.backward_step(grad)
        p2p.send_backward(input_grad, is_first_stage)


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
