"""Checks the two conjugates and the MLP: each alone, then the MLP inside a GPT's training step."""

import random
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.tensor_parallel.sharding import shard_parameter
from minimegatron.core.transformer.mlp import MLP, MLPSubmodules
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.exercises.bench_counting import Counter, counted
from minimegatron.exercises.bench_gpt import (
    GptStep,
    OneRank,
    StepCase,
    check_gradients,
    make_groups,
    one_process,
)
from minimegatron.exercises.check import Case, Result, Wrong, check_numbers, installed

FORWARD = "minimegatron.core.transformer.mlp.MLP.forward"
SEQ, BATCH, HIDDEN = 3, 2, 4


def cases(seed: int) -> list[Case]:
    """A group of all ranks, and two groups of two, whose sums must not be mixed up."""
    draw = random.Random(seed)
    return [
        Case("tp=4", tp=4, wide=draw.choice([4, 8, 12]), seed=seed),
        Case("tp=2, dp=2", tp=2, wide=draw.choice([4, 6]), seed=seed + 1),
    ]


def run(student: ModuleType, case: Case) -> Result:
    """The conjugates, one MLP, and where it fits (2 heads) a GPT."""
    step_case = StepCase(tp=case.tp, num_microbatches=2, seed=case.seed)
    groups = make_groups(step_case)
    check_copy(student, case, groups)
    check_reduce(student, case, groups)
    counter = check_mlp(student, case, groups)
    if case.tp == 2:
        check_gpt(student, step_case, groups)
    return Result({"collectives": f"{counter.words()}, forward and backward of one MLP"})


def _draw(case: Case, shape: tuple[int, ...], which: int) -> torch.Tensor:
    """Numbers that depend on the case and `which` only."""
    generator = torch.Generator().manual_seed(1000 * case.seed + which)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# -- The conjugates alone --


def _pass_through(function: Any, value: torch.Tensor, grad: torch.Tensor, group: Any) -> tuple:
    """(output, gradient of the input) of one call; Wrong if the caller's tensors were changed."""
    where = f"rank {dist.get_rank()}: {function.__name__}"
    entered = value.clone().requires_grad_()
    output = function(entered, group)
    if not isinstance(output, torch.Tensor):
        raise Wrong(f"{where} returned {output!r}; a tensor is expected (was `return` forgotten?)")
    result = output.detach().clone()
    if not torch.equal(entered.detach(), value):
        raise Wrong(
            f"{where} changed the tensor it was given\n"
            "all_reduce works in place. The caller still uses its tensor (autograd may have saved "
            "it for backward): reduce a .clone()."
        )
    given = grad.clone()
    output.backward(given)
    if not torch.equal(given, grad):
        raise Wrong(
            f"{where}: its backward changed grad_output\n"
            "Autograd may pass the same tensor to other branches of the graph: reduce a .clone()."
        )
    if entered.grad is None:
        raise Wrong(f"{where}: its backward returned no gradient for the input")
    return result, entered.grad


def check_copy(student: ModuleType, case: Case, groups: ProcessGroupCollection) -> None:
    """The same value on all ranks enters; a different gradient comes back on each."""
    function, rank = student.copy_to_tensor_model_parallel_region, dist.get_rank()
    value = _draw(case, (SEQ, HIDDEN), 100 + groups.dp.rank())
    grads = [_draw(case, (SEQ, HIDDEN), 200 + r) for r in range(dist.get_world_size())]
    output, found = _pass_through(function, value, grads[rank], groups.tp)
    sizes = {"tp": case.tp}
    check_numbers("copy's output", output, value, rank, sizes)
    members = dist.get_process_group_ranks(groups.tp)
    wanted = sum(grads[r] for r in members)
    _check_sum_over_group("copy's backward", found, wanted, sum(grads), groups)
    if torch.allclose(found, grads[rank]):
        raise Wrong(
            f"rank {rank}: copy's backward handed on this rank's own gradient\n"
            f"One value was used by {case.tp} ranks, each for something else. What arrives here is "
            "the gradient of one use; the value's gradient is the sum over all of them."
        )
    check_numbers("copy's gradient of the input", found, wanted, rank, sizes)


def check_reduce(student: ModuleType, case: Case, groups: ProcessGroupCollection) -> None:
    """A different term enters on each rank; the same gradient comes back on all."""
    function, rank = student.reduce_from_tensor_model_parallel_region, dist.get_rank()
    terms = [_draw(case, (SEQ, HIDDEN), 300 + r) for r in range(dist.get_world_size())]
    grad = _draw(case, (SEQ, HIDDEN), 400 + groups.dp.rank())
    output, found = _pass_through(function, terms[rank], grad, groups.tp)
    sizes = {"tp": case.tp}
    wanted = sum(terms[r] for r in dist.get_process_group_ranks(groups.tp))
    _check_sum_over_group("reduce's output", output, wanted, sum(terms), groups)
    check_numbers("reduce's output", output, wanted, rank, sizes)
    if torch.allclose(found, case.tp * grad):
        raise Wrong(
            f"rank {rank}: reduce's backward is {case.tp} times too large: it was summed over the "
            f"{case.tp} tensor-parallel ranks\n"
            "After the exit all ranks compute the same thing, so each of them has the whole "
            "gradient already. y = y1 + y2 + ... changes by 1 if y1 does: hand it on as it is."
        )
    check_numbers("reduce's gradient of the input", found, grad, rank, sizes)


