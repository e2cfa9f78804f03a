"""Gradient buffers over real ranks: equal to one process, one collective per bucket, clear faults."""

import contextlib
import gc
import weakref

import pytest
import torch

from minimegatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchDistributedDataParallel,
)
from minimegatron.core.distributed.param_and_grad_buffer import partition_buckets, shard_buffer
from minimegatron.core.tracing import observed_by
from minimegatron.launching.launcher import RankError
from tests.core.distributed.common import (
    Recorder,
    Toy,
    loss_of,
    make_batch,
    make_config,
    make_groups,
    reference_grads,
    run_microbatches,
)
from tests.ranks import run_ranks

MICROBATCHES = (3, 1, 2, 5)  # per step: the number may change from one to the next


def _main_grads(ddp):
    return {name: param.main_grad.clone() for name, param in ddp.module.named_parameters()}


def _largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def _train(ddp, num_ranks, rank, force_all_reduce=False):
    """Steps of several microbatches; the largest difference to one process, and all gradients."""
    grads, worst = [], 0.0
    reference = Toy(next(ddp.module.parameters()).dtype)
    for step, num_microbatches in enumerate(MICROBATCHES):
        ddp.zero_grad_buffer()
        run_microbatches(ddp, step, rank, num_microbatches)
        ddp.finish_grad_sync(force_all_reduce)
        grads.append(_main_grads(ddp))
        expected = reference_grads(reference, step, num_ranks, num_microbatches)
        worst = max(worst, _largest_difference(grads[-1], expected))
        assert all(param.grad is None for param in ddp.module.parameters())
    return worst, grads


def _gradients_equal_one_process():
    groups = make_groups()
    num_ranks, rank = groups.dp_cp.size(), groups.dp_cp.rank()
    results = {}
    for name, kwargs in {
        "plain": {},
        "overlap": {"overlap_grad_reduce": True},
        "buckets": {"overlap_grad_reduce": True, "bucket_size": 300},
        "each alone": {"overlap_grad_reduce": True, "bucket_size": 1},
        "average": {"average_in_collective": True},
        "checked": {"check_for_nan_in_grad": True, "overlap_grad_reduce": True, "bucket_size": 99},
    }.items():
        ddp = DistributedDataParallel(
            make_config(), DistributedDataParallelConfig(**kwargs), Toy(), pg_collection=groups
        )
        results[name] = _train(ddp, num_ranks, rank)
    plain = results["plain"][1]
    for name, (worst, grads) in results.items():
        assert worst < 1e-14, (name, worst)
        for ours, theirs in zip(grads, plain, strict=True):
            assert _largest_difference(ours, theirs) < 1e-14, name
            if num_ranks == 2:  # two addends have one sum
                assert _largest_difference(ours, theirs) == 0.0, name
    # With a distributed optimizer each rank has its shard of the same sums.
    for overlap in (False, True):
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=overlap, bucket_size=300
        )
        ddp = DistributedDataParallel(make_config(), config, Toy(), pg_collection=groups)
        if not overlap:
            worst, _ = _train(ddp, num_ranks, rank, force_all_reduce=True)
            assert worst < 1e-14
        ddp.zero_grad_buffer()
        run_microbatches(ddp, 1, rank, 1)
        ddp.finish_grad_sync()
        for param, (start, end, _) in ddp.buffers[0].param_index_map.items():
            name = ddp.param_to_bucket_group[param].params[param]
            whole = torch.zeros_like(ddp.buffers[0].grad_data)
            whole[start:end] = plain[1][name].view(-1)
            for bucket in ddp.buffers[0].buckets:
                part = whole[bucket.offset :][: bucket.grad_data.numel()]
                inside = shard_buffer(part, num_ranks)[rank] != 0
                ours = shard_buffer(bucket.grad_data, num_ranks)[rank][inside]
                expected = shard_buffer(part, num_ranks)[rank][inside]
                assert torch.allclose(ours, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_equal_one_process(num_ranks):
    run_ranks(_gradients_equal_one_process, num_ranks)


def _one_collective_per_bucket():
    groups = make_groups()
    for kwargs, collective in (
        ({"bucket_size": 300}, "all-reduce"),
        ({"bucket_size": 300, "use_distributed_optimizer": True}, "reduce-scatter"),
    ):
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, **kwargs)
        ddp = DistributedDataParallel(make_config(), config, Toy(), pg_collection=groups)
        num_buckets = len(ddp.buffers[0].buckets)
        assert num_buckets == len(ddp.bucket_groups) >= 3
        for step, num_microbatches in enumerate(MICROBATCHES):
            recorder = Recorder()
            with observed_by(recorder):
                ddp.zero_grad_buffer()
                run_microbatches(ddp, step, groups.dp_cp.rank(), num_microbatches)
                # All are on their way before anybody asks for them.
                launched = recorder.named(collective)
                ddp.finish_grad_sync()
            assert recorder.named(collective) == launched
            sizes = [bucket.grad_data.numel() * 8 for bucket in ddp.buffers[0].buckets]
            assert [call.attributes["bytes"] for call in launched] == sizes
            order = [call.attributes["bucket"] for call in recorder.named("bucket-launch")]
            assert order == [[i] for i in range(num_buckets)]
    # Without overlap nothing happens before `finish_grad_sync`, and then one sum per dtype.
    ddp = DistributedDataParallel(
        make_config(), DistributedDataParallelConfig(), Toy(), pg_collection=groups
    )
    recorder = Recorder()
    with observed_by(recorder):
        run_microbatches(ddp, 0, groups.dp_cp.rank(), 3)
        assert not recorder.calls
        ddp.finish_grad_sync()
    assert len(recorder.named("all-reduce")) == 1


