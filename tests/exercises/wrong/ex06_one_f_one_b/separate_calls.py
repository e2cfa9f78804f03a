"""Send, then receive, where both neighbours send at the same moment.

Expected: one fused call must do both
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
    # The last stage follows no one: it can go back at once. Every stage before it waits one more.
    return min(pp_size - pp_rank - 1, num_microbatches)


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
    is_first_stage, is_last_stage = is_pp_first_stage(p2p.pp_group), is_pp_last_stage(p2p.pp_group)
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
        p2p.send_forward(output_tensor, is_last_stage)
        grad = p2p.recv_backward(send_shapes, is_last_stage)
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

    # -- Given: the end of the step --
    p2p.finish()
    grad_sync.enable()
    if not forward_only:
        grad_sync.launch(model)
    finish_step(config, [chunk], forward_only, pg_collection)
    return chunk.forward_data_store
