"""Checks what is freed and what is not, gradients from freed outputs, then a GPT on two stages."""

import math
import random
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.bench.gpt_step import StepCase, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.bench.untagged_messages import without_tags
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed

STEPS = "minimegatron.core.pipeline_parallel.steps."
REPLACES = (STEPS + "deallocate_output_tensor", STEPS + "custom_backward")
SHAPE = (3, 2, 4)
EMPTIED = (
    "freeing {} emptied the storage itself (resize_?)\nAn operation such as tanh saves its output "
    "for backward, in that very storage: its numbers are lost too. How can the output alone let go "
    "of it, so that the storage stays exactly as long as the graph needs it?"
)
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x.transpose(0, 1)": lambda x: x.transpose(0, 1),
    "x[0]": lambda x: x[0],
    "x.view(-1)": lambda x: x.view(-1),
}
"""Outputs that look into the memory of x. The last two are contiguous, the last one has all of it."""
WORLD = 2
FREEING, BACKWARD, STEP = "freeing an output", "backward from it", "a training step"


def cases(seed: int) -> list[Case]:
    """The functions alone, then a training step with M > p, and one with a single microbatch."""
    draw, data = random.Random(seed), data_seed(seed)
    found = [Case(name, part=part, about=name, seed=data) for name, (part, *_) in ALONE.items()]
    for M in (draw.randint(3, 6), 1):
        step = StepCase(pp=2, num_microbatches=M, seed=data).values
        found.append(Case(f"GPT, 2 stages, M={M}", part=STEP, step=step, M=M))
    return found


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """One property of the two functions, or one step."""
    if case.part == STEP:
        return _run_step(student, case)
    return ALONE[case.about][1](student, case.seed)


def judge(case: Case, answers: Sequence[Any]) -> Result | None:
    """What the property is, on every rank; or a step's gradients."""
    if case.part == STEP:
        return _judge_step(case, answers)
    for rank, answer in enumerate(answers):
        result = ALONE[case.about][2](f"rank {rank}", answer, case.seed)
    return result


def _draw(seed: int, which: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + which)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype)


# -- Freeing --


def _run_freed(student: ModuleType, seed: int) -> dict[str, Any]:
    """The memory is gone; dtype, device and place in the graph are not."""
    found = {}
    for dtype in (torch.float64, torch.bfloat16):
        entered = _draw(seed, 1, dtype).requires_grad_()
        out = entered * 2
        node, memory = out.grad_fn, StorageWeakRef(out.untyped_storage())
        num_bytes, storage = out.untyped_storage().nbytes(), out.untyped_storage()._cdata
        student.deallocate_output_tensor(out, True)
        found[str(dtype)] = {
            "is_elsewhere": out.untyped_storage()._cdata != storage,
            "dtype": str(out.dtype),
            "is_gone": memory.expired(),
            "numel": out.numel(),
            "is_in_graph": out.grad_fn is node,
            "num_bytes": num_bytes,
            "left": out.untyped_storage().nbytes(),
        }
    return found


def _judge_freed(where: str, found: dict[str, Any], seed: int) -> Result:
    for dtype, one in found.items():
        if one["dtype"] != dtype:
            raise Wrong(
                f"{where}: an output of {dtype} became one of {one['dtype']}\nThe stub says what "
                "an output keeps. From where has your small tensor its dtype?"
            )
        if not one["is_gone"]:
            raise Wrong(f"{where}: {_kept_words(one)}")
        if one["numel"] != 1:
            raise Wrong(
                f"{where}: the freed output has {one['numel']} elements; it should have one\nSuch "
                "an output is not the tensor that others expect. Where does the number of its "
                "elements come from?"
            )
        if not one["is_in_graph"]:
            raise Wrong(
                f"{where}: the freed output has lost its grad_fn, so no backward can begin from it"
            )
    bf16 = found["torch.bfloat16"]
    words = f"{bf16['num_bytes']} bytes for each output of {list(SHAPE)} in bf16"
    return Result({"freed": f"{words}, down to {bf16['left']}"})


