"""Where torch cannot have a group that is written in Python, gloo carries everything, and says so."""

import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import minimegatron.backend
from minimegatron.backend import group
from minimegatron.backend.gloo_inside import make_gloo
from tests.ranks import run_ranks

NAME = f"cpu:{minimegatron.backend.NAME}"


def sum_in_a_group() -> tuple[float, str, list[str]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        group = dist.new_group(backend=NAME)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item(), type(group).__name__, [str(warning.message) for warning in warned]


def sum_where_torch_lacks_a_method() -> tuple[float, str, list[str]]:
    group.why_not = lambda: "torch 9.9 has no ProcessGroup._register_backend"
    return sum_in_a_group()


def test_this_torch_can():
    assert group.why_not() is None and minimegatron.backend.is_available()
    for total, kind, _ in run_ranks(sum_in_a_group, 2):
        assert (total, kind) == (2.0, "SharedMemoryGroup")


def test_a_torch_that_cannot_has_gloo_and_one_sentence():
    for total, kind, said in run_ranks(sum_where_torch_lacks_a_method, 2):
        assert (total, kind) == (2.0, "ProcessGroup")
        assert said == [
            "torch 9.9 has no ProcessGroup._register_backend; gloo carries everything in this group"
        ]


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.delattr(dist.ProcessGroupGloo, "create_default_device")
    words = group.why_not()
    assert words == f"torch {torch.__version__} has no ProcessGroupGloo.create_default_device"


@pytest.mark.parametrize(("told", "number"), [("lo", 1), ("lo,lo", 2), (None, 1)])
def test_gloo_inside_uses_the_interfaces_that_gloo_is_told(monkeypatch, told, number):
    """Another machine may reach no other; and on one machine, nobody else shall reach it."""
    asked = []
    create = dist.ProcessGroupGloo.create_device

    def noted(**how):
        asked.append(how["interface"])
        return create(**how)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", noted)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if told is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", told)
    options = make_gloo(dist.HashStore(), 0, 1, timedelta(seconds=5)).options
    assert asked == (told.split(",") if told else [])
    assert (len(options._devices), options._threads) == (number, 2 * number)
