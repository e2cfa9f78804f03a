"""Interleaved 1F1B: each stage holds several chunks of the model and takes turns between them.

Counterpart:
`megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving`. Here are its
arguments and their checks; `loops.interleaved_1f1b` is its loop, with the nested helpers as methods.

Why: with v chunks per stage a pipeline fills in p - 1 steps that are v times shorter, so the bubble
shrinks from (p - 1)/M of the ideal time to (p - 1)/(v M). The price is (p v - 1)/(p - 1) times as many
messages. Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.core.orders.orders import require_usual_placement
from minimegatron.core.orders.send_limits import get_interleaved_send_limit
from minimegatron.core.pipeline_parallel.combined_1f1b import CombinedSteps
from minimegatron.core.pipeline_parallel.loops import InterleavedRun, interleaved_1f1b
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, communicator_of
from minimegatron.core.pipeline_parallel.schedule_table import InterleavedOrder
from minimegatron.core.pipeline_parallel.step_frame import (
    StepFrame,
    framed_schedule,
    get_tensor_shapes,
    groups_of_step,
    refuse_shared_iterators,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.utils import config_of_run, get_model_config


@framed_schedule
def forward_backward_pipelining_with_interleaving(
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
    """Interleaved 1F1B over `model`, a list of this stage's chunks, with one iterator for each.

    The loop is `loops.interleaved_1f1b`. One shape is sent, of `seq_length`;
    `decoder_seq_length` is not read, as in Megatron.

    Raises ValueError for what interleaving cannot do: other shapes than one, and numbers of
    microbatches that `check_interleaving` refuses.
    """
    config = config_of_run(model)
    _check_arguments(model, data_iterator, config, adjust_tensor_shapes_fn)
    pg_collection = groups_of_step(model[0], pg_collection)
    p2p = p2p_communicator or communicator_of(pg_collection, get_model_config(model[0]))
    if isinstance(p2p, P2PCommunicator):  # somebody else's has Megatron's nine methods, and no more
        p2p.refuse_a_ring_of_two()
    num_stages, stage = p2p.pp_group.size(), p2p.pp_group.rank()
    group_size = config.microbatch_group_size_per_vp_stage or num_stages
    sizes = (num_stages, stage, num_microbatches, len(model), group_size)
    order = InterleavedOrder(*sizes, forward_only, config.overlap_moe_expert_parallel_comm)
    send_limit = get_interleaved_send_limit(order, config.overlap_p2p_comm)
    frame = StepFrame(config, pg_collection, p2p, forward_only, order.table, send_limit)
    (tensor_shape,) = get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=None,
        config=config,
        tp_group=pg_collection.tp,
        cp_group=pg_collection.cp,
    )
    for chunk_id in range(len(model)):
        frame.add_chunk(
            forward_step_func,
            data_iterator[chunk_id],
            model[chunk_id],
            num_microbatches,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            num_in_flight=order.counts.num_warmup + 1,
            vp_stage=chunk_id,
            is_last_stage=order.is_last_virtual_stage(chunk_id),
            sends=tensor_shape,
        )
    loop = _LOOPS[order.is_combined]
    with frame:
        loop(frame.chunks, p2p, order, tensor_shape, config.overlap_p2p_comm)
    return frame.forward_data_store


def _check_arguments(
    model: Any, data_iterator: Any, config: Any, adjust_tensor_shapes_fn: Callable | None
) -> None:
    if not isinstance(model, list) or not isinstance(data_iterator, list):
        raise ValueError("interleaving needs a list of model chunks and a list of data iterators")
    if len(model) != len(data_iterator):
        raise ValueError(
            f"{len(model)} model chunks but {len(data_iterator)} data iterators; give one iterator "
            "per chunk, each going through all microbatches by itself"
        )
    refuse_shared_iterators(data_iterator)
    if adjust_tensor_shapes_fn is not None:
        raise ValueError("adjust_tensor_shapes_fn works with plain 1F1B only; drop virtual stages")
    if config.overlap_p2p_comm and config.batch_p2p_comm:
        raise ValueError("overlap_p2p_comm needs batch_p2p_comm=False")
    if config.pipeline_schedule is not None:
        require_usual_placement(config)


class _CombinedRun(CombinedSteps, InterleavedRun):
    """The same with combined steps."""


def _combined(*actors_and_step: Any) -> None:
    _CombinedRun(*actors_and_step).run()


_LOOPS = {False: interleaved_1f1b, True: _combined}
"""By whether each forward hides the all-to-alls of a backward, and the other way."""
