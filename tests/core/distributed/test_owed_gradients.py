"""Gradient buffers under weight gradients that come after backward: whole, sent once, never lost."""

import itertools
import sys

import pytest
import torch

from minimegatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchDistributedDataParallel,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel import weight_grad_store
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear
from minimegatron.core.tensor_parallel.random import checkpoint
from minimegatron.core.tensor_parallel.weight_grad_store import is_owed
from minimegatron.core.tracing import observed_by
from tests.core.distributed.common import Recorder, make_batch, make_config, make_groups
from tests.fake_transport import FakeGroup
from tests.groups import PretendGroup
from tests.ranks import run_ranks

M, WIDTH = 3, 5  # microbatches; batches are [4, 5]


class Tower(torch.nn.Module):
    """Two layers that delay, a norm, and a head that defers; on request the head is the first layer."""

    def __init__(self, dtype: torch.dtype = torch.float64, tied: bool = False, **options):
        super().__init__()
        self.config = make_config(params_dtype=dtype, **options)
        deferring = self.config.defer_embedding_wgrad_compute
        self.inputs, self.grads = ([], []) if deferring else (None, None)
        built = {"config": self.config, "tp_group": PretendGroup()}
        torch.manual_seed(5)
        self.first = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.layers = torch.nn.ModuleList(
            ColumnParallelLinear(WIDTH, WIDTH, init_method=self._draw, **built) for _ in range(2)
        )
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=dtype)
        self.head = ColumnParallelLinear(
            WIDTH,
            WIDTH,
            init_method=self._draw,
            bias=False,
            skip_weight_param_allocation=tied,
            embedding_activation_buffer=self.inputs,
            grad_output_buffer=self.grads,
            delay_wgrad_compute=False,
            **built,
        )
        self.tied = tied

    @staticmethod
    def _draw(weight):
        return torch.nn.init.normal_(weight, std=0.4)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)[0].tanh()
        return self.head(self.norm(x), weight=self.first.weight if self.tied else None)[0]

    def backward_dw(self):
        for layer in reversed(self.layers):
            layer.backward_dw()

    def drain(self):
        weight = self.first.weight if self.tied else self.head.weight
        while is_owed(weight):
            weight.weight_grad_store.backward_dw(weight)


DELAY, DEFER = {"delay_wgrad_compute": True}, {"defer_embedding_wgrad_compute": True}
LATER = {"delay": DELAY, "defer": DEFER, "both": DELAY | DEFER}


def wrap(groups, dtype=torch.float64, tied=False, ddp_options=None, **options):
    module = Tower(dtype, tied, **options)
    ddp_config = DistributedDataParallelConfig(**(ddp_options or {}))
    return DistributedDataParallel(module.config, ddp_config, module, pg_collection=groups)


def backward(ddp, rank: int, microbatch: int) -> None:
    dtype = next(ddp.module.parameters()).dtype
    output = ddp(make_batch(0, rank, microbatch, dtype))
    output.to(torch.promote_types(dtype, torch.float32)).pow(2).mean().backward()


def backwards(ddp, rank: int) -> None:
    """B of all microbatches, the last outside of `no_sync`; nothing of what they leave."""
    with ddp.no_sync():
        for microbatch in range(M - 1):
            backward(ddp, rank, microbatch)
    backward(ddp, rank, M - 1)


def pay(ddp) -> None:
    """W of all microbatches, oldest first, then the head's."""
    for _ in range(M):
        ddp.module.backward_dw()
    ddp.module.drain()


def gradients(ddp) -> dict[str, torch.Tensor]:
    return {name: param.main_grad.clone() for name, param in ddp.module.named_parameters()}


def one_step(groups, **arguments) -> dict[str, torch.Tensor]:
    ddp = wrap(groups, **arguments)
    ddp.zero_grad_buffer()
    backwards(ddp, groups.dp_cp.rank())
    pay(ddp)
    ddp.finish_grad_sync()
    assert all(param.grad is None for param in ddp.module.parameters())
    return gradients(ddp)


def alone() -> ProcessGroupCollection:
    return ProcessGroupCollection(dp_cp=FakeGroup(), pp=FakeGroup())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("later", LATER)
def test_main_grad_is_bit_equal(dtype, later):
    """16-bit gradients are added in float32, each as it comes."""
    options = {"dtype": dtype, "ddp_options": {"grad_reduce_in_fp32": True}}
    usual, found = one_step(alone(), **options), one_step(alone(), **options, **LATER[later])
    in_fp32 = dtype in (torch.bfloat16, torch.float16)
    for name, grad in usual.items():
        assert grad.dtype == (torch.float32 if in_fp32 else dtype)
        assert grad.abs().sum() > 0 and torch.equal(grad, found[name]), name


def test_a_tied_weight_is_summed_in_another_order():
    usual, found = one_step(alone(), tied=True), one_step(alone(), tied=True, **DEFER)
    for name, grad in usual.items():
        torch.testing.assert_close(grad, found[name], rtol=0, atol=1e-14, msg=name)


def test_the_hook_of_an_owed_weight_does_nothing():
    """torch 2.13 calls it in backward, without a gradient; older ones do not."""
    ddp = wrap(alone(), **DELAY, **DEFER)
    backwards(ddp, 0)  # was a TypeError
    for param in (ddp.module.head.weight, ddp.module.layers[0].weight):
        assert is_owed(param) and param.grad is None
        ddp._after_grad(param)
        assert not param.main_grad.any()


