"""One model chunk during one training step: its arguments bound once, its microbatches in flight.

Called by: the three schedules, which decide the order. Calls: `forward_step` and `backward_step`,
after a backward the weight gradients that it left (`tensor_parallel.weight_grad_store`), and the
step's frame around each of them.
Megatron has no such class; there each schedule passes the same fourteen arguments at each call, and
keeps `input_tensors` and `output_tensors` lists of its own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.steps import (
    backward_step,
    check_first_val_step,
    deallocate_output_tensor,
    forward_step,
)
from minimegatron.core.tensor_parallel.weight_grad_store import weight_gradients_at_once
from minimegatron.core.utils import get_device, get_model_config


class ModelChunk:
    """Runs microbatches of one chunk, and holds them from their forward to their backward.

    Args:
        forward_step_func, data_iterator, model, num_microbatches, collect_non_loss_data,
            forward_only, first_val_step: as the schedule got them.
        forward_data_store: where the last stage's reports go; shared by a stage's chunks.
        cp_group_size: ranks that share each sequence.
        num_in_flight: forwards a stage is ahead of its backwards, at most; for recompute.
        vp_stage: this chunk's number; None where a stage has one chunk.
        is_last_stage: whether this chunk ends in the loss.
        config: the step's; None for the model's own. A stage's chunks share the first one's, because
            the hooks are filled in there.
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
        num_in_flight: int = 1,
        vp_stage: int | None = None,
        is_last_stage: bool = True,
        config: ModelParallelConfig | None = None,
        frame: "NoFrame | None" = None,
    ):
        self.model, self.config = model, config or get_model_config(model)
        self.num_microbatches = num_microbatches
        self.vp_stage, self.is_last_stage = vp_stage, is_last_stage
        self.num_tokens = torch.zeros([], dtype=torch.int, device=get_device())
        self._step = (forward_step_func, data_iterator, model, num_microbatches)
        self.forward_data_store, self._cp_group_size = forward_data_store, cp_group_size
        self._collect_non_loss_data = collect_non_loss_data
        self._forward_only, self._first_val_step = forward_only, first_val_step
        self._num_in_flight = num_in_flight
        self._in_flight: dict[int, tuple[Any, Any]] = {}
        self.frame = frame or NoFrame()
        self._num_forwards = self._num_backwards = 0

    def forward_step(self, microbatch_id: int, input_tensor: Any) -> Any:
        """Forward of one microbatch; remembers input and output for its backward."""
        self._num_forwards += 1
        place = self.frame.before_forward(self, microbatch_id)
        output_tensor, num_tokens = forward_step(
            *self._step,
            input_tensor,
            self.forward_data_store,
            self.config,
            self._cp_group_size,
            self._collect_non_loss_data,
            self._recomputes(place),
            check_first_val_step(self._first_val_step, self._forward_only, microbatch_id == 0),
            microbatch_id,
            self.vp_stage,
            self.is_last_stage,
        )
        if self.is_last_stage:  # elsewhere there is no loss, and no tokens
            self.num_tokens += num_tokens
        if not self._forward_only:
            self._in_flight[microbatch_id] = (input_tensor, output_tensor)
        return output_tensor

    def _recomputes(self, place: int) -> bool | None:
        # Of the microbatches a stage holds at a time, the first few follow the model's recompute
        # settings and the others recompute all; None leaves it to the model.
        num_partial = self.config.num_microbatches_with_partial_activation_checkpoints
        return None if num_partial is None else place % self._num_in_flight >= num_partial

    def free_output(self, output_tensor: Any) -> None:
        """After sending: frees an output. Only its place in the autograd graph is still needed.

        The loss is not freed: it is one number, never sent, and readers may still want it.
        """
        if not self._forward_only and not self.is_last_stage:
            out = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
            deallocate_output_tensor(out, self.config.deallocate_pipeline_outputs)

    def backward_step(self, output_tensor_grad: Any, microbatch_id: int | None = None) -> Any:
        """Backward of the oldest microbatch in flight, or of the one named.

        Returns the gradient of its input.
        """
        self.frame.before_backward(self)
        oldest = next(iter(self._in_flight)) if microbatch_id is None else microbatch_id
        input_tensor, output_tensor = self._in_flight.pop(oldest)
        # No schedule has a place of its own for weight gradients: what backward leaves follows it.
        with weight_gradients_at_once():
            grad = backward_step(input_tensor, output_tensor, output_tensor_grad, None, self.config)
        self._num_backwards += 1
        self.frame.after_backward(self)
        return grad

    def num_in_flight(self) -> int:
        """Microbatches whose forward is done and whose backward is not."""
        return len(self._in_flight)

    def is_in_last_microbatch(self) -> bool:
        """True from the beginning of its last forward, if no other microbatch is in flight then."""
        return self._num_forwards == self.num_microbatches and self.num_in_flight() == 0

    def num_backwards_left(self) -> int:
        """Microbatches of the step whose backward is not done."""
        return self.num_microbatches - self._num_backwards


class NoFrame:
    """What stands around a chunk's work if nothing does; see `step_frame.StepFrame`."""

    def before_forward(self, chunk: ModelChunk, microbatch_id: int) -> int:
        """Returns the forward's number among all of the stage's."""
        return microbatch_id

    def before_backward(self, chunk: ModelChunk) -> None:
        """Called with the microbatch still in flight."""

    def after_backward(self, chunk: ModelChunk) -> None:
        """Called with the input's gradient not yet sent."""
