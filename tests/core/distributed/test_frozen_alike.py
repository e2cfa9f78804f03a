"""Ranks that would freeze different parameters are told so, and a wrapped model freezes no more."""

from unittest import mock

import pytest
import torch

from minimegatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from minimegatron.core.distributed.frozen_alike import check_frozen_alike
from minimegatron.core.process_groups_config import ProcessGroupCollection
from tests.core.distributed.common import Toy, make_config
from tests.fake_transport import FakeGroup
from tests.groups import PretendGroup


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


def refusals(name: str, first: Layers, second: Layers) -> list[str]:
    """What two ranks of the group `name` raise: each sees the greater of both their numbers."""
    sent, raised = [], []

    def note(bounds, group, op):
        sent.append(bounds.clone())

    def answer(bounds, group, op):
        bounds.copy_(torch.maximum(bounds, sent.pop(0)))

    for rank, (mine, other) in enumerate([(first, second), (second, first)]):
        groups = ProcessGroupCollection(**{name: PretendGroup(rank, 2)})
        for model, reduce in ((other, note), (mine, answer)):
            with (
                mock.patch("minimegatron.core.distributed.frozen_alike.all_reduce", reduce),
                mock.patch("torch.distributed.ProcessGroup", PretendGroup),
            ):
                try:
                    check_frozen_alike([model], groups)
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