def test_one_collective_per_bucket_and_step():
    run_ranks(_one_collective_per_bucket, 2)


def _storage_and_dtypes():
    groups = make_groups()
    for sharded in (False, True):
        module = Toy(torch.bfloat16)
        module.norm.float()
        module.inner.weight.requires_grad_(False)
        before = {name: param.detach().clone() for name, param in module.named_parameters()}
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=sharded
        )
        ddp = DistributedDataParallel(make_config(), config, module, pg_collection=groups)
        kinds = {(buffer.param_dtype, buffer.grad_dtype) for buffer in ddp.buffers}
        assert kinds == {(torch.bfloat16, torch.float32), (torch.float32, torch.float32)}
        assert not hasattr(module.inner.weight, "main_grad")
        for buffer in ddp.buffers:
            for param, (start, end, _) in buffer.param_index_map.items():
                # `main_grad` is memory of the buffer, and so is `param` where it is to be gathered.
                assert param.main_grad.untyped_storage().data_ptr() == (
                    buffer.grad_data.untyped_storage().data_ptr()
                )
                param.main_grad.fill_(2.0)
                assert buffer.grad_data[start:end].eq(2.0).all()
                if sharded:
                    assert torch.equal(buffer.param_data[start:end], param.detach().view(-1))
                    buffer.param_data[start:end] += 0
                    assert param.data_ptr() == buffer.param_data[start:end].data_ptr()
            assert buffer.numel >= sum(param.numel() for param in buffer.params)
        ddp.scale_gradients(0.5)
        assert module.head.weight.main_grad.eq(1.0).all()
        ddp.zero_grad_buffer()
        assert not any(buffer.grad_data.any() for buffer in ddp.buffers)
        for name, param in module.named_parameters():
            assert torch.equal(param, before[name])
        assert ddp.state_dict().keys() == Toy().state_dict().keys()


def test_storage_and_dtypes():
    run_ranks(_storage_and_dtypes, 2)


def _wrapper_that_goes():
    """Whether a wrapper, and its module, are freed when nobody has them any more."""
    module = Toy()
    ddp = DistributedDataParallel(
        make_config(), DistributedDataParallelConfig(), module, pg_collection=make_groups()
    )
    ddp.zero_grad_buffer()
    run_microbatches(ddp, 0, 0, 1)
    there = [weakref.ref(ddp), weakref.ref(module)]
    del ddp, module
    gc.collect()
    return [one() is None for one in there]


