"""The schedules that are planned with their messages: the loops that training runs, and GPipe's.

Megatron has no counterpart. A plan of one of these is what its loop does with actors that record. What
each computes, without the messages, is in `core.orders.orders`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from minimegatron.core.orders.loop_recorder import (
    RecordedPairs,
    RecordedRun,
    RecordingChunk,
    RecordingCommunicator,
)
from minimegatron.core.orders.orders import (
    COMBINED,
    GPIPE,
    INTERLEAVED,
    NO_PIPELINING,
    ONE_F_ONE_B,
    written_as,
)
from minimegatron.core.pipeline_parallel.loop_of_pairs import one_stage_in_pairs
from minimegatron.core.pipeline_parallel.loops import (
    Chunk,
    Communicator,
    no_pipelining,
    one_f_one_b,
)
from minimegatron.core.pipeline_parallel.schedule_table import InterleavedOrder

written_as(NO_PIPELINING)(no_pipelining)
written_as(ONE_F_ONE_B)(one_f_one_b)


@written_as(GPIPE)
def gpipe(chunk: Chunk, p2p: Communicator, recv_shapes: Any, send_shapes: Any) -> None:
    """All forwards, then all backwards. Source: Huang et al. 2019 (arXiv:1811.06965).

    Backwards run in the order of the forwards: the gradient of microbatch 0 is the first to exist.
    Any other order of backwards gives the same makespan, if all stages use the same one.
    """
    stage, num_stages = p2p.pp_group.rank(), p2p.pp_group.size()
    is_first_stage, is_last_stage = stage == 0, stage == num_stages - 1
    for i in range(chunk.num_microbatches):
        input_tensor = p2p.recv_forward(recv_shapes, is_first_stage)
        output_tensor = chunk.forward_step(i, input_tensor)
        p2p.send_forward(output_tensor, is_last_stage)
        chunk.free_output(output_tensor)
    while chunk.num_in_flight() > 0:
        grad = p2p.recv_backward(send_shapes, is_last_stage)
        input_grad = chunk.backward_step(grad)
        p2p.send_backward(input_grad, is_first_stage)


@written_as(INTERLEAVED)
def interleaved(
    chunks: Sequence[RecordingChunk],
    p2p: RecordingCommunicator,
    order: InterleavedOrder,
    tensor_shape: tuple[int, ...],
    overlap: bool,
) -> None:
    """1F1B over several chunks per stage: `loops.interleaved_1f1b`."""
    RecordedRun(chunks, p2p, order, tensor_shape, overlap).run()


@written_as(COMBINED)
def combined(
    chunks: Sequence[RecordingChunk],
    p2p: RecordingCommunicator,
    order: InterleavedOrder,
    tensor_shape: tuple[int, ...],
    overlap: bool,
) -> None:
    """Megatron's combined 1F1B: a forward and a backward in one step, its messages after it.

    A step without backwards takes the ordinary path.
    """
    if order.pp_size > 1:
        run = RecordedPairs if order.is_combined else RecordedRun
        run(chunks, p2p, order, tensor_shape, overlap).run()
    elif order.forward_only:
        no_pipelining(chunks[0])
    else:
        one_stage_in_pairs(partial(_step, chunks[0], p2p), order.num_microbatches)


def _step(
    chunk: RecordingChunk, p2p: RecordingCommunicator, microbatch: int | None, has_backward: bool
) -> None:
    if microbatch is not None:
        chunk.forward_step(microbatch, None)
    if has_backward:
        chunk.backward_step(None)
    if microbatch is not None and has_backward:
        p2p.recording.pair_of_last_two()
