"""Each row of the conjugate table is differentiated correctly, on real ranks, in float64."""

import pytest
import torch
import torch.distributed as dist

from minimegatron.core.tensor_parallel import mappings
from minimegatron.core.tensor_parallel.utils import gather_split_1d_tensor
from tests.groups import PretendGroup
from tests.played_ranks import play
from tests.ranks import run_ranks

# Per row: the function, which kind of tensor it takes and gives ("same": one value in t copies,
# "own": each rank its own), and the shape it takes for t ranks.
TABLE = {
    "copy": (mappings.copy_to_tensor_model_parallel_region, "same", "own"),
    "reduce": (mappings.reduce_from_tensor_model_parallel_region, "own", "same"),
    "scatter": (mappings.scatter_to_tensor_model_parallel_region, "same", "own"),
    "gather": (mappings.gather_from_tensor_model_parallel_region, "own", "same"),
    "scatter_sequence": (mappings.scatter_to_sequence_parallel_region, "same", "own"),
    "gather_sequence": (mappings.gather_from_sequence_parallel_region, "own", "own"),
    "gather_sequence_for_all": (
        lambda x, group: mappings.gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=False, group=group
        ),
        "own",
        "same",
    ),
    "reduce_scatter_sequence": (
        mappings.reduce_scatter_to_sequence_parallel_region,
        "own",
        "own",
    ),
    "all_to_all": (lambda x, group: mappings.all_to_all(group, x), "own", "own"),
}
SHAPE = (4, 1, 4)


def _objective(name: str, x: torch.Tensor) -> torch.Tensor:
    """One number over the whole world: sums over ranks unless they all hold the same value."""
    function, _, given = TABLE[name]
    group = dist.group.WORLD
    y = function(x, group=group)
    salt = group.rank() if given == "own" else 0
    weight = torch.arange(y.numel(), dtype=y.dtype).view(y.shape).add(1 + 10 * salt).cos()
    total = (y.sin() * weight).sum()
    if given == "own":
        shown = total.detach().clone()
        dist.all_reduce(shown)
        # The value is the world's, the gradient this rank's: backward does the summing.
        total = total + (shown - total).detach()
    return total