def test_a_wrapper_that_nobody_has_is_freed():
    """Was: its hooks kept it, and with it the groups, their sockets and their memory."""
    assert run_ranks(_wrapper_that_goes, 2) == [[True, True]] * 2


def _gradient_left_by_a_hook():
    """How far a step's gradients are from those after a step that failed in a hook."""
    module, is_armed = Toy(), [False]

    def hook(param):
        if is_armed[0]:
            raise ZeroDivisionError

    for param in module.parameters():
        param.register_post_accumulate_grad_hook(hook)
    ddp = DistributedDataParallel(
        make_config(), DistributedDataParallelConfig(), module, pg_collection=make_groups()
    )
    found = []
    for fails in (False, True, False):
        is_armed[0] = fails
        ddp.zero_grad_buffer()
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            run_microbatches(ddp, 0, 0, 1)
        if not fails:
            found.append(_main_grads(ddp))
    return _largest_difference(*found)


def test_a_step_that_fails_in_a_hook_leaves_no_gradient():
    """Was: what the hook had not come to add was added to the next step's."""
    assert run_ranks(_gradient_left_by_a_hook, 1) == [0.0]


class _Fused(torch.autograd.Function):
    """x @ w.T that adds its weight gradient into `main_grad` itself, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.weight.main_grad += grad.t() @ x
        ctx.weight.grad_added_to_main_grad = True
        return grad @ weight, grad.new_zeros(()).expand(weight.shape)


class _FusedToy(Toy):
    def forward(self, x):
        x = _Fused.apply(x, self.inner.weight) + self.inner.bias
        for layer in self.layers:
            x = x + torch.tanh(_Fused.apply(x, layer.weight) + layer.bias)
        return self.head(self.norm(x))


def _other_ways():
    groups = make_groups()
    num_ranks, rank = groups.dp_cp.size(), groups.dp_cp.rank()
    overlap = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=300)
    # Layers that add to `main_grad` themselves.
    ddp = DistributedDataParallel(make_config(), overlap, _FusedToy(), pg_collection=groups)
    assert _train(ddp, num_ranks, rank)[0] < 1e-14
    # Everything within `no_sync`, then launched at a moment of the caller's choice.
    ddp = DistributedDataParallel(make_config(), overlap, Toy(), pg_collection=groups)
    expected = reference_grads(Toy(), 0, num_ranks, 2)
    for _ in range(2):
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            run_microbatches_within_no_sync = [make_batch(0, rank, m) for m in range(2)]
            for x in run_microbatches_within_no_sync:
                (loss_of(ddp, x) / 2).backward()
            local = _main_grads(ddp)
        ddp.start_grad_sync(ddp.parameters())
        ddp.finish_grad_sync()
        assert _largest_difference(_main_grads(ddp), expected) < 1e-14
        assert _largest_difference(local, expected) > 1e-3
    # Sums instead of means, for a loss that is divided by the number of tokens at the end.
    config = make_config(calculate_per_token_loss=True)
    ddp = DistributedDataParallel(config, overlap, Toy(), pg_collection=groups)
    run_microbatches(ddp, 0, rank, 2)
    ddp.finish_grad_sync()
    ddp.scale_gradients(1 / num_ranks)
    assert _largest_difference(_main_grads(ddp), expected) < 1e-14
    # One group of buckets alone: it launches what nobody has launched.
    for force_all_reduce, collective in ((False, "reduce-scatter"), (True, "all-reduce")):
        sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
        ddp = DistributedDataParallel(make_config(), sharded, Toy(), pg_collection=groups)
        (group,) = partition_buckets(ddp.buffers, True)
        recorder = Recorder()
        with observed_by(recorder):
            group.finish_grad_sync(force_all_reduce)
        assert [call.name for call in recorder.calls[1:2]] == [collective]
        with pytest.raises(AssertionError, match="without overlap"):
            group.register_grad_ready(ddp.module.head.weight)
    ddp = DistributedDataParallel(make_config(), overlap, Toy(), pg_collection=groups)
    in_order = [group.buckets for group in ddp.bucket_groups]
    assert [group.buckets for group in partition_buckets(ddp.buffers)] == in_order
    with pytest.raises(AssertionError, match="never launched"):
        ddp.bucket_groups[0].finish_grad_sync()
    # Different weights at first, made equal.
    ddp = DistributedDataParallel(make_config(), overlap, Toy(seed=rank), pg_collection=groups)
    ddp.broadcast_params()
    for name, param in Toy(seed=0).named_parameters():
        assert torch.equal(param, dict(ddp.module.named_parameters())[name])


def test_fused_gradients_no_sync_sums_and_broadcast():
    run_ranks(_other_ways, 2)


def _torch_ddp_equals_ours():
    groups = make_groups()
    num_ranks, rank = groups.dp_cp.size(), groups.dp_cp.rank()
    for per_token in (False, True):
        config = make_config(calculate_per_token_loss=per_token)
        ddp_config = DistributedDataParallelConfig(bucket_size=300)
        ours = DistributedDataParallel(config, ddp_config, Toy(), pg_collection=groups)
        theirs = TorchDistributedDataParallel(config, ddp_config, Toy(), pg_collection=groups)
        for step, num_microbatches in enumerate(MICROBATCHES):
            for ddp in (ours, theirs):
                ddp.zero_grad_buffer()
                run_microbatches(ddp, step, rank, num_microbatches)
                ddp.finish_grad_sync()
            torchs = {name: param.grad for name, param in theirs.module.named_parameters()}
            difference = _largest_difference(_main_grads(ours), torchs)
            assert difference <= (0.0 if num_ranks == 2 else 1e-14), difference
        assert theirs.state_dict().keys() == ours.state_dict().keys()


def test_torch_ddp_equals_ours():
    run_ranks(_torch_ddp_equals_ours, 2)


def test_shards_are_equal_views():
    buffer = torch.arange(12.0)
    shards = shard_buffer(buffer, 3)
    assert [shard.tolist() for shard in shards] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    shards[1].zero_()
    assert not buffer[4:8].any()
    with pytest.raises(RuntimeError):
        shard_buffer(buffer, 5)


class _OutOfOrder(Toy):
    """Uses its layers in another order than it lists them, and has parameters of two dtypes."""

    def __init__(self):
        super().__init__(torch.bfloat16)
        self.norm.float()

    def forward(self, x):
        x = self.inner(x)
        for layer in reversed(self.layers):
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x.float()).bfloat16())


def _launch_order():
    groups = make_groups()
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=300)
    module = _OutOfOrder()
    ddp = DistributedDataParallel(make_config(), config, module, pg_collection=groups)
    names = [sorted(group.params.values()) for group in ddp.bucket_groups]
    # The norm, whose dtype's buffer is the second, does not wait for all of the first: only for
    # what is behind it, the head, whose bucket takes in the last layer's bias and weight.
    assert names[0] == ["norm.bias", "norm.weight"]
    assert "head.weight" in names[1]
    recorder = Recorder()
    with observed_by(recorder):
        run_microbatches(ddp, 0, groups.dp_cp.rank(), 2)
    sizes = [call.attributes["bytes"] for call in recorder.named("bucket-launch")]
    expected = [
        sum(b.grad_data.numel() * b.grad_data.element_size() for b in group.buckets)
        for group in ddp.bucket_groups
    ]
    assert sizes == expected and len(sizes) >= 4
    ddp.finish_grad_sync()
    overlapped = _main_grads(ddp)
    plain = DistributedDataParallel(
        make_config(), DistributedDataParallelConfig(), _OutOfOrder(), pg_collection=groups
    )
    run_microbatches(plain, 0, groups.dp_cp.rank(), 2)
    plain.finish_grad_sync()
    assert _largest_difference(overlapped, _main_grads(plain)) == 0.0


def test_buckets_are_launched_in_one_order_whatever_order_they_fill_in():
    run_ranks(_launch_order, 2)


class _Forgetful(Toy):
    """Uses its second layer on some data-parallel ranks only."""

    skips = False

    def forward(self, x):
        x = self.inner(x)
        for i, layer in enumerate(self.layers):
            if not (self.skips and i == 1):
                x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def _unused_parameter(skipping_ranks, overlap):
    groups = make_groups()
    module = _Forgetful()
    module.skips = groups.dp_cp.rank() in skipping_ranks
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=300)
    ddp = DistributedDataParallel(make_config(), config, module, pg_collection=groups)
    run_microbatches(ddp, 0, groups.dp_cp.rank(), 2)
    ddp.finish_grad_sync()
    return float(module.layers[1].weight.main_grad.abs().sum())


@pytest.mark.parametrize("skipping_ranks", [(0, 1), (1,)])
def test_an_unused_parameter_is_named_not_waited_for(skipping_ranks):
    with pytest.raises(
        RankError, match=r"layers\.1\.weight, layers\.1\.bias|layers\.1\.bias"
    ) as error:
        run_ranks(_unused_parameter, 2, skipping_ranks, True, timeout=40)
    assert f"rank {skipping_ranks[0]}" in str(error.value)
    # Without overlap it simply has no gradient from there.
    assert run_ranks(_unused_parameter, 2, (0, 1), False) == [0.0, 0.0]


def _forgotten_no_sync():
    groups = make_groups()
    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    ddp = DistributedDataParallel(make_config(), config, Toy(), pg_collection=groups)
    for microbatch in range(2):
        loss_of(ddp, make_batch(0, 0, microbatch)).backward()


def _planted_nan():
    groups = make_groups()
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True, bucket_size=300)
    module = Toy()
    ddp = DistributedDataParallel(make_config(), config, module, pg_collection=groups)
    run_microbatches(ddp, 0, groups.dp_cp.rank(), 1)
    if groups.dp_cp.rank() == 1:
        module.layers[2].weight.main_grad[3, 4] = float("nan")
        module.layers[2].weight.main_grad[0, 0] = float("inf")
    ddp.finish_grad_sync()


def test_other_faults_are_named():
    with pytest.raises(RankError, match=r"another gradient of .*no_sync\(\)"):
        run_ranks(_forgotten_no_sync, 2, timeout=40)
    pattern = r"rank 1: .*bucket 0.*layers\.2\.weight \(1 NaN, 1 Inf of 576\)"
    with pytest.raises(RankError, match=pattern):
        run_ranks(_planted_nan, 2, timeout=40)


def _refused():
    groups = make_groups(pp=2)
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="pipeline of 2 stages"):
        TorchDistributedDataParallel(make_config(), sharded, Toy(), pg_collection=groups)
    overlap = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=300)
    ddp = DistributedDataParallel(make_config(), overlap, Toy(), pg_collection=groups)
    # Only the first stage, and there only its first chunk, cuts its buffer up.
    num_buckets = len(ddp.buffers[0].buckets)
    assert (num_buckets == 1) == (groups.pp.rank() > 0)
    ddp = DistributedDataParallel(
        make_config(), overlap, Toy(), disable_bucketing=True, pg_collection=groups
    )
    assert len(ddp.buffers[0].buckets) == 1
    both = DistributedDataParallelConfig(average_in_collective=True)
    with pytest.raises(ValueError, match="number of tokens"):
        config = make_config(calculate_per_token_loss=True)
        DistributedDataParallel(config, both, Toy(), pg_collection=groups)
    # A stage without parameters.
    empty = torch.nn.Identity()
    ddp = DistributedDataParallel(make_config(), overlap, empty, pg_collection=groups)
    ddp.zero_grad_buffer()
    ddp.finish_grad_sync()
    groups = make_groups()
    with pytest.raises(ValueError, match="use_distributed_optimizer"):
        TorchDistributedDataParallel(make_config(), sharded, Toy(), pg_collection=groups)


def test_stages_and_refusals():
    run_ranks(_refused, 2)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"bucket_size": 0}, "bucket_size is 0"),
        ({"overlap_param_gather": True}, "use_distributed_optimizer"),
        ({"overlap_param_gather": True, "use_distributed_optimizer": True}, "overlap_grad_reduce"),
    ],
)
def test_bad_configurations(kwargs, words):
    with pytest.raises(ValueError, match=words):
        DistributedDataParallelConfig(**kwargs)
