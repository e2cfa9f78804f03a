"""A run that was stopped and goes on is the run that was never stopped."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from minimegatron.core.dist_checkpointing.core import load_common_state_dict
from minimegatron.core.dist_checkpointing.serialization import load_plain_tensors
from minimegatron.core.optimizer import OptimizerConfig
from minimegatron.core.optimizer.optimizer import FP32Optimizer, NamedParamGroup
from minimegatron.training import checkpointing
from minimegatron.training.checkpoint_folder import find_checkpoint
from tests.figures import figure
from tests.groups import PretendGroup, pretend_groups
from tests.ranks import run_ranks
from tests.training.bad_configs import USER_ORDERS
from tests.training.short_runs import PP2, PP4, TP2, TP4, VP2, ZERO1, run

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


def newest(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, whole."""
    return load_plain_tensors(find_checkpoint(folder))


# -- Another placement: names are the full model's --

DOWN_AND_UP = f"{PP2} --pipeline-schedule {USER_ORDERS}:down_and_up"


def save_and_load_over_a_v(folder: str) -> list[int]:
    """A step in a loop; then through a V and back, without a step."""
    places = [f"{PP2} {VP2}", DOWN_AND_UP, PP4]
    began = []
    for number, flags in enumerate(places):
        flags += f" --global-batch-size 8 --save {folder}/{number}"
        load = f"--load {folder}/{number - 1}" if number else ""
        began.append(run(f"{flags} {load}", 1)["began"])
    return began


def test_a_checkpoint_of_one_placement_loads_at_another(tmp_path):
    assert run_ranks(save_and_load_over_a_v, 4, str(tmp_path))[0] == [0, 1, 1]
    loop, v, line = (newest(tmp_path / str(number)) for number in range(3))
    places_differ = {name for name in {*loop, *v, *line} if name.startswith("rng.")}
    for name in {*loop} - places_differ:
        assert torch.equal(loop[name], v[name]) and torch.equal(loop[name], line[name]), name
    assert {*loop} - places_differ == {*v} - places_differ == {*line} - places_differ


# -- The same layout: not one bit differs --

SAME_LAYOUT = [
    # steps, flags of both halves, flags of the second half only, which change no bit
    (6, f"{TP2} {PP2} {DROPOUT}", ""),
    (4, f"{TP2} {DROPOUT} --data-parallel-random-init", ""),
    (4, f"{TP2} {DROPOUT} --bf16", ZERO1),
    (4, f"{TP2} {ZERO1} {DROPOUT} --swiglu --dataloader-type cyclic --rampup-batch-size 2 2 8", ""),
    (4, f"{PP2} {ZERO1} {DROPOUT} --bf16 --overlap-grad-reduce --overlap-param-gather", ""),
    (
        4,
        f"{PP2} {VP2} {ZERO1} {DROPOUT} --fp16 --initial-loss-scale 4096 --loss-scale-window 2",
        "",
    ),
]


def stop_and_go_on(folder: str) -> list[tuple[dict, dict, dict]]:
    results = []
    for number, (steps, flags, only_second) in enumerate(SAME_LAYOUT):
        whole, half = f"{folder}/{number}-whole", f"{folder}/{number}-half"
        results.append(
            (
                run(f"{flags} --save {whole}", steps),
                run(f"{flags} --save {half}", steps // 2),
                run(f"{flags} {only_second} --load {half} --save {half}", steps),
            )
        )
    return results


def test_resumed_run_is_bit_identical(tmp_path):
    results = run_ranks(stop_and_go_on, 4, str(tmp_path), timeout=200)[0]
    numbers = []
    for number, (steps, flags, _) in enumerate(SAME_LAYOUT):
        whole, first, second = results[number]
        assert second["began"] == steps // 2
        assert first["losses"] + second["losses"] == whole["losses"], flags
        folders = [find_checkpoint(tmp_path / f"{number}-{kind}") for kind in ("whole", "half")]
        expected, found = map(load_plain_tensors, folders)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), (flags, name)
        numbers = [load_common_state_dict(folder) for folder in folders]
        for common in numbers:
            assert common.pop("args")["training"]["train_iters"] == 20
        assert numbers[0] == numbers[1]
    assert numbers[0]["optimizer"]["grad_scaler"]["scale"] != 4096


# -- Other layouts: the same to rounding --

IN_A_V = f"{PP2} {ZERO1} --pipeline-schedule {USER_ORDERS}:fold"
CHAIN = [
    # ranks, [(flags, up to which iteration)]
    (4, [(f"{TP2} {PP2}", 10), (PP4, 13), (f"{PP2} {VP2} {ZERO1}", 15), (IN_A_V, 16)]),
    (8, [(f"{TP4} {ZERO1} --overlap-grad-reduce --overlap-param-gather", 18)]),
    (1, [("", 20)]),
]


def run_chain(folder: str, runs: list[tuple[str, int]], whole: bool) -> list[dict]:
    results = []
    if whole:
        results.append(run(f"{TP2} {PP2} {NO_DROPOUT} --save {folder}/whole", 20, double=True))
    chained = f"{NO_DROPOUT} --load {folder}/chain --save {folder}/chain"
    return results + [run(f"{flags} {chained}", stop, double=True) for flags, stop in runs]


