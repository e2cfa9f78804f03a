"""One microbatch on one stage: `forward_step`, the loss contract, `backward_step`.

It runs the user's `forward_step_func` (and through it the model), the loss function that this
returned, and autograd; after a backward the weight gradients that it left. Counterpart: the
functions of the same names in `megatron.core.pipeline_parallel.schedules`, which re-exports them
here too. Megatron has no `ModelChunk`: there each schedule passes the same fourteen arguments at
each call, and keeps `input_tensors` and `output_tensors` lists of its own.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.variable import Variable

from minimegatron.core import parallel_state, tracing
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel import user_results
from minimegatron.core.pipeline_parallel.failed_step import NoFrame
from minimegatron.core.pipeline_parallel.p2p_checks import check_output
from minimegatron.core.tensor_parallel.weight_grad_store import weight_gradients_at_once
from minimegatron.core.tracing import call_traced, traced
from minimegatron.core.utils import (
    get_attr_wrapped_model,
    get_device,
    get_model_config,
    or_one,
    unwrap_model,
)

NO_TOKENS = torch.tensor(0, dtype=torch.int)


@traced("forward-compute", tracing.of_forward)
def forward_step(
    forward_step_func: Callable,
    data_iterator: Iterator | None,
    model: torch.nn.Module,
    num_microbatches: int,
    input_tensor: torch.Tensor | list[torch.Tensor | None] | None,
    forward_data_store: list,
    config: ModelParallelConfig,
    cp_group_size: int,
    collect_non_loss_data: bool = False,
    checkpoint_activations_microbatch: bool | None = None,
    is_first_microbatch: bool = False,
    current_microbatch: int | None = None,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
) -> tuple[torch.Tensor | list[torch.Tensor], torch.Tensor]:
    """Forward of one microbatch through this stage, and on the last stage its loss.

    The first stage takes its input from `data_iterator`; every other one from `input_tensor`, which
    reaches the model by `set_input_tensor`, so that the user's function need not know its stage.

    Args:
        forward_step_func: `(data_iterator, model) -> (output, loss_func)`; with recompute per
            microbatch it also gets `checkpoint_activations_microbatch` as third argument. What
            `loss_func(output)` may return is told in `forward_step_calc_loss`.
        collect_non_loss_data: call `loss_func(output, non_loss_data=True)` instead, a keyword that the
            function must take; what it returns is stored, and there is no loss.
        input_tensor: [s, b, h] (per rank [s/c/t, b, h] with context and sequence parallelism), in
            `pipeline_dtype`; None on the first stage. In plain 1F1B a list: of one tensor, or
            of more where the stage before hands some on (`all_outputs`).
        forward_data_store: the last stage appends what the loss function reports.
        is_first_microbatch: tells a model that has `set_is_first_microbatch`.

    Returns the output (a list if the input was one), and the number of tokens, a tensor [].
    On the last stage the output is the loss, scaled for backward.
    """
    prepare_forward(model, input_tensor, is_first_microbatch, current_microbatch)
    asked = checkpoint_activations_microbatch
    more = () if asked is None else (asked,)
    with autocast(config):
        returned = call_traced("forward-step-func", forward_step_func, data_iterator, model, *more)
        if not _is_output_and_function(returned):
            user_results.refuse_step_results(returned)
        output_tensor, loss_func = returned
        output_tensor, num_tokens = forward_step_calc_loss(
            model,
            output_tensor,
            loss_func,
            config,
            vp_stage,
            collect_non_loss_data,
            num_microbatches,
            forward_data_store,
            cp_group_size,
            is_last_stage,
        )
    return all_outputs(model, input_tensor, output_tensor), num_tokens


def _is_output_and_function(returned: Any) -> bool:
    is_pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    return is_pair and (returned[1] is None or callable(returned[1]))


def all_outputs(model: torch.nn.Module, input_tensor: Any, output_tensor: torch.Tensor) -> Any:
    """What a stage sends: its output, in a list if its input came in one.

    A model may hand on some of its inputs as they came, for stages after the next one: those that its
    method `extra_outputs(inputs)` returns. T5's decoder does, with the encoder's output.
    """
    if not isinstance(input_tensor, list):
        return output_tensor
    extra_outputs = getattr(unwrap_model(model), "extra_outputs", lambda inputs: ())
    return [output_tensor, *extra_outputs(input_tensor)]


def prepare_forward(
    model: torch.nn.Module,
    input_tensor: torch.Tensor | list[torch.Tensor | None] | None,
    is_first_microbatch: bool,
    current_microbatch: int | None,
) -> None:
    """Tells the model which microbatch comes, and gives it the input that another stage made."""
    if is_first_microbatch and hasattr(model, "set_is_first_microbatch"):
        model.set_is_first_microbatch()
    if current_microbatch is not None:
        set_current_microbatch(model, current_microbatch)
    set_input_tensor = get_attr_wrapped_model(model, "set_input_tensor")
    set_input_tensor(input_tensor if isinstance(input_tensor, list) else [input_tensor])


def autocast(config: ModelParallelConfig) -> contextlib.AbstractContextManager:
    """Around a forward: mixed precision, if the config asks for it."""
    return (
        torch.autocast(get_device().type, dtype=config.autocast_dtype)
        if config.enable_autocast
        else contextlib.nullcontext()
    )


def set_current_microbatch(model: torch.nn.Module, microbatch_id: int) -> None:
    """Tells the chunk under its wrappers which microbatch comes now; there its layers may ask."""
    unwrap_model(model).current_microbatch = microbatch_id


def tell_whole_length(model: torch.nn.Module, seq_length: int) -> None:
    """A chunk with an attribute `whole_length` learns how long whole sequences are.

    On one stage no message has their length, which would tell a whole one from a context-parallel
    rank's part.
    """
    chunk = unwrap_model(model)
    if "whole_length" in vars(chunk):
        chunk.whole_length = seq_length


@traced("loss-compute", tracing.of_loss)
def forward_step_calc_loss(
    model: torch.nn.Module,
    output_tensor: torch.Tensor,
    loss_func: Callable | None,
    config: ModelParallelConfig,
    vp_stage: int | None,
    collect_non_loss_data: bool,
    num_microbatches: int,
    forward_data_store: list,
    cp_group_size: int | None = None,
    is_last_stage: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies the loss function on the last stage, and scales the loss for this microbatch.

    The contract, with M microbatches, d data-parallel ranks, c context-parallel ranks and n tokens, a
    number or a tensor of one, of int or float dtype (if tokens have weights, n is their sum):

    | `loss_func` returns    | `calculate_per_token_loss` | loss for backward                     |
    |------------------------|----------------------------|---------------------------------------|
    | (sum, n, report)       | off                        | sum / n / M; 0 where n is 0           |
    | (sum, n, report)       | on                         | sum; finalize divides by all tokens   |
    | (mean, report)         | off                        | mean * c / M                          |
    | (mean, report)         | on                         | the same; gradients d * c times these |
    | anything               | `collect_non_loss_data`    | none; the value itself is stored      |
    | (`loss_func` is None)  | off or on                  | the output as it is, which is stored  |

    With `collect_non_loss_data` it is called as `loss_func(output, non_loss_data=True)`.

    A two-tuple's mean is expected over all c ranks' tokens, hence the factor c: gradients are later
    averaged over data-parallel and context-parallel ranks together. A mean over the rank's own tokens
    comes out c times too large. In the first row n is the rank's own: over c ranks that have unequal n
    it is a mean of means, which one process does not have; the second row and a two-tuple are exact.

    `cp_group_size` and `is_last_stage` None are what `parallel_state` says, there for chunk `vp_stage`.

    The division makes a new tensor. Megatron divides in place, which also changes a report that
    shares storage with the loss (`loss.detach()`).

    Returns (output or scaled loss, number of tokens, a tensor [] of the dtype that was returned;
    int 0 where three values were not). Raises ValueError for another number of values, for tokens that
    are not one number, and, with the option on, for tokens that require a gradient.

    Warns, while it trains, of a mean with the option on: as in Megatron, gradients are then summed over
    d * c ranks, and nothing divides auxiliary losses by tokens. A loss with a factor 1 / (d * c)
    of its own is right, and `config.mean_loss_has_factor` says so.
    """
    cp_group_size = cp_group_size or parallel_state.get_context_parallel_world_size()
    if is_last_stage is None:
        is_last_stage = parallel_state.is_pipeline_last_stage(False, vp_stage)
    num_tokens = NO_TOKENS
    if is_last_stage and (loss_func is None or collect_non_loss_data):
        forward_data_store.append(user_results.value_to_store(loss_func, output_tensor))
    elif is_last_stage:
        outputs = call_traced("loss-func", loss_func, output_tensor)
        has_tokens = isinstance(outputs, (tuple, list)) and len(outputs) == 3
        sizes = (cp_group_size, num_microbatches)
        output_tensor, num_tokens, report = (
            outputs if has_tokens else user_results.scaled_mean(outputs, config, model, *sizes)
        )
        num_tokens = _count_of_tokens(num_tokens, config)
        if has_tokens and not config.calculate_per_token_loss:
            output_tensor = output_tensor / or_one(num_tokens) / num_microbatches
        forward_data_store.append(report)
    if config.aux_loss_scale_funcs:
        user_results.scale_auxiliary_losses(config, output_tensor, num_microbatches, cp_group_size)
    return output_tensor, num_tokens.detach()


