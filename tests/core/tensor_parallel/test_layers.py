"""The linear layers and the embedding, cut over ranks, equal the uncut ones in float64."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.core import collectives
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.tensor_parallel import layers
from minimegatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    drain_embedding_wgrad_compute,
    linear_with_frozen_weight,
)
from minimegatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.tensor_parallel.sharding import shard_parameter, unshard_parameter
from minimegatron.core.transformer.transformer_config import init_method_normal
from tests.groups import PretendGroup
from tests.ranks import run_ranks

S, B, H, N = 4, 3, 8, 16


def make_config(tp: int, sequence_parallel: bool = False, **options) -> ModelParallelConfig:
    return ModelParallelConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        params_dtype=torch.float64,
        **options,
    )


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def load(param: torch.nn.Parameter, full: torch.Tensor, group) -> None:
    with torch.no_grad():
        param.copy_(shard_parameter(full, param, group.rank(), group.size()))


def piece_error(param: torch.nn.Parameter, full: torch.Tensor, group) -> float:
    """Distance of `param`'s gradient from its piece of the full model's."""
    piece = shard_parameter(full, param, group.rank(), group.size())
    return (param.grad - piece).abs().max().item()


def activate(x: torch.Tensor, stride: int) -> torch.Tensor:
    """[..., stride n] -> [..., n]"""
    if stride == 1:
        return x.tanh()
    gate, up = x.chunk(2, dim=-1)
    return gate.tanh() * up


def pair_error(group, sequence_parallel: bool, bias: bool, skip_bias_add: bool, stride: int):
    """Column, activation (gated for stride 2), row against two matrix products."""
    config = make_config(group.size(), sequence_parallel)
    options = {"config": config, "init_method": init_method_normal(0.1), "tp_group": group}
    column = ColumnParallelLinear(
        H, N, bias=bias, stride=stride, skip_bias_add=skip_bias_add, **options
    )
    row = RowParallelLinear(
        N // stride, H, bias=bias, input_is_parallel=True, skip_bias_add=skip_bias_add, **options
    )
    full = {"w1": draw(N, H, seed=1), "b1": draw(N, seed=2), "w2": draw(H, N // stride, seed=3)}
    full |= {"b2": draw(H, seed=4), "x": draw(S, B, H, seed=5)}
    full = {name: tensor.requires_grad_() for name, tensor in full.items()}
    params = {"w1": column.weight, "w2": row.weight}
    params |= {"b1": column.bias, "b2": row.bias} if bias else {}
    for name, param in params.items():
        load(param, full[name], group)

    expected = F.linear(full["x"], full["w1"], full["b1"] if bias else None)
    expected = F.linear(activate(expected, stride), full["w2"], full["b2"] if bias else None)
    expected.sin().sum().backward()

    x = full["x"].detach().clone().requires_grad_()
    entering = scatter_to_sequence_parallel_region(x, group) if config.sequence_parallel else x
    hidden, added = column(entering)
    hidden = hidden if added is None else hidden + added
    output, added = row(activate(hidden, stride))
    output = output if added is None else output + added
    if config.sequence_parallel:
        output = gather_from_sequence_parallel_region(output, False, group)
    output.sin().sum().backward()

    if config.sequence_parallel and bias:
        assert row.bias.sequence_parallel
        collectives.all_reduce(row.bias.grad, group)
    errors = {"output": (output - expected).abs().max().item()}
    errors["x"] = (x.grad - full["x"].grad).abs().max().item()
    for name, param in params.items():
        errors[name] = piece_error(param, full[name].grad, group)
    return errors


def lone_layer_errors(group) -> dict[str, float]:
    """gather_output, input_is_parallel=False, a weight from outside."""
    config = make_config(group.size())
    options = {"config": config, "init_method": init_method_normal(0.1), "tp_group": group}
    weight, x = draw(N, H, seed=1).requires_grad_(), draw(S, B, H, seed=5).requires_grad_()
    F.linear(x, weight).sin().sum().backward()

    column = ColumnParallelLinear(
        H, N, bias=False, gather_output=True, skip_weight_param_allocation=True, **options
    )
    assert column.weight is None
    with pytest.raises(ValueError, match="pass weight= to forward"):
        column(x)
    given = torch.nn.Parameter(weight.detach().chunk(group.size())[group.rank()].clone())
    mine = x.detach().clone().requires_grad_()
    output, _ = column(mine, weight=given)
    output.sin().sum().backward()
    errors = {
        "gathered output": (output - F.linear(x, weight)).abs().max().item(),
        "given weight": (given.grad - weight.grad.chunk(group.size())[group.rank()]).abs().max(),
        "gathered input": (mine.grad - x.grad).abs().max().item(),
    }
    weight, x = draw(H, N, seed=1).requires_grad_(), draw(S, B, N, seed=5).requires_grad_()
    F.linear(x, weight).sin().sum().backward()
    row = RowParallelLinear(
        N, H, bias=False, input_is_parallel=False, skip_bias_add=False, **options
    )
    load(row.weight, weight.detach(), group)
    mine = x.detach().clone().requires_grad_()
    row(mine)[0].sin().sum().backward()
    errors["split input"] = (mine.grad - x.grad).abs().max().item()
    errors["row weight"] = piece_error(row.weight, weight.grad, group)
    return {name: float(error) for name, error in errors.items()}


def embedding_errors(group, sequence_parallel: bool) -> dict[str, float]:
    config = make_config(group.size(), sequence_parallel)
    embedding = VocabParallelEmbedding(
        N,
        H,
        init_method=init_method_normal(0.1),
        reduce_scatter_embeddings=sequence_parallel,
        config=config,
        tp_group=group,
    )
    table = draw(N, H).requires_grad_()
    load(embedding.weight, table.detach(), group)
    ids = torch.randint(N, (B, S), generator=torch.Generator().manual_seed(1))
    expected = F.embedding(ids, table)
    expected.sin().sum().backward()
    output = embedding(ids)
    if sequence_parallel:
        output = gather_from_sequence_parallel_region(output, False, group).transpose(0, 1)
    output.sin().sum().backward()
    return {
        "output": (output - expected).abs().max().item(),
        "table": piece_error(embedding.weight, table.grad, group),
    }


def frozen_errors(group, sequence_parallel: bool) -> dict[str, float]:
    """A layer with a frozen weight, and the function by itself, against torch's linear."""
    config = make_config(group.size(), sequence_parallel)
    layer = ColumnParallelLinear(
        H, N, config=config, init_method=init_method_normal(0.1), tp_group=group
    )
    weight, bias = draw(N, H, seed=1), draw(N, seed=2).requires_grad_()
    x = draw(S, B, H, seed=5).requires_grad_()
    load(layer.weight, weight, group)
    load(layer.bias, bias, group)
    expected = F.linear(x, weight, bias)
    expected.sin().sum().backward()
    mine = expected.chunk(group.size(), dim=-1)[group.rank()]

    def product(entering: torch.Tensor) -> torch.Tensor:
        return linear_with_frozen_weight(
            entering,
            layer.weight,
            layer.bias,
            allreduce_dgrad=layer.allreduce_dgrad,
            sequence_parallel=layer.sequence_parallel,
            tp_group=group,
        )

    errors = {}
    for name in ("function", "layer"):
        layer.weight.requires_grad_(name == "function")  # the function gives it no gradient anyway
        layer.zero_grad()
        given = x.detach().clone().requires_grad_()
        entering = scatter_to_sequence_parallel_region(given, group) if sequence_parallel else given
        output = product(entering) if name == "function" else layer(entering)[0]
        output.sin().sum().backward()
        assert layer.weight.grad is None
        errors[f"{name}: output"] = (output - mine).abs().max().item()
        errors[f"{name}: input"] = (given.grad - x.grad).abs().max().item()
        errors[f"{name}: bias"] = piece_error(layer.bias, bias.grad, group)
    return errors


