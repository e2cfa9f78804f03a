"""The losses of further tokens: how they join the main loss's backward, and what a log says of them.

Counterpart: parts of `megatron.core.transformer.multi_token_prediction`; ours imports these names from
here. Megatron's training loop asks for the log; here functions are entered in the hooks of a step.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from minimegatron.core.collectives import all_reduce
from minimegatron.core.utils import get_device, get_model_config, unwrap_model

# -- Their place in the backward --


class MTPLossAutoScaler(torch.autograd.Function):
    """Hangs a loss on an activation: the activation's backward is the loss's too.

    Use the returned activation; else the loss has no gradient. The gradient of each of the loss's
    elements is `main_loss_backward_scale`: one number for the process, which the schedules set after
    each forward.
    """

    main_loss_backward_scale: torch.Tensor = torch.tensor(1.0)

    @staticmethod
    def forward(ctx, output: torch.Tensor, mtp_loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mtp_loss)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (mtp_loss,) = ctx.saved_tensors
        scale = MTPLossAutoScaler.main_loss_backward_scale.to(mtp_loss).view(())
        return grad_output, torch.ones_like(mtp_loss) * scale

    @staticmethod
    def set_loss_scale(scale: torch.Tensor) -> None:
        """`scale` is a tensor of one element; it also multiplies the main loss."""
        MTPLossAutoScaler.main_loss_backward_scale = scale


@contextmanager
def mtp_scale_put_back() -> Iterator[None]:
    """Of `config.around_step_funcs`: after a step, a loop's own backward finds the scale it had."""
    before = MTPLossAutoScaler.main_loss_backward_scale
    try:
        yield
    finally:
        MTPLossAutoScaler.main_loss_backward_scale = before


# Of `config.aux_loss_scale_funcs`, one or the other. Float64: 1/3 in float32 is off by 1e-8.


def scale_mtp_as_mean(scale: torch.Tensor, num_microbatches: int, cp_size: int) -> None:
    """A step has the mean over microbatches and data ranks of each depth's mean loss.

    Gradients are divided by d * c, but the c ranks' shares sum to a mean. Megatron has no factor c.
    """
    MTPLossAutoScaler.set_loss_scale(scale.double() * cp_size / num_microbatches)


def scale_mtp_as_sum(scale: torch.Tensor, num_microbatches: int, cp_size: int) -> None:
    """The same with `calculate_per_token_loss`: `finalize_model_grads` divides by all tokens."""
    MTPLossAutoScaler.set_loss_scale(scale.double())


# -- What a log says of them --


class MTPLossLoggingHelper:
    """Each depth's loss, added up over microbatches; only ranks that compute the loss have values.

    `tracker` is one for the process, with "values" [K], as in Megatron. It has more here: how many
    microbatches are in them. So `track_mtp_metrics` belongs after the step of one model, before that of
    another. What the finished steps since the last line of the log had is kept for each model apart.
    """

    tracker: dict[str, Any] = {}

    @staticmethod
    def save_loss_to_tracker(
        loss: torch.Tensor,
        layer_number: int | None,
        num_layers: int,
        reduce_group: Any = None,
        avg_group: Any = None,
    ) -> None:
        """Adds one microbatch's loss, a scalar, of depth `layer_number`, which counts from 0.

        The groups are for `reduce_loss_in_tracker`. Without a number nothing is added.
        """
        if layer_number is None:
            return
        tracker = MTPLossLoggingHelper.tracker
        if "values" not in tracker or len(tracker["values"]) != num_layers:
            zeros = torch.zeros(num_layers, dtype=loss.dtype, device=loss.device)
            tracker |= {"values": zeros, "num_saved": 0}
        tracker["values"][layer_number] += loss.detach()
        tracker["num_saved"] += layer_number == 0
        tracker["reduce_group"] = reduce_group
        tracker["avg_group"] = avg_group

    @staticmethod
    def clean_loss_in_tracker() -> None:
        """Forgets the values of the last step."""
        tracker = MTPLossLoggingHelper.tracker
        if "values" in tracker:
            tracker["values"].zero_()
        tracker |= {"num_saved": 0, "reduce_group": None, "avg_group": None}

    @staticmethod
    def reduce_loss_in_tracker() -> None:
        """Sums "values" over `reduce_group` and averages them over `avg_group`, in place."""
        tracker = MTPLossLoggingHelper.tracker
        if "values" not in tracker:
            return
        if tracker["reduce_group"] is not None:
            all_reduce(tracker["values"], tracker["reduce_group"])
        if tracker["avg_group"] is not None:
            all_reduce(tracker["values"], tracker["avg_group"])
            tracker["values"] /= tracker["avg_group"].size()

    @staticmethod
    def track_mtp_metrics(
        loss_scale: float,
        iteration: int,
        writer: Any,
        wandb_writer: Any = None,
        total_loss_dict: dict[str, Any] | None = None,
    ) -> None:
        """Reduces the step's losses, writes "mtp_1 loss", ..., and forgets them.

        For a training loop of one's own, after each step, on the ranks that compute the loss.

        Args:
            loss_scale: 1 / M.
            writer: of TensorBoard, or None; `wandb_writer` has `log(dict, iteration)`.
            total_loss_dict: the losses are added to what it has under their names.
        """
        MTPLossLoggingHelper.reduce_loss_in_tracker()
        if "values" not in MTPLossLoggingHelper.tracker:
            return
        losses = MTPLossLoggingHelper.tracker["values"] * loss_scale
        for depth, loss in enumerate(losses, 1):
            name = f"mtp_{depth} loss"
            if total_loss_dict is not None:
                total_loss_dict[name] = total_loss_dict.get(name, 0.0) + loss
            if writer is not None:
                writer.add_scalar(name, loss, iteration)
            if wandb_writer is not None:
                wandb_writer.log({name: loss}, iteration)
        MTPLossLoggingHelper.clean_loss_in_tracker()


