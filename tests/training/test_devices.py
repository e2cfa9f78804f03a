"""The ranks agree on a device and a backend before any process group exists."""

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from minimegatron.core import utils
from minimegatron.training import devices, process_group
from minimegatron.training.devices import agree_on_device, choose_device, is_supported
from tests.ways_of_a_gpu import ways_of_a_gpu

EIGHT = [f"GPU-{number}" for number in range(8)]


@pytest.mark.parametrize(
    "gpus, device, backend, expected",
    [
        (EIGHT, "auto", None, ("cuda", "nccl")),
        (EIGHT, "cuda", None, ("cuda", "nccl")),
        (EIGHT, "auto", "gloo", ("cuda", "gloo")),
        (EIGHT, "cpu", None, ("cpu", "gloo")),
        # A laptop with one GPU: four ranks would be slower on it than on the CPU.
        (["GPU-0"] * 4, "auto", None, ("cpu", "gloo")),
        (["GPU-0"] * 4, "cuda", None, ("cuda", "gloo")),
        (["", ""], "auto", None, ("cpu", "gloo")),
        # Two machines, one of them without GPUs, or with fewer than ranks.
        ([*EIGHT, "", ""], "auto", None, ("cpu", "gloo")),
        ([*EIGHT, "GPU-x", "GPU-x"], "auto", None, ("cpu", "gloo")),
    ],
)
def test_what_is_chosen(gpus, device, backend, expected):
    assert choose_device(gpus, device, backend) == expected


@pytest.mark.parametrize(
    "gpus, device, backend, words",
    [
        ([*EIGHT, ""], "auto", "nccl", "nccl needs a GPU for each of the 9 ranks.*rank 8 has no"),
        (["", "GPU-0", ""], "cuda", None, r"--device cuda needs.*3 ranks, but 2 of them \(0, 2\)"),
        (["GPU-0", "GPU-1", "GPU-0"], "auto", "nccl", r"\(0, 2\) have a GPU that another rank has"),
        ([""] * 20, "cuda", None, r"20 of them \(0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\)"),
    ],
)
def test_what_cannot_be_names_the_ranks(gpus, device, backend, words):
    with pytest.raises(ValueError, match=words):
        choose_device(gpus, device, backend)


def test_without_nccl_own_gpus_use_gloo():
    assert choose_device(EIGHT, "auto", None, has_nccl=False) == ("cuda", "gloo")
    with pytest.raises(ValueError, match="torch was built without NCCL"):
        choose_device(EIGHT, "auto", "nccl", has_nccl=False)


def agree(gpus: list[str], device: str, backend: str | None) -> list:
    store = dist.HashStore()

    def answer(rank: int):
        try:
            return agree_on_device(store, rank, len(gpus), gpus[rank], device, backend)
        except ValueError as reason:
            return str(reason)

    with ThreadPoolExecutor(len(gpus)) as ranks:
        return list(ranks.map(answer, range(len(gpus))))


def test_all_ranks_hear_the_same(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert agree(EIGHT, "auto", None) == [("cuda", "nccl")] * 8
    assert agree([*EIGHT[:3], ""], "auto", None) == [("cpu", "gloo")] * 4
    ((refusal, count),) = Counter(agree([*EIGHT[:3], ""], "auto", "nccl")).items()
    assert count == 4 and "rank 3 has no GPU" in refusal


def test_a_rank_that_does_not_answer_is_named():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match="rank 1 has not said which device"):
        agree_on_device(store, 0, 2, "", "auto", None)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(RuntimeError, match="rank 0 has not said which device"):
        agree_on_device(store, 1, 2, "", "auto", None)


def test_which_gpus_torch_can_use():
    assert is_supported((9, 0), ["sm_80", "sm_90"]) and is_supported((9, 0), ["sm_90a"])
    assert is_supported((12, 0), ["sm_90", "compute_90"])  # translated when it is loaded
    assert not is_supported((12, 0), ["sm_80", "sm_90"])
    assert not is_supported((5, 2), ["sm_70", "compute_70"])
    assert is_supported((9, 0), ["gfx90a"]) and is_supported((8, 0), [])


