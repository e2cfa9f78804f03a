"""Saving and loading a checkpoint, from whatever boxes the ranks hold to whatever they want.

Counterpart: `megatron.core.dist_checkpointing.serialization`.

`save` and `load` take nested dicts that hold tensors and plain objects; `save_tensors` and
`load_tensors`, on which they stand, take boxes. Every rank calls; if one fails, all raise the same one
line.
"""

import os
import secrets
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from minimegatron.core.dist_checkpointing.core import (
    ASIDE,
    CheckpointingException,
    check_files,
    load_common_state_dict,
)
from minimegatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from minimegatron.core.dist_checkpointing.meeting import await_all_ranks
from minimegatron.core.dist_checkpointing.planners import (
    Boxes,
    MCoreLoadPlanner,
    MCoreSavePlanner,
)
from minimegatron.core.dist_checkpointing.state_dict_utils import (
    NOTHING,
    built,
    merged,
    plain_part,
    tensors_in,
    why_not_json,
)
from minimegatron.core.dist_checkpointing.storage import (
    SafetensorsReader,
    SafetensorsWriter,
    read_metadata,
    tensors_of,
)

STRATEGY = ("torch_dist", 1)
"""Megatron's name of what torch.distributed.checkpoint plans; the files are ours (see `storage`)."""

# -- Nested dicts --


