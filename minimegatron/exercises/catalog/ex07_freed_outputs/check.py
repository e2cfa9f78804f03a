"""Checks what is freed and what is not, gradients from freed outputs, then a GPT on two stages."""

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from minimegatron.exercises.bench_gpt import (
    StepCase,
    check_gradients,
    on_these_ranks,
    reference_gradients,
)
from minimegatron.exercises.bench_rendezvous import GET_TRANSPORT, RendezvousTransport
from minimegatron.exercises.check import Case, Result, Wrong, check_numbers, installed

STEPS = "minimegatron.core.pipeline_parallel.steps."
SHAPE = (3, 2, 4)


def cases(seed: int) -> list[Case]:
    """The functions alone, then a training step with M > p, and one with a single microbatch."""
    draw = random.Random(seed)
    alone = [Case(name, check=name, seed=seed) for name in ALONE]
    steps = [
        Case(f"GPT, 2 stages, M={M}", check="", M=M, seed=seed) for M in (draw.randint(3, 6), 1)
    ]
    return alone + steps


def run(student: ModuleType, case: Case) -> Result:
    """One property of the two functions, or one step."""
    if not case.check:
        return run_step(student, case)
    return Result(ALONE[case.check](student, case.seed) or {})


def _draw(seed: int, which: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + which)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype)


def _where() -> str:
    return f"rank {dist.get_rank()}"


# -- Freeing --


def check_freed(student: ModuleType, seed: int) -> dict[str, str]:
    """The memory is gone; dtype, device and place in the graph are not."""
    for dtype in (torch.float64, torch.bfloat16):
        entered = _draw(seed, 1, dtype).requires_grad_()
        out = entered * 2
        node, memory = out.grad_fn, StorageWeakRef(out.untyped_storage())
        num_bytes = out.untyped_storage().nbytes()
        student.deallocate_output_tensor(out, True)
        if out.dtype != dtype:
            raise Wrong(
                f"{_where()}: an output of {dtype} became one of {out.dtype}\nThe engine compares "
                "the dtype (and device) of output and gradient: give the small tensor those of out."
            )
        if not memory.expired():
            words = "the caller's tensor is as it was" if out.numel() > 1 else "somebody keeps it"
            raise Wrong(
                f"{_where()}: the memory of an output of shape {list(SHAPE)} is still there: {words}"
                "\n`out = ...` gives only the local name another tensor, and clearing values frees "
                "nothing. The tensor object must point at other memory: set its .data."
            )
        if out.grad_fn is not node:
            raise Wrong(
                f"{_where()}: the freed output has lost its grad_fn, so no backward can begin from it"
            )
    return {"freed": f"{num_bytes} bytes for each output of {list(SHAPE)} in bf16, down to 2"}


def check_left_alone(student: ModuleType, seed: int) -> None:
    """Nothing happens without the option, or without an output."""
    entered = _draw(seed, 2).requires_grad_()
    out = entered * 2
    student.deallocate_output_tensor(out, False)
    if out.shape != SHAPE or not torch.equal(out, entered * 2):
        raise Wrong(
            f"{_where()}: the output was freed although deallocate_pipeline_outputs is False"
        )
    try:
        student.deallocate_output_tensor(None, True)
    except (AttributeError, TypeError) as error:
        raise Wrong(f"{_where()}: None (a stage without an output) is refused: {error}") from None


def check_view(student: ModuleType, seed: int) -> None:
    """A view is refused: its base would keep the memory."""
    base = _draw(seed, 3).requires_grad_() * 2
    view = base.transpose(0, 1)
    try:
        student.deallocate_output_tensor(view, True)
    except (ValueError, AssertionError):
        return
    raise Wrong(
        f"{_where()}: a view was freed without complaint\nIt looks into the memory of another "
        f"tensor ({base.untyped_storage().nbytes()} bytes), which is all still there. Nothing is "
        "gained, and nobody notices: raise ValueError if out._base is not None."
    )


def check_saved(student: ModuleType, seed: int) -> None:
    """tanh saves its output. Freeing the output must not take that away."""
    entered = _draw(seed, 4).requires_grad_()
    out = torch.tanh(entered)
    student.deallocate_output_tensor(out, True)
    if out.grad_fn._saved_result.untyped_storage().nbytes() == 0:
        raise Wrong(
            f"{_where()}: freeing an output of tanh emptied what tanh had saved for its backward\n"
            "The storage itself was shrunk (resize_?), and autograd shares it. Let the output point "
            "at other memory; then the old one stays exactly as long as the graph needs it."
        )
    grad = _draw(seed, 5)
    _backward(student, out, grad)
    expected = grad * (1 - torch.tanh(entered.detach()) ** 2)
    check_numbers("gradient through a freed tanh", entered.grad, expected, dist.get_rank())


