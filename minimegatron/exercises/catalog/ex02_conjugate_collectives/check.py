"""Checks the two conjugates and the MLP: each alone, then the MLP inside a GPT's training step."""

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.core import collectives
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.tensor_parallel.sharding import shard_parameter
from minimegatron.core.transformer.mlp import MLP, MLPSubmodules
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.exercises.bench.apart import meet
from minimegatron.exercises.bench.counted_collectives import CountedCollective
from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.bench.gpt_step import Seat, StepCase, make_groups, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.bench.replacing import withheld
from minimegatron.exercises.bench.sent_bytes import BY_TORCH, all_sent_counted
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed

FORWARD = "minimegatron.core.transformer.mlp.MLP.forward"
REPLACES = (FORWARD,)
ALL_REDUCE = "minimegatron.core.collectives.all_reduce"
_KEPT = {"all_reduce": collectives.all_reduce}
"""Ours, where `installed` does not find it."""
_OURS = "minimegatron.core.tensor_parallel."
WITHHELD = (
    f"{_OURS}mappings._CopyToModelParallelRegion.forward",
    f"{_OURS}mappings._ReduceFromModelParallelRegion.forward",
    f"{_OURS}mappings._reduce",
    f"{_OURS}layers.ColumnParallelLinear.forward",
    f"{_OURS}layers.RowParallelLinear.forward",
    f"{_OURS}layers.linear",
)
"""What a solution could hand all its work to. The rest of a GPT needs it."""
SEQ, BATCH, HIDDEN = 3, 2, 4
NUM_BYTES = 8 * SEQ * BATCH * HIDDEN
"""Of what enters an MLP, and of what leaves it."""
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu}
WORLD = 4


def cases(seed: int) -> list[Case]:
    """A group of all ranks, and two groups of two, whose sums must not be mixed up."""
    draw, data = random.Random(seed), data_seed(seed)
    sizes = [(4, draw.choice([4, 8, 12]), data), (2, draw.choice([4, 6]), data + 1)]
    found = []
    for part in ("copy and reduce", "the MLP"):
        found += [
            Case(f"tp={tp}, dp={WORLD // tp}", part=part, tp=tp, wide=wide, seed=number, act=act)
            for (tp, wide, number), act in zip(sizes, ACTIVATIONS, strict=True)
        ]
    gpt = StepCase(tp=2, num_microbatches=2, seed=data).values
    return [*found, Case("a GPT, tp=2, dp=2", part="the MLP in a GPT", step=gpt)]


def run(student: ModuleType, case: Case) -> dict[str, Any]:
    """One of the parts."""
    if case.part == "the MLP in a GPT":
        step = on_these_ranks(case.step)
        with installed(student.forward, FORWARD):
            reports = step.forward_backward()
        return {"reports": reports, "gradients": step.gradients()}
    groups = make_groups(StepCase(tp=case.tp))
    with withheld(WITHHELD):
        return (_run_mlp if case.part == "the MLP" else _run_conjugates)(student, case, groups)


def _run_conjugates(
    student: ModuleType, case: Case, groups: ProcessGroupCollection
) -> dict[str, Any]:
    me = Place(case, torch.distributed.get_rank())
    copy = student.copy_to_tensor_model_parallel_region
    reduce = student.reduce_from_tensor_model_parallel_region
    mine, term = me.grads[me.rank], me.terms[me.rank]
    found: dict[str, list] = {"copy": [], "reduce": []}
    with installed(_all_reduce_in_a_row, ALL_REDUCE):
        # The rarer mistakes come with the second case: others are named before them.
        for kind in (torch.Tensor.contiguous, _strided)[: 1 + (case.tp < WORLD)]:
            passed = _pass_through(copy, kind(me.value), kind(mine), groups.tp, me.rank)
            found["copy"].append(passed)
            passed = _pass_through(reduce, kind(term), kind(me.grad), groups.tp, me.rank)
            found["reduce"].append(passed)
    if case.tp < WORLD:
        found["two groups"] = _two_at_once(copy, me, [groups.tp, groups.dp])
    return found