def _count_of_tokens(num_tokens: Any, config: ModelParallelConfig) -> torch.Tensor:
    """A loss function's number of tokens, a number or a tensor of one, as a tensor []."""
    is_one = isinstance(num_tokens, torch.Tensor) and num_tokens.numel() == 1
    if not is_one or num_tokens.requires_grad:
        num_tokens = user_results.count_of(num_tokens, config.calculate_per_token_loss)
    return num_tokens.reshape(())


@traced("backward-compute")
def backward_step(
    input_tensor: Any,
    output_tensor: Any,
    output_tensor_grad: Any,
    model_type: Any,
    config: ModelParallelConfig,
) -> Any:
    """Backward of one microbatch through this stage.

    Args:
        input_tensor: what `forward_step` was given; its gradient is the result.
        output_tensor: what `forward_step` returned; on the last stage the loss. May have been freed
            by `deallocate_output_tensor`.
        output_tensor_grad: the loss's gradient with respect to the output; None on the last stage.
        model_type: unused, here as in Megatron; the schedules pass None.

    Each of the three may be a list: of one, or with what a model hands on (`all_outputs`), which is one
    tensor as input and as output. Its gradient is the sum of two: of this stage, which used it, and of
    later stages, which did too. Returns the loss's gradient with respect to the input, None on the
    first stage; a list if the input was one. An input that nobody used has zeros.
    """
    unwrap = not isinstance(input_tensor, list)
    inputs = [input_tensor] if unwrap else input_tensor
    outputs = output_tensor if isinstance(output_tensor, list) else [output_tensor]
    grads = output_tensor_grad if isinstance(output_tensor_grad, list) else [output_tensor_grad]
    for tensor in inputs:
        if tensor is not None:
            tensor.retain_grad()

    output, grad = outputs[0], grads[0]
    if grad is None and not (output.requires_grad and output.numel() == 1):
        user_results.look_at_loss(output)
    if grad is None and config.grad_scale_func is not None:
        output = config.grad_scale_func(output)
    # A stage may have had nothing to do for this microbatch (no image for the vision encoder).
    if output.requires_grad:
        custom_backward(output, grad)

    for handed_on, grad_from_behind in zip(outputs[1:], grads[1:], strict=False):
        user_results.add_gradient(handed_on, grad_from_behind)
    input_grads = [input_gradient(tensor) for tensor in inputs]
    return input_grads[0] if unwrap else input_grads