def save(sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
    """Writes a checkpoint of nested dicts and lists. When it returns, it is complete and on disk.

    Args:
        sharded_state_dict: a ShardedTensor (or a ShardedTensorFactory) for each tensor of this rank;
            everything else is plain, and the first rank's is written, as JSON: a tuple becomes a list.
            A LocalNonpersistentObject is not saved. It stays as it is.
        checkpoint_dir: the checkpoint's folder, on every rank. What bears the name is replaced.

    Raises ValueError for a plain object that JSON cannot hold, CheckpointingException if any rank
    cannot write, or two would write other content to one box: on all ranks, and nothing is left behind.
    Where some ranks do not call it, the others say so after half a minute, and end before the group's
    time-out (see `meeting`).
    Source: `megatron.core.dist_checkpointing.serialization.save`, which also saves in the background.
    """
    await_all_ranks(f"save {checkpoint_dir}", "save")
    tree = built(sharded_state_dict)
    plain = plain_part(tree)
    common = {} if plain is NOTHING else plain
    problem = _agreed(why_not_json(common))
    if problem is not None:
        raise ValueError(f"cannot save {checkpoint_dir}: {problem}")
    _write(tensors_in(tree), common, Path(checkpoint_dir))


def load(sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
    """Fills the tensors of `sharded_state_dict`, in place, from a checkpoint of any layout.

    Args:
        sharded_state_dict: what is wanted: a ShardedTensor (or a ShardedTensorFactory) for each tensor.
            Its `data` is filled; where the checkpoint's tensor may be shorter (`allow_shape_mismatch`),
            with zeros at the end.
        checkpoint_dir: the checkpoint's folder.

    Returns `sharded_state_dict`'s dicts and lists with tensors in them, and with all plain objects of
    the checkpoint, also those that nobody asked for. A LocalNonpersistentObject is unwrapped.
    Raises CheckpointingException, on all ranks: before any tensor is changed for a checkpoint that is
    incomplete or of another model; while reading for one whose bytes have changed.
    Source: `megatron.core.dist_checkpointing.serialization.load`.
    """
    common = load_common_state_dict(checkpoint_dir)
    tree = built(sharded_state_dict)
    wanted = list(tensors_in(tree))
    for tensor in wanted:
        if tensor.data.is_meta:
            tensor.data = torch.empty_like(tensor.data, device="cpu")
    load_tensors(wanted, checkpoint_dir)
    _clear_beyond_saved(wanted, checkpoint_dir)
    return merged(common, tree)


def _clear_beyond_saved(tensors: Iterable[ShardedTensor], checkpoint_dir: str | Path) -> None:
    """Fills with zeros where a tensor is longer here than in the checkpoint."""
    saved = {key: size for key, size, _ in tensors_of(read_metadata(Path(checkpoint_dir)))}
    for tensor in tensors:
        if tensor.allow_shape_mismatch:
            num_saved = max(0, saved[tensor.key][0] - tensor.global_offset[0])
            tensor.box[num_saved:].zero_()


def get_default_save_sharded_strategy(
    backend: str = "torch_dist", version: int = 1
) -> tuple[str, int]:
    """The strategy that `save` takes: there is one, and this pair names it.

    In Megatron, an object. Raises ValueError for another backend or version.
    """
    if (backend, version) != STRATEGY:
        raise ValueError(f"the strategy {backend!r}, {version} is unknown; use {STRATEGY}")
    return STRATEGY


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> tuple[str, int]:
    """The strategy that `load` takes. Raises CheckpointingException if the folder has no checkpoint."""
    check_files(checkpoint_dir)
    return STRATEGY


# -- Boxes --


def save_tensors(
    sharded_tensors: Iterable[ShardedTensor], common: dict[str, Any], checkpoint_dir: str | Path
) -> None:
    """Writes a checkpoint. When it returns, `checkpoint_dir` is complete and on disk.

    Until then there is no folder of that name, or the one that was there before. A box that several
    ranks hold alike is written by one of them.

    Args:
        sharded_tensors: this rank's boxes.
        common: everything but the tensors, as JSON; the first rank's is written.

    Raises CheckpointingException, on all ranks, if any rank cannot write, if two ranks would save
    other content as one box or to other folders, or for a dtype that `storage` does not name; nothing
    is left behind. Warns where copies of a buffer differ: the first copy's is saved.
    """
    await_all_ranks(f"save {checkpoint_dir}", "save")
    _write(sharded_tensors, common, Path(checkpoint_dir))


def _write(sharded_tensors: Iterable[ShardedTensor], common: dict[str, Any], target: Path) -> None:
    aside = target.with_name(f"{target.name}{ASIDE}{_agreed(secrets.token_hex(4))}")
    planner = MCoreSavePlanner(_by_key(sharded_tensors), str(target))
    try:
        with _quiet():
            dcp.save(
                {},  # our planner knows the tensors
                storage_writer=SafetensorsWriter(aside, target, common),
                planner=planner,
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        shutil.rmtree(aside, ignore_errors=True)  # on every rank: it may have had another folder
        raise CheckpointingException(f"cannot save {target}: {_reason(error)}") from None
    if planner.note:
        warnings.warn(f"{target}: {planner.note}", stacklevel=3)


def load_tensors(sharded_tensors: Iterable[ShardedTensor], checkpoint_dir: str | Path) -> None:
    """Fills every box, in place, from a checkpoint of any layout. dtypes are converted.

    Raises CheckpointingException, on all ranks: before anything is changed for a checkpoint that is
    incomplete or of another model, or where ranks read other checkpoints; while reading for one whose
    bytes have changed. Where some ranks do not call it, as `save` does.
    """
    folder = Path(checkpoint_dir)
    check_files(folder)
    reader = SafetensorsReader(folder)
    await_all_ranks(f"load {folder}", "load")
    try:
        with _quiet():
            dcp.load(
                {},
                storage_reader=reader,
                planner=MCoreLoadPlanner(_by_key(sharded_tensors), folder),
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        raise CheckpointingException(f"cannot load {folder}: {_reason(error)}") from None


def load_tensors_metadata(checkpoint_dir: str | Path) -> dict[str, ShardedTensor]:
    """{key: whole tensor} of every tensor that the checkpoint holds, on the device "meta".

    It is what `load` takes: the dict then comes back with all tensors, whole.
    """
    return {
        key: ShardedTensor.from_rank_offsets(key, torch.empty(size, dtype=dtype, device="meta"))
        for key, size, dtype in tensors_of(read_metadata(Path(checkpoint_dir)))
    }


def load_plain_tensors(checkpoint_dir: str | Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor whose name begins with `prefix`, whole, on the CPU of this process."""
    wanted = {
        key: tensor
        for key, tensor in load_tensors_metadata(checkpoint_dir).items()
        if key.startswith(prefix)
    }
    for tensor in wanted.values():
        tensor.data = torch.empty_like(tensor.data, device="cpu")
    load_tensors(wanted.values(), checkpoint_dir)
    return {key: tensor.data for key, tensor in wanted.items()}


def _by_key(sharded_tensors: Iterable[ShardedTensor]) -> Boxes:
    result: dict[str, list[ShardedTensor]] = {}
    for tensor in sharded_tensors:
        result.setdefault(tensor.key, []).append(tensor)
    return result


def _agreed(value: Any) -> Any:
    """The first rank's `value`, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def _quiet() -> warnings.catch_warnings:
    """Torch warns where there are no process groups; that is meant."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _reason(error: CheckpointException) -> str:
    """What went wrong first, in one line: torch's exception holds a traceback per rank."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, OSError) and cause.errno is not None:
        what = os.strerror(cause.errno)
        name = f" ({cause.filename})" if cause.filename else ""
        return f"rank {rank}: {what}{name}"
    text = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    others = f" (and {len(error.failures) - 1} other ranks)" if len(error.failures) > 1 else ""
    return f"rank {rank}{others}: {text}"
