"""Programs for `test_for_anybody`: torch's own ways to train copies of a model and to keep it.

Each program runs on every rank, uses the default group and nothing of this package, and returns the
numbers that it worked out.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

Numbers = list[torch.Tensor]

NUM_STEPS = 3
SMALL_BUCKETS = {"bucket_cap_mb": 0.002}
"""Several buckets in a model of a few thousand weights."""


class Net(nn.Module):
    """Three layers, a normalisation with buffers, and a layer that not every step uses."""

    def __init__(self, width: int = 24, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.first = nn.Linear(8, width, dtype=dtype)
        self.norm = nn.BatchNorm1d(width, dtype=dtype)
        self.second = nn.Linear(width, width, dtype=dtype)
        self.seldom = nn.Linear(width, width, dtype=dtype)
        self.last = nn.Linear(width, 4, dtype=dtype)

    def forward(self, x: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        x = self.second(torch.relu(self.norm(self.first(x))))
        if use_all:
            x = x + self.seldom(x)
        return self.last(torch.tanh(x))


def make_net(**options) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batch(step_id: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Other samples on each rank and in each step."""
    generator = torch.Generator().manual_seed(100 * step_id + dist.get_rank() + 1)
    return torch.randn(6, 8, generator=generator, dtype=dtype)


def numbers_of(model: nn.Module, losses: Numbers) -> Numbers:
    """Losses, gradients of the last step, buffers; last the weights."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = (*losses, *gradients, *model.buffers(), *model.parameters())
    return [t.detach().clone() for t in found]


def train(model: nn.Module, forward: Callable | None = None) -> Numbers:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step_id in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = (forward or call)(model, step_id)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return numbers_of(model, losses)


def call(model: nn.Module, step_id: int) -> torch.Tensor:
    return model(batch(step_id)).square().mean()


# -- DistributedDataParallel --


def ddp(folder: Path) -> Numbers:
    return train(DistributedDataParallel(make_net()))


def ddp_of_many_buckets(folder: Path) -> Numbers:
    options = {"gradient_as_bucket_view": True, **SMALL_BUCKETS}
    return train(DistributedDataParallel(make_net(width=64), **options))


def ddp_of_a_static_graph(folder: Path) -> Numbers:
    return train(DistributedDataParallel(make_net(), static_graph=True, **SMALL_BUCKETS))


def ddp_that_finds_unused_parameters(folder: Path) -> Numbers:
    """The first step and the last leave a layer out."""
    model = DistributedDataParallel(make_net(), find_unused_parameters=True)
    return train(model, lambda net, step_id: net(batch(step_id), step_id == 1).square().mean())


def ddp_that_sends_one_time_in_two(folder: Path) -> Numbers:
    def two_batches(model: nn.Module, step_id: int) -> torch.Tensor:
        with model.no_sync():
            call(model, 2 * step_id).backward()
        return call(model, 2 * step_id + 1)

    return train(DistributedDataParallel(make_net(), **SMALL_BUCKETS), two_batches)


def ddp_that_sends_half_precision(folder: Path) -> Numbers:
    model = DistributedDataParallel(make_net(), **SMALL_BUCKETS)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model)


def ddp_with_a_hook(folder: Path) -> Numbers:
    def sum_then_divide(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        size = dist.get_world_size()
        return work.get_future().then(lambda future: future.value()[0] / size)

    model = DistributedDataParallel(make_net(), **SMALL_BUCKETS)
    model.register_comm_hook(None, sum_then_divide)
    return train(model)


def ddp_that_sends_low_ranks(folder: Path) -> Numbers:
    """PowerSGD: collectives that begin in the callback of another one's future."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    model = DistributedDataParallel(make_net())
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model)