def input_gradient(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """What backward has left in an input; zeros if no stage from here on used it.

    The stage before waits for it all the same.
    """
    is_unused = tensor is not None and tensor.grad is None
    return torch.zeros_like(tensor) if is_unused else getattr(tensor, "grad", None)


def deallocate_output_tensor(
    out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False
) -> None:
    """Pseudo-frees an output that has been sent: only its `grad_fn` is still needed.

    The storage is replaced by a single element. Autograd keeps what backward needs by itself, so an
    output that no operation saved is truly gone. Raises ValueError for a view: its base would keep
    the storage alive and nothing would be freed.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    if out._base is not None:
        user_results.refuse_view(out)
    out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Backward from an output, also from a freed one, of shape [1]: `torch.autograd.backward` would
    refuse that. The engine underneath does not look. Raises ValueError without a gradient, unless the
    output is one number; RuntimeError for a gradient of another shape than an output that was kept.
    """
    if output.numel() != 1 and (grad_output is None or output.shape != grad_output.shape):
        user_results.refuse_gradient(grad_output, output)
    if grad_output is None:
        grad_output = torch.ones_like(output, memory_format=torch.preserve_format)
    run_backward((output,), (grad_output,))


def run_backward(outputs: tuple, grads: tuple) -> None:
    """Backward from outputs with these gradients, by the engine itself: it compares no shapes."""
    keep_graph, create_graph, inputs = False, False, ()  # no inputs: all leaves
    options = {"allow_unreachable": True, "accumulate_grad": True}
    run = Variable._execution_engine.run_backward
    run(outputs, grads, keep_graph, create_graph, inputs, **options)


def check_first_val_step(first_val_step: bool | None, forward_only: bool, cond: bool) -> bool:
    """`cond` while training; while validating, `cond` only in the first validation step."""
    return cond and (first_val_step is None or not forward_only or first_val_step)


# -- One chunk, and its microbatches --


SAME_FOR_ALL = (
    *("forward_step_func", "data_iterator", "model", "num_microbatches", "forward_data_store"),
    *("config", "cp_group_size", "collect_non_loss_data", "vp_stage", "is_last_stage"),
)
"""What a chunk's forwards share of the arguments of `forward_step`."""


class ModelChunk:
    """Runs microbatches of one chunk, and holds them from their forward to their backward.

    Args:
        forward_step_func, data_iterator, model, num_microbatches, collect_non_loss_data,
            forward_only, first_val_step: as the schedule got them.
        forward_data_store: where the last stage's reports go; shared by a stage's chunks.
        cp_group_size: ranks that share each sequence.
        most_in_flight: forwards a stage is ahead of its backwards, at most; for recompute.
        vp_stage: this chunk's number; None where a stage has one chunk.
        is_last_stage: whether this chunk ends in the loss.
        sends: shapes in which the next stage receives its output, as the schedule announces them;
            None, or an empty one, where no shape is announced.
        config: the step's, the same for all of a stage's chunks; None for the model's own.
        frame: the `StepFrame` around the step, called before and after each forward and backward;
            None for no frame.
    """

    def __init__(
        self,
        forward_step_func: Callable,
        data_iterator: Iterator | None,
        model: torch.nn.Module,
        num_microbatches: int,
        *,
        forward_data_store: list,
        cp_group_size: int,
        collect_non_loss_data: bool = False,
        forward_only: bool = False,
        first_val_step: bool | None = None,
        most_in_flight: int = 1,
        vp_stage: int | None = None,
        is_last_stage: bool = True,
        sends: Any = None,
        config: ModelParallelConfig | None = None,
        frame: "NoFrame | None" = None,
    ):
        self.model, self.config = model, config or get_model_config(model)
        self.num_microbatches = num_microbatches
        self.vp_stage, self.is_last_stage, self.sends = vp_stage, is_last_stage, sends
        self.num_tokens = torch.zeros([], dtype=torch.float64, device=get_device())
        self.forward_step_func, self.data_iterator = forward_step_func, data_iterator
        self.forward_data_store, self.cp_group_size = forward_data_store, cp_group_size
        self.collect_non_loss_data = collect_non_loss_data
        self.forward_only, self._first_val_step = forward_only, first_val_step
        self._most_in_flight = most_in_flight
        self._in_flight: dict[int, tuple[Any, Any]] = {}
        self.frame = frame or NoFrame()
        self._num_forwards, self.num_backwards_left = 0, num_microbatches  # of this step
        # A backward here has no place of its own for weight gradients: what it leaves follows it.
        is_deferring = self.config.delay_wgrad_compute or self.config.defer_embedding_wgrad_compute
        self._backward_step = (
            weight_gradients_at_once()(backward_step) if is_deferring else backward_step
        )
        self._same_for_all = {name: vars(self)[name] for name in SAME_FOR_ALL}

    def forward_step(self, microbatch_id: int, input_tensor: Any) -> Any:
        """Forward of one microbatch; remembers input and output for its backward."""
        place = self.begin_forward(microbatch_id)
        output_tensor, num_tokens = forward_step(
            **self._same_for_all,
            input_tensor=input_tensor,
            checkpoint_activations_microbatch=self._recomputes(place),
            is_first_microbatch=check_first_val_step(
                self._first_val_step, self.forward_only, microbatch_id == 0
            ),
            current_microbatch=microbatch_id,
        )
        self.finish_forward(microbatch_id, input_tensor, output_tensor, num_tokens)
        return output_tensor

    def begin_forward(self, microbatch_id: int) -> int:
        """Before a forward. Returns its number among all of the stage's."""
        self._num_forwards += 1
        return self.frame.before_forward(self, microbatch_id)

    def finish_forward(
        self, microbatch_id: int, input_tensor: Any, output_tensor: Any, num_tokens: torch.Tensor
    ) -> None:
        """After a forward: its tokens count, and the microbatch is in flight."""
        if self.is_last_stage:  # elsewhere there is no loss, and no tokens
            self.num_tokens += num_tokens
        elif self.sends is not None:
            check_output(output_tensor, self.sends, self.config.pipeline_dtype)
        if not self.forward_only:
            self._in_flight[microbatch_id] = (input_tensor, output_tensor)

    def _recomputes(self, place: int) -> bool | None:
        # Of the microbatches a stage holds at a time, the first few follow the model's recompute
        # settings and the others recompute all; None leaves it to the model.
        num_partial = self.config.num_microbatches_with_partial_activation_checkpoints
        return None if num_partial is None else place % self._most_in_flight >= num_partial

    def free_output(self, output_tensor: Any) -> None:
        """After sending: frees an output. Only its place in the autograd graph is still needed.

        The loss is not freed: it is one number, never sent, and readers may still want it.
        """
        if not self.forward_only and not self.is_last_stage:
            out = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
            deallocate_output_tensor(out, self.config.deallocate_pipeline_outputs)

    def backward_step(self, output_tensor_grad: Any, microbatch_id: int | None = None) -> Any:
        """Backward of the oldest microbatch in flight, or of the one named.

        Returns the gradient of its input.
        """
        input_tensor, output_tensor = self.begin_backward(microbatch_id)
        tensors = (input_tensor, output_tensor, output_tensor_grad)
        grad = self._backward_step(*tensors, None, self.config)
        self.finish_backward()
        return grad

    def begin_backward(self, microbatch_id: int | None = None) -> tuple[Any, Any]:
        """Before a backward: (input, output) of its forward, which is in flight no longer."""
        self.frame.before_backward(self)
        oldest = next(iter(self._in_flight)) if microbatch_id is None else microbatch_id
        return self._in_flight.pop(oldest)

    def finish_backward(self) -> None:
        """After a backward: its gradients may be due."""
        self.num_backwards_left -= 1
        self.frame.after_backward(self)

    def num_in_flight(self) -> int:
        """Microbatches whose forward is done and whose backward is not."""
        return len(self._in_flight)

    def is_in_last_microbatch(self) -> bool:
        """True from the beginning of its last forward, if no other microbatch is in flight then."""
        return self._num_forwards == self.num_microbatches and not self._in_flight
