"""Saving and loading a checkpoint, from whatever boxes the ranks hold to whatever they want.

Counterpart: `megatron.core.dist_checkpointing.serialization`.

Every rank calls; if one fails, all raise the same one line.
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
)
from minimegatron.core.dist_checkpointing.mapping import ShardedTensor
from minimegatron.core.dist_checkpointing.planners import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    ShardedStateDict,
)
from minimegatron.core.dist_checkpointing.storage import (
    SafetensorsReader,
    SafetensorsWriter,
    read_metadata,
    tensors_of,
)


def save(
    sharded_tensors: Iterable[ShardedTensor], common: dict[str, Any], checkpoint_dir: str | Path
) -> None:
    """Writes a checkpoint. When it returns, `checkpoint_dir` is complete and on disk.

    Until then there is no folder of that name, or the one that was there before. A box that several
    ranks hold alike is written by one of them.

    Args:
        sharded_tensors: this rank's boxes.
        common: everything but the tensors, as JSON; the first rank's is written.

    Raises CheckpointingException, on all ranks, if any rank cannot write; nothing is left behind.
    """
    target = Path(checkpoint_dir)
    aside = target.with_name(f"{target.name}{ASIDE}{_agreed(secrets.token_hex(4))}")
    try:
        with _quiet():
            dcp.save(
                {},  # our planner knows the tensors
                storage_writer=SafetensorsWriter(aside, target, common),
                planner=MCoreSavePlanner(_by_key(sharded_tensors)),
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        if _is_first():
            shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointingException(f"cannot save {target}: {_reason(error)}") from None


def load(sharded_tensors: Iterable[ShardedTensor], checkpoint_dir: str | Path) -> None:
    """Fills every box, in place, from a checkpoint of any layout. dtypes are converted.

    Raises CheckpointingException, on all ranks: before anything is changed for a checkpoint that is
    incomplete or of another model; while reading for one whose bytes have changed.
    """
    folder = Path(checkpoint_dir)
    check_files(folder)
    reader = SafetensorsReader(folder)
    try:
        with _quiet():
            dcp.load(
                {},
                storage_reader=reader,
                planner=MCoreLoadPlanner(_by_key(sharded_tensors)),
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        raise CheckpointingException(f"cannot load {folder}: {_reason(error)}") from None


def load_tensors_metadata(checkpoint_dir: str | Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """{name: (shape, dtype)} of every tensor of the full model that the checkpoint holds."""
    metadata = read_metadata(Path(checkpoint_dir))
    return {key: (size, dtype) for key, size, dtype in tensors_of(metadata)}


def load_plain_tensors(checkpoint_dir: str | Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor whose name begins with `prefix`, whole, on the CPU of this process."""
    tensors = {
        key: torch.empty(size, dtype=dtype)
        for key, (size, dtype) in load_tensors_metadata(checkpoint_dir).items()
        if key.startswith(prefix)
    }
    load((ShardedTensor.from_rank_offsets(key, tensors[key]) for key in tensors), checkpoint_dir)
    return tensors


def _by_key(sharded_tensors: Iterable[ShardedTensor]) -> ShardedStateDict:
    result: dict[str, list[ShardedTensor]] = {}
    for tensor in sharded_tensors:
        result.setdefault(tensor.key, []).append(tensor)
    return result


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


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
