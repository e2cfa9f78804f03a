"""Programs for `test_for_anybody`: torch's own ways to cut a model, and its other ways to exchange.

Each program runs on every rank, uses the default group and nothing of this package, and returns the
numbers that it worked out.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.backend.copies import Numbers, batch

WIDTH, NUM_MICROBATCHES = 8, 8


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Others on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank() + 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def shared_values(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same on each rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- Pipelines --


def stage_module(stage_id: int) -> nn.Module:
    torch.manual_seed(stage_id)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())


def run_pipeline(schedule_class: type, stage_ids: list[int], num_stages: int) -> Numbers:
    """Two steps of this rank's stages; its losses and gradients."""
    device = torch.device("cpu")
    modules = [stage_module(stage_id) for stage_id in stage_ids]
    stages = [
        PipelineStage(module, stage_id, num_stages, device)
        for module, stage_id in zip(modules, stage_ids, strict=True)
    ]
    is_multi = issubclass(schedule_class, PipelineScheduleMulti)
    schedule = schedule_class(
        stages if is_multi else stages[0],
        NUM_MICROBATCHES,
        loss_fn=lambda output, target: (output - target).square().mean(),
    )
    losses: list[torch.Tensor] = []
    for step_id in range(2):
        inputs = shared_values(2 * NUM_MICROBATCHES, WIDTH, seed=step_id)
        arguments = (inputs,) if 0 in stage_ids else ()
        if num_stages - 1 in stage_ids:
            schedule.step(*arguments, target=inputs.flip(0), losses=losses)
        else:
            schedule.step(*arguments)
    gradients = [p.grad for module in modules for p in module.parameters()]
    return [t.detach().clone() for t in (*losses, *gradients)]


def pipeline_1f1b(folder: Path) -> Numbers:
    return run_pipeline(Schedule1F1B, [dist.get_rank()], dist.get_world_size())


def pipeline_gpipe(folder: Path) -> Numbers:
    return run_pipeline(ScheduleGPipe, [dist.get_rank()], dist.get_world_size())


def pipeline_interleaved(folder: Path) -> Numbers:
    rank, size = dist.get_rank(), dist.get_world_size()
    return run_pipeline(ScheduleInterleaved1F1B, [rank, rank + size], 2 * size)


def pipeline_zero_bubble(folder: Path) -> Numbers:
    rank, size = dist.get_rank(), dist.get_world_size()
    return run_pipeline(ScheduleZBVZeroBubble, [rank, 2 * size - 1 - rank], 2 * size)


# -- Tensors in parts --


class Block(nn.Module):
    """A normalisation, and two products with a sum over ranks behind them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH, dtype=torch.float64)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.relu(self.wide(self.norm(x))))


def tensor_parallel(folder: Path) -> Numbers:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    return step_of_block(parallelize_module(Block(), mesh, plan))


def sequence_parallel(folder: Path) -> Numbers:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "norm": SequenceParallel(),
        "wide": ColwiseParallel(input_layouts=Shard(1)),
        "narrow": RowwiseParallel(output_layouts=Replicate()),
    }
    return step_of_block(parallelize_module(Block(), mesh, plan))


def step_of_block(block: nn.Module) -> Numbers:
    output = block(shared_values(2, 8, WIDTH, seed=1))
    output.square().mean().backward()
    gradients = [p.grad for p in block.parameters()]
    return [
        output.detach(),
        *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients),
    ]


def distributed_tensors(folder: Path) -> Numbers:
    """A cut along one dimension becomes one along another: all-to-all, all-gather, reduce-scatter."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(shared_values(8, 12), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = columns @ distribute_tensor(shared_values(12, 8, seed=1), mesh, [Shard(0)])
    scattered = product.redistribute(mesh, [Shard(1)])
    uneven = distribute_tensor(shared_values(7, 3, seed=2), mesh, [Shard(0)])
    return [columns.to_local(), scattered.to_local(), product.full_tensor(), uneven.full_tensor()]