def _strided(value: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous."""
    return value.t().contiguous().t()


def _all_reduce_in_a_row(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any = collectives.ReduceOp.SUM,
    async_op: bool = False,
) -> Any:
    """Ours, which on some transports takes any tensor; NCCL takes a contiguous one only."""
    if not tensor.is_contiguous():
        raise Wrong(
            f"rank {dist.get_rank()}: all_reduce was given a tensor of shape {list(tensor.shape)} with "
            f"strides {list(tensor.stride())}: it is not contiguous\nOn a GPU it is refused, or what "
            "lies at the same place in memory is added up, whatever number that is. Autograd hands on "
            "such tensors, after a transpose. From where has yours its strides?"
        )
    return _KEPT["all_reduce"](tensor, group, op, async_op)


def _two_at_once(copy: Any, me: "Place", groups: list) -> list[torch.Tensor | None]:
    """Gradients of two inputs, each with a group of its own: both forwards, then both backwards."""
    inputs = [me.value.clone().requires_grad_() for _ in groups]
    outputs = [copy(entered, group) for entered, group in zip(inputs, groups, strict=True)]
    for output in outputs:
        meet()
        output.backward(me.grads[me.rank].clone())
    return [entered.grad for entered in inputs]


def judge(case: Case, answers: list[Any]) -> Result | None:
    """Every rank's numbers."""
    if case.part == "the MLP in a GPT":
        reference = Reference(case.step, WORLD).run()
        reference.check_losses([answer["reports"] for answer in answers], "GPT's loss")
        reference.check_gradients([answer["gradients"] for answer in answers])
        return None
    if case.part == "the MLP":
        return _judge_mlp(case, answers)
    for rank, answer in enumerate(answers):
        me = Place(case, rank)
        for found in answer["copy"]:
            _judge_copy(case, me, *found)
        if "two groups" in answer:
            _judge_two_at_once(me, answer["two groups"])
    for rank, answer in enumerate(answers):
        me = Place(case, rank)
        for found in answer["reduce"]:
            _judge_reduce(case, me, *found)
    return None


class Place:
    """A rank in the case, and the numbers it is given."""

    def __init__(self, case: Case, rank: int):
        self.rank = rank
        self.replica, self.tp_rank = divmod(self.rank, case.tp)
        self.members = list(range(self.replica * case.tp, (self.replica + 1) * case.tp))
        self.copies = list(range(self.tp_rank, WORLD, case.tp))
        self.value = _draw(case, (SEQ, HIDDEN), 100 + self.replica)
        self.grads = [_draw(case, (SEQ, HIDDEN), 200 + r) for r in range(WORLD)]
        self.terms = [_draw(case, (SEQ, HIDDEN), 300 + r) for r in range(WORLD)]
        self.grad = _draw(case, (SEQ, HIDDEN), 400 + self.replica)


def _draw(case: Case, shape: tuple[int, ...], which: int) -> torch.Tensor:
    """Numbers that depend on the case and `which` only."""
    generator = torch.Generator().manual_seed(1000 * case.seed + which)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# -- The conjugates alone --


def _pass_through(
    function: Any, value: torch.Tensor, grad: torch.Tensor, group: Any, rank: int
) -> tuple:
    """(output, gradient of the input) of one call; Wrong if the caller's tensors were changed."""
    where = f"rank {rank}: {function.__name__}"
    entered = value.clone().requires_grad_()
    output = function(entered, group)
    if not isinstance(output, torch.Tensor):
        raise Wrong(f"{where} returned {_kind(output)}; a tensor is expected")
    if output.shape != value.shape:
        raise Wrong(
            f"{where} returned a tensor of shape {list(output.shape)}; {list(value.shape)} went in"
        )
    result = output.detach().clone()
    if not torch.equal(entered.detach(), value):
        raise Wrong(
            f"{where} changed the tensor it was given\n"
            "all_reduce works in place. The caller still uses its tensor (autograd may have saved "
            "it for backward). In which tensor may the sum be made, then?"
        )
    if not output.requires_grad:
        raise Wrong(
            f"{where}: its output has no graph (requires_grad is False): was it detached?\n"
            "Backward starts at the output, and must find its way to your backward."
        )
    # A collective that only some ranks call must not meet one of the next call.
    meet()
    given = grad.clone()
    output.backward(given)
    meet()
    if not torch.equal(given, grad):
        raise Wrong(
            f"{where}: its backward changed grad_output\n"
            "Autograd may pass the same tensor to other branches of the graph. Whose tensor may "
            "you sum in?"
        )
    if entered.grad is None:
        raise Wrong(f"{where}: its backward returned no gradient for the input")
    return result, entered.grad


def _kind(value: Any) -> str:
    return "None (was `return` forgotten?)" if value is None else f"a {type(value).__name__}"


def _judge_copy(case: Case, me: Place, output: torch.Tensor, found: torch.Tensor) -> None:
    """The same value on all ranks entered; a different gradient came back on each."""
    sizes = {"tp": case.tp}
    check_numbers("copy's output", output, me.value, me.rank, sizes)
    wanted = sum(me.grads[r] for r in me.members)
    _check_sum_over_group("copy's backward", found, wanted, sum(me.grads), me)
    if _is(found, me.grads[me.rank]):
        raise Wrong(
            f"rank {me.rank}: copy's backward handed on this rank's own gradient\n"
            f"One value was used by {case.tp} ranks, each for something else. What arrives here is "
            "the gradient of one use; the value's gradient is the sum over all of them."
        )
    check_numbers("copy's gradient of the input", found, wanted, me.rank, sizes)


def _judge_two_at_once(me: Place, found: list[torch.Tensor | None]) -> None:
    """Each input's gradient is a sum over its own group."""
    for place, (got, group) in enumerate(zip(found, (me.members, me.copies), strict=True)):
        wanted = sum(me.grads[r] for r in group)
        if got is None or not _is(got, wanted):
            raise Wrong(
                f"rank {me.rank}: two inputs went through copy, the first with the group "
                f"{me.members}, the second with {me.copies}; then both went backward, and the gradient "
                f"of the {('first', 'second')[place]} is not the sum over {group}\nBetween a forward "
                "and its backward there may be other forwards, with other groups. Where does each keep "
                "its own?"
            )


def _judge_reduce(case: Case, me: Place, output: torch.Tensor, found: torch.Tensor) -> None:
    """A different term entered on each rank; the same gradient came back on all."""
    sizes = {"tp": case.tp}
    wanted = sum(me.terms[r] for r in me.members)
    _check_sum_over_group("reduce's output", output, wanted, sum(me.terms), me)
    if _is(output, me.terms[me.rank]):
        raise Wrong(
            f"rank {me.rank}: reduce's output is this rank's own term\nEach of {case.tp} ranks has one "
            "term of the sum. How do the others come here?"
        )
    check_numbers("reduce's output", output, wanted, me.rank, sizes)
    if _is(found, case.tp * me.grad):
        raise Wrong(
            f"rank {me.rank}: reduce's backward is {case.tp} times too large: it was summed over "
            f"the {case.tp} tensor-parallel ranks\n"
            "After the exit all ranks compute the same thing, so each of them has the whole "
            "gradient already. y = y1 + y2 + ... changes by 1 if y1 does: hand it on as it is."
        )
    check_numbers("reduce's gradient of the input", found, me.grad, me.rank, sizes)


def _is(found: torch.Tensor, value: torch.Tensor) -> bool:
    return found.shape == value.shape and torch.allclose(found.double(), value)


def _check_sum_over_group(
    what: str, found: torch.Tensor, wanted: torch.Tensor, world: torch.Tensor, me: Place
) -> None:
    if _is(found, world) and not _is(found, wanted):
        raise Wrong(
            f"rank {me.rank}: {what} is the sum over all {WORLD} ranks, "
            f"but this rank's tensor-parallel group is {me.members}\n"
            "The other ranks hold another copy of the model and other data. Which ranks do "
            "your forwards and backwards mean, and who told them?"
        )


# -- One MLP --


class Layer:
    """One MLP, whole or cut, with the case's weights; biases are not zero."""

    def __init__(self, case: Case, rank: int):
        self.replica = rank // case.tp
        parts = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
        self.whole = MLP(_config(case, 1), parts, tp_group=Seat())
        self.weights = [
            _draw(case, tuple(full.shape), 500 + number)
            for number, full in enumerate(self.whole.parameters())
        ]
        for param, weight in zip(self.whole.parameters(), self.weights, strict=True):
            param.data.copy_(weight)
        self.entered = _draw(case, (SEQ, BATCH, HIDDEN), 600 + self.replica)
        self.grad = _draw(case, (SEQ, BATCH, HIDDEN), 700 + self.replica)

    def cut(self, case: Case, group: Any) -> MLP:
        """This rank's piece."""
        parts = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
        layer = MLP(_config(case, case.tp), parts, tp_group=group)
        for param, weight in zip(layer.parameters(), self.weights, strict=True):
            param.data.copy_(shard_parameter(weight, param, group.rank(), case.tp))
        return layer


def _config(case: Case, tp: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=case.wide,
        activation_func=ACTIVATIONS[case.act],
        params_dtype=torch.float64,
        tensor_model_parallel_size=tp,
    )


def _run_mlp(student: ModuleType, case: Case, groups: ProcessGroupCollection) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    layer = Layer(case, rank)
    mlp = layer.cut(case, groups.tp)
    sent: dict[str, list[Any]] = {}

    def forward(*arguments: Any) -> Any:
        with all_sent_counted() as counter:
            returned = student.forward(*arguments)
        sent["forward"] = _plain(counter.calls)
        return returned

    with all_sent_counted() as counter:
        passed = _through(forward, mlp, layer.entered, layer.grad, rank)
    sent["backward"] = _plain(counter.calls[len(sent["forward"]) :])
    weights = {name: param.grad for name, param in mlp.named_parameters()}
    return {**passed, "weights": weights, "sent": sent}


def _plain(calls: Sequence[CountedCollective]) -> list[Any]:
    return [[call.name, call.num_bytes] for call in calls]


def _through(
    forward: Any, mlp: MLP, value: torch.Tensor, grad: torch.Tensor, rank: int
) -> dict[str, Any]:
    """Forward and backward: the output, the bias that is returned beside it, the input's gradient."""
    entered = value.clone().requires_grad_()
    returned = forward(mlp, entered)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise Wrong(
            f"rank {rank}: forward returned {_kind(returned)}; a tuple of two is expected: the output, "
            "and the second bias, which the transformer layer adds"
        )
    output, bias = returned
    for what, one in (("the output", output), ("the second bias", bias)):
        if not isinstance(one, torch.Tensor) and (one is output or one is not None):
            raise Wrong(f"rank {rank}: {what} that forward returned is {_kind(one)}, not a tensor")
    total = output if bias is None else output + bias
    if not total.requires_grad:
        raise Wrong(f"rank {rank}: the output that forward returned has no graph: was it detached?")
    total.backward(grad)
    told = None if bias is None else bias.detach()
    return {"output": output.detach(), "bias": told, "input": entered.grad}


def _judge_mlp(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    for rank, answer in enumerate(answers):
        members = range(rank // case.tp * case.tp, (rank // case.tp + 1) * case.tp)
        _judge_mlp_on(case, rank, answer, [answers[other] for other in members])
    for rank, answer in enumerate(answers):
        for way, calls in answer["sent"].items():
            _judge_sent(rank, way, calls)
    return Result({"exchanged by one MLP": f"one sum of {NUM_BYTES} bytes in each direction"})


def _judge_sent(rank: int, way: str, calls: Sequence[Sequence[Any]]) -> None:
    """One sum of the size of what enters and leaves."""
    found = [(name.removeprefix(BY_TORCH), num_bytes) for name, num_bytes in calls]
    if found != [("all-reduce", NUM_BYTES)]:
        words = ", ".join(f"{name} of {num_bytes} bytes" for name, num_bytes in found) or "nothing"
        raise Wrong(
            f"rank {rank}: the numbers are right, but in {way} this MLP exchanges something "
            f"else than one sum of {NUM_BYTES} bytes, the size of its output: {words}\n"
            "With its own columns and rows a rank computes its own features, and one term of each "
            "output. Which of the things that cross are neither an output nor a gradient of the input?"
        )


def _judge_mlp_on(case: Case, rank: int, answer: dict[str, Any], group: list[Any]) -> None:
    layer, sizes = Layer(case, rank), {"tp": case.tp}
    whole, cut = layer.whole, layer.cut(case, Seat(rank % case.tp, case.tp))
    expected = _through(MLP.forward, whole, layer.entered, layer.grad, rank)
    _judge_output(case, rank, answer["output"], expected["output"], layer)
    _judge_no_guess(case, rank, answer["output"], expected["output"], layer, group)
    check_numbers("the MLP's output", answer["output"], expected["output"], rank, sizes)
    if answer["bias"] is None:
        raise Wrong(
            f"rank {rank}: forward returned None beside the output\nReturn the second bias there: "
            "the transformer layer adds it."
        )
    name = "the second bias that forward returned"
    check_numbers(name, answer["bias"], whole.linear_fc2.bias, rank, sizes)
    found_grad, expected_grad = answer["input"], expected["input"]
    terms = [other["input"] for other in group]
    if found_grad is None:
        raise Wrong(f"rank {rank}: the MLP's input got no gradient; does forward detach it?")
    if _is(sum(terms), expected_grad) and not _is(found_grad, expected_grad):
        raise Wrong(
            f"rank {rank}: gradient of the MLP's input is one rank's term only: summed over the "
            f"{case.tp} ranks it would be right\n"
            "The input went to all ranks' first products. It has to enter through copy, so that "
            "backward adds up what comes back from them."
        )
    check_numbers("gradient of the MLP's input", found_grad, expected_grad, rank, sizes)
    for (name, full), mine in zip(whole.named_parameters(), cut.parameters(), strict=True):
        wanted = shard_parameter(full.grad, mine, rank % case.tp, case.tp)
        if answer["weights"][name] is None:
            raise Wrong(f"rank {rank}: {name} of the MLP got no gradient; does forward use it?")
        got = answer["weights"][name]
        check_numbers(f"the MLP's gradient of {name}", got, wanted, rank, sizes)


def _judge_output(
    case: Case, rank: int, found: torch.Tensor, expected: torch.Tensor, layer: Layer
) -> None:
    """Raises Wrong where the second bias was added, once or on every rank."""
    bias = layer.whole.linear_fc2.bias.detach()
    if _is(found, expected + bias):
        raise Wrong(
            f"rank {rank}: the second bias is in the MLP's output already\nReturn it beside the "
            "sum, not in it: the transformer layer adds it together with the residual."
        )
    if _is(found, expected + case.tp * bias):
        raise Wrong(
            f"rank {rank}: the MLP's output is too large by {case.tp} times the second bias\n"
            f"Every rank has the whole bias. Added before the sum over {case.tp} ranks, it counts "
            f"{case.tp} times. It is not to be added at all: return it beside the sum."
        )


def _judge_no_guess(
    case: Case,
    rank: int,
    found: torch.Tensor,
    expected: torch.Tensor,
    layer: Layer,
    group: list[Any],
) -> None:
    """Raises Wrong where the output is what a known mistake gives."""
    if _is(found, expected):
        return
    what = f"rank {rank}: the MLP's output is wrong: "
    outputs = [other["output"] for other in group]
    same_shapes = all(one.shape == expected.shape for one in outputs)
    if same_shapes and _is(sum(outputs), expected):
        raise Wrong(
            f"{what}it is this rank's term only\nSummed over the {case.tp} ranks it would be right: "
            "let the second product leave through reduce."
        )
    weights = [param.detach() for param in layer.whole.parameters()]
    first, first_bias, second, _ = weights
    inner = F.linear(layer.entered, first, first_bias)
    activation = ACTIVATIONS[case.act]
    summed = F.linear(activation(F.linear(case.tp * layer.entered, first, first_bias)), second)
    if _is(found, summed) or (same_shapes and _is(sum(outputs), summed)):
        left = "" if _is(found, summed) else ", and the terms were not on their way out"
        raise Wrong(
            f"{what}the input was summed over the {case.tp} ranks on its way in{left}\nAll ranks have "
            f"the same input, so that sum is {case.tp} times too large. Of copy and reduce, which one "
            "sums in forward, and where are there terms to sum?"
        )
    if _is(found, F.linear(activation(F.linear(layer.entered, first)), second)):
        raise Wrong(f"{what}the first bias, self.linear_fc1.bias, was not added")
    if _is(found, F.linear(inner, second)):
        raise Wrong(f"{what}there is no activation between the two products")
    for name, function in {**ACTIVATIONS, "relu": F.relu}.items():
        if _is(found, F.linear(function(inner), second)):
            raise Wrong(
                f"{what}its activation is {name}, but this model's is {case.act}\n"
                "Models differ in it. Where does this layer say which is its own?"
            )