def _check_sum_over_group(
    what: str, found: torch.Tensor, wanted: torch.Tensor, world: torch.Tensor, groups: Any
) -> None:
    members = dist.get_process_group_ranks(groups.tp)
    if torch.allclose(found, world) and not torch.allclose(found, wanted):
        raise Wrong(
            f"rank {dist.get_rank()}: {what} is the sum over all {dist.get_world_size()} ranks, "
            f"but this rank's tensor-parallel group is {members}\n"
            "The other ranks hold another copy of the model and other data. Pass the group on."
        )


# -- One MLP --


def _config(case: Case, tp: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=case.wide,
        params_dtype=torch.float64,
        tensor_model_parallel_size=tp,
    )


def check_mlp(student: ModuleType, case: Case, groups: ProcessGroupCollection) -> Counter:
    """One MLP cut over the group against one that is not, with biases that are not zero."""
    parts = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    whole, cut = (
        MLP(_config(case, 1), parts, OneRank()),
        MLP(_config(case, case.tp), parts, groups.tp),
    )
    copies = list(zip(whole.named_parameters(), cut.parameters(), strict=True))
    for number, ((_, full), mine) in enumerate(copies):
        full.data.copy_(_draw(case, tuple(full.shape), 500 + number))
        mine.data.copy_(shard_parameter(full.data, mine, groups.tp.rank(), case.tp))
    entered = _draw(case, (SEQ, BATCH, HIDDEN), 600 + groups.dp.rank())
    grad = _draw(case, (SEQ, BATCH, HIDDEN), 700 + groups.dp.rank())
    expected, expected_grad = _run(MLP.forward, whole, entered, grad)
    with counted() as counter:
        found, found_grad = _run(student.forward, cut, entered, grad)

    rank, sizes = dist.get_rank(), {"tp": case.tp}
    bias = whole.linear_fc2.bias.detach()
    if torch.allclose(found - expected, (case.tp - 1) * bias):
        raise Wrong(
            f"rank {rank}: the MLP's output is too large by {case.tp - 1} times the second bias\n"
            f"Every rank has the whole bias. Added before the sum over {case.tp} ranks, it counts "
            f"{case.tp} times: return it beside the sum."
        )
    check_numbers("the MLP's output", found, expected, rank, sizes)
    terms = found_grad.clone()
    dist.all_reduce(terms, group=groups.tp)
    if torch.allclose(terms, expected_grad) and not torch.allclose(found_grad, expected_grad):
        raise Wrong(
            f"rank {rank}: gradient of the MLP's input is one rank's term only: summed over the "
            f"{case.tp} ranks it would be right\n"
            "The input went to all ranks' first products. It has to enter through copy, so that "
            "backward adds up what comes back from them."
        )
    check_numbers("gradient of the MLP's input", found_grad, expected_grad, rank, sizes)
    for (name, full), mine in copies:
        wanted = shard_parameter(full.grad, mine, groups.tp.rank(), case.tp)
        if mine.grad is None:
            raise Wrong(f"rank {rank}: {name} of the MLP got no gradient; does forward use it?")
        check_numbers(f"the MLP's gradient of {name}", mine.grad, wanted, rank, sizes)
    return counter


def _run(forward: Any, mlp: MLP, value: torch.Tensor, grad: torch.Tensor) -> tuple:
    entered = value.clone().requires_grad_()
    returned = forward(mlp, entered)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise Wrong(
            f"rank {dist.get_rank()}: forward returned {type(returned).__name__}, but the layer "
            "expects two values: the output, and the bias that it adds itself (or None)"
        )
    output, bias = returned
    output = output if bias is None else output + bias
    output.backward(grad)
    return output.detach(), entered.grad


# -- In a GPT --


def check_gpt(student: ModuleType, case: StepCase, groups: ProcessGroupCollection) -> None:
    """Two replicas of a GPT over two ranks each, against one process."""
    step = GptStep(case, groups)
    serial = one_process(case, groups.dp.size())
    with installed(student.forward, FORWARD):
        reports = step.forward_backward()
    expected = serial.forward_backward()[groups.dp.rank() :: groups.dp.size()]
    for number, (report, wanted) in enumerate(zip(reports, expected, strict=True)):
        what = f"the GPT's loss of microbatch {number}"
        check_numbers(what, report["loss"], wanted["loss"], dist.get_rank(), step.sizes())
    check_gradients(step, serial.gradients())
