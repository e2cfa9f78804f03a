"""A model with experts, saved by ranks that share them one way and loaded by ranks that do another.

Weights, biases of the routers and the optimizer's moments come back to the bit; the step after is the
same as without the checkpoint.
"""

from pathlib import Path

import torch

from minimegatron.core import dist_checkpointing
from minimegatron.core.dist_checkpointing import load_plain_tensors
from minimegatron.core.dist_checkpointing.serialization import load_tensors
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.training.checkpointing import sharded_model_state, sharded_optimizer_state
from tests.parity import Case, batches, build, make_groups, train_steps
from tests.ranks import run_ranks

SAME = {"experts": 4, "num_layers": 2, "balance": "bias", "llama": True, "shared": True}
PAIRS = Case(dp=4, ep=2, M=1, dist_opt=True, **SAME)
LAYOUTS = [
    PAIRS,
    Case(dp=4, ep=4, M=1, **SAME),
    Case(tp=2, dp=2, sp=True, ep=2, M=2, dist_opt=True, **SAME),
    Case(tp=2, dp=2, sp=True, ep=1, etp=2, M=2, **SAME),
    Case(pp=2, dp=2, ep=2, M=2, **SAME),
]


def built(case: Case):
    make_groups(case)
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return groups, *build(case, groups)


def steps(case: Case, groups, chunks, optimizer, number: int) -> list[float]:
    data = batches(4)[groups.dp.rank() :: case.dp]
    return [norm for _, _, norm in train_steps(case, chunks, optimizer, groups, data, number)]


def state(chunks, optimizer, keys=None):
    yield from sharded_model_state(chunks)
    yield from sharded_optimizer_state(chunks, optimizer, keys)


def saved(chunks, optimizer, folder: Path) -> dict[str, torch.Tensor]:
    """Writes the checkpoint; returns all of it, whole."""
    dist_checkpointing.save_tensors(state(chunks, optimizer), {}, folder)
    return load_plain_tensors(folder)


def from_each_to_each(folder: str) -> list[str]:
    return from_one_to_each(PAIRS, LAYOUTS, folder)


def from_one_to_each(one: Case, layouts: list[Case], folder: str) -> list[str]:
    """Saved by `one`, loaded by each layout: the same bits, and the next step's norm. Names in it."""
    groups, chunks, optimizer = built(one)
    steps(one, groups, chunks, optimizer, 2)
    first = Path(folder, "first")
    whole = saved(chunks, optimizer, first)
    wanted = steps(one, groups, chunks, optimizer, 1)
    for number, case in enumerate(layouts):
        groups, chunks, optimizer = built(case)
        load_tensors(state(chunks, optimizer, set(whole)), first)
        again = saved(chunks, optimizer, Path(folder, f"of layout {number}"))
        assert again.keys() == whole.keys(), case
        differing = [name for name in whole if not torch.equal(again[name], whole[name])]
        assert differing == [], (case, differing)
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
        (norm,) = steps(case, groups, chunks, optimizer, 1)
        assert abs(norm - wanted[0]) < 1e-10, (case, norm, wanted)
    return sorted(whole)


def test_saved_by_one_layout_and_loaded_by_another(tmp_path):
    names = run_ranks(from_each_to_each, 4, str(tmp_path), timeout=120)[0]
    for layer in range(2):
        mlp = f"decoder.layers.{layer}.mlp"
        assert f"model.{mlp}.router.expert_bias" in names
        for expert in range(SAME["experts"]):
            name = f"{mlp}.experts.local_experts.{expert}.linear_fc1.weight"
            assert {f"model.{name}", f"optimizer.state.exp_avg.{name}"} <= set(names)