def deferred_errors(group, sequence_parallel: bool, limit: int) -> dict[str, float]:
    """Two passes with the weight gradient put off, then drained, against the usual two passes."""
    gradients = []
    for deferring in (False, True):
        config = make_config(
            group.size(),
            sequence_parallel,
            defer_embedding_wgrad_compute=deferring,
            wgrad_deferral_limit=limit,
        )
        activations, grads = ([], []) if deferring else (None, None)
        layer = ColumnParallelLinear(
            H,
            N,
            config=config,
            init_method=init_method_normal(0.1),
            bias=False,
            embedding_activation_buffer=activations,
            grad_output_buffer=grads,
            tp_group=group,
        )
        load(layer.weight, draw(N, H), group)
        inputs = []
        for seed in (1, 2):
            x = draw(S, B, H, seed=seed)
            if config.sequence_parallel:
                x = x.chunk(group.size())[group.rank()]
            inputs.append(x.clone().requires_grad_())
            layer(inputs[-1])[0].sin().sum().backward()
        if deferring:
            assert len(activations) == len(grads) == (limit or 2)
            if limit == 0:
                assert layer.weight.grad is None
            drain_embedding_wgrad_compute(config, activations, grads, layer.weight, group)
            assert activations == grads == []
        gradients.append([layer.weight.grad, inputs[0].grad, inputs[1].grad])
    usual, put_off = gradients
    return {
        name: (a - b).abs().max().item()
        for name, a, b in zip(("weight", "x1", "x2"), usual, put_off, strict=True)
    }


