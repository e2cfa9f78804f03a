"""Checks the boxes: of single tensors, then of a whole run saved at one layout, loaded at another."""

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import dist_checkpointing
from minimegatron.core.dist_checkpointing.core import CheckpointingException
from minimegatron.core.dist_checkpointing.mapping import ShardedTensor, boxes_of_range
from minimegatron.core.tensor_parallel.sharding import (
    set_tensor_model_parallel_attributes,
    shard_parameter,
)
from minimegatron.doctor.folders import make_folder, remove_folder
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.bench.feedback_numbers import check_numbers
from minimegatron.exercises.bench.gpt_step import GptStep, StepCase, batches, on_these_ranks
from minimegatron.exercises.bench.gpt_step_judge import Reference
from minimegatron.exercises.check import Case, Result, Wrong, data_seed, installed
from minimegatron.training.checkpointing import sharded_model_state, sharded_optimizer_state

OURS = "minimegatron.core.dist_checkpointing.mapping.make_sharded_tensors"
REPLACES = (OURS,)
SINGLE, MOVE = "single tensors", "moves between layouts"
WORLD = 4


def cases(seed: int) -> list[Case]:
    """Single tensors, from plain to stacked ranges; then two moves between layouts."""
    draw, data = random.Random(seed), data_seed(seed)
    # With these rows, ranges begin and end within a row, whatever the number of columns is.
    row, column = draw.choice([4, 8]), 2 * draw.randint(2, 4)
    stacked = 4 * draw.randint(1, 2)
    tensors = [
        ("cut along dimension 0", (row, column), 0, 1, 1, 2),
        ("cut along dimension 1", (row, column), 1, 1, 1, 2),
        ("not cut", (row, column), -1, 1, 1, 2),
        ("a bias, cut", (2 * row,), 0, 1, 1, 2),
        ("stacked, cut along dimension 0", (stacked, column), 0, 2, 1, 2),
        ("cut along dimension 1, in ranges", (row, column), 1, 1, 3, 2),
        ("stacked, cut along dimension 0, in ranges", (stacked, column), 0, 2, 3, 2),
        ("not cut, in ranges", (row, column), -1, 1, 3, 2),
        ("cut for 4 ranks, in ranges", (row, column), 0, 1, 3, 4),
        ("three stacked, cut along dimension 0 for 3 ranks, in ranges", (18, column), 0, 3, 5, 3),
        ("stacked, cut along dimension 1 for 3 ranks, in ranges", (row, 12), 1, 2, 3, 3),
        ("three dimensions, cut along the middle one, in ranges", (3, 8, column), 1, 2, 5, 2),
        ("four stacked, cut along dimension 0", (16, column), 0, 4, 1, 2),
        ("cut for 1 rank: whole, in ranges", (row, column), 0, 1, 3, 1),
    ]
    single = [
        Case(name, part=SINGLE, shape=shape, dim=dim, stride=stride, parts=parts, tp=tp)
        for name, shape, dim, stride, parts, tp in tensors
    ]
    both = {"seed": data, "swiglu": True}
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
    return single + [
        Case(name, part=MOVE, before=before.values, after=after.values)
        for name, (before, after) in moves.items()
    ]


def run(student: ModuleType, case: Case) -> Any:
    """Single tensors need one rank; a move needs all."""
    if case.part == MOVE:
        return _run_move(student, case)
    return _run_tensor(student.make_sharded_tensors, case) if dist.get_rank() == 0 else None


def judge(case: Case, answers: Sequence[Any]) -> Result:
    """Boxes against the full tensor; or weights and Adam's state against one process."""
    return _judge_move(case, answers) if case.part == MOVE else _judge_tensor(case, answers[0])


# -- Single tensors --


def _full(case: Case) -> torch.Tensor:
    """A tensor whose every element says where it is."""
    return torch.arange(torch.Size(case.shape).numel()).view(case.shape)


def _piece(case: Case, tp_rank: int, stride: int) -> torch.Tensor:
    like = torch.empty(0)
    set_tensor_model_parallel_attributes(like, case.dim >= 0, case.dim, stride)
    return shard_parameter(_full(case), like, tp_rank, case.tp)