class Slurm:
    """Stands in for a machine where every rank has a GPU, and torch shows a rank no other GPU."""

    def __init__(self, monkeypatch):
        self.here = threading.local()
        fakes = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_arch_list": lambda: ["sm_90"],
            "get_device_properties": self.properties,
            "set_device": lambda _: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def properties(self, device: int) -> SimpleNamespace:
        assert device == 0, "a rank sees one GPU"
        return SimpleNamespace(uuid=f"uuid of {self.here.rank}", major=9, minor=0)


def arguments(rank: int, num_ranks: int, **others) -> SimpleNamespace:
    """What a rank of one machine is given, as far as it is looked at before groups are made."""
    given = {
        "rank": rank,
        "world_size": num_ranks,
        "local_rank": rank,
        "local_world_size": num_ranks,
        "device": "auto",
        "distributed_backend": None,
        "distributed_timeout_minutes": 1,
        "tensor_model_parallel_size": 1,
        "tf32": False,
        "hang_timeout": None,
        "cuda_graph_impl": "none",
    }
    return SimpleNamespace(**(given | others))


def test_one_visible_gpu_per_process_is_nccl(monkeypatch):
    """`srun --gpus-per-task=1`: every rank counts one GPU, and each has its own."""
    slurm, store, begun = Slurm(monkeypatch), dist.HashStore(), {}
    monkeypatch.setattr(utils, "_device", None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(process_group, "find_each_other", lambda *_: store)

    def begin(backend: str, rank: int, **_) -> None:
        begun[rank] = backend

    monkeypatch.setattr(dist, "init_process_group", begin)

    def start(rank: int) -> None:
        slurm.here.rank = rank
        process_group.init_process_group(arguments(rank, 4))

    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(start, range(4)))
    assert begun == dict.fromkeys(range(4), "nccl")
    assert utils.get_device() == torch.device("cuda", 0)


def test_a_gpu_that_torch_was_not_built_for_is_none(monkeypatch):
    Slurm(monkeypatch).here.rank = 0
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    assert devices.name_of_gpu(0) == ""


@pytest.fixture
def start_one(monkeypatch):
    """`start_one(device="cuda", ...)`: one rank begins; what it asked of matrix products, and CUDA's
    number of connections then."""
    Slurm(monkeypatch).here.rank = 0
    asked = []
    monkeypatch.setattr(utils, "_device", None)
    monkeypatch.setattr(process_group, "find_each_other", lambda *_: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")

    def start(**others) -> tuple[list[str], str | None]:
        asked.clear()
        process_group.init_process_group(arguments(0, 1, **others))
        return list(asked), os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")

    return start


def test_tf32_is_used_on_a_gpu_where_it_is_asked_for(start_one):
    assert start_one(device="cuda")[0] == ["highest"]
    assert start_one(device="cuda", tf32=True)[0] == ["high"]
    assert start_one(device="cpu", tf32=True)[0] == []


def test_kernels_of_tensor_parallel_ranks_begin_in_order(start_one, monkeypatch):
    assert start_one(device="cuda")[1] is None
    seen = []
    name_of_gpu = process_group.name_of_gpu
    monkeypatch.setattr(
        process_group,
        "name_of_gpu",
        lambda rank: seen.append(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]) or name_of_gpu(rank),
    )
    assert start_one(device="cuda", tensor_model_parallel_size=2)[1] == "1"
    assert seen == ["1"], "CUDA was used before it was told"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert start_one(device="cuda", tensor_model_parallel_size=2)[1] == "8"


def test_attention_without_a_fused_kernel_is_told(monkeypatch, capsys):
    monkeypatch.setattr(utils, "_device", torch.device("cpu"))
    devices.warn_of_slow_attention(16, torch.bfloat16)
    with ways_of_a_gpu():
        devices.warn_of_slow_attention(16, torch.bfloat16)  # the CPU has a flash kernel
        assert capsys.readouterr().out == ""
        monkeypatch.setattr(devices, "FUSED", [SDPBackend.CUDNN_ATTENTION])
        devices.warn_of_slow_attention(16, torch.bfloat16)
    said = capsys.readouterr().out
    assert "no fused kernel here for heads of 16 elements in torch.bfloat16" in said
    monkeypatch.setattr(devices, "device_is_asynchronous", lambda: False)
    devices.warn_of_slow_attention(16, torch.bfloat16)
    assert capsys.readouterr().out == ""