def all_errors(group=None) -> dict[str, float]:
    group = group or dist.group.WORLD
    errors: dict[str, dict[str, float]] = {"lone": lone_layer_errors(group)}
    for case in itertools.product((False, True), (False, True), (False, True), (1, 2)):
        errors[f"pair sp={case[0]} bias={case[1]} skip={case[2]} stride={case[3]}"] = pair_error(
            group, *case
        )
    for sequence_parallel in (False, True):
        errors[f"embedding sp={sequence_parallel}"] = embedding_errors(group, sequence_parallel)
        errors[f"frozen sp={sequence_parallel}"] = frozen_errors(group, sequence_parallel)
        for limit in (0, 1):
            errors[f"deferred sp={sequence_parallel} limit={limit}"] = deferred_errors(
                group, sequence_parallel, limit
            )
    return {f"{case}: {name}": e for case, found in errors.items() for name, e in found.items()}


@pytest.mark.parametrize("size", [2, 4])
def test_cut_equals_whole(size):
    for rank, errors in enumerate(run_ranks(all_errors, size)):
        for case, error in errors.items():
            assert error < 1e-12, f"{case} on rank {rank} of {size}: off by {error}"


def test_one_rank_equals_torch():
    for case, error in all_errors(PretendGroup()).items():
        assert error < 1e-12, f"{case}: off by {error}"


def test_reduction_of_the_input_gradient_is_hidden_behind_the_weight_gradient(monkeypatch):
    order = []

    class Handle:
        def wait(self):
            order.append("reduced")

    def launch(tensor, group, async_op=False):
        assert async_op
        order.append("launched")
        return Handle()

    real = layers.weight_gradient
    monkeypatch.setattr(layers.collectives, "all_reduce", launch)
    monkeypatch.setattr(
        layers, "weight_gradient", lambda *args: (order.append("weight gradient"), real(*args))[1]
    )
    layer = ColumnParallelLinear(
        H,
        N,
        config=make_config(2),
        init_method=init_method_normal(0.1),
        tp_group=PretendGroup(0, 2),
    )
    layer(draw(S, B, H).requires_grad_())[0].sum().backward()
    assert order == ["launched", "weight gradient", "reduced"]


def autocast_error() -> float:
    """bf16 autocast through the custom function, against torch's own linear."""
    group = dist.group.WORLD
    config = ModelParallelConfig(tensor_model_parallel_size=2)
    weight, x = draw(N, H).float(), draw(S, B, H, seed=1).float().requires_grad_()
    layer = ColumnParallelLinear(
        H, N, config=config, init_method=init_method_normal(0.1), gather_output=True, tp_group=group
    )
    load(layer.weight, weight, group)
    mine = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.linear(x, weight)
        output, _ = layer(mine)
    assert output.dtype == expected.dtype == torch.bfloat16
    expected.float().sum().backward()
    output.float().sum().backward()
    assert mine.grad.dtype == layer.weight.grad.dtype == torch.float32
    return max((output - expected).abs().max().item(), (mine.grad - x.grad).abs().max().item())