def _kept_words(one: dict[str, Any]) -> str:
    """Why the memory of an output is not free."""
    if one["left"] < one["num_bytes"] and not one["is_elsewhere"]:
        return EMPTIED.format("an output")
    if one["left"] < one["num_bytes"]:
        return (
            f"the memory of an output of shape {list(SHAPE)} is still there: somebody keeps it\nThe "
            "tensor object points at other memory. Which variable of yours still holds the old one?"
        )
    if one["numel"] < math.prod(SHAPE):
        return (
            f"the memory of an output of shape {list(SHAPE)} is still there: the new .data is a "
            "view of the old memory\nA slice or a reshape keeps all the memory that it looks into. "
            "Where can one element come from that has never been a part of the output?"
        )
    return (
        f"the memory of an output of shape {list(SHAPE)} is still there: the caller's tensor is as "
        "it was\n`out = ...` gives only the local name another tensor, and clearing values frees "
        "nothing. What of a tensor object says at which memory it looks?"
    )


def _run_left_alone(student: ModuleType, seed: int) -> dict[str, Any]:
    """Nothing happens without the option, or without an output."""
    out = _draw(seed, 2).requires_grad_() * 2
    student.deallocate_output_tensor(out, False)
    refusal = ""
    try:
        student.deallocate_output_tensor(None, True)
    except (AttributeError, TypeError) as error:
        refusal = str(error)
    base = _draw(seed, 2).requires_grad_() * 2
    return {
        "out": out.detach(),
        "refusal": refusal,
        "refused": {
            name: _refusal(student.deallocate_output_tensor, make(base), False)
            for name, make in VIEWS.items()
        },
    }


def _judge_left_alone(where: str, found: dict[str, Any], seed: int) -> None:
    expected = _draw(seed, 2) * 2
    if found["out"].shape != expected.shape or not torch.equal(found["out"], expected):
        raise Wrong(f"{where}: the output was freed although deallocate_pipeline_outputs is False")
    if found["refusal"]:
        raise Wrong(f"{where}: None (a stage without an output) is refused: {found['refusal']}")
    for name, kind in found["refused"].items():
        if kind:
            raise Wrong(
                f"{where}: {name}, a view, is refused with {kind} although "
                "deallocate_pipeline_outputs is False\nNobody wants it freed. In what order are your "
                "questions asked?"
            )


def _run_view(student: ModuleType, seed: int) -> dict[str, Any]:
    """Each view is refused: its base would keep the memory. What looks like one is freed."""
    found: dict[str, Any] = {}
    for name, make in VIEWS.items():
        base = _draw(seed, 3).requires_grad_() * 2
        view = make(base)
        kind = _refusal(student.deallocate_output_tensor, view, True)
        found[name] = {"refusal": kind, "is_as_it_was": view.shape == make(base).shape}
    own = _draw(seed, 3).requires_grad_().transpose(0, 1) * 2
    return {"views": found, "own": _refusal(student.deallocate_output_tensor, own, True)}


def _refusal(function: Callable, *args: Any) -> str:
    """The kind of error with which the function refuses; "" if it does not."""
    try:
        function(*args)
    except (ValueError, AssertionError, RuntimeError) as error:
        return type(error).__name__
    return ""


def _judge_refusal(where: str, what: str, kind: str) -> None:
    """Raises Wrong where another error than ValueError refuses."""
    if kind not in ("", "ValueError"):
        words = f"{where}: {what} is refused with {kind}; raise ValueError"
        is_assert = kind == "AssertionError"
        raise Wrong(words + ("\n`python -O` leaves every assert out." if is_assert else ""))


