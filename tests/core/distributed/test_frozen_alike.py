"""Ranks that would freeze different parameters are told so, and a wrapped model freezes no more."""

from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchDistributedDataParallel,
)
from minimegatron.core.distributed.frozen_alike import check_frozen_alike
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from minimegatron.core.process_groups_config import ProcessGroupCollection
from tests.core.distributed.common import Toy, make_config
from tests.fake_transport import FakeGroup
from tests.groups import PretendGroup

GROUPS = dict.fromkeys(("tp", "pp", "cp", "dp_cp", "expt_dp", "mp"), PretendGroup())


class Layers(torch.nn.Module):
    """An embedding and two layers with an expert each; only names and marks matter."""

    def __init__(self, trained: str, has_copy: bool = True):
        super().__init__()
        self.pre_process = True
        self.embedding = torch.nn.Embedding(3, 2)
        self.embedding.weight.shared_embedding = has_copy
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            layer = torch.nn.Module()
            layer.norm, layer.mlp = torch.nn.LayerNorm(2), torch.nn.Module()
            layer.mlp.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
            self.layers.append(layer)
        for name, param in self.named_parameters():
            param.requires_grad_(any(part in name for part in trained.split()))


def refusals(name: str, first: Any, second: Any, check: Any = None) -> list[str]:
    """What two ranks of the group `name` raise: each sees the greater of both their numbers."""
    check = check or (lambda model, groups: check_frozen_alike([model], groups))
    sent, raised = [], []

    def note(bounds, group, op):
        sent.append(bounds.clone())

    def answer(bounds, group, op):
        bounds.copy_(torch.maximum(bounds, sent.pop(0)))

    for rank, (mine, other) in enumerate([(first, second), (second, first)]):
        groups = ProcessGroupCollection(**dict(GROUPS) | {name: PretendGroup(rank, 2)})
        for model, reduce in ((other, note), (mine, answer)):
            with (
                mock.patch("minimegatron.core.distributed.frozen_alike.all_reduce", reduce),
                mock.patch("torch.distributed.ProcessGroup", PretendGroup),
            ):
                try:
                    check(model, groups)
                except ValueError as error:
                    raised.append(str(error))
    return raised


@pytest.mark.parametrize(
    ("name", "trained", "words"),
    [
        ("dp_cp", ("norm", "layers.0.norm"), "4 parameters require a gradient"),
        ("tp", ("norm embedding", "norm"), "4 parameters require a gradient"),
        ("embd", ("embedding", "norm"), "1 here, and 0 of them require a gradient"),
        ("tp_ep", ("layers.1.mlp.experts", "none"), "at layers.1.mlp.experts.0.weight"),
        ("tp_ep", ("experts", "layers.1.mlp.experts"), "at layers.0.mlp.experts.0.weight"),
    ],
)
def test_a2_ranks_that_freeze_other_parameters_are_refused(name, trained, words):
    """Was: one waited for a message that the other did not send, in backward or after it."""
    found = refusals(name, *map(Layers, trained))
    assert len(found) == 2 and all(f"of the 2 in group {name}" in text for text in found)
    assert any(words in text for text in found)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("dp_cp", Layers("norm"), Layers("norm")),
        ("dp_cp", Layers("norm experts"), Layers("norm")),
        ("embd", Layers("none"), Layers("norm")),
        ("embd", Layers("embedding"), Layers("norm", has_copy=False)),
        # Gradients of tokens go back to the norm on both, whichever experts are trained.
        ("tp_ep", Layers("layers.0.norm experts"), Layers("layers.0.norm")),
    ],
)
def test_a2_ranks_that_freeze_alike_are_not(name, first, second):
    assert refusals(name, first, second) == []


def test_a2_groups_of_one_and_groups_that_are_not_there_send_nothing():
    check_frozen_alike([Layers("norm")], ProcessGroupCollection(dp_cp=FakeGroup(), embd=None))


@pytest.mark.parametrize("frozen_first", [True, False])
def test_a2_what_is_frozen_or_thawed_after_wrapping_is_refused(frozen_first):
    """Was: without overlap, a weight frozen late moved on; one thawed late stayed where it was."""
    one, module = FakeGroup(), Toy()
    module.head.requires_grad_(not frozen_first)
    groups = ProcessGroupCollection(dp_cp=one, pp=one)
    ddp = DistributedDataParallel(
        make_config(), DistributedDataParallelConfig(), module, pg_collection=groups
    )
    ddp.zero_grad_buffer()
    module.head.requires_grad_(frozen_first)
    with pytest.raises(ValueError, match=r"of 1 parameters, such as head.weight, was changed"):
        ddp.zero_grad_buffer()


# -- T10: in a loop of one's own --


def wrap(model: Any, groups: Any, kind: Any = DistributedDataParallel) -> Any:
    """`model` is the module, and what its wrapper is told."""
    module, options = model
    wrapped = kind(make_config(), DistributedDataParallelConfig(**options), module, False, groups)
    wrapped.zero_grad_buffer()
    return wrapped


def toy(frozen: str = "", **options: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    module = Toy()
    for name, param in module.named_parameters():
        param.requires_grad_(not (frozen and frozen in name))
    for param in module.head.parameters():
        param.allreduce = False
    return module, options


@pytest.mark.parametrize("kind", [DistributedDataParallel, TorchDistributedDataParallel])
def test_t10_a_wrapper_refuses_copies_that_freeze_other_parameters(kind, monkeypatch):
    """Was: layers of one shape were added to each other; others of another met in one message."""
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda *_, **__: None)

    def dense(frozen: str) -> Any:
        module, options = toy(frozen)
        del module.head.weight.allreduce
        return module, options

    found = refusals("dp_cp", dense("layers.0"), dense("layers.1"), lambda *m: wrap(*m, kind))
    assert len(found) == 2 and all("9 of 11 parameters require a gradient" in t for t in found)
    assert "(frozen: layers.0.weight, layers.0.bias)" in found[0]
    assert refusals("dp_cp", dense("layers.0"), dense("layers.0"), lambda *m: wrap(*m, kind)) == []


@pytest.mark.parametrize(
    ("name", "first", "second", "words"),
    [
        ("dp_cp", toy(), toy(use_distributed_optimizer=True), "use_distributed_optimizer False"),
        ("dp_cp", toy(), toy(grad_reduce_in_fp32=True), None),  # they are in 64 bits anyway
        ("dp_cp", toy("head"), toy(), None),
        (
            "expt_dp",
            toy("head"),
            toy(),
            "0 of 1 parameters require a gradient (frozen: head.weight)",
        ),
        ("expt_dp", toy("norm"), toy(), None),
    ],
)
def test_t10_dense_weights_and_experts_have_copies_on_other_ranks(name, first, second, words):
    found = refusals(name, first, second, wrap)
    assert len(found) == (0 if words is None else 2)
    assert words is None or words in found[0]


def test_t10_buckets_of_another_size_are_refused():
    """Was: a message of one length met one of another."""
    first, second = (toy(overlap_grad_reduce=True, bucket_size=size) for size in (300, 1000))
    found = refusals("dp_cp", first, second, wrap)
    assert len(found) == 2 and "buckets 4" in found[0] and "buckets 2" in found[1]


def test_t10_an_optimizer_asks_the_other_groups_of_its_model():
    def build(model: torch.nn.Module, groups: Any) -> None:
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=groups)

    for model in (models := [Layers("norm embedding"), Layers("norm")]):
        model.config = make_config()
    found = refusals("tp", *models, build)
    assert len(found) == 2 and "4 parameters require a gradient" in found[1]
    assert refusals("tp", models[0], models[0], build) == []
