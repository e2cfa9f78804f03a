"""One model chunk during one training step: its arguments bound once, its microbatches in flight.

Called by: the three schedules, which decide the order. Calls: `forward_step` and `backward_step`,
and after a backward the weight gradients that it left (`tensor_parallel.weight_grad_store`).
Megatron has no such class; there each schedule passes the same fourteen arguments at each call, and
keeps `input_tensors` and `output_tensors` lists of its own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.core.device import get_device
from minimegatron.core.pipeline_parallel.steps import (
    backward_step,
    check_first_val_step,
    deallocate_output_tensor,
    forward_step,
)
from minimegatron.core.tensor_parallel.weight_grad_store import weight_gradients_at_once
from minimegatron.core.utils import get_model_config


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
    ):
        self.model, self.config = model, get_model_config(model)
        self.vp_stage, self.is_last_stage = vp_stage, is_last_stage
        self.num_tokens = torch.zeros([], dtype=torch.int, device=get_device())
        self._step = (forward_step_func, data_iterator, model, num_microbatches)
        self.forward_data_store, self._cp_group_size = forward_data_store, cp_group_size
        self._collect_non_loss_data = collect_non_loss_data
        self._forward_only, self._first_val_step = forward_only, first_val_step
        self._num_in_flight = num_in_flight
        self._in_flight: dict[int, tuple[Any, Any]] = {}

    def forward_step(self, microbatch_id: int, input_tensor: Any, place: int | None = None) -> Any:
        """Forward of one microbatch; remembers input and output for its backward.

        `place` is the forward's number in the stage's order, where that is not `microbatch_id`.
        """
        output_tensor, num_tokens = forward_step(
            *self._step,
            input_tensor,
            self.forward_data_store,
            self.config,
            self._cp_group_size,
            self._collect_non_loss_data,
            self._recomputes(microbatch_id if place is None else place),
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
        """After sending: frees an output of which only the autograd graph is still needed.

        The loss is not freed: it is one number, never sent, and readers may still want it.
        """
        if not self._forward_only and not self.is_last_stage:
            out = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
            deallocate_output_tensor(out, self.config.deallocate_pipeline_outputs)

    def backward_step(self, output_tensor_grad: Any, microbatch_id: int | None = None) -> Any:
        """Backward of the oldest microbatch in flight, or of the one named.

        Returns the gradient of its input.
        """
        oldest = next(iter(self._in_flight)) if microbatch_id is None else microbatch_id
        input_tensor, output_tensor = self._in_flight.pop(oldest)
        # No schedule has a place of its own for weight gradients: what backward leaves follows it.
        with weight_gradients_at_once():
            return backward_step(input_tensor, output_tensor, output_tensor_grad, None, self.config)

    def num_in_flight(self) -> int:
        """Microbatches whose forward is done and whose backward is not."""
        return len(self._in_flight)