def _pieces(case: Case, tp_rank: int) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]:
    """A rank's piece, and what of it is saved at a time: (start, data)."""
    piece = _piece(case, tp_rank, case.stride).clone()
    set_tensor_model_parallel_attributes(piece, case.dim >= 0, case.dim, case.stride)
    if case.parts == 1:
        return piece, [(0, piece)]
    length = -(-piece.numel() // case.parts)
    flat = piece.reshape(-1)
    starts = range(0, piece.numel(), length)
    return piece, [(start, flat[start : start + length]) for start in starts]


def _run_tensor(make: Callable, case: Case) -> list[dict[str, Any]]:
    """What every rank's call gives, with rank 1's piece made here too."""
    calls = []
    for tp_rank in range(case.tp):
        piece, parts = _pieces(case, tp_rank)
        for start, data in parts:
            boxes, who = (
                make("weight", piece, data, tp_rank, case.tp, start),
                _who(case, tp_rank, start, data),
            )
            calls.append(_plain(boxes, data, who))
            _check_number(boxes, case, tuple(piece.shape), start, data.numel(), who)
        second = make("weight", piece, piece, tp_rank, case.tp, replica_id=1)
        calls.append(_plain(second, piece, f"tp rank {tp_rank} of {case.tp}, replica_id=1"))
    return calls


def _check_number(
    boxes: list[ShardedTensor], case: Case, shape: tuple[int, ...], start: int, numel: int, who: str
) -> None:
    """Each box of the piece, once for each of the stacked matrices, is enough. Not a matter of time."""
    most = len(list(boxes_of_range(shape, start, start + numel))) * case.stride
    if len(boxes) > most:
        raise Wrong(
            f"{who}: it returned {num_of(len(boxes), 'box', 'boxes')}, and {most} "
            f"{'is' if most == 1 else 'are'} enough\nEach box is an entry of the checkpoint, and is "
            "looked up and copied by itself. How many would a matrix of 10,000 x 10,000 have in your "
            "way? What do neighbouring elements have in common?"
        )


def _who(case: Case, tp_rank: int, start: int, data: torch.Tensor) -> str:
    who = f"tp rank {tp_rank} of {case.tp}, elements {start} to {start + data.numel()}"
    return f"{who} (start={start})" if start else who


def _plain(boxes: Any, data: torch.Tensor, who: str) -> list[dict[str, Any]]:
    if not isinstance(boxes, list) or not all(isinstance(box, ShardedTensor) for box in boxes):
        raise Wrong(f"{who}: it returned {_kind(boxes)}; return a list of ShardedTensor")
    memory = data.untyped_storage().data_ptr()
    for box in boxes:
        if not isinstance(box.data, torch.Tensor):
            kind = _kind(box.data)
            raise Wrong(f"{who}: a box's data is {kind}; make it a view into `data`")
    return [
        {
            "key": str(box.key),
            "data": box.data.detach().clone(),
            "is_view": box.data.untyped_storage().data_ptr() == memory,
            "global_shape": [int(size) for size in box.global_shape],
            "global_offset": [int(place) for place in box.global_offset],
            "replica_id": int(box.replica_id),
        }
        for box in boxes
    ]


def _kind(value: Any) -> str:
    if value is None:
        return "None (was `return` forgotten?)"
    if isinstance(value, list):
        odd = next(one for one in value if not isinstance(one, ShardedTensor))
        return f"a list that holds {'None' if odd is None else f'a {type(odd).__name__}'}"
    return f"a {type(value).__name__}"


def _judge_tensor(case: Case, calls: list[list[dict[str, Any]]]) -> Result:
    said = iter(calls)
    saved, num_boxes = torch.zeros(case.shape, dtype=torch.int64), 0
    for tp_rank in range(case.tp):
        for start, data in _pieces(case, tp_rank)[1]:
            boxes = next(said)
            _judge_boxes(boxes, case, tp_rank, start, data)
            num_boxes += len(boxes)
            for box in boxes:
                if box["replica_id"] == 0:
                    saved[_slices(box)] += 1
        if any(box["replica_id"] == 0 for box in next(said)):
            raise Wrong(
                f"tp rank {tp_rank} of {case.tp}: called with replica_id=1 (a second copy, as of a "
                "tied embedding), it gives boxes with replica_id 0: two ranks would save the same"
            )
    _judge_saved_once(saved, case)
    return Result({"boxes": num_boxes})


def _slices(box: dict[str, Any]) -> tuple[slice, ...]:
    return tuple(
        slice(begin, begin + size)
        for begin, size in zip(box["global_offset"], box["data"].shape, strict=True)
    )


def _judge_boxes(
    boxes: list[dict[str, Any]], case: Case, tp_rank: int, start: int, data: torch.Tensor
) -> None:
    full, who = _full(case), _who(case, tp_rank, start, data)
    for box in boxes:
        offset, shape = tuple(box["global_offset"]), tuple(box["data"].shape)
        where = f"{who}: the box at {offset}, size {shape},"
        if box["key"] != "weight" or tuple(box["global_shape"]) != tuple(full.shape):
            raise Wrong(
                f"{where} is of {box['key']!r} {tuple(box['global_shape'])}; the full tensor is "
                f"'weight' {tuple(full.shape)}"
            )
        if len(offset) != full.dim() or len(shape) != full.dim():
            raise Wrong(f"{where} must have {full.dim()} dimensions, as the full tensor has")
        there = full[_slices(box)]
        if there.shape != box["data"].shape:
            raise Wrong(f"{where} reaches beyond the full tensor, {tuple(full.shape)}")
        if not torch.equal(there, box["data"]):
            cause = _cause(case, tp_rank, start, data, boxes)
            raise Wrong(_misplaced(where, box, full, cause or _advice(start)))
        if not box["is_view"]:
            raise Wrong(
                f"{where} holds a copy: what is loaded into it is lost\n"
                "A box is filled where its data lies. Which of your operations makes new memory?"
            )
    held = sum(box["data"].numel() for box in boxes)
    if held != data.numel():
        raise Wrong(
            f"{who}: its boxes hold {num_of(held, 'element')}, but `data` has {data.numel()}"
        )


def _misplaced(where: str, box: dict[str, Any], full: torch.Tensor, why: str) -> str:
    inside = tuple(int(i) for i in (full[_slices(box)] != box["data"]).nonzero()[0])
    here = torch.tensor(int(box["data"][inside]))
    place = tuple(int(i) for i in torch.unravel_index(here, full.shape))
    claimed = tuple(begin + i for begin, i in zip(box["global_offset"], inside, strict=True))
    return (
        f"{where} is at the wrong place: it holds element {place} of the full tensor, but puts it at "
        f"{claimed}\nWhoever loads that box gets another box's numbers, of the right shape.\n{why}"
    )


def _advice(start: int) -> str:
    words = (
        "Where does this rank's piece (with a stride: each block of it) begin in the full tensor?"
    )
    if start:
        words += f" And `data` begins at element {start} of the piece, not at its first."
    return words


def _cause(
    case: Case, tp_rank: int, start: int, data: torch.Tensor, boxes: list[dict[str, Any]]
) -> str:
    """What was not used, if the boxes are where they would be without it; or ""."""
    full, claimed = _full(case), {}
    for box in boxes:
        if not len(box["global_offset"]) == box["data"].dim() == full.dim():
            return ""
        there = full[_slices(box)]
        if there.shape != box["data"].shape:
            return ""
        values = (tensor.reshape(-1).tolist() for tensor in (box["data"], there))
        claimed |= dict(zip(*values, strict=True))
    ideas = [
        (
            (tp_rank, case.stride, 0),
            f"Your boxes are those of elements 0 to {data.numel()} of the piece: you did not use "
            f"`start`. `data` begins at element {start}.",
        ),
        (
            (tp_rank, 1, start),
            "Your boxes are those of one matrix (stride 1). This piece has partition_stride "
            f"{case.stride}: its {case.stride} blocks lie apart in the full tensor, each in a matrix "
            "of its own.",
        ),
        (
            (0, case.stride, start),
            f"Your boxes are those of tp_rank 0: you did not use `tp_rank`. It is {tp_rank} here.",
        ),
    ]
    for (rank, stride, begin), words in ideas:
        there = _piece(case, rank, stride).reshape(-1)[begin : begin + data.numel()]
        places = dict(zip(data.reshape(-1).tolist(), there.tolist(), strict=True))
        if claimed.items() <= places.items():
            return words
    return ""


def _judge_saved_once(saved: torch.Tensor, case: Case) -> None:
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


def _run_move(student: ModuleType, case: Case) -> dict[str, Any]:
    folder = [str(make_folder("minimegatron-reshard-")) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    try:
        with installed(student.make_sharded_tensors, OURS), _quiet():
            return _move(case, folder[0])
    except CheckpointingException as error:
        raise Wrong(f"with your boxes the checkpoint does not work: {error}") from error
    finally:
        if dist.get_rank() == 0:
            remove_folder(Path(folder[0]))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Boxes that do not fill a tensor are judged here; torch's own warnings of them are not shown."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _move(case: Case, folder: str) -> dict[str, Any]:
    old = on_these_ranks(case.before)
    old.forward_backward()
    old.optimizer.step()
    tensors = [*sharded_model_state(old.chunks)]
    tensors += sharded_optimizer_state(old.chunks, old.optimizer)
    dist_checkpointing.save_tensors(tensors, {}, f"{folder}/saved")

    # Other initial weights, so that what is not loaded is seen.
    new = on_these_ranks(case.after | {"seed": case.after["seed"] + 1})
    new.data = _same_data(case, new)
    saved_keys = set(dist_checkpointing.load_tensors_metadata(f"{folder}/saved"))
    wanted = [*sharded_model_state(new.chunks)]
    wanted += sharded_optimizer_state(new.chunks, new.optimizer, saved_keys)
    dist_checkpointing.load_tensors(wanted, f"{folder}/saved")
    new.optimizer.set_step(old.optimizer.get_step())
    new.meet()
    loaded = _state(new)
    new.forward_backward()
    new.optimizer.step()
    new.meet()
    counts = {"num_tensors": len(saved_keys), "num_boxes": [len(tensors), len(wanted)]}
    return {"loaded": loaded, "later": _state(new), **counts}


def _same_data(case: Case, step: GptStep) -> list:
    """The first layout's global batch, divided over the new layout's replicas."""
    dp = WORLD // (case.before["tp"] * case.before["pp"])
    num = case.before["num_microbatches"] * dp
    return batches(case.before["seed"], num)[step.groups.dp.rank() :: step.groups.dp.size()]


def _state(step: GptStep) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's weights, and of each parameter's part that it updates the optimizer's state."""
    names = {id(param): name for name, param in step.parameters()}
    found = {"weight": {name: param.detach().clone() for name, param in step.parameters()}}
    for shard in step.optimizer.shards:
        for what, tensor in step.optimizer.parameter_state(shard).items():
            part = tensor.detach().reshape(-1).clone()
            found.setdefault(what, {})[names[id(shard.model_param)]] = part
    return found


def _judge_move(case: Case, answers: Sequence[dict[str, Any]]) -> Result:
    source, target = Reference(case.before, WORLD), Reference(case.after, WORLD)
    for when, word in (("loaded", "after loading"), ("later", "one step later")):
        source.run()
        source.step.optimizer.step()
        for rank, answer in enumerate(answers):
            _compare(target, rank, answer[when], _state(source.step), word)
    boxes = " -> ".join(map(str, answers[0]["num_boxes"]))
    return Result({"tensors": answers[0]["num_tensors"], "boxes on rank 0": boxes})


def _compare(
    target: Reference,
    rank: int,
    found: dict[str, dict[str, torch.Tensor]],
    full: dict[str, dict[str, torch.Tensor]],
    when: str,
) -> None:
    step, who = target.as_rank(rank), target.who(rank)
    for name, wanted in target.pieces(rank, full["weight"]).items():
        check_numbers(f"{name} {when}", found["weight"].get(name), wanted, who)
    names = {id(param): name for name, param in step.parameters()}
    for shard in step.optimizer.shards:
        name = names[id(shard.model_param)]
        shape = full["weight"][name].shape
        for what in step.optimizer.parameter_state(shard):
            piece = step.mine(full[what][name].view(shape), shard.model_param)
            wanted = piece.reshape(-1)[shard.start : shard.end]
            check_numbers(f"{what} of {name} {when}", found[what].get(name), wanted, who)
