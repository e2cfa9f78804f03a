"""Weight gradients computed after backward are, bit for bit, those computed in it."""

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.tensor_parallel import weight_grad_store
from minimegatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    drain_embedding_wgrad_compute,
)
from minimegatron.core.tensor_parallel.random import checkpoint
from minimegatron.core.tensor_parallel.weight_grad_store import (
    backward_pass,
    forget_owed,
    is_owed,
)
from minimegatron.core.transformer.transformer_config import init_method_normal
from tests.groups import PretendGroup
from tests.ranks import run_ranks

S, B, H, N = 6, 3, 8, 16


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Pair(torch.nn.Module):
    """x + row(tanh(column(x))): [s, b, h] -> [s, b, h], or [s/t, b, h] with sequence parallelism."""

    def __init__(self, group: Any, dtype: torch.dtype = torch.float64, **options: Any):
        super().__init__()
        size = group.size()
        options["sequence_parallel"] = size > 1 and options.get("sequence_parallel", False)
        config = ModelParallelConfig(tensor_model_parallel_size=size, params_dtype=dtype, **options)
        built = {"config": config, "init_method": init_method_normal(0.3), "tp_group": group}
        torch.manual_seed(3)
        self.column = ColumnParallelLinear(H, N, **built)
        self.row = RowParallelLinear(
            N, H, bias=True, input_is_parallel=True, skip_bias_add=False, **built
        )
        self.config, self.group = config, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.row(self.column(x)[0].tanh())[0]

    def backward_dw(self) -> None:
        self.row.backward_dw()
        self.column.backward_dw()

    def make_input(self, seed: int) -> torch.Tensor:
        x = draw(S, B, H, seed=seed, dtype=self.row.weight.dtype)
        if self.config.sequence_parallel:
            x = x.chunk(self.group.size())[self.group.rank()].clone()
        return x.requires_grad_()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: param.grad for name, param in self.named_parameters()}


def again(pair, x):
    return checkpoint(pair, False, x)


def both(pair, x):
    return checkpoint(lambda y: pair(pair(y)), False, x)


USES = {
    "once": lambda pair, x: pair(x),
    "twice": lambda pair, x: pair(pair(x)),
    "three times": lambda pair, x: pair(pair(pair(x))),
    "recomputed": again,
    "recomputed twice in one": both,
    "recomputed in two": lambda pair, x: again(pair, again(pair, x)),
    "recomputed, then not": lambda pair, x: pair(pair(again(pair, x))),
    "between recomputed": lambda pair, x: pair(again(pair, pair(x))),
}
"""How one microbatch applies the pair's weights."""