def ddp_of_uneven_inputs(folder: Path) -> Numbers:
    """`Join`: rank r has r batches more than rank 0."""
    model = DistributedDataParallel(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step_id in range(NUM_STEPS + dist.get_rank()):
            optimizer.zero_grad()
            call(model, step_id).backward()
            optimizer.step()
    return numbers_of(model, [])


def zero_redundancy_optimizer(folder: Path) -> Numbers:
    model = DistributedDataParallel(make_net())
    # With Adam's usual eps, the last digit of a small gradient would be one of a weight.
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, eps=1e-3)
    for step_id in range(NUM_STEPS):
        optimizer.zero_grad()
        call(model, step_id).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    kept: Numbers = []
    if dist.get_rank() == 0:
        states = optimizer.state_dict()["state"]
        kept = [states[i]["exp_avg"] for i in sorted(states)]
    return numbers_of(model, kept)


# -- Sharded weights --


class Sharded(nn.Module):
    """Without a normalisation over the batch."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def cpu_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard(mesh: DeviceMesh, dtype: torch.dtype = torch.float64, **options) -> Sharded:
    model = Sharded(dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(model: nn.Module) -> Numbers:
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def fsdp_1(folder: Path) -> Numbers:
    model = FullyShardedDataParallel(Sharded(), device_id=torch.device("cpu"), use_orig_params=True)
    numbers = train(model)
    with FullyShardedDataParallel.summon_full_params(model):
        return [*numbers, *(p.detach().clone() for p in model.parameters())]


def fsdp_2(folder: Path) -> Numbers:
    model = shard(cpu_mesh())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    numbers = []
    for step_id in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = call(model, step_id)
        loss.backward()
        numbers += [loss.detach(), *(p.grad.full_tensor() for p in model.parameters())]
        optimizer.step()
    return [*numbers, *whole(model)]


def fsdp_2_of_mixed_precision(folder: Path) -> Numbers:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(cpu_mesh(), torch.float32, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step_id in range(NUM_STEPS):
        optimizer.zero_grad()
        model(batch(step_id, torch.float32)).float().square().mean().backward()
        optimizer.step()
    return whole(model)


def fsdp_2_of_copies(folder: Path) -> Numbers:
    """Sharded over pairs of ranks, copied over the pairs."""
    pairs = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("copy", "shard")
    )
    model = shard(pairs)
    call(model, 0).backward()
    return [p.grad.full_tensor() for p in model.parameters()]


# -- Checkpoints --


def checkpoint(folder: Path) -> Numbers:
    """Saves; loads into a model with other weights."""
    model = shard(cpu_mesh())
    train_sharded(model)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "saved")
    return read_back(folder / "saved", cpu_mesh(), model)


def checkpoint_beside_training(folder: Path) -> Numbers:
    """`async_save` in a thread, over a group of its own: what the model was, whatever it becomes."""
    model = shard(cpu_mesh())
    train_sharded(model)
    before = whole(model)
    group = dist.new_group()
    state = get_model_state_dict(model)
    written = dcp.async_save(state, checkpoint_id=folder / "saved", process_group=group)
    train_sharded(model)
    written.result(timeout=60)
    read = read_back(folder / "saved", cpu_mesh(), None)
    assert all(torch.equal(a, b) for a, b in zip(before, read, strict=True))
    return [*read, *whole(model)]


def checkpoint_for_half_of_the_ranks(folder: Path) -> Numbers:
    """Saved by all ranks, loaded by the first half of them, in a group of their own."""
    model = shard(cpu_mesh())
    train_sharded(model)
    wanted = whole(model)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder / "saved")
    ranks = list(range(dist.get_world_size() // 2))
    half = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return []
    read = read_back(folder / "saved", DeviceMesh.from_group(half, "cpu"), None, half)
    assert all(torch.equal(a, b) for a, b in zip(wanted, read, strict=True))
    return read


def train_sharded(model: Sharded) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call(model, 0).backward()
    optimizer.step()


def read_back(
    saved: Path,
    mesh: DeviceMesh,
    model: Sharded | None,
    group: dist.ProcessGroup | None = None,
) -> Numbers:
    """What the checkpoint gives a fresh model; the same as `model` has, if there is one."""
    fresh = shard(mesh)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=saved, process_group=group)
    read = whole(fresh)
    if model is not None:
        assert all(torch.equal(a, b) for a, b in zip(whole(model), read, strict=True))
    return read
