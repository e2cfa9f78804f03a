"""What a step does otherwise on a GPU: fewer kernels, fewer waits, and the same answers.

All of it runs on the CPU; see `tests.ways_of_a_gpu`.
"""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

from minimegatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from minimegatron.core.optimizer.clip_grads import get_grad_norm_fp32
from minimegatron.core.optimizer.grad_scaler import ConstantGradScaler
from minimegatron.core.optimizer.optimizer import MegatronOptimizer, make_torch_optimizer
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel import data, sizes_of_first_batch
from minimegatron.core.tensor_parallel.data import broadcast_data
from tests.core.distributed.common import Toy, make_config, run_microbatches
from tests.fake_transport import FakeGroup, no_numbers
from tests.groups import PretendGroup
from tests.ways_of_a_gpu import ways_of_a_gpu

GROUPS = ("tp", "pp", "dp_cp", "mp")


@pytest.fixture(autouse=True)
def named_rank(monkeypatch):
    """Messages name the rank of the job; there is no job here."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 3)


@pytest.fixture
def on_a_gpu():
    with ways_of_a_gpu():
        yield


# -- Gradients that are not finite --


def wrapped(**settings) -> DistributedDataParallel:
    groups = ProcessGroupCollection(**{name: FakeGroup() for name in GROUPS})
    settings = {"check_for_nan_in_grad": True, "overlap_grad_reduce": True, **settings}
    config = DistributedDataParallelConfig(bucket_size=300, **settings)
    return DistributedDataParallel(make_config(), config, Toy(torch.float32), pg_collection=groups)


def optimizer_of(ddp: DistributedDataParallel) -> MegatronOptimizer:
    sharded = ddp.ddp_config.use_distributed_optimizer
    config = OptimizerConfig(lr=0.1, use_distributed_optimizer=sharded)
    return get_megatron_optimizer(config, [ddp], pg_collection=ddp.pg_collection)


def spoil(ddp: DistributedDataParallel, name: str, value: float) -> None:
    """From now on, the gradient of this parameter has one element of this value."""
    param = dict(ddp.module.named_parameters())[name]
    spoilt = torch.zeros_like(param)
    spoilt.view(-1)[0] = value
    param.register_hook(lambda grad: grad + spoilt)


def backward(ddp: DistributedDataParallel) -> None:
    """Of one step. The program reads nothing: every bucket is launched by a hook in backward."""
    ddp.zero_grad_buffer()
    with no_numbers():
        run_microbatches(ddp, 0, 0, 2)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("value, what", [(math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "Inf")])
def test_gradients_are_looked_at_with_the_norm(on_a_gpu, value, what, sharded):
    ddp = wrapped(use_distributed_optimizer=sharded)
    optimizer = optimizer_of(ddp)
    spoil(ddp, "layers.1.weight", value)
    before = [param.clone() for param in ddp.parameters()]
    backward(ddp)
    ddp.finish_grad_sync()
    words = (
        rf"rank 3: .* bucket \d, before data-parallel summation: layers\.1\.weight \({what}\); look"
    )
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert all(map(torch.equal, before, ddp.parameters())), "updated all the same"


def test_all_are_named(on_a_gpu):
    ddp = wrapped(overlap_grad_reduce=False)
    optimizer_of(ddp)
    for name, value in (("norm.bias", math.nan), ("inner.weight", math.inf)):
        spoil(ddp, name, value)
    backward(ddp)
    ddp.finish_grad_sync()
    with pytest.raises(RuntimeError, match=r"inner\.weight \(Inf\), norm\.bias \(NaN\);"):
        ddp.check_grads()


def test_without_an_optimizer_the_end_of_the_sums_looks(on_a_gpu):
    ddp = wrapped()
    spoil(ddp, "head.weight", math.nan)
    backward(ddp)
    with pytest.raises(RuntimeError, match=r"head\.weight \(NaN\)"):
        ddp.finish_grad_sync()


def test_a_step_that_failed_leaves_no_notes(on_a_gpu):
    ddp = wrapped()
    optimizer = optimizer_of(ddp)
    backward(ddp)
    ddp.bucket_groups[0].buckets[0].noted.fill_(math.nan)
    backward(ddp)
    ddp.finish_grad_sync()
    assert optimizer.step()[0]


def test_without_the_check_nothing_is_noted(on_a_gpu):
    ddp = wrapped(check_for_nan_in_grad=False)
    spoil(ddp, "head.weight", math.nan)
    backward(ddp)
    ddp.finish_grad_sync()
    assert not any(bucket.noted is not None for g in ddp.bucket_groups for bucket in g.buckets)


def test_a_cpu_looks_at_once():
    ddp = wrapped()
    optimizer_of(ddp)
    spoil(ddp, "head.weight", math.nan)
    with pytest.raises(RuntimeError, match=r"head\.weight \(1 NaN, 0 Inf of 72\)"):
        run_microbatches(ddp, 0, 0, 1)


# -- Norm, loss scale, copies --


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_the_same_in_few_kernels(monkeypatch, dtype):
    generator = torch.Generator().manual_seed(1)
    sizes = ((7, 5), (3,), (400, 300), (1,))
    # Of whole numbers, all sums of squares are exact, in whichever order a processor adds them up.
    grads = [torch.randn(*size, generator=generator).mul(9).round().to(dtype) for size in sizes]
    wanted = get_grad_norm_fp32(grads)
    calls, foreach_norm = [], torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda g: calls.append(len(g)) or foreach_norm(g))
    with ways_of_a_gpu():
        found = get_grad_norm_fp32(iter(grads))
        assert calls == [4]
        assert get_grad_norm_fp32([]) == 0.0
    assert found == pytest.approx(wanted, rel=1e-6 if dtype == torch.float32 else 1e-14)


def unscaled(grads: list[torch.Tensor | None], scale: float) -> tuple[bool, list]:
    params = [SimpleNamespace(grad=None if g is None else g.clone()) for g in grads]
    optimizer = SimpleNamespace(
        grad_scaler=ConstantGradScaler(scale),
        get_parameters=lambda: params,
        grad_stats_parallel_groups=(),
    )
    found = MegatronOptimizer._unscale_main_grads_and_check_for_nan.__wrapped__(optimizer)
    return found, [param.grad for param in params]


@pytest.mark.parametrize("scale", [4.0, 1000.0])
def test_unscaling_is_one_call(monkeypatch, scale):
    calls, name = [], "_amp_foreach_non_finite_check_and_unscale_"
    unscale = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *args: calls.append(len(args[0])) or unscale(*args))
    grads = [torch.tensor([scale, 3.0]), None, torch.full((2, 2), -scale), torch.ones(1)]
    found, results = unscaled(grads, scale)
    assert not found and calls == [3]
    inverse = torch.tensor(1.0 / scale)
    for grad, result in zip(grads, results, strict=True):
        assert grad is None or torch.equal(result, grad * inverse)
    for bad in (math.nan, math.inf, -math.inf):
        assert unscaled([*grads, torch.tensor([1.0, bad])], scale)[0]
    assert unscaled([None], scale) == (False, [None])


# -- Sizes of a batch --


BATCH = {"tokens": torch.arange(8).view(2, 4), "labels": torch.ones(2, 4, dtype=torch.int64)}
TWO = PretendGroup(0, 2)
OTHER = {key: tensor[:1] for key, tensor in BATCH.items()}


@pytest.fixture
def sent(monkeypatch):
    """Shapes of what the first rank of two broadcasts."""
    shapes = []
    monkeypatch.setattr(
        data.collectives, "broadcast", lambda tensor, *_: shapes.append(tuple(tensor.shape))
    )
    monkeypatch.setattr(sizes_of_first_batch, "_told", {})
    return shapes


def share(batch, keys=("tokens", "labels"), group=TWO):
    return broadcast_data(list(keys), batch, torch.int64, group, sizes_vary=False)


def test_sizes_are_told_once(on_a_gpu, sent):
    for _ in range(3):
        found = share(BATCH)
        assert all(torch.equal(found[key], tensor) for key, tensor in BATCH.items())
    share(BATCH, ("tokens",))
    share(BATCH, group=PretendGroup(0, 4))
    table, all_of_it = (2, 6), (16,)
    assert sent == [table, all_of_it, all_of_it, all_of_it, (1, 6), (8,), table, all_of_it]


def test_a_batch_of_another_size_is_refused(on_a_gpu, sent):
    share(BATCH)
    words = r"sizes \[\(1, 4\), \(1, 4\)\], and the first batch had \[\(2, 4\), \(2, 4\)\]"
    with pytest.raises(ValueError, match=words):
        share(OTHER)
    assert len(sent) == 2, "sent all the same"


def test_a_cpu_is_told_each_time(sent):
    for batch in (BATCH, OTHER):
        assert share(batch)["tokens"].shape == batch["tokens"].shape
    assert len(sent) == 4


# -- Adam's count of steps --


@pytest.mark.parametrize("is_gpu", [False, True])
def test_the_count_is_where_torch_itself_would_put_it(is_gpu):
    """Of a state that was made to load a checkpoint. The fused kernel reads the count on the GPU: one
    in the memory of the CPU would be an illegal access."""
    param = torch.nn.Parameter(torch.ones(2, device="meta" if is_gpu else "cpu"))
    with ways_of_a_gpu() if is_gpu else contextlib.nullcontext():
        adam = make_torch_optimizer([{"params": [param], "wd_mult": 1.0}], OptimizerConfig(lr=0.1))
        ours = SimpleNamespace(
            config=OptimizerConfig(lr=0.1), optimizer=adam, get_parameters=lambda: [param]
        )
        MegatronOptimizer.initialize_state(ours)
    count = adam.state[param]["step"]
    assert (count.device.type, count.dtype) == ("meta" if is_gpu else "cpu", torch.float32)


def test_the_fused_kernel_counts_in_float32_as_torch_does():
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    with ways_of_a_gpu():
        config = OptimizerConfig(lr=0.1)
        adam = make_torch_optimizer([{"params": [param], "wd_mult": 1.0}], config)
    adam.step()
    assert adam.state[param]["step"].dtype == torch.float32
