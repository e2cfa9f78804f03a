"""One training step's forwards and backwards: which schedule, its chunks, and who runs its loop.

A schedule makes a chunk and a communicator, and a loop runs `forward_step` and `backward_step` once
per microbatch, with messages between them. `StepFrame` is around the loop, and ends with
`config.finalize_model_grads_func`. Counterpart:
`megatron.core.pipeline_parallel.schedules`; what stands there in one file is here in several, and
its names can be imported from this one:

* `loops`: the order in which microbatches go forward and backward, and the messages between.
* `steps`: one microbatch on one stage.
* `step_frame`: what stands around all of them; the same for every schedule.
* `schedule_table`: the order of work, as arithmetic without torch.
* `planned_schedule`: any other order of work, by name.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from minimegatron.core import parallel_state
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders import planned_schedule
from minimegatron.core.orders.send_limits import get_interleaved_send_limit
from minimegatron.core.orders.work import INTERLEAVED, NO_PIPELINING, ONE_F_ONE_B
from minimegatron.core.pipeline_parallel import combined_1f1b, hooked_frame, schedule_checks
from minimegatron.core.pipeline_parallel.failed_step import framed_schedule
from minimegatron.core.pipeline_parallel.loops import interleaved_1f1b, no_pipelining, one_f_one_b
from minimegatron.core.pipeline_parallel.p2p_communication import (
    P2PCommunicator,
    communicator_of,
    get_tensor_shapes,
)
from minimegatron.core.pipeline_parallel.schedule_table import InterleavedOrder
from minimegatron.core.pipeline_parallel.step_frame import StepFrame, groups_of_step
from minimegatron.core.pipeline_parallel.steps import tell_whole_length
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.utils import config_of_run, get_model_config, unwrap_model
from minimegatron.exports import lazily

_HERE = "minimegatron.core.pipeline_parallel"
_STEPS = "minimegatron.core.pipeline_parallel.steps"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "backward_step": f"{_STEPS}:backward_step",
        "check_first_val_step": f"{_STEPS}:check_first_val_step",
        "clear_embedding_activation_buffer": f"{_HERE}.hooked_frame:clear_embedding_activation_buffer",
        "convert_schedule_table_to_order": f"{_HERE}.schedule_table:convert_schedule_table_to_order",
        "custom_backward": f"{_STEPS}:custom_backward",
        "deallocate_output_tensor": f"{_STEPS}:deallocate_output_tensor",
        "finish_embedding_wgrad_compute": (
            "minimegatron.core.tensor_parallel.weight_grad_store:finish_embedding_wgrad_compute"
        ),
        "forward_step": f"{_STEPS}:forward_step",
        "forward_step_calc_loss": f"{_STEPS}:forward_step_calc_loss",
        "get_pp_rank_microbatches": f"{_HERE}.rank_microbatches:get_pp_rank_microbatches",
        "get_schedule_table": f"{_HERE}.schedule_table:get_schedule_table",
        "set_current_microbatch": f"{_STEPS}:set_current_microbatch",
    },
)


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    pipeline_schedule: str | None = None,
) -> Callable:
    """The schedule for the process groups that exist: one signature, three implementations.

    | stages | chunks per stage | schedule                                           |
    |--------|------------------|----------------------------------------------------|
    | 1      |                  | `forward_backward_no_pipelining`                   |
    | > 1    | None             | `forward_backward_pipelining_without_interleaving` |
    | > 1    | a number         | `forward_backward_pipelining_with_interleaving`    |

    `pp_size` and `vp_size` None mean those of `parallel_state`. `pipeline_schedule` names another order
    of work (`orders`), which one runner executes (`planned_schedule`); or one of these three. Raises
    ValueError for an unknown name, and for one of the three that these sizes do not fit.

    The returned function takes these keyword arguments:

    * forward_step_func: `(data_iterator, model) -> (output, loss_func)`; see `forward_step`. A third
      argument says whether to recompute this microbatch's activations, when
      `num_microbatches_with_partial_activation_checkpoints` is used.
    * data_iterator: handed through to `forward_step_func`; one per chunk with interleaving.
    * model: the stage's model, wrapped or not; a list with one entry per chunk.
    * num_microbatches, seq_length, micro_batch_size: sizes of this step. `seq_length` is the full
      sequence; what travels between stages is [seq_length / c / t, micro_batch_size, hidden_size],
      the division by t only with sequence parallelism. Ignored with `variable_seq_lengths`.
    * decoder_seq_length: of a two-stack model; plain 1F1B sends the decoder's length, or what the model
      says of each stage (`message_shapes`); interleaving sends `seq_length`.
    * forward_only: no backward, for evaluation and log-probabilities; `torch.no_grad` is the caller's.
    * collect_non_loss_data: the loss function returns anything; it is collected as it is.
    * first_val_step: with `forward_only`, whether this is the first validation step.
    * adjust_tensor_shapes_fn: plain 1F1B only; maps (receive shapes, send shapes) to other ones. With
      one stage it is not called: nothing is sent.
    * p2p_communicator, pg_collection: the groups; default to those of `parallel_state`. With one stage
      the function takes no p2p_communicator but None: it sends no messages.

    It returns what the loss function reported, a list with one entry per microbatch, on the last
    stage; an empty list elsewhere.
    """
    if pp_size is None:
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if pp_size == 1 and (pipeline_schedule != ONE_F_ONE_B or vp_size is not None):
        name, function = NO_PIPELINING, forward_backward_no_pipelining
    elif vp_size is not None:
        name, function = INTERLEAVED, forward_backward_pipelining_with_interleaving
    else:
        name, function = ONE_F_ONE_B, forward_backward_pipelining_without_interleaving
    if pipeline_schedule not in (None, name):
        schedule_checks.check_fits(pipeline_schedule, pp_size, vp_size, name)
        function = planned_schedule.get_named_forward_backward_func(pipeline_schedule)
    return function


@framed_schedule
def forward_backward_no_pipelining(
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
    pg_collection: ProcessGroupCollection | None = None,
) -> list:
    """Gradient accumulation on one stage: forward and backward of each microbatch in turn.

    All but the last microbatch run under `no_sync_func` (see `StepFrame`), so that gradients cross
    the data-parallel ranks once per step. Nothing is sent: sizes and shape functions are unused, but
    for `seq_length`, by which a model sees whether it has whole sequences where ranks share them.
    """
    model, data_iterator = _only(model, "model"), _only(data_iterator, "data_iterator")
    config = get_model_config(model)
    pg_collection = groups_of_step(model, pg_collection)
    frame = _frame_class(config)(config, pg_collection, None, forward_only)
    chunk = frame.add_chunk(
        forward_step_func,
        data_iterator,
        model,
        num_microbatches,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
    )
    tell_whole_length(model, seq_length)
    is_combined = config.overlap_moe_expert_parallel_comm and not forward_only
    loop = combined_1f1b.run_on_one_stage if is_combined else no_pipelining
    with frame:
        loop(chunk)
    return frame.forward_data_store


@framed_schedule
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
    """Plain 1F1B over the stages of a pipeline; `model` is this stage's part. It runs `one_f_one_b`.

    Raises ValueError for more than one chunk, for `overlap_p2p_comm`, and for a model that was built
    for another placement.
    """
    model, data_iterator = _only(model, "model"), _only(data_iterator, "data_iterator")
    config = get_model_config(model)
    pg_collection = groups_of_step(model, pg_collection)
    p2p, pg_collection = _groups_for_1f1b(config, p2p_communicator, pg_collection)
    stage, num_stages = p2p.pp_group.rank(), p2p.pp_group.size()
    sizes = (seq_length, micro_batch_size, decoder_seq_length)
    recv_shapes, send_shapes = _message_shapes(
        config, pg_collection, sizes, adjust_tensor_shapes_fn, model
    )
    frame = _frame_class(config)(config, pg_collection, p2p, forward_only)
    chunk = frame.add_chunk(
        forward_step_func,
        data_iterator,
        model,
        num_microbatches,
        collect_non_loss_data=collect_non_loss_data,
        first_val_step=first_val_step,
        most_in_flight=num_microbatches if forward_only else num_stages - stage,
        is_last_stage=stage == num_stages - 1,
        sends=send_shapes,
    )
    with frame:
        one_f_one_b(chunk, p2p, recv_shapes, send_shapes)
    return frame.forward_data_store


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

    Each stage holds v chunks of the model and takes turns between them. So a pipeline fills in p - 1
    turns that are v times shorter, and the bubble shrinks from (p - 1)/M of the ideal time to
    (p - 1)/(v M). The price is (p v - 1)/(p - 1) times as many messages.
    Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.2.

    It runs `interleaved_1f1b`. One shape is sent, of `seq_length`; `decoder_seq_length` is not read, as
    in Megatron.

    Raises ValueError for what interleaving cannot do: other shapes than one, and numbers of
    microbatches that `check_interleaving` refuses.
    """
    config = config_of_run(model)
    schedule_checks.check_chunks(model, data_iterator, config, adjust_tensor_shapes_fn)
    pg_collection = groups_of_step(model[0], pg_collection)
    p2p = p2p_communicator or communicator_of(pg_collection, get_model_config(model[0]))
    schedule_checks.check_ring(p2p)
    num_stages, stage = p2p.pp_group.size(), p2p.pp_group.rank()
    group_size = config.microbatch_group_size_per_vp_stage or num_stages
    sizes = (num_stages, stage, num_microbatches, len(model), group_size)
    order = InterleavedOrder(*sizes, forward_only, config.overlap_moe_expert_parallel_comm)
    send_limit = get_interleaved_send_limit(order, config.overlap_p2p_comm)
    frame = _frame_class(config)(config, pg_collection, p2p, forward_only, order.table, send_limit)
    (tensor_shape,) = _shapes_of(config, pg_collection, micro_batch_size)(seq_length=seq_length)
    for chunk_id in range(len(model)):
        frame.add_chunk(
            forward_step_func,
            data_iterator[chunk_id],
            model[chunk_id],
            num_microbatches,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            most_in_flight=order.counts.num_warmup + 1,
            vp_stage=chunk_id,
            is_last_stage=order.is_last_virtual_stage(chunk_id),
            sends=tensor_shape,
        )
    loop = combined_1f1b.run_interleaved if order.is_combined else interleaved_1f1b
    with frame:
        loop(frame.chunks, p2p, order, tensor_shape, config.overlap_p2p_comm)
    return frame.forward_data_store