def _judge_view(where: str, found: dict[str, Any], seed: int) -> None:
    num_bytes = _draw(seed, 3).untyped_storage().nbytes()
    for name, one in found["views"].items():
        _judge_refusal(where, f"{name}, a view,", one["refusal"])
        if not one["refusal"]:
            what = (
                "accepted and left as it was" if one["is_as_it_was"] else "freed without complaint"
            )
            raise Wrong(
                f"{where}: {name}, a view, was {what}\nIt looks into the memory of another "
                f"tensor ({num_bytes} bytes), which is all still there. Nothing is "
                "gained, and nobody notices. By what can a view be told, so that it is refused?"
            )
    if found["own"]:
        raise Wrong(
            f"{where}: the output of x.transpose(0, 1) * 2 is refused with {found['own']}\nIt is not "
            "contiguous, but its memory is its own: it is no view. By what can the two be told apart?"
        )


def _run_saved(student: ModuleType, seed: int) -> dict[str, Any]:
    """tanh saves its output. Freeing the output must not take that away."""
    entered = _draw(seed, 4).requires_grad_()
    out = torch.tanh(entered)
    student.deallocate_output_tensor(out, True)
    node = out.grad_fn
    if node._saved_result.untyped_storage().nbytes() == 0:
        raise Wrong(f"rank {dist.get_rank()}: {EMPTIED.format('an output of tanh')}")
    _backward(student, out, _draw(seed, 5))
    return {"gradient": entered.grad, "is_kept": _is_saved(node)}


def _is_saved(node: Any) -> bool:
    """Whether a node of the graph still has what it saved."""
    try:
        return node._saved_result is not None
    except RuntimeError:
        return False


def _judge_saved(where: str, found: dict[str, Any], seed: int) -> None:
    expected = _draw(seed, 5) * (1 - torch.tanh(_draw(seed, 4)) ** 2)
    if found["gradient"] is None:
        raise Wrong(
            f"{where}: after custom_backward, the input of the graph has no .grad: backward did not "
            "get there\nCompare your call of the engine with the stub's, argument by argument. Which "
            "of them decides where gradients are put?"
        )
    check_numbers(f"{where}: gradient through a freed tanh", found["gradient"], expected)
    if found["is_kept"]:
        raise Wrong(
            f"{where}: after custom_backward, the graph still has what tanh had saved\nNobody goes "
            "back a second time, and each microbatch in turn would leave its activations behind. "
            "Which of your arguments keeps them?"
        )


# -- Backward --


def _backward(student: ModuleType, out: torch.Tensor, grad: torch.Tensor | None) -> None:
    shape = None if grad is None else list(grad.shape)
    try:
        student.custom_backward(out, grad)
    except RuntimeError as error:
        if "shape" not in str(error):
            raise
        raise Wrong(
            f"rank {dist.get_rank()}: custom_backward of a freed output failed: "
            f"{str(error).splitlines()[0]}\n"
            f"The output now has shape {list(out.shape)}, its gradient {shape}. "
            "torch.autograd.backward compares the two, and products with the output do not work "
            "either: its numbers are gone. Who goes backward without a look at the output?"
        ) from None


