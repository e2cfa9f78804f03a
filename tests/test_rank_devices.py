"""What a rank asks of torch follows from its own device and backend, not from what the machine has.

These tests need no GPU. Each replaces the functions of torch that would ask for one.
"""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import tracing, utils
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.optimizer import OptimizerConfig
from minimegatron.core.optimizer.optimizer import make_torch_optimizer
from minimegatron.core.pipeline_parallel import steps
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, TensorMessage
from minimegatron.notebook.live_ranks import choose_place
from minimegatron.training import result_checks, result_words
from minimegatron.training.datasets import data_samplers
from tests.ranks import run_ranks

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "02_tensor_parallel_by_hand.py"


@pytest.fixture
def rank_on(monkeypatch):
    """`rank_on("cpu")`: this rank's device, on a machine where torch finds GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def choose(device: str) -> None:
        monkeypatch.setattr(utils, "_device", torch.device(device))

    return choose


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_of_the_ranks_device(rank_on, monkeypatch, device):
    rank_on(device)
    asked = []
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype: asked.append((kind, dtype)))
    steps.autocast(SimpleNamespace(enable_autocast=True, autocast_dtype=torch.bfloat16))
    assert asked == [(device, torch.bfloat16)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_pinned_for_ranks_on_a_gpu_alone(rank_on, monkeypatch, device):
    rank_on(device)
    made = {}
    monkeypatch.setattr(torch.utils.data, "DataLoader", lambda *_, **how: made.update(how))
    data_samplers.build_pretraining_data_loader(
        [0] * 8, 0, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1
    )
    assert made["pin_memory"] == (device == "cuda")


def test_a_barrier_on_nccl_is_told_the_gpu(rank_on, monkeypatch):
    rank_on("cuda:3")
    calls = []
    monkeypatch.setattr(dist, "barrier", lambda group, device_ids: calls.append(device_ids))
    for backend in ("nccl", "gloo"):
        monkeypatch.setattr(dist, "get_backend", lambda _, backend=backend: backend)
        utils.barrier()
    assert calls == [[3], None]


def send_and_receive_in_a_batch() -> list[tuple[str, bool]]:
    config = ModelParallelConfig(
        pipeline_model_parallel_size=dist.get_world_size(), pipeline_dtype=torch.float32
    )
    p2p, seen = P2PCommunicator(dist.group.WORLD, config), []
    observer = SimpleNamespace(
        start=lambda call: seen.append((call.name, call.arguments["message"].is_send)),
        stop=lambda _: None,
    )
    peer = 1 - dist.get_rank()
    messages = [
        TensorMessage(True, torch.ones(3), peer, "activation"),
        TensorMessage(False, torch.empty(3), peer, "activation"),
    ]
    with tracing.observed_by(observer):
        for work in p2p.start_batch(messages):  # as on NCCL; others take torch's batches too
            work.wait()
    return seen


def test_each_message_of_a_batch_is_seen():
    """The doctor, the tracer and notebook 01 count "p2p-start", and know no batches."""
    both = [("p2p-start", True), ("p2p-start", False)]
    assert run_ranks(send_and_receive_in_a_batch, 2) == [both, both]


def layers_of_the_notebook() -> set[str]:
    """Runs the cell of notebook 02 that builds layers, with its input on another device."""
    cells = NOTEBOOK.read_text().split("# %%\n")
    (cell,) = [cell for cell in cells if "column = ColumnParallelLinear(" in cell]
    A, B = (torch.ones(size, dtype=torch.float64) for size in ((4, 8), (8, 4)))
    names = {"A": A, "B": B, "X": torch.empty(3, 4, device="meta"), "torch": torch, "world_size": 1}
    exec(cell, names)
    return {str(names[layer].weight.device) for layer in ("column", "row")}


def test_the_layers_of_notebook_02_are_where_their_input_is():
    assert run_ranks(layers_of_the_notebook, 1)[0] == {"meta"}


def test_a_notebook_counts_gpus_and_uses_none(monkeypatch):
    def forbidden(*_):
        raise AssertionError("the notebook's own process would hold memory of a GPU")

    for name in ("set_device", "_lazy_init", "is_available", "current_device", "init"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(utils, "_device", None)
    assert choose_place(4) == ("cuda", "nccl", "4 of 4 GPUs, one each")
    assert choose_place(8)[:2] == choose_place(2, "cpu")[:2] == ("cpu", "gloo")
    assert choose_place(8, "cuda") == ("cuda", "gloo", "4 GPUs, which they share")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="torch sees no GPU here"):
        choose_place(1, "cuda")
    with pytest.raises(ValueError, match="device is 'tpu'"):
        choose_place(1, "tpu")
    assert utils._device is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_one_kernel_updates_all_parameters_on_a_gpu_alone(rank_on, monkeypatch, device, rule):
    rank_on(device)
    made = {}
    for name in ("AdamW", "SGD"):
        monkeypatch.setattr(torch.optim, name, lambda _, **how: made.update(how))
    config = OptimizerConfig(optimizer=rule, lr=1.0)
    make_torch_optimizer([{"params": [], "wd_mult": 1.0}], config)
    assert made["fused"] == (device == "cuda")


@pytest.mark.parametrize("value, what", [(math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "Inf")])
def test_a_loss_is_looked_at_once(monkeypatch, value, what):
    """Whether it is NaN and whether it is Inf is one question: the program waits for one answer."""
    asked = []
    is_true = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda t: asked.append(t) or is_true(t))
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=False)
    monkeypatch.setattr(result_checks, "get_args", lambda: args)
    monkeypatch.setattr(result_words, "_where", lambda _: "microbatch 3")
    result_checks.check_loss(torch.tensor(2.5), torch.nn.Identity())
    assert len(asked) == 1
    with pytest.raises(RuntimeError, match=f"the loss is {what} in microbatch 3"):
        result_checks.check_loss(torch.tensor(value), torch.nn.Identity())
