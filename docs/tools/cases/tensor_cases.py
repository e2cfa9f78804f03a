"""Cases of the problems and the exam that need tensors: the links of the chain, run on small numbers.

Called by: `problem_cases`. Calls: the package's layers, steps, optimizer and checkpoints. Where a
collective is needed, it is given what the other ranks hold.
"""

import importlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from minimegatron.core.dist_checkpointing.core import ASIDE
from minimegatron.core.dist_checkpointing.mapping import boxes_of_range, make_sharded_tensors
from minimegatron.core.distributed.distributed_data_parallel import gradient_scaling_factor
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.optimizer import OptimizerConfig, _get_grad_scaler
from minimegatron.core.optimizer.clip_grads import get_grad_norm_fp32
from minimegatron.core.optimizer.distrib_optimizer import local_ranges
from minimegatron.core.pipeline_parallel.steps import (
    backward_step,
    custom_backward,
    deallocate_output_tensor,
    forward_step,
    forward_step_calc_loss,
)
from minimegatron.core.tensor_parallel import mappings
from minimegatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from minimegatron.core.tensor_parallel.utils import divide
from minimegatron.training.checkpoint_folder import (
    METADATA,
    TRACKER,
    find_checkpoint,
    get_checkpoint_name,
)

# The package has a function of this name too.
finalize = importlib.import_module("minimegatron.core.distributed.finalize_model_grads")

__all__ = [
    "bf16_after",
    "boxes_words",
    "clipped_norm",
    "contract_objective",
    "copied_input_grad",
    "cross_entropy_of",
    "freed_bytes",
    "gradient_of_token",
    "input_door",
    "loss_calls",
    "norm_of",
    "plain_number",
    "read_from",
    "refused_backward",
    "resumes_from",
    "rows_of_rank",
    "saved_box",
    "scale_after",
    "sent_back",
    "shard_of",
    "slice_shapes",
    "tied_gradient",
    "times_too_large",
]


def plain_number(value: float | Fraction, digits: int = 4) -> str:
    """
    >>> plain_number(0.1250001), plain_number(Fraction(16, 2)), plain_number(1.38629436)
    ('0.125', '8', '1.386')
    """
    return f"{float(value):.{digits}g}"


