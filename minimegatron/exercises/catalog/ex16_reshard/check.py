"""Checks the boxes: of single tensors, then of a whole run saved at one layout, loaded at another.

Called by: the exercises' engine, on 4 ranks. Calls: the checkpoint code, `bench_gpt`.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.dist_checkpointing import serialization
from minimegatron.core.dist_checkpointing.core import CheckpointingException
from minimegatron.core.dist_checkpointing.mapping import ShardedTensor
from minimegatron.core.tensor_parallel.sharding import (
    full_shape,
    set_tensor_model_parallel_attributes,
    shard_parameter,
)
from minimegatron.doctor.folders import make_folder, remove_folder
from minimegatron.exercises.bench_gpt import GptStep, StepCase, on_these_ranks, one_process
from minimegatron.exercises.check import Case, Result, Wrong, check_numbers, installed
from minimegatron.training.checkpointing import sharded_model_state, sharded_optimizer_state

SYMBOL = "minimegatron.core.dist_checkpointing.mapping.make_sharded_tensors"


def cases(seed: int) -> list[Case]:
    """Single tensors, from plain to stacked ranges; then two moves between layouts."""
    draw = random.Random(seed)
    row, column = 2 * draw.randint(2, 4), 2 * draw.randint(2, 4)
    tensors = [
        ("cut along dimension 0", (row, column), 0, 1, 1),
        ("cut along dimension 1", (row, column), 1, 1, 1),
        ("not cut", (row, column), -1, 1, 1),
        ("a bias, cut", (2 * row,), 0, 1, 1),
        ("stacked, cut along dimension 0", (4 * draw.randint(1, 3), column), 0, 2, 1),
        ("cut along dimension 1, in ranges", (row, column), 1, 1, 3),
        ("stacked, cut along dimension 0, in ranges", (4 * draw.randint(1, 3), column), 0, 2, 4),
        ("not cut, in ranges", (row, column), -1, 1, 2),
    ]
    single = [
        Case(name, shape=shape, dim=dim, stride=stride, parts=parts)
        for name, shape, dim, stride, parts in tensors
    ]
    both = {"seed": seed, "swiglu": True}
    moves = {
        "tp=2, pp=2 -> 2 stages, 2 replicas with ZeRO-1": (
            StepCase(tp=2, pp=2, num_microbatches=2, num_layers=2, **both),
            StepCase(pp=2, num_microbatches=1, num_layers=2, distributed_optimizer=True, **both),
        ),
        "tp=2, 2 replicas with ZeRO-1 -> 4 stages": (
            StepCase(tp=2, num_microbatches=1, num_layers=4, distributed_optimizer=True, **both),
            StepCase(pp=4, num_microbatches=2, num_layers=4, **both),
        ),
    }
    return single + [Case(name, move=move) for name, move in moves.items()]


def run(student: ModuleType, case: Case) -> Result:
    """Single tensors need one rank; a move needs all."""
    if "shape" not in case.values:
        return _check_move(student, case)
    if dist.get_rank() > 0:
        return Result({})
    return _check_tensor(student.make_sharded_tensors, case)


# -- Single tensors --


def _check_tensor(make: Callable, case: Case) -> Result:
    tp_size = 2
    full = torch.arange(torch.Size(case.shape).numel()).view(case.shape)
    saved, num_boxes = torch.zeros(case.shape, dtype=torch.int64), 0
    for tp_rank in range(tp_size):
        piece = _piece(full, case, tp_rank, tp_size)
        length = -(-piece.numel() // case.parts)
        for start in range(0, piece.numel(), length):
            data = piece.reshape(-1)[start : start + length]
            data = data.view(piece.shape) if case.parts == 1 else data
            boxes = make("weight", piece, data, tp_rank, tp_size, start)
            who = f"tp rank {tp_rank} of {tp_size}, elements {start} to {start + data.numel()}"
            who += f" (start={start})" if start else ""
            _check_boxes(boxes, full, data, who)
            num_boxes += len(boxes)
            for box in boxes:
                if box.replica_id == 0:
                    saved[_slices(box)] += 1
        _check_replica(make, piece, tp_rank, tp_size)
    _check_saved_once(saved, case)
    return Result({"boxes": num_boxes})


def _piece(full: torch.Tensor, case: Case, tp_rank: int, tp_size: int) -> torch.Tensor:
    like = torch.empty(0)
    set_tensor_model_parallel_attributes(like, case.dim >= 0, case.dim, case.stride)
    piece = shard_parameter(full, like, tp_rank, tp_size).clone()
    set_tensor_model_parallel_attributes(piece, case.dim >= 0, case.dim, case.stride)
    assert full_shape(piece, tp_size) == full.shape
    return piece


def _slices(box: ShardedTensor) -> tuple[slice, ...]:
    return tuple(
        slice(begin, begin + size)
        for begin, size in zip(box.global_offset, box.data.shape, strict=True)
    )


def _check_boxes(boxes: Any, full: torch.Tensor, data: torch.Tensor, who: str) -> None:
    if not isinstance(boxes, list) or not all(isinstance(box, ShardedTensor) for box in boxes):
        raise Wrong(f"{who}: it returned {boxes!r}; return a list of ShardedTensor")
    for box in boxes:
        if not isinstance(box.data, torch.Tensor):
            raise Wrong(f"{who}: a box's data is {box.data!r}; make it a view into `data`")
        where = f"{who}: the box at {tuple(box.global_offset)}, size {tuple(box.data.shape)},"
        if box.key != "weight" or tuple(box.global_shape) != tuple(full.shape):
            raise Wrong(
                f"{where} is of {box.key!r} {tuple(box.global_shape)}; the full tensor is 'weight' "
                f"{tuple(full.shape)}"
            )
        if len(box.global_offset) != full.dim() or box.data.dim() != full.dim():
            raise Wrong(f"{where} must have {full.dim()} dimensions, as the full tensor has")
        there = full[_slices(box)]
        if there.shape != box.data.shape:
            raise Wrong(f"{where} reaches beyond the full tensor, {tuple(full.shape)}")
        if not torch.equal(there, box.data):
            raise Wrong(_misplaced(where, box, full))
        if box.data.untyped_storage().data_ptr() != data.untyped_storage().data_ptr():
            raise Wrong(f"{where} holds a copy: what is loaded into it is lost. Make it a view.")
    held = sum(box.data.numel() for box in boxes)
    if held != data.numel():
        raise Wrong(f"{who}: its boxes hold {held} elements, but `data` has {data.numel()}")


def _misplaced(where: str, box: ShardedTensor, full: torch.Tensor) -> str:
    off = (full[_slices(box)] != box.data).nonzero()[0]
    inside = tuple(int(i) for i in off)
    here = int(box.data[inside])
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(here), full.shape))
    claimed = tuple(begin + i for begin, i in zip(box.global_offset, inside, strict=True))
    return (
        f"{where} is at the wrong place: its element {inside} would be {claimed} of the full tensor, "
        f"but it is {place}\n"
        "Whoever loads that box gets another box's numbers, of the right shape. Look at dimension "
        f"{next(i for i, (a, b) in enumerate(zip(claimed, place, strict=True)) if a != b)}: where "
        "does this rank's piece (with a stride: each block of it) begin there? And which elements of "
        "the piece are these: they begin at `start`."
    )


def _check_replica(make: Callable, piece: torch.Tensor, tp_rank: int, tp_size: int) -> None:
    boxes = make("weight", piece, piece, tp_rank, tp_size, replica_id=1)
    if any(box.replica_id == 0 for box in boxes):
        raise Wrong(
            f"tp rank {tp_rank} of {tp_size}: called with replica_id=1 (a second copy, as of a tied "
            "embedding), it gives boxes with replica_id 0: two ranks would save the same"
        )


def _check_saved_once(saved: torch.Tensor, case: Case) -> None:
    wrong = (saved != 1).nonzero()
    if not len(wrong):
        return
    place = tuple(int(i) for i in wrong[0])
    times = int(saved[place])
    why = "it would be lost" if times == 0 else "several ranks would write the same box"
    text = f"element {place} of the full tensor is saved by {times} ranks: {why}"
    if case.dim < 0:
        text += (
            "\nThis tensor is not cut: every tensor-parallel rank holds all of it. Only tp_rank 0 "
            "may save (replica_id 0); the others use their tp_rank as replica_id."
        )
    raise Wrong(text)


# -- A move from one layout to another --


def _check_move(student: ModuleType, case: Case) -> Result:
    before, after = case.move
    folder = [str(make_folder("minimegatron-reshard-")) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    try:
        with installed(student.make_sharded_tensors, SYMBOL):
            return _move(before, after, folder[0])
    except CheckpointingException as error:
        raise Wrong(f"with your boxes the checkpoint does not work: {error}") from error
    finally:
        if dist.get_rank() == 0:
            remove_folder(Path(folder[0]))


def _move(before: StepCase, after: StepCase, folder: str) -> Result:
    old = on_these_ranks(before)
    reference = one_process(before, old.groups.dp.size())
    for step in (old, reference):
        step.forward_backward()
        step.optimizer.step()
    tensors = [*sharded_model_state(old.chunks)]
    tensors += sharded_optimizer_state(old.chunks, old.optimizer)
    serialization.save(tensors, {}, f"{folder}/saved")
    num_steps = old.optimizer.get_step()

    # Other initial weights, so that what is not loaded is seen.
    new = on_these_ranks(replace(after, seed=after.seed + 1))
    new.data = _data_of(reference, new)
    saved_keys = set(serialization.load_tensors_metadata(f"{folder}/saved"))
    wanted = [*sharded_model_state(new.chunks)]
    wanted += sharded_optimizer_state(new.chunks, new.optimizer, saved_keys)
    serialization.load(wanted, f"{folder}/saved")
    new.optimizer.set_step(num_steps)
    new.meet()
    _compare(new, reference, "after loading")
    for step in (new, reference):
        step.forward_backward()
        step.optimizer.step()
    new.meet()
    _compare(new, reference, "one step later")
    return Result(
        {"tensors": len(saved_keys), "boxes on rank 0": f"{len(tensors)} -> {len(wanted)}"}
    )


def _data_of(reference: GptStep, step: GptStep) -> list:
    """The reference's global batch, divided over the new layout's replicas."""
    dp = step.groups.dp
    return reference.data[dp.rank() :: dp.size()]


def _compare(step: GptStep, reference: GptStep, when: str) -> None:
    full = dict(reference.parameters())
    for name, param in step.parameters():
        wanted = step.mine(full[name].detach(), param)
        check_numbers(f"{name} {when}", param.detach(), wanted, step.place())
    states = {id(shard.model_param): shard for shard in reference.optimizer.shards}
    names = {id(param): name for name, param in step.parameters()}
    for shard in step.optimizer.shards:
        name = names[id(shard.model_param)]
        whole = reference.optimizer.parameter_state(states[id(full[name])])
        for what, tensor in step.optimizer.parameter_state(shard).items():
            piece = step.mine(whole[what].view(full[name].shape), shard.model_param)
            wanted = piece.reshape(-1)[shard.start : shard.end]
            check_numbers(f"{what} of {name} {when}", tensor.reshape(-1), wanted, step.place())