def overlapped() -> None:
    groups = make_groups()
    rank = groups.dp_cp.rank()
    kinds = [(*kind, 30) for kind in itertools.product((False, True), (False, True))]
    for tied, sharded, bucket_size in [*kinds, (True, True, None)]:
        options = {"use_distributed_optimizer": sharded, "bucket_size": bucket_size}
        options["overlap_grad_reduce"] = True
        usual = one_step(groups, tied=tied, ddp_options=options)
        for name, later in LATER.items():
            found = one_step(groups, tied=tied, ddp_options=options, **later)
            for param, grad in usual.items():
                error = (grad - found[param]).abs().max()
                exact = not tied or name == "delay"
                case = (name, param, tied, sharded, bucket_size, float(error))
                assert error == 0.0 if exact else error < 1e-14, case
    recorder = Recorder()
    ddp = wrap(groups, ddp_options={"overlap_grad_reduce": True, "bucket_size": 1}, **DELAY)
    with observed_by(recorder):
        backwards(ddp, rank)
        # In the order of backward: the head and the norm have all, the last layer lacks its weight.
        names = [[*group.params.values()] for group in ddp.bucket_groups]
        launched = len(recorder.named("bucket-launch"))
        assert names[launched] == ["layers.1.weight"], names
        ddp.module.backward_dw()
        ddp.module.backward_dw()
        assert len(recorder.named("bucket-launch")) == launched, "another microbatch is owed"
        ddp.module.layers[1].backward_dw()
        assert len(recorder.named("bucket-launch")) > launched
        ddp.module.layers[0].backward_dw()
        assert len(recorder.named("bucket-launch")) == len(names)
    ddp.finish_grad_sync()


def test_with_overlap_a_bucket_is_launched_after_its_weight_gradients():
    run_ranks(overlapped, 2)


def launched_by_the_schedule() -> None:
    """`grad_sync_func` may call before the output layer's weight gradients are there."""
    groups = make_groups()
    for tied, sharded in itertools.product((False, True), (False, True)):
        options = {"use_distributed_optimizer": sharded, "bucket_size": 30}
        options["overlap_grad_reduce"] = True
        usual = one_step(groups, tied=tied, ddp_options=options)
        ddp = wrap(groups, tied=tied, ddp_options=options, **DEFER)
        for _ in range(2):
            ddp.zero_grad_buffer()
            with ddp.no_sync():
                for microbatch in range(M):
                    backward(ddp, groups.dp_cp.rank(), microbatch)
            ddp.start_grad_sync()
            owing = [group for group in ddp.bucket_groups if group.grad_reduce_handles is None]
            assert owing, "the bucket of the head waits"
            ddp.module.drain()
            assert all(group.grad_reduce_handles is not None for group in ddp.bucket_groups)
            ddp.finish_grad_sync()
            for name, grad in gradients(ddp).items():
                error = (grad - usual[name]).abs().max()
                assert error < 1e-14, (name, tied, sharded, float(error))


def test_a_bucket_that_the_schedule_launches_waits_for_what_is_owed():
    run_ranks(launched_by_the_schedule, 2)


def unpaid() -> None:
    for overlap in (False, True):
        ddp = wrap(make_groups(), ddp_options={"overlap_grad_reduce": overlap}, **DELAY)
        backwards(ddp, 0)
        pattern = r"layers\.0\.weight, layers\.1\.weight are still owed.*backward_dw\(\)"
        with pytest.raises(RuntimeError, match=pattern):
            ddp.finish_grad_sync()


def test_a_sum_that_would_lack_owed_gradients_is_refused():
    run_ranks(unpaid, 1)


def test_zeroed_gradients_owe_nothing():
    ddp = wrap(alone(), **DELAY, **DEFER)
    backwards(ddp, 0)
    ddp.zero_grad_buffer()
    assert ddp.module.inputs == ddp.module.grads == []
    pay(ddp)
    assert not any(grad.any() for grad in gradients(ddp).values())


def torch_refuses() -> None:
    groups = make_groups()
    for options in (DELAY, DEFER):
        module, (name,) = Tower(**options), options
        with pytest.raises(ValueError, match=f"turn {name} off or use our own"):
            TorchDistributedDataParallel(
                module.config, DistributedDataParallelConfig(), module, pg_collection=groups
            )


def test_torch_ddp_refuses_weight_gradients_that_come_later():
    run_ranks(torch_refuses, 2)


def calls_into_the_store(options: dict) -> int:
    """Of one microbatch, with overlap and recompute, in a process that has built nothing before."""
    ddp = wrap(alone(), ddp_options={"overlap_grad_reduce": True}, **options)
    file, entered = weight_grad_store.__file__, []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename == file:
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    ddp.zero_grad_buffer()
    x = make_batch(0, 0, 0, torch.float64).requires_grad_()
    checkpoint(ddp, False, x, tp_group=PretendGroup()).pow(2).mean().backward()
    sys.setprofile(None)
    return len(entered)


def test_who_delays_nothing_calls_no_store():
    assert run_ranks(calls_into_the_store, 1, {}) == [0]
    assert run_ranks(calls_into_the_store, 1, DELAY)[0] > 0
