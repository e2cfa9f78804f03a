"""Combined 1F1B: a forward and a backward in one turn, so that each hides the other's all-to-alls.

Counterpart: `megatron.core.pipeline_parallel.combined_1f1b`.

    one stage:    F0 | [F1 B0] [F2 B1] [F3 B2] | B3

Interleaved, with one warm-up forward more than usual, for else the last stage would pair a forward with
the backward of the same microbatch, and neither could run beside the other:

    rank 0 of 2   F0.0 F1.0 F0.1 F1.1 F2.0 | [F3.0 B0.1] [F2.1 B1.1] [F3.1 B0.0] | B1.0 B2.1 B3.1 ...
    rank 1 of 2   F0.0 F1.0 F0.1 | [F1.1 B0.1] [F2.0 B1.1] [F3.0 B0.0] [F2.1 B1.0] [F3.1 B2.1] | ...

Every step takes this way while training with `overlap_moe_expert_parallel_comm`, a lone forward or
backward too. An evaluation takes the ordinary one.

`forward_step_func(data_iterator, model, return_schedule_plan=True)` gets the model without wrappers,
and returns `model.build_schedule_plan(...)` and the loss function.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.loop_of_pairs import one_stage_in_pairs
from minimegatron.core.pipeline_parallel.loops import InterleavedRun
from minimegatron.core.pipeline_parallel.p2p_communication import Shape  # noqa: F401  Megatron's
from minimegatron.core.pipeline_parallel.schedule_node import AbstractSchedulePlan, detached
from minimegatron.core.pipeline_parallel.schedule_table import InterleavedOrder
from minimegatron.core.pipeline_parallel.steps import (
    ModelChunk,
    autocast,
    forward_step_calc_loss,
    input_gradient,
    prepare_forward,
)
from minimegatron.core.tensor_parallel.weight_grad_store import weight_gradients_of
from minimegatron.core.tracing import call_traced, traced
from minimegatron.core.utils import get_attr_wrapped_model

# -- One stage --


def run_on_one_stage(
    chunk: ModelChunk,
    no_sync_func: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> None:
    """All microbatches of a step without a pipeline.

    `no_sync_func` makes what holds gradients back until the last backward, if no frame does.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(no_sync_func())
        one_stage_in_pairs(partial(_step_of_chunk, chunk, held), chunk.num_microbatches)


def _step_of_chunk(
    chunk: ModelChunk, held: contextlib.ExitStack, microbatch: int | None, has_backward: bool
) -> None:
    f_chunk, b_chunk = None if microbatch is None else chunk, chunk if has_backward else None
    b_output = None
    if f_chunk is None:
        held.close()
    else:
        f_chunk.begin_forward(microbatch)
    if b_chunk is not None:
        _, b_output = b_chunk.begin_backward()
    output, num_tokens, _ = combined_forward_backward_step(
        chunk.forward_step_func,
        chunk.data_iterator,
        None if f_chunk is None else f_chunk.model,
        chunk.num_microbatches,
        None,
        chunk.forward_data_store,
        None if b_chunk is None else b_chunk.model,
        None,
        b_output,
        None,
        chunk.config,
        chunk.vp_stage,
        collect_non_loss_data=chunk.collect_non_loss_data,
        is_first_microbatch=microbatch == 0,
        current_microbatch=microbatch,
        cp_group_size=chunk.cp_group_size,
        is_last_stage=chunk.is_last_stage,
    )
    if f_chunk is not None:
        f_chunk.finish_forward(microbatch, None, output, num_tokens)
    if b_chunk is not None:
        b_chunk.finish_backward()