def _group(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@contextmanager
def _others_hold(module: object, value: float) -> Iterator[None]:
    """Within it, the module's all-reduce adds what the other ranks hold."""

    def add(tensor: torch.Tensor, *_: object, **__: object) -> None:
        tensor += value

    with mock.patch.object(module, "all_reduce", add):
        yield


# -- Tensor parallelism --


def slice_shapes(h: int, t: int) -> tuple[list[int], list[int]]:
    """Of an MLP's two weights, what a rank holds: outputs of the first cut, inputs of the second."""
    return [divide(4 * h, t), h], [h, divide(4 * h, t)]


def copied_input_grad(ours: float, others: float) -> str:
    """The gradient of an input that two ranks use, each for its own features."""
    x = torch.zeros(1, requires_grad=True)
    out = mappings.copy_to_tensor_model_parallel_region(x, _group(0, 2))
    with _others_hold(mappings.collectives, others):
        out.backward(torch.tensor([ours]))
    return plain_number(x.grad.item())


def cross_entropy_of(weights: Sequence[float], target: int) -> str:
    """The loss where the logits are the logarithms of these; uncut, so that nothing is exchanged."""
    logits = torch.tensor([[math.log(weight) for weight in weights]], dtype=torch.float64)
    with mock.patch("minimegatron.core.collectives.all_reduce"):
        loss = vocab_parallel_cross_entropy(logits, torch.tensor([target]), 0.0, _group(0, 1))
    return plain_number(loss.item())


# -- One microbatch --


def input_door() -> str:
    """By which call the input of a middle stage reaches the model."""
    calls = []

    class Stage(torch.nn.Module):
        config = ModelParallelConfig()

        def set_input_tensor(self, tensor: object) -> None:
            calls.append("set_input_tensor")

    def your_forward_step(data_iterator: object, model: object) -> tuple:
        calls.append("your forward_step")
        return torch.zeros(1), None

    forward_step(
        your_forward_step,
        None,
        Stage(),
        1,
        torch.zeros(1),
        [],
        Stage.config,
        1,
        is_last_stage=False,
    )
    return ", then ".join(calls)


def loss_calls(is_last_stage: bool, m: int) -> int:
    """How often the loss function is called on one stage."""
    calls = []

    def loss_func(output: torch.Tensor) -> tuple:
        calls.append(1)
        return output.sum(), {}

    for _ in range(m):
        forward_step_calc_loss(
            None,
            torch.zeros(1),
            loss_func,
            ModelParallelConfig(),
            None,
            False,
            m,
            [],
            1,
            is_last_stage,
        )
    return len(calls)


def _scaled_loss(loss: float, tokens: int | None, m: int, per_token: bool, c: int) -> Fraction:
    """What backward begins with, for one microbatch on the last stage."""
    values = (torch.tensor(loss, dtype=torch.float64),)
    values += () if tokens is None else (torch.tensor(tokens),)
    config = ModelParallelConfig(calculate_per_token_loss=per_token)
    scaled, _ = forward_step_calc_loss(
        None, torch.zeros(1), lambda _: (*values, {}), config, None, False, m, [], c, True
    )
    return Fraction(scaled.item()).limit_denominator(10**6)


def contract_objective(
    sums: Sequence[Sequence[float]], counts: Sequence[Sequence[int]], per_token: bool
) -> Fraction:
    """What is optimised where (sum, n, report) is returned; a list per copy."""
    copies, m = len(sums), len(sums[0])
    factor = _copies_factor(copies, per_token)
    total = sum(
        _scaled_loss(loss, n, m, per_token, 1) * factor
        for losses, ns in zip(sums, counts, strict=True)
        for loss, n in zip(losses, ns, strict=True)
    )
    return total / sum(map(sum, counts)) if per_token else total


def _copies_factor(num_ranks: int, per_token: bool) -> Fraction:
    config = SimpleNamespace(calculate_per_token_loss=per_token)
    ddp_config = SimpleNamespace(average_in_collective=False)
    found = gradient_scaling_factor(config, ddp_config, num_ranks)
    return Fraction(found).limit_denominator(10**6)


def gradient_of_token(
    grad: float, n: int, m: int, d: int, tokens: int, per_token: bool, scale: float = 1
) -> list[Fraction]:
    """What one token's gradient has become: after the loss, in the summed buffer, in the optimizer."""
    in_loss = _scaled_loss(grad, n, m, per_token, 1) * Fraction(scale)
    in_buffer = in_loss * _copies_factor(d, per_token)
    divided = in_buffer / tokens if per_token else in_buffer
    return [in_loss, in_buffer, divided, divided / Fraction(scale)]


def times_too_large(d: int, c: int, m: int) -> Fraction:
    """A mean over all ranks' tokens with the per-token flag on, over the right gradient."""
    ranks = d * c
    # The tokens' number stays 0, which the division takes for 1.
    wrong = sum(
        _scaled_loss(1, None, m, True, c) * _copies_factor(ranks, True) for _ in range(ranks)
    )
    right = sum(
        _scaled_loss(1, None, m, False, c) * _copies_factor(ranks, False) for _ in range(ranks)
    )
    return wrong / right


def sent_back(
    weight: float, x: float, grad: float | None, m: int = 1, scale: float = 1.0
) -> tuple[str, str]:
    """A stage computes y = weight · x². Returns the gradient that it sends, and its weight's.

    Without `grad` it is the last stage, and y the mean that its loss function returns.
    """
    config = ModelParallelConfig(
        grad_scale_func=lambda loss: loss * scale, deallocate_pipeline_outputs=True
    )
    x_tensor = torch.tensor([float(x)], requires_grad=True)
    w = torch.tensor([float(weight)], requires_grad=True)
    y = w * x_tensor**2
    if grad is None:
        y, _ = forward_step_calc_loss(
            None, y, lambda out: (out.sum(), {}), config, None, False, m, [], 1, True
        )
    else:
        deallocate_output_tensor(y, deallocate_pipeline_outputs=True)
        grad = torch.tensor([float(grad)])
    found = backward_step(x_tensor, y, grad, None, config)
    return plain_number(found.item()), plain_number(w.grad.item())


def freed_bytes(*shape: int) -> tuple[int, int]:
    """Bytes of a bf16 output before it is freed, and after."""
    output = torch.empty(shape, dtype=torch.bfloat16)
    before = output.untyped_storage().nbytes()
    deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
    return before, output.untyped_storage().nbytes()


def refused_backward(num_losses: int) -> str:
    """The error of backward for a loss that is not a scalar."""
    try:
        custom_backward(torch.zeros(num_losses, requires_grad=True), None)
    except ValueError as error:
        return str(error)
    raise AssertionError("accepted")


# -- Finalize, optimizer --


def tied_gradient(first: float | Fraction, last: float | Fraction) -> str:
    """Of a tied embedding's copy on the first stage, once the embedding group has summed."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.main_grad = torch.tensor([float(first)])
    weight.shared_embedding = True
    chunk = SimpleNamespace(
        config=SimpleNamespace(mtp_num_layers=None),
        share_embeddings_and_output_weights=True,
        parameters=lambda: [weight],
    )
    with _others_hold(finalize, float(last)):
        finalize._allreduce_word_embedding_grads(
            [chunk], embd_group=_group(0, 2), pp_group=_group(0, 4)
        )
    return plain_number(weight.main_grad.item())


def norm_of(*grads: float) -> str:
    return plain_number(get_grad_norm_fp32([torch.tensor([g]) for g in grads]))


def clipped_norm(norm: float, limit: float) -> str:
    return plain_number(min(norm, limit))


def bf16_after(start: float, update: float, count: int) -> tuple[str, str]:
    """A weight after so many equal additions: in bf16, and in fp32."""
    weight = torch.tensor(start, dtype=torch.bfloat16)
    main = torch.tensor(start)
    for _ in range(count):
        weight, main = weight + update, main + update
    return f"{weight.item():.6g}", f"{main.item():.6g}"


def scale_after(overflows: Sequence[bool], **given: float) -> list[str]:
    """The dynamic loss scale after each step. `given` are fields of the optimizer's config; the others
    have their defaults, so two overflows lower the scale (`hysteresis`)."""
    scaler = _get_grad_scaler(OptimizerConfig(lr=1.0, fp16=True, **given))
    found = []
    for overflow in overflows:
        scaler.update(overflow)
        found.append(f"{float(scaler.scale):g}")
    return found


def shard_of(rank: int, num_ranks: int, bucket: int, start: int, end: int) -> str:
    """Which elements of a parameter at [start, end) of the one bucket a rank updates."""
    buffer = SimpleNamespace(
        data_parallel_group=_group(rank, num_ranks),
        param_index_map={"param": (start, end, 0)},
        buckets=[SimpleNamespace(offset=0, grad_data=torch.empty(bucket))],
    )
    found = local_ranges(buffer).get("param")
    return f"{found[0]} to {found[1] - 1}" if found else "none"


# -- Checkpoints --


def _saved(h: int, t: int, tp_rank: int) -> object:
    """The box of a [4h, h] weight that is cut along its first dimension."""
    part = torch.empty(divide(4 * h, t), h, device="meta")
    part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, 0, 1
    (box,) = make_sharded_tensors("weight", part, part, tp_rank, t)
    return box


def saved_box(h: int, t: int, tp_rank: int) -> str:
    box = _saved(h, t, tp_rank)
    return f"offset {box.global_offset}, size {box.local_shape}"


def rows_of_rank(h: int, t: int, tp_rank: int) -> tuple[int, int]:
    """The rows of the whole weight that the rank holds, first and last."""
    box = _saved(h, t, tp_rank)
    return box.global_offset[0], box.global_offset[0] + box.local_shape[0] - 1


def read_from(h: int, saved_t: int, t: int, tp_rank: int) -> str:
    """Of a weight saved by `saved_t` ranks: whose boxes a rank of another layout reads."""
    first, last = rows_of_rank(h, t, tp_rank)
    found = []
    for rank in range(saved_t):
        begin, end = rows_of_rank(h, saved_t, rank)
        if begin <= last and end >= first:
            found.append(f"rows {max(first, begin)} to {min(last, end)} of rank {rank}'s box")
    return " and ".join(found)


def boxes_words(shape: tuple[int, ...], start: int, end: int) -> str:
    return "; ".join(
        f"offset {offset}, size {size}" for offset, size in boxes_of_range(shape, start, end)
    )


def resumes_from(complete: int, interrupted: int) -> int:
    """The iteration that a run loads, if the saving of a later one was cut short."""
    with tempfile.TemporaryDirectory() as folder:
        Path(get_checkpoint_name(folder, complete)).mkdir()
        # Its files are written aside; the folder gets its name, and the tracker its number, last.
        Path(f"{get_checkpoint_name(folder, interrupted)}{ASIDE}1a2b").mkdir()
        (Path(get_checkpoint_name(folder, complete)) / METADATA).touch()
        Path(folder, TRACKER).write_text(str(complete))
        return int(find_checkpoint(folder).name.removeprefix("iter_"))