def mesh_of_two_dimensions(folder: Path) -> Numbers:
    """Sharded weights along one dimension, tensor parallelism along the other: 2 x 2 on four ranks."""
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))
    plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    block = fully_shard(parallelize_module(Block(), mesh["parts"], plan), mesh=mesh["copies"])
    inputs = torch.randn(
        4, WIDTH, generator=torch.Generator().manual_seed(mesh.get_local_rank("copies"))
    )
    block(inputs.double()).square().mean().backward()
    flat = mesh._flatten("all")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=flat.get_group())
    return [total, *(p.grad.full_tensor() for p in block.parameters())]


# -- Other ways to exchange --


def functional_collectives(folder: Path) -> Numbers:
    group, size = dist.group.WORLD, dist.get_world_size()
    part = values(2 * size, 3)
    results = [
        functional.all_reduce(part, "sum", group),
        functional.all_reduce(part, "max", group),
        functional.all_gather_tensor(part, 0, group),
        functional.reduce_scatter_tensor(part, "sum", 0, group),
        functional.all_to_all_single(part, None, None, group),
        functional.broadcast(part, size - 1, group),
        *functional.all_reduce_coalesced([part, part[0]], "sum", group),
        *functional.all_gather_into_tensor_coalesced([part, part + 1], group),
        *functional.reduce_scatter_tensor_coalesced([part, part * 2], "sum", [0, 0], group),
    ]
    return [result + 0 for result in results]


def differentiable_collectives(folder: Path) -> Numbers:
    """`torch.distributed.nn.functional`: each with its backward."""
    size, rank = dist.get_world_size(), dist.get_rank()
    numbers = []

    def add(outputs: torch.Tensor | list | tuple, leaf: torch.Tensor) -> None:
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        loss = sum((output * (rank + 1)).square().sum() for output in outputs)
        loss.backward()
        numbers.extend([*(output.detach() for output in outputs), leaf.grad])

    leaf = values(size, 3).requires_grad_()
    for how in (
        lambda x: differentiable.all_reduce(x * 1),
        lambda x: differentiable.all_gather(x * 1),
        lambda x: differentiable.broadcast(x * 1, 0),
        # Elsewhere than on its rank 0, what a reduce leaves behind is not defined.
        lambda x: differentiable.reduce(x * 1, 0) * (rank == 0),
        lambda x: differentiable.reduce_scatter(x.new_empty(3), list((x * 1).unbind())),
        lambda x: differentiable.all_to_all(
            [x.new_empty(3) for _ in range(size)], list((x * 1).unbind())
        ),
        lambda x: differentiable.all_to_all_single(torch.empty_like(x), x * 1),
    ):
        leaf.grad = None
        add(how(leaf), leaf)
    return numbers


def messages_and_objects(folder: Path) -> Numbers:
    rank, size = dist.get_rank(), dist.get_world_size()
    arrived = [torch.empty(5, dtype=torch.float64) for _ in range(2)]
    operations = [
        dist.P2POp(dist.isend, values(5), (rank + 1) % size),
        dist.P2POp(dist.irecv, arrived[0], (rank - 1) % size),
        dist.P2POp(dist.isend, values(5, seed=1), (rank - 1) % size),
        dist.P2POp(dist.irecv, arrived[1], (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    seen: list = [None] * size
    dist.all_gather_object(seen, {"rank": rank, "words": "x" * 100 * (rank + 1)})
    told = [f"from {rank}", rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, src=1)
    assert [one["rank"] for one in seen] == list(range(size)) and told == ["from 1", 1]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert gathered == (list(range(size)) if rank == 0 else None)
    dealt: list = [None]
    dist.scatter_object_list(dealt, [{"to": i} for i in range(size)] if rank == 0 else None, src=0)
    assert dealt == [{"to": rank}]
    return [*arrived, torch.tensor([len(one["words"]) for one in seen])]


def small_beside_large(folder: Path) -> Numbers:
    """Handles of large and small collectives under way together, waited for from the last."""
    tensors = [values(count, seed=count) for count in (3, 300_000, 5, 200_000, 7)]
    handles = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for handle in reversed(handles):
        handle.wait()
    return tensors


def groups_of_some_ranks(folder: Path) -> Numbers:
    """Neighbours in pairs, then all but the first; each rank uses those that it is in."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    rest = dist.new_group(list(range(1, size)))
    total = batch(0)
    dist.all_reduce(total, group=pairs[rank // 2])
    if rank > 0:
        dist.all_reduce(total, group=rest)
    dist.barrier()
    return [total]