def run(use: str, group: Any, in_pass: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Three microbatches, of which two are owed at a time; every gradient."""
    pair = Pair(group, **options)
    delayed = pair.config.delay_wgrad_compute
    inputs = [pair.make_input(seed) for seed in range(3)]
    outputs = [USES[use](pair, x) for x in inputs]
    for i, output in enumerate(outputs):
        with backward_pass() if in_pass else contextlib.nullcontext():
            output.sin().sum().backward()
        if delayed and i > 0:
            pair.backward_dw()
    if delayed:
        assert is_owed(pair.row.weight) and is_owed(pair.column.weight)
        pair.backward_dw()
        assert not is_owed(pair.row.weight) and not is_owed(pair.column.weight)
    found = pair.gradients() | {f"input {i}": x.grad for i, x in enumerate(inputs)}
    pair.backward_dw()  # nothing is owed
    assert all(torch.equal(found[name], grad) for name, grad in pair.gradients().items())
    return found


def differences(group: Any, uses: Iterable[str], kinds: Iterable[tuple], frames=(False, True)):
    """Every case in which a gradient is not what it is without delay."""
    found = []
    for use, (dtype, sequence_parallel) in itertools.product(uses, kinds):
        options = {"dtype": dtype, "sequence_parallel": sequence_parallel}
        usual = run(use, group, **options)
        for in_pass in frames:
            later = run(use, group, in_pass, delay_wgrad_compute=True, **options)
            found += [
                f"{use}, {options}, {in_pass}: {name}"
                for name, grad in usual.items()
                if not torch.equal(grad, later[name])
            ]
    return found


def test_a_weight_whose_gradient_a_hook_changes_gets_it_in_backward():
    """Was: the hook was called with None, or not at all."""
    gradients = []
    for delay in (False, True):
        pair = Pair(PretendGroup(), delay_wgrad_compute=delay)
        pair.row.weight.register_hook(lambda grad: 2 * grad)
        pair(pair.make_input(0)).sin().sum().backward()
        assert not is_owed(pair.row.weight) and is_owed(pair.column.weight) == delay
        pair.backward_dw()
        gradients.append(pair.gradients())
    assert all(torch.equal(grad, gradients[1][name]) for name, grad in gradients[0].items())


def test_a_gradient_that_somebody_asks_for_is_handed_out_in_backward():
    """Was: `torch.autograd.grad` left it in the store, for the next step's sum."""
    pairs = [Pair(PretendGroup(), delay_wgrad_compute=delay) for delay in (False, True)]
    losses = [pair(pair.make_input(0)).sin().sum() for pair in pairs]
    found = [
        torch.autograd.grad(loss, [pair.row.weight, pair.column.weight], retain_graph=True)
        for pair, loss in zip(pairs, losses, strict=True)
    ]
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    assert not is_owed(pairs[1].row.weight) and not is_owed(pairs[1].column.weight)
    # A backward for some weights leaves nothing for the others.
    losses[1].backward(inputs=[pairs[1].column.weight])
    assert is_owed(pairs[1].column.weight) and not is_owed(pairs[1].row.weight)


def test_a_weight_that_was_computed_gets_its_gradient_in_backward():
    pair = Pair(PretendGroup(), delay_wgrad_compute=True)
    original = pair.column.weight.detach().clone().requires_grad_()
    pair.column(pair.make_input(0), weight=2 * original)[0].sum().backward()
    assert original.grad is not None


def test_weight_gradients_are_equal_on_one_rank():
    kinds = ((torch.float64, False), (torch.float32, False))
    assert differences(PretendGroup(), USES, kinds) == []


def differences_on_two_ranks() -> list[str]:
    kinds = itertools.product((torch.float64, torch.float32), (False, True))
    found = differences(dist.group.WORLD, ["once"], kinds, frames=(False,))
    kinds = ((torch.float64, True), (torch.float32, False))
    uses = ("three times", "between recomputed")
    return found + differences(dist.group.WORLD, uses, kinds, frames=(False,))


def test_weight_gradients_are_equal_on_two_ranks():
    assert run_ranks(differences_on_two_ranks, 2) == [[], []]


def gathers(delay: bool) -> list[str]:
    """In which phase the column-parallel layer gathers its input."""
    pair = Pair(dist.group.WORLD, sequence_parallel=True, delay_wgrad_compute=delay)
    phases, phase = [], "forward"
    real = collectives.all_gather

    def note(*args, **kwargs):
        phases.append(phase)
        return real(*args, **kwargs)

    collectives.all_gather = note  # in this rank's process, which ends with the test
    output = pair(pair.make_input(0))
    phase = "B"
    output.sum().backward()
    if delay:
        sizes = [x.size(0) for x in pair.column.weight.weight_grad_store.inputs]
        assert sizes == [S // 2], "the store keeps this rank's part of the sequence"
    phase = "W"
    pair.backward_dw()
    return phases


def test_under_sequence_parallelism_the_input_is_gathered_in_w_not_in_b():
    for usual, later in zip(run_ranks(gathers, 2, False), run_ranks(gathers, 2, True), strict=True):
        # In B, the reduce-scatter of the row-parallel layer's forward is undone by a gathering.
        assert usual == ["forward", "B", "B"]
        assert later == ["forward", "B", "W"]


def test_microbatches_are_computed_oldest_first(monkeypatch):
    pair = Pair(PretendGroup(), delay_wgrad_compute=True)
    order, real = [], weight_grad_store.weight_gradient

    def note(grad_output, total_input):
        order.append(total_input[0, 0, 0].item())
        return real(grad_output, total_input)

    monkeypatch.setattr(weight_grad_store, "weight_gradient", note)
    for seed in range(3):
        pair.column(pair.make_input(seed))[0].sum().backward()
    for _ in range(4):
        pair.column.backward_dw()
    assert order == [pair.make_input(seed)[0, 0, 0].item() for seed in range(3)]


def test_a_pass_computes_its_own_and_nothing_twice():
    pair, expected = Pair(PretendGroup(), delay_wgrad_compute=True), []
    passes = []
    for seed in range(2):
        output = pair(pair.make_input(seed))
        with backward_pass() as left:
            output.sum().backward()
        passes.append(left)
    for seed in (1, 0):
        passes[seed].backward_dw()
        passes[seed].backward_dw()
        alone = Pair(PretendGroup())
        alone(alone.make_input(seed)).sum().backward()
        expected.append(alone.row.weight.grad)
        total = sum(expected[1:], start=expected[0])
        torch.testing.assert_close(pair.row.weight.grad, total, rtol=0, atol=1e-13)
    assert not is_owed(pair.row.weight)


def test_hooks_run_in_w_once_the_gradient_is_there():
    pair = Pair(PretendGroup(), delay_wgrad_compute=True)
    seen = []
    pair.row.weight.register_post_accumulate_grad_hook(
        lambda weight: seen.append((weight.grad is not None, is_owed(weight)))
    )
    for seed in range(2):
        pair(pair.make_input(seed)).sum().backward()
    seen.clear()  # torch 2.13 calls hooks in B too, without a gradient
    pair.backward_dw()
    assert seen == [(True, True)]
    pair.backward_dw()
    assert seen == [(True, True), (True, False)]
    assert pair.row.weight.skip_backward_post_hook and pair.column.weight.skip_backward_post_hook
    assert not hasattr(Pair(PretendGroup()).row.weight, "skip_backward_post_hook")


def test_between_two_graphs_of_one_pass_the_weight_is_still_owed():
    """Recompute runs a graph of its own; autograd adds the two gradients one after the other."""
    pair = Pair(PretendGroup(), delay_wgrad_compute=True)
    seen = []
    pair.row.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(is_owed(weight)))
    USES["recomputed in two"](pair, pair.make_input(0)).sum().backward()
    seen.clear()
    pair.backward_dw()
    assert seen == [True, False]


def test_a_frozen_weight_owes_nothing():
    pair = Pair(PretendGroup(), delay_wgrad_compute=True)
    pair.column.weight.requires_grad_(False)
    pair(pair.make_input(0)).sum().backward()
    assert not is_owed(pair.column.weight) and is_owed(pair.row.weight)
    pair.backward_dw()
    assert pair.column.weight.grad is None


def test_a_weight_that_forward_is_given_gets_its_gradient_in_backward():
    pair = Pair(PretendGroup(), delay_wgrad_compute=True)
    given = torch.nn.Parameter(draw(N, H))
    pair.column(pair.make_input(0), weight=given)[0].sum().backward()
    assert given.grad is not None and not is_owed(given)


def test_an_error_in_backward_leaves_nothing_owed():
    pair = Pair(PretendGroup(), delay_wgrad_compute=True)
    x = pair.make_input(0)

    def fails(grad):
        raise OSError("in backward")

    x.register_hook(fails)
    output = pair(x)
    with pytest.raises(OSError, match="in backward"), backward_pass():
        output.sum().backward()
    assert not is_owed(pair.row.weight)
    # Without such a frame, whoever begins the next step forgets it.
    output = pair(x)
    with pytest.raises(OSError, match="in backward"):
        output.sum().backward()
    assert is_owed(pair.row.weight)
    forget_owed(pair.parameters())
    pair.backward_dw()
    assert pair.row.weight.grad is None


def autocast_differences() -> list[str]:
    found = []
    for group in (PretendGroup(), dist.group.WORLD):
        grads = []
        for delay in (False, True):
            pair = Pair(group, torch.float32, delay_wgrad_compute=delay)
            for seed in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    output = pair(pair.make_input(seed))
                output.float().sin().sum().backward()
            for _ in range(2):
                pair.backward_dw()
            grads.append(pair.gradients())
        usual, later = grads
        assert later["row.weight"].dtype == torch.float32
        found += [name for name in usual if not torch.equal(usual[name], later[name])]
    return found


def test_autocast():
    assert run_ranks(autocast_differences, 2) == [[], []]


def test_the_output_layers_lists_are_the_store():
    """Megatron's names: two lists, drained oldest first; one may also clear or fill them by hand."""
    config = ModelParallelConfig(
        params_dtype=torch.float64, defer_embedding_wgrad_compute=True, wgrad_deferral_limit=2
    )
    inputs, grads = [], []
    layer = ColumnParallelLinear(
        H,
        N,
        config=config,
        init_method=init_method_normal(0.3),
        bias=False,
        embedding_activation_buffer=inputs,
        grad_output_buffer=grads,
        tp_group=PretendGroup(),
    )
    batches = [draw(S, B, H, seed=seed) for seed in range(3)]
    for x in batches:
        layer(x)[0].sin().sum().backward()
    assert len(inputs) == len(grads) == 2 and torch.equal(inputs[1], batches[1])
    assert layer.weight.grad is not None, "the third was computed at once"
    inputs.clear()
    grads.clear()
    layer.weight.grad = None
    assert not is_owed(layer.weight)
    for x in batches[:2]:
        layer(x)[0].sin().sum().backward()
    usual = layer.weight.detach().clone().requires_grad_()
    for x in batches[:2]:
        (x @ usual.t()).sin().sum().backward()
    by_hand = layer.weight.detach().clone().requires_grad_()
    copies = [*inputs], [*grads]
    drain_embedding_wgrad_compute(config, inputs, grads, layer.weight, PretendGroup())
    drain_embedding_wgrad_compute(config, *copies, by_hand, PretendGroup())
    assert inputs == grads == [] and copies == ([], [])
    torch.testing.assert_close(layer.weight.grad, usual.grad, rtol=0, atol=1e-12)
    assert torch.equal(by_hand.grad, layer.weight.grad)
    with pytest.raises(ValueError, match="1 inputs .* 0 gradients; clear both lists"):
        drain_embedding_wgrad_compute(config, [batches[0]], [], layer.weight, PretendGroup())
    with pytest.raises(ValueError, match="wgrad_deferral_limit is -1"):
        ModelParallelConfig(wgrad_deferral_limit=-1)