def forget_step(models: list[torch.nn.Module]) -> Callable[[], None]:
    """Before a step: what the last one saved, be it finished or not, is not this one's.

    A step without gradients saves nothing. So what is there stays for `track_mtp_metrics`. Returns what
    puts it back.
    """
    # Its tensors are added to in place.
    before = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in MTPLossLoggingHelper.tracker.items()
    }
    if torch.is_grad_enabled():
        MTPLossLoggingHelper.clean_loss_in_tracker()
    return partial(setattr, MTPLossLoggingHelper, "tracker", before)


_of_steps: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""By model, its first chunk here: the sum over finished steps since its last line, and their number."""


def count_step(models: list[torch.nn.Module], pg_collection: Any) -> None:
    """When gradients are final: the step's mean losses count for the model's next line of the log."""
    tracker = MTPLossLoggingHelper.tracker
    if tracker.get("num_saved"):
        losses = tracker["values"] / tracker["num_saved"]
        total, num_steps = _of_steps.get(unwrap_model(models[0]), (0.0, 0))
        _of_steps[unwrap_model(models[0])] = (total + losses, num_steps + 1)


def describe_further_tokens(models: list[torch.nn.Module], pg_collection: Any) -> dict[str, float]:
    """For a line of the log: "mtp_1 loss", ..., as means over the steps since the line before.

    A step whose update is skipped counts too; in the line's mean of the main loss it does not.
    The same on all ranks, which must all call it. A step's loss is the mean over its microbatches and
    data-parallel ranks. Evaluation saves none. Needs dp_cp and pp of `pg_collection`.
    """
    num_depths = get_model_config(models[0]).mtp_num_layers
    table = torch.zeros(num_depths + 1, dtype=torch.float64, device=get_device())
    table[:-1], table[-1] = _of_steps.pop(unwrap_model(models[0]), (0.0, 0))
    for group in (pg_collection.dp_cp, pg_collection.pp):
        all_reduce(table, group)
    *losses, num_steps = table.tolist()
    if not num_steps:
        return {}
    return {f"mtp_{depth} loss": loss / num_steps for depth, loss in enumerate(losses, 1)}


# -- When a step enters them --


def hooks_of_mtp(config: Any) -> dict[str, tuple[Callable, ...]]:
    """What is entered in the hooks of a step that predicts further tokens."""
    scales = (scale_mtp_as_mean, scale_mtp_as_sum)
    return {
        "aux_loss_scale_funcs": scales[::-1] if config.calculate_per_token_loss else scales,
        "before_step_funcs": (forget_step,),
        "around_step_funcs": (mtp_scale_put_back,),
        "after_grads_funcs": (count_step,),
        "log_funcs": (describe_further_tokens,),
    }