def test_resharded_run_is_the_same(tmp_path):
    """tp2 pp2 -> pp4 -> pp2 vp2 dp2 -> pp2 in a V -> tp4 dp2 with ZeRO-1 -> one process, in float64."""
    losses, whole = [], None
    for number, (world_size, runs) in enumerate(CHAIN):
        results = run_ranks(run_chain, world_size, str(tmp_path), runs, number == 0, timeout=200)[0]
        if number == 0:
            whole = results.pop(0)
        losses += [loss for result in results for loss in result["losses"]]
    assert len(losses) == 20
    assert losses == pytest.approx(whole["losses"], abs=1e-9, rel=0)
    assert losses[-1] < losses[0] - 0.5
    expected, found = newest(tmp_path / "whole"), newest(tmp_path / "chain")
    worst = 0.0
    for name, tensor in expected.items():
        if not name.startswith("rng."):
            assert tensor.dtype == torch.float64
            worst = max(worst, (tensor - found[name]).abs().max().item())
    figure(f"largest difference after five re-shardings: {worst:.2g}")
    assert worst <= 1e-9


# -- Other precisions, other vocabularies, parts of a checkpoint --


def convert_between(folder: str) -> list[dict]:
    flags = f"{TP2} {DROPOUT}"
    half, full = f"{folder}/half", f"{folder}/full"
    run(f"{flags} --bf16 --save {half}", 2)
    run(f"{flags} --load {half} --save {full}", 2)
    run(f"{flags} --bf16 --load {full} --save {folder}/again", 2)
    run(f"{flags} --bf16 {ZERO1} --load {half} --no-load-optim --save {folder}/weights", 2)
    run(f"{flags} --load {half} --padded-vocab-size 520 --save {folder}/longer", 2)
    run(f"{flags} --load {folder}/longer --padded-vocab-size 258 --save {folder}/shorter", 2)
    started = [
        run(f"{flags} --load {half} --finetune --optimizer sgd", 1),
        run(f"{flags} --no-save-optim --no-save-rng --save {folder}/bare", 2),
        run(f"{flags} --load {folder}/bare --no-load-optim --no-load-rng", 3),
        run(f"{flags} --load {folder}/new --save {folder}/new", 1),
        run(f"{flags} --load {folder}/new --save {folder}/new --keep-last 2 --save-interval 1", 2),
        run(f"{flags} --load {folder}/new --save {folder}/new --keep-last 2", 3),
        run(f"{flags} --load {folder}/new --save {folder}/new --keep-last 2", 3),
    ]
    return started


def test_parts_of_a_checkpoint(tmp_path):
    started = run_ranks(convert_between, 2, str(tmp_path), timeout=200)[0]
    half, full, again = (newest(tmp_path / name) for name in ("half", "full", "again"))
    weights = newest(tmp_path / "weights")
    for name in [name for name in half if name.startswith("model.")]:
        main = f"optimizer.state.fp32_param.{name.removeprefix('model.')}"
        # bf16 -> fp32 takes the main parameters, fp32 -> bf16 makes them of the weights.
        assert torch.equal(full[name], half[main])
        assert torch.equal(again[main], half[main])
        assert torch.equal(again[name], half[name])
        # Without optimizer state, the main parameters are the rounded weights.
        assert torch.equal(weights[main], half[name].float())
    # A vocabulary padded to another length keeps its real rows.
    longer, shorter = newest(tmp_path / "longer"), newest(tmp_path / "shorter")
    for name in ("model.{}", "optimizer.state.exp_avg.{}"):
        name = name.format("embedding.word_embeddings.weight")
        assert longer[name].shape == (520, 16) and shorter[name].shape == (258, 16)
        assert torch.equal(longer[name][:512], full[name])
        assert torch.equal(shorter[name], full[name][:258])
    assert [result["began"] for result in started] == [0, 0, 2, 0, 1, 2, 3]
    assert sorted(os.listdir(tmp_path / "new")) == [
        "iter_0000002",
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    ]


# -- Updates of each weight --


class Layers(torch.nn.Module):
    """Some of the layers "0", "1" and "2"."""

    def __init__(self, numbers: list[int]):
        super().__init__()
        for number in numbers:
            self.add_module(str(number), torch.nn.Linear(2, 2))


def steps_over_a_change_of_layout() -> dict[str, int]:
    """Rank 0 saves layers 0 and 1, rank 1 saves layer 2; then both have all, and take the steps."""
    config, groups = OptimizerConfig(lr=1e-2), pretend_groups(mp=PretendGroup())

    def build(numbers: list[int]) -> tuple[Layers, FP32Optimizer]:
        module = Layers(numbers)
        named = [(f"model0.{name}", param) for name, param in module.named_parameters()]
        optimizer = FP32Optimizer([NamedParamGroup(named)], config, None, groups)
        optimizer.initialize_state()
        return module, optimizer

    here, optimizer = build([0, 1] if torch.distributed.get_rank() == 0 else [2])
    optimizer.set_step(7, {"model0.1.weight": 3, "model0.2.bias": 0})
    with mock.patch.object(checkpointing, "get_args", lambda: SimpleNamespace(optimizer="adam")):
        numbers = checkpointing._optimizer_numbers([here], optimizer)
    whole, resumed = build([0, 1, 2])
    checkpointing._take_optimizer_numbers([whole], resumed, json.loads(json.dumps(numbers)))
    return resumed.get_steps()


def test_s11_the_updates_of_each_weight_are_in_the_checkpoint():
    for steps in run_ranks(steps_over_a_change_of_layout, 2):
        assert len(steps) == 6
        others = {name: step for name, step in steps.items() if step != 7}
        assert others == {"model0.1.weight": 3, "model0.2.bias": 0}