def combined_1f1b_schedule_for_no_pipelining(
    forward_step_func: Callable,
    data_iterator: Iterator | None,
    model: torch.nn.Module,
    num_microbatches: int,
    input_tensor: None,
    output_tensor_grad: None,
    forward_data_store: list,
    config: ModelParallelConfig,
    collect_non_loss_data: bool,
    first_val_step: bool | None,
    forward_only: bool,
    no_sync_func: Callable[[], contextlib.AbstractContextManager],
    total_num_tokens: torch.Tensor,
    check_first_val_step: Callable[[bool], bool],
    *,
    cp_group_size: int | None = None,
) -> tuple[list, torch.Tensor]:
    """`run_on_one_stage` with Megatron's arguments, for a caller with a frame of its own.

    Not read, because one stage that trains has no choice: `input_tensor`, `output_tensor_grad`,
    `first_val_step`, `forward_only`, `check_first_val_step`.

    Args:
        no_sync_func: see `run_on_one_stage`.
        total_num_tokens: a tensor [], to which the step's tokens are added.
        cp_group_size: ranks that share each sequence; None for `parallel_state`'s.

    Returns (forward_data_store, total_num_tokens).
    """
    chunk = ModelChunk(
        forward_step_func,
        data_iterator,
        model,
        num_microbatches,
        forward_data_store=forward_data_store,
        cp_group_size=cp_group_size,
        collect_non_loss_data=collect_non_loss_data,
        config=config,
    )
    run_on_one_stage(chunk, no_sync_func)
    return forward_data_store, total_num_tokens + chunk.num_tokens


# -- Interleaved --