# -- Backward --


def _backward(student: ModuleType, out: torch.Tensor, grad: torch.Tensor | None) -> None:
    shape = None if grad is None else list(grad.shape)
    try:
        student.custom_backward(out, grad)
    except RuntimeError as error:
        if "shape" not in str(error):
            raise
        raise Wrong(
            f"{_where()}: custom_backward of a freed output failed: {str(error).splitlines()[0]}\n"
            f"The output now has shape {list(out.shape)}, its gradient {shape}. "
            "torch.autograd.backward compares the two, and products with the output do not work "
            "either: its numbers are gone. Call the engine."
        ) from None


def check_backward(student: ModuleType, seed: int) -> None:
    """From freed outputs, twice: gradients add up."""
    weight = _draw(seed, 6).requires_grad_()
    inputs = [_draw(seed, 7 + i).requires_grad_() for i in range(2)]
    grads = [_draw(seed, 9 + i) for i in range(2)]
    outputs = [entered * weight for entered in inputs]
    for out, grad in zip(outputs, grads, strict=True):
        student.deallocate_output_tensor(out, True)
        _backward(student, out, grad.clone())
    for entered, grad in zip(inputs, grads, strict=True):
        what = "gradient of a freed output's input"
        if entered.grad is None:
            raise Wrong(f"{_where()}: custom_backward left no .grad on the input of the graph")
        check_numbers(what, entered.grad, grad * weight.detach(), dist.get_rank())
    expected = sum(x.detach() * grad for x, grad in zip(inputs, grads, strict=True))
    what = "gradient of a weight after two backwards"
    check_numbers(what, weight.grad, expected, dist.get_rank(), {"num_microbatches": 2})


def check_loss(student: ModuleType, seed: int) -> None:
    """Without a gradient: from 1 for one number, and an error for anything else."""
    entered = _draw(seed, 12).requires_grad_()
    _backward(student, (3 * entered).sum(), None)
    expected = torch.full(SHAPE, 3.0, dtype=torch.float64)
    check_numbers("gradient of a loss", entered.grad, expected, dist.get_rank())
    try:
        student.custom_backward(3 * entered, None)
    except (ValueError, AssertionError, RuntimeError):
        return
    raise Wrong(
        f"{_where()}: backward without a gradient began from a tensor of shape {list(SHAPE)}\nOnly a "
        "loss, one number, needs no gradient. Here the next stage's gradient is missing: that is a "
        "mistake which must not pass. Raise ValueError unless output.numel() is 1."
    )


ALONE: dict[str, Callable[[ModuleType, int], Any]] = {
    "the memory of an output": check_freed,
    "option off, no output": check_left_alone,
    "a view": check_view,
    "an output that its operation has saved": check_saved,
    "backward from freed outputs": check_backward,
    "backward from a loss": check_loss,
}


# -- A training step --


def run_step(student: ModuleType, case: Case) -> Result:
    """A GPT on two stages that frees its outputs, against one process."""
    step_case = StepCase(pp=2, num_microbatches=case.M, seed=case.seed)
    step = on_these_ranks(step_case)
    step.config.deallocate_pipeline_outputs = True
    freed: list[int] = []

    def deallocate(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
        num_bytes = 0 if out is None else out.untyped_storage().nbytes()
        student.deallocate_output_tensor(out, deallocate_pipeline_outputs)
        freed.append(num_bytes - (0 if out is None else out.untyped_storage().nbytes()))

    with (
        installed(RendezvousTransport, GET_TRANSPORT),
        installed(deallocate, STEPS + "deallocate_output_tensor"),
        installed(student.custom_backward, STEPS + "custom_backward"),
    ):
        step.forward_backward()
    check_gradients(step, reference_gradients(step_case, 1))
    held = min(2, case.M)
    return Result(
        {
            "freed": f"{freed[0]} bytes of each of {len(freed)} outputs of stage 0",
            "less memory": f"{held * freed[0]} bytes (outputs in flight there: {held})",
        }
        if freed
        else {}
    )