# -- What the three share --


def _frame_class(config: ModelParallelConfig) -> type[StepFrame]:
    hooks = (config.grad_sync_func, config.param_sync_func)
    later = (config.defer_embedding_wgrad_compute, config.delay_wgrad_compute)
    return hooked_frame.HookedFrame if any((*hooks, *later)) else StepFrame


def _shapes_of(
    config: ModelParallelConfig, pg_collection: ProcessGroupCollection, micro_batch_size: int
) -> Callable[..., list[tuple[int, ...]]]:
    return partial(
        get_tensor_shapes,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=None,
        config=config,
        tp_group=pg_collection.tp,
        cp_group=pg_collection.cp,
    )


def _groups_for_1f1b(
    config: ModelParallelConfig,
    p2p_communicator: P2PCommunicator | None,
    pg_collection: ProcessGroupCollection | None,
) -> tuple[P2PCommunicator, ProcessGroupCollection]:
    if config.overlap_p2p_comm or config.pipeline_schedule is not None:
        schedule_checks.check_plain(config)
    pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    return p2p_communicator or communicator_of(pg_collection, config), pg_collection


def _message_shapes(
    config: ModelParallelConfig,
    pg_collection: ProcessGroupCollection,
    sizes: tuple[int, int, int | None],
    adjust_tensor_shapes_fn: Callable | None,
    model: torch.nn.Module | None = None,
) -> tuple[list, list]:
    """What this stage receives and sends, forwards: the model may say so itself, as T5 does."""
    seq_length, micro_batch_size, decoder_seq_length = sizes
    shapes_of = _shapes_of(config, pg_collection, micro_batch_size)
    shapes = shapes_of(seq_length=decoder_seq_length or seq_length)
    if adjust_tensor_shapes_fn is not None:
        # Two lists: such a function may change each in place, as that of ModelOpt does.
        return adjust_tensor_shapes_fn(shapes, list(shapes))
    own = getattr(unwrap_model(model), "message_shapes", None)
    return (shapes, shapes) if own is None else own(shapes_of(seq_length=seq_length), shapes)


def _only(one_or_list: Any, name: str) -> Any:
    # Both come as lists where a caller does not know which schedule it got.
    if isinstance(one_or_list, list) and len(one_or_list) != 1:
        schedule_checks.refuse_several(one_or_list, name)
    return one_or_list[0] if isinstance(one_or_list, list) else one_or_list