def combined_1f1b_schedule_for_interleaved_pipelining(
    config: ModelParallelConfig,
    forward_step_func: Callable,
    data_iterator: list[Iterator | None],
    model: list[torch.nn.Module],
    num_microbatches: int,
    forward_data_store: list,
    forward_step_helper_preprocess: Callable[[int, int, int], torch.Tensor | None],
    forward_step_helper_postprocess: Callable[[int, torch.Tensor, torch.Tensor], None],
    backward_step_helper_preprocess: Callable[[int, int], tuple],
    backward_step_helper_postprocess: Callable[[int], None],
    get_microbatch_id_in_model_chunk: Callable[..., int],
    get_model_chunk_id: Callable[..., int],
    check_first_val_step: Callable[[bool], bool],
    is_first_microbatch_for_model_chunk: Callable[[int], bool],
    collect_non_loss_data: bool,
    f_virtual_microbatch_id: int | None = None,
    b_virtual_microbatch_id: int | None = None,
    pre_forward: Callable | None = None,
    pre_backward: Callable | None = None,
    post_forward: Callable | None = None,
    post_backward: Callable | None = None,
    *,
    cp_group_size: int | None = None,
    is_last_stage: Sequence[bool | None] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """One turn of interleaving: forward number f, backward number b, or both.

    Args:
        data_iterator, model: one for each chunk.
        forward_step_helper_preprocess: (f, chunk, microbatch) -> the forward's input.
        forward_step_helper_postprocess: (chunk, output, number of tokens).
        backward_step_helper_preprocess: (b, chunk) -> (input, output, the output's gradient).
        backward_step_helper_postprocess: (b).
        get_microbatch_id_in_model_chunk, get_model_chunk_id: of (number, forward=).
        check_first_val_step, is_first_microbatch_for_model_chunk: tell a chunk of its first microbatch.
        pre_forward, pre_backward, post_forward, post_backward: see `AbstractSchedulePlan.run`.
        cp_group_size: ranks that share each sequence; None for `parallel_state`'s.
        is_last_stage: of each chunk, whether it ends in the loss; None for what the models say.

    Returns (the forward's output, the gradient of the backward's input), None for an absent one.
    """
    f, b = f_virtual_microbatch_id, b_virtual_microbatch_id
    f_chunk_id = b_chunk_id = microbatch = input_tensor = None
    b_tensors = (None, None, None)
    if f is not None:
        microbatch = get_microbatch_id_in_model_chunk(f, forward=True)
        f_chunk_id = get_model_chunk_id(f, forward=True)
        input_tensor = forward_step_helper_preprocess(f, f_chunk_id, microbatch)
    if b is not None:
        b_chunk_id = get_model_chunk_id(b, forward=False)
        b_tensors = backward_step_helper_preprocess(b, b_chunk_id)
    output_tensor, num_tokens, input_tensor_grad = combined_forward_backward_step(
        forward_step_func,
        None if f is None else data_iterator[f_chunk_id],
        None if f is None else model[f_chunk_id],
        num_microbatches,
        input_tensor,
        forward_data_store,
        None if b is None else model[b_chunk_id],
        *b_tensors,
        config,
        f_chunk_id,
        pre_forward,
        pre_backward,
        post_forward,
        post_backward,
        collect_non_loss_data,
        is_first_microbatch=f is not None
        and check_first_val_step(is_first_microbatch_for_model_chunk(f)),
        current_microbatch=microbatch,
        cp_group_size=cp_group_size,
        is_last_stage=None if f is None or is_last_stage is None else is_last_stage[f_chunk_id],
    )
    if f is not None:
        forward_step_helper_postprocess(f_chunk_id, output_tensor, num_tokens)
    if b is not None:
        backward_step_helper_postprocess(b)
    return output_tensor, input_tensor_grad


class CombinedSteps:
    """Makes an interleaved run one of combined turns: stands before the run's class, as its base."""

    chunks: list[ModelChunk]
    order: InterleavedOrder
    overlap: bool

    def _step(self, f_k: int | None = None, b_k: int | None = None) -> tuple:
        sends_within = self.overlap and f_k is not None and b_k is not None
        first, order = self.chunks[0], self.order
        output, input_grad = combined_1f1b_schedule_for_interleaved_pipelining(
            first.config,
            first.forward_step_func,
            [chunk.data_iterator for chunk in self.chunks],
            [chunk.model for chunk in self.chunks],
            first.num_microbatches,
            first.forward_data_store,
            self._begin_forward,
            self._finish_forward,
            self._begin_backward,
            self._finish_backward,
            self._microbatch_id,
            order.model_chunk_id,
            bool,
            order.is_first_microbatch_for_model_chunk,
            first.collect_non_loss_data,
            f_k,
            b_k,
            post_forward=partial(self._send_output, f_k) if sends_within else None,
            post_backward=partial(self._send_grad, b_k) if sends_within else None,
            cp_group_size=first.cp_group_size,
            is_last_stage=[chunk.is_last_stage for chunk in self.chunks],
        )
        return None if f_k is None else self._to_send(f_k, output), input_grad

    def _microbatch_id(self, k: int, forward: bool) -> int:
        return self.order.microbatch_id(k)

    def _begin_forward(self, k: int, chunk_id: int, microbatch: int) -> torch.Tensor | None:
        self.chunks[chunk_id].begin_forward(microbatch)
        self._begun = (microbatch, self._input(chunk_id))
        return self._begun[1]

    def _finish_forward(
        self, chunk_id: int, output: torch.Tensor, num_tokens: torch.Tensor
    ) -> None:
        self.chunks[chunk_id].finish_forward(*self._begun, output, num_tokens)
        self._begun = None

    def _begin_backward(self, k: int, chunk_id: int) -> tuple:
        return *self.chunks[chunk_id].begin_backward(), self._grad(chunk_id)

    def _finish_backward(self, k: int) -> None:
        self.chunks[self.order.model_chunk_id(k, forward=False)].finish_backward()

    def _send_output(self, k: int, output: torch.Tensor, vp_stage: int | None) -> None:
        self._after_forward(k, self._to_send(k, output))

    def _send_grad(self, k: int, input_grad: torch.Tensor, vp_stage: int | None) -> None:
        chunk_id = self.order.model_chunk_id(k, forward=False)
        is_first = self.order.is_first_virtual_stage(chunk_id)
        self._after_backward(k, None if is_first else input_grad)


# -- One turn --


def _describe(arguments: dict[str, Any]) -> dict[str, Any]:
    output = arguments["b_output_tensor"]
    plan = None if output is None else output.schedule_plan
    chunk, is_forward = arguments["f_model_chunk_id"], arguments["f_model"] is not None
    return {
        "f_microbatch": arguments["current_microbatch"],
        "f_chunk": (chunk or 0) if is_forward else None,
        "b_microbatch": getattr(plan, "microbatch", None),
        "b_chunk": None if plan is None else getattr(plan, "vp_stage", None) or 0,
    }


@traced("combined-step", _describe)
def combined_forward_backward_step(
    forward_step_func: Callable,
    data_iterator: Iterator | None,
    f_model: torch.nn.Module | None,
    num_microbatches: int,
    input_tensor: torch.Tensor | None,
    forward_data_store: list,
    b_model: torch.nn.Module | None,
    b_input_tensor: torch.Tensor | None,
    b_output_tensor: torch.Tensor | None,
    b_output_tensor_grad: torch.Tensor | None,
    config: ModelParallelConfig,
    f_model_chunk_id: int | None = None,
    pre_forward: Callable | None = None,
    pre_backward: Callable | None = None,
    post_forward: Callable | None = None,
    post_backward: Callable | None = None,
    collect_non_loss_data: bool = False,
    checkpoint_activations_microbatch: None = None,
    is_first_microbatch: bool = False,
    current_microbatch: int | None = None,
    *,
    cp_group_size: int | None = None,
    is_last_stage: bool | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """`forward_step` of one microbatch and `backward_step` of another, their nodes side by side.

    Args:
        f_model, b_model: the chunks; None for a lone backward, or a lone forward.
        b_output_tensor: what the backward's forward returned here: it carries the schedule plan.
        pre_forward, pre_backward, post_forward, post_backward: see `AbstractSchedulePlan.run`.
        checkpoint_activations_microbatch: None: a plan is not run again.
        cp_group_size: as for `forward_step`; None for `parallel_state`'s.
        is_last_stage: of the forward's chunk; None for what the model says (`post_process`).
        The others: as for `forward_step` and `backward_step`; no lists of tensors.

    Returns (output, number of tokens, gradient of the backward's input), None for an absent one. Raises
    TypeError if `forward_step_func` returns no schedule plan.
    """
    if checkpoint_activations_microbatch is not None:
        raise ValueError(
            f"checkpoint_activations_microbatch is {checkpoint_activations_microbatch}, but a schedule "
            "plan is not run again; turn overlap_moe_expert_parallel_comm off, or leave it out"
        )
    f_plan = b_plan = loss_func = b_grad = output = num_tokens = None
    with autocast(config):
        if f_model is not None:
            prepare_forward(f_model, input_tensor, is_first_microbatch, current_microbatch)
            f_plan, loss_func = _build_plan(forward_step_func, data_iterator, f_model)
        with weight_gradients_of(config):
            if b_model is not None:
                b_plan, b_grad = _take_plan(b_output_tensor, b_output_tensor_grad, config)
            hooks = (pre_forward, pre_backward, post_forward, post_backward)
            output = type(f_plan or b_plan).run(f_plan, b_plan, b_grad, *hooks)
        if f_model is not None:
            if is_last_stage is None:
                is_last_stage = get_attr_wrapped_model(f_model, "post_process")
            loss_input = detached(output) if is_last_stage else None
            output, num_tokens = forward_step_calc_loss(
                f_model,
                loss_input if is_last_stage else output,
                loss_func,
                config,
                f_model_chunk_id,
                collect_non_loss_data,
                num_microbatches,
                forward_data_store,
                cp_group_size,
                is_last_stage,
            )
            output.schedule_plan, output.loss_input = f_plan, loss_input
    return output, num_tokens, input_gradient(b_input_tensor)


def _build_plan(
    forward_step_func: Callable, data_iterator: Iterator | None, model: torch.nn.Module
) -> tuple[AbstractSchedulePlan, Callable]:
    # The wrapper's forward does not run, but what it would refuse is refused.
    getattr(model, "check_params", _nothing)()
    unwrapped = get_attr_wrapped_model(model, "build_schedule_plan", return_model_obj=True)
    plan, loss_func = call_traced(
        "forward-step-func",
        partial(forward_step_func, return_schedule_plan=True),
        data_iterator,
        unwrapped,
    )
    if not isinstance(plan, AbstractSchedulePlan):
        raise TypeError(
            f"forward_step_func(..., return_schedule_plan=True) returned a {type(plan).__name__}; "
            "return (model.build_schedule_plan(...), loss function)"
        )
    return plan, loss_func


def _nothing() -> None:
    """In place of a wrapper's check."""


def _take_plan(
    output_tensor: torch.Tensor,
    output_tensor_grad: torch.Tensor | None,
    config: ModelParallelConfig,
) -> tuple[AbstractSchedulePlan, torch.Tensor | None]:
    """The plan of a forward, and the gradient of its output: on the last stage the loss's backward."""
    plan, loss_input = output_tensor.schedule_plan, output_tensor.loss_input
    output_tensor.schedule_plan = output_tensor.loss_input = None
    if loss_input is None:
        return plan, output_tensor_grad
    scale = config.grad_scale_func
    loss = output_tensor if scale is None else scale(output_tensor)
    if loss.requires_grad:
        with torch.autocast(loss.device.type, enabled=False):
            torch.autograd.backward(loss)
    return plan, loss_input.grad


class _CombinedRun(CombinedSteps, InterleavedRun):
    """The same with combined turns."""


def run_interleaved(*actors_and_step: Any) -> None:
    """`loops.interleaved_1f1b`, where each forward hides the all-to-alls of a backward."""
    _CombinedRun(*actors_and_step).run()