def test_autocast():
    for error in run_ranks(autocast_error, 2):
        assert error < 0.05


def test_sharding_is_undone_by_unsharding():
    full = draw(12, 8)
    for dim, stride, size in [(0, 1, 4), (0, 2, 2), (0, 3, 2), (1, 1, 4), (1, 2, 2), (-1, 1, 4)]:
        param = torch.nn.Parameter(torch.empty(0))
        layers.set_tensor_model_parallel_attributes(param, dim >= 0, dim, stride)
        shards = [shard_parameter(full, param, rank, size) for rank in range(size)]
        assert torch.equal(unshard_parameter(shards, param), full)
        if dim >= 0:
            assert shards[0].shape[dim] == full.shape[dim] // size
    # Stride 2 pairs the halves: rank 0 has the first part of each, not the first half of all.
    layers.set_tensor_model_parallel_attributes(param, True, 0, 2)
    assert torch.equal(shard_parameter(full, param, 0, 2), torch.cat((full[0:3], full[6:9])))
    layers.set_tensor_model_parallel_attributes(param, True, 0, 5)
    with pytest.raises(ValueError, match="make it a multiple of 10"):
        shard_parameter(full, param, 0, 2)


def test_standalone_weights_are_pieces_of_one_draw():
    """Whatever seed the dropout of each layout has."""
    shards, options = [], {"config": make_config(2), "init_method": init_method_normal(0.1)}
    for rank in range(2):
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(7, tp_rank=rank)
        layer = ColumnParallelLinear(H, N, tp_group=PretendGroup(rank, 2), **options)
        shards.append(layer.weight.detach())
    torch.manual_seed(5)
    whole = ColumnParallelLinear(H, N, tp_group=PretendGroup(), **options)
    assert torch.equal(torch.cat(shards), whole.weight.detach())
    assert whole.weight.std() > 0.05


def test_bad_sizes_say_what_fits():
    options = {"config": make_config(3), "init_method": init_method_normal(0.1)}
    with pytest.raises(ValueError, match=r"16 is not divisible by 3.*15 and 18"):
        ColumnParallelLinear(H, N, tp_group=PretendGroup(0, 3), **options)
    with pytest.raises(ValueError, match="input_is_parallel=True"):
        RowParallelLinear(
            N,
            H,
            bias=False,
            input_is_parallel=False,
            skip_bias_add=False,
            config=make_config(2, sequence_parallel=True),
            init_method=init_method_normal(0.1),
            tp_group=PretendGroup(0, 2),
        )


def test_duplicates_are_counted_on_the_first_rank_only():
    cut, whole = torch.nn.Parameter(torch.empty(2)), torch.nn.Parameter(torch.empty(2))
    layers.set_tensor_model_parallel_attributes(cut, True, 0, 1)
    counted = [
        [
            layers.param_is_not_tensor_parallel_duplicate(param, PretendGroup(rank, 2))
            for rank in range(2)
        ]
        for param in (cut, whole)
    ]
    assert counted == [[True, True], [True, False]]
    layers.set_defaults_if_not_set_tensor_model_parallel_attributes(whole)
    copy = torch.empty(2)
    layers.copy_tensor_model_parallel_attributes(copy, cut)
    assert (copy.tensor_model_parallel, copy.partition_dim, copy.partition_stride) == (True, 0, 1)
    assert (whole.tensor_model_parallel, whole.partition_dim) == (False, -1)


def test_a1_a_weight_that_is_not_this_rank_s_slice_is_refused():
    """A whole tied weight would give whole logits, which count as t vocabularies."""
    options = {"config": make_config(2), "init_method": init_method_normal(0.1)}
    layer = ColumnParallelLinear(H, N, **options, bias=False, tp_group=PretendGroup(1, 2))
    with pytest.raises(ValueError, match=r"weight is \[16, 8\], but this rank's rows .* \[8, 8\]"):
        layer(torch.zeros(S, B, H), weight=torch.zeros(N, H))
