"""The 1F1B loop: warm-up, one forward and one backward in turn, cool-down.

Two holes: the number of warm-up forwards, and the loop of three phases, in the middle of a function
that is otherwise the real one. Your tools:

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

from collections.abc import Callable, Iterator

import torch

from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.schedules import _groups_for_1f1b, _message_shapes, _only
from minimegatron.core.pipeline_parallel.steps import ModelChunk
from minimegatron.core.pipeline_parallel.utils import (
    GradSync,
    finish_step,
    is_pp_first_stage,
    is_pp_last_stage,
    schedule,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.utils import get_model_config


def get_num_warmup_microbatches(pp_size: int, pp_rank: int, num_microbatches: int) -> int:
    """How many forwards stage `pp_rank` of `pp_size` does before it begins to take turns."""
    raise NotImplementedError("Write get_num_warmup_microbatches: how many stages follow?")


@schedule
def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator | list[Iterator],
    model: torch.nn.Module | list[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list:
    """One step of plain 1F1B on this stage. With `forward_only` there is no backward at all."""
    # -- Given: who this stage is, what it sends, and its microbatches --
    model, data_iterator = _only(model, "model"), _only(data_iterator, "data_iterator")
    config = get_model_config(model)
    p2p, pg_collection = _groups_for_1f1b(config, p2p_communicator, pg_collection)
    stage, num_stages = p2p.pp_group.rank(), p2p.pp_group.size()
    is_first_stage = is_pp_first_stage(p2p.pp_group)  # noqa: F841  for your loop
    is_last_stage = is_pp_last_stage(p2p.pp_group)
    sizes = (seq_length, micro_batch_size, decoder_seq_length)
    recv_shapes, send_shapes = _message_shapes(
        config, pg_collection, sizes, adjust_tensor_shapes_fn
    )
    chunk = ModelChunk(
        forward_step_func,
        data_iterator,
        model,
        num_microbatches,
        forward_data_store=[],
        cp_group_size=pg_collection.cp.size(),
        collect_non_loss_data=collect_non_loss_data,
        forward_only=forward_only,
        first_val_step=first_val_step,
        is_last_stage=is_last_stage,
    )
    grad_sync = GradSync(config)

    num_warmup_microbatches = get_num_warmup_microbatches(num_stages, stage, num_microbatches)
    if forward_only:  # nothing to wait for: every forward is a warm-up forward
        num_warmup_microbatches = num_microbatches  # noqa: F841

    raise NotImplementedError("Write the three phases: warm-up, steady, cool-down")

    # -- Given: the end of the step --
    p2p.finish()
    grad_sync.enable()
    if not forward_only:
        grad_sync.launch(model)
    finish_step(config, [chunk], forward_only, pg_collection)
    return chunk.forward_data_store


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