def _run_backward(student: ModuleType, seed: int) -> dict[str, Any]:
    """From freed outputs, twice: gradients add up."""
    weight = _draw(seed, 6).requires_grad_()
    inputs = [_draw(seed, 7 + i).requires_grad_() for i in range(2)]
    outputs = [entered * weight for entered in inputs]
    for i, out in enumerate(outputs):
        student.deallocate_output_tensor(out, True)
        _backward(student, out, _draw(seed, 9 + i))
    left = max(out.untyped_storage().nbytes() // out.element_size() for out in outputs)
    return {"left": left, "inputs": [entered.grad for entered in inputs], "weight": weight.grad}


def _judge_backward(where: str, found: dict[str, Any], seed: int) -> None:
    weight, total = _draw(seed, 6), torch.zeros(SHAPE, dtype=torch.float64)
    for i, got in enumerate(found["inputs"]):
        if got is None:
            raise Wrong(f"{where}: custom_backward left no .grad on the input of the graph")
        what = f"{where}: gradient of a freed output's input"
        check_numbers(what, got, _draw(seed, 9 + i) * weight)
        total += _draw(seed, 7 + i) * _draw(seed, 9 + i)
    if found["left"] > 1:
        raise Wrong(
            f"{where}: after custom_backward, the freed output has memory for {found['left']} "
            "elements again\nSomebody made the output large once more. Who looks at its shape in "
            "backward?"
        )
    what = f"{where}: gradient of a weight after two backwards"
    check_numbers(what, found["weight"], total, None, {"num_microbatches": 2})


def _run_loss(student: ModuleType, seed: int) -> dict[str, Any]:
    """Without a gradient: from 1 for one number, and an error for anything else."""
    entered = _draw(seed, 12).requires_grad_()
    _backward(student, (3 * entered).sum(), None)
    gradient = entered.grad
    entered = _draw(seed, 12).requires_grad_()
    refusal = _refusal(student.custom_backward, (3 * entered).sum().reshape(1), None)
    many = 3 * _draw(seed, 13).requires_grad_()
    return {
        "gradient": gradient,
        "one": {"refusal": refusal, "gradient": entered.grad},
        "refusals": {
            str(list(one.shape)): _refusal(student.custom_backward, one, None)
            for one in (many, 3 * many.detach()[0, 0].requires_grad_())
        },
    }


def _judge_loss(where: str, found: dict[str, Any], seed: int) -> None:
    for shape, kind in found["refusals"].items():
        _judge_refusal(where, f"backward without a gradient from a tensor of shape {shape}", kind)
        if not kind:
            raise Wrong(
                f"{where}: backward without a gradient began from a tensor of shape {shape}\nOnly "
                "a loss, one number, needs no gradient. Here the next stage's gradient is missing: "
                "that is a mistake which must not pass. By what can a loss be told from other tensors?"
            )
    if found["one"]["refusal"]:
        raise Wrong(
            f"{where}: a loss of shape [1] is refused with {found['one']['refusal']}\nIt is one number "
            "too. What makes a tensor a single number?"
        )
    expected = torch.full(SHAPE, 3.0, dtype=torch.float64)
    check_numbers(f"{where}: gradient of a loss", found["gradient"], expected)
    check_numbers(f"{where}: gradient of a loss of shape [1]", found["one"]["gradient"], expected)


ALONE: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "the memory of an output": (FREEING, _run_freed, _judge_freed),
    "option off, no output": (FREEING, _run_left_alone, _judge_left_alone),
    "a view": (FREEING, _run_view, _judge_view),
    "an output that its operation has saved": (BACKWARD, _run_saved, _judge_saved),
    "backward from freed outputs": (BACKWARD, _run_backward, _judge_backward),
    "backward from a loss": (BACKWARD, _run_loss, _judge_loss),
}


# -- A training step --


def _run_step(student: ModuleType, case: Case) -> dict[str, Any]:
    """A GPT on two stages that frees its outputs."""
    step = on_these_ranks(case.step)
    step.config.deallocate_pipeline_outputs = True
    freed: list[int] = []

    def deallocate(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
        num_bytes = 0 if out is None else out.untyped_storage().nbytes()
        student.deallocate_output_tensor(out, deallocate_pipeline_outputs)
        freed.append(num_bytes - (0 if out is None else out.untyped_storage().nbytes()))

    with (
        without_tags(),
        installed(deallocate, STEPS + "deallocate_output_tensor"),
        installed(student.custom_backward, STEPS + "custom_backward"),
    ):
        step.forward_backward()
    return {"gradients": step.gradients(), "freed": freed}


def _judge_step(case: Case, answers: Sequence[Any]) -> Result:
    reference = Reference(case.step, WORLD).run()
    reference.check_gradients([answer["gradients"] for answer in answers])
    freed, held = answers[0]["freed"], min(2, case.M)
    if not freed:
        return Result()
    return Result(
        {
            "freed": f"{freed[0]} bytes for each output of stage 0",
            "memory saved": f"{held * freed[0]} bytes = {held} in flight x {freed[0]}",
        }
    )