def _check_row(name: str) -> float:
    """Largest difference between autograd's gradient and central differences."""
    _, taken, _ = TABLE[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    salt = rank if taken == "own" else 0
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(_objective(name, x), x)
    worst, step = 0.0, 1e-6
    # All ranks move together. A value in copies is moved on all of them; of own values, one rank's.
    for mover in range(size if taken == "own" else 1):
        moves = taken == "same" or mover == rank
        for i in range(x.numel()):
            shift = torch.zeros_like(x)
            shift.view(-1)[i] = step if moves else 0.0
            with torch.no_grad():
                slope = (_objective(name, x + shift) - _objective(name, x - shift)) / (2 * step)
            if moves:
                worst = max(worst, abs(slope - grad.view(-1)[i]).item())
    return worst


def _sandwich(first, last, x):
    """Same value in, same value out, with a different computation per rank in between."""
    group = dist.group.WORLD
    inside = first(x, group=group)
    factor = torch.arange(inside.numel(), dtype=x.dtype).view(inside.shape).add(group.rank()).cos()
    return last((inside * factor).sin(), group=group)


def _gather_compute_scatter(x):
    """Sequence parallelism around a tensor-parallel computation."""
    group = dist.group.WORLD
    x = mappings.scatter_to_sequence_parallel_region(x, group=group)
    x = _sandwich(
        mappings.gather_from_sequence_parallel_region,
        mappings.reduce_scatter_to_sequence_parallel_region,
        x,
    )
    return mappings.gather_from_sequence_parallel_region(x, False, group=group)


def check_table() -> dict[str, float]:
    errors = {name: _check_row(name) for name in TABLE}
    # torch's own gradcheck moves inputs in step on all ranks, so it needs functions from one value
    # in copies to one value in copies: an entry and its exit.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64, requires_grad=True)
    table = {name: row[0] for name, row in TABLE.items()}
    for first, last in [
        ("copy", "reduce"),
        ("scatter", "gather"),
        ("scatter_sequence", "gather_sequence_for_all"),
    ]:
        assert torch.autograd.gradcheck(
            lambda x, ends=(table[first], table[last]): _sandwich(*ends, x), (x,)
        )
    assert torch.autograd.gradcheck(_gather_compute_scatter, (x,))
    return errors


@pytest.mark.parametrize("size", [2, 4])
def test_conjugate_table(size):
    for rank, errors in enumerate(run_ranks(check_table, size)):
        for name, error in errors.items():
            assert error < 1e-8, f"{name} on rank {rank} of {size}: gradient is off by {error}"


def test_forward_values():
    """What each row does, against the definition, seen from outside."""
    inputs, outputs = zip(*run_ranks(all_forwards, 2), strict=True)
    x0, x1 = inputs
    for rank, got in enumerate(outputs):
        rows, columns = slice(2 * rank, 2 * rank + 2), slice(2 * rank, 2 * rank + 2)
        expected = {
            "copy": inputs[rank],
            "reduce": x0 + x1,
            "scatter": inputs[rank][..., columns],
            "gather": torch.cat((x0, x1), dim=-1),
            "scatter_sequence": inputs[rank][rows],
            "gather_sequence": torch.cat((x0, x1)),
            "gather_sequence_for_all": torch.cat((x0, x1)),
            "reduce_scatter_sequence": (x0 + x1)[rows],
            "reduce by symbolic": x0 + x1,
            "gather_sequence by symbolic": torch.cat((x0, x1)),
            "gather flat": torch.cat((x0, x1)).flatten(),
        }
        for name, value in expected.items():
            assert torch.equal(got[name], value), f"{name} on rank {rank}"


def all_forwards():
    group = dist.group.WORLD
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(group.rank()))
    before = x.clone()
    outputs = {name: row[0](x, group=group) for name, row in TABLE.items()}
    reduce, gather = (
        mappings._ReduceFromModelParallelRegion,
        mappings._GatherFromSequenceParallelRegion,
    )
    outputs["reduce by symbolic"] = reduce.symbolic(None, x, group)
    outputs["gather_sequence by symbolic"] = gather.symbolic(None, x, group)
    outputs["gather flat"] = gather_split_1d_tensor(x, group)
    assert torch.equal(x, before), "a mapping changed its caller's tensor"
    return x, outputs


def test_a_group_of_one_does_nothing():
    x = torch.randn(SHAPE)
    for name, (function, _, _) in TABLE.items():
        assert function(x, group=PretendGroup()) is x, name


def test_sizes_that_cannot_be_cut():
    with pytest.raises(ValueError, match="4 is not divisible by 3"):
        mappings.scatter_to_sequence_parallel_region(torch.zeros(SHAPE), group=PretendGroup(0, 3))


class GatherContext:
    """What Megatron's context has, by itself."""

    tensor_parallel_output_grad = True
    output_split_sizes = None
    use_global_buffer = False

    def __init__(self, group, **attributes):
        self.group = group
        vars(self).update(attributes)


class ScatterContext(GatherContext):
    input_split_sizes = None


def backwards(group) -> list[torch.Tensor]:
    rows = torch.arange(4.0)[:, None] * (1 + group.rank())
    gather = mappings._GatherFromSequenceParallelRegion
    scatter = mappings._ReduceScatterToSequenceParallelRegion
    mine = rows[: 1 + 2 * group.rank()]
    return [
        gather.backward(GatherContext(group), rows)[0],
        gather.backward(GatherContext(group, tensor_parallel_output_grad=False), rows)[0],
        gather.backward(GatherContext(group, output_split_sizes=[1, 3]), rows)[0],
        scatter.backward(ScatterContext(group), rows[:2])[0],
        scatter.backward(ScatterContext(group, input_split_sizes=[1, 3]), mine)[0],
    ]


def test_f_backward_takes_a_context_of_the_caller_s():
    for rank, found in enumerate(play(2, backwards)):
        first, second = slice(2 * rank, 2 * rank + 2), slice(rank, 1 + 3 * rank)
        rows = torch.arange(4.0)[:, None]
        wanted = [
            3 * rows[first],
            (1 + rank) * rows[first],
            3 * rows[second],
            torch.cat([rows[:2], 2 * rows[:2]]),
            torch.cat([rows[:1], 2 * rows[:3]]),
        ]
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other), rank
