"""Tells `torch.distributed.checkpoint` what to write and what to read.

The planners of torch share the writing of what several ranks hold alike, check that boxes cover
tensors without overlap, and find which saved boxes overlap which wanted ones. Counterpart:
`MCoreSavePlanner` and `MCoreLoadPlanner` in `megatron.core.dist_checkpointing.strategies.torch`.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, LoadPlan, LoadPlanner, SavePlan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from minimegatron.core.dist_checkpointing.core import METADATA, CheckpointingException
from minimegatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from minimegatron.core.dist_checkpointing.storage import as_bytes

Boxes = Mapping[str, list[ShardedTensor]]
"""This rank's boxes of each tensor, by key."""


def _chunk(tensor: ShardedTensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(tensor.global_offset), tensor.box.shape)


class _Copy(NamedTuple):
    """What one rank has in a buffer."""

    is_saved: bool
    crc32: int
    mean: float


class _Told(NamedTuple):
    """What a rank tells the first one beside its plan."""

    crc32s: list[int]
    keys: list[str]
    folder: str
    buffers: dict[str, _Copy]


class MCoreSavePlanner(DefaultSavePlanner):
    """Plans to write every box that is the one to save; torch drops what another rank writes too.

    Raises CheckpointingException, from `create_global_plan`, where that would drop other content, for
    a tensor that is no rank's to save, and for another folder than the first rank's. On the first rank,
    `note` then says which buffers have copies that differ, and are not saved; "" for none.
    """

    def __init__(self, tensors: Boxes, folder: str):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors, self.folder, self.note = tensors, folder, ""
        self.boxes: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """This rank's boxes."""
        items = []
        for key, tensors in self.tensors.items():
            for tensor in tensors:
                tensor.validate_metadata_integrity()
                if not is_main_replica(tensor.replica_id):
                    continue
                index = MetadataIndex(key, tensor.global_offset)
                self.boxes[index] = tensor.box
                data = TensorWriteData(
                    chunk=_chunk(tensor),
                    properties=TensorProperties(dtype=tensor.dtype),
                    size=torch.Size(tensor.global_shape),
                )
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        sums = [] if is_alone else [zlib.crc32(as_bytes(self.boxes[i.index])) for i in items]
        buffers = {} if is_alone else self._buffers()
        told = _Told(sums, list(self.tensors), self.folder, buffers)
        self.plan = SavePlan(items, planner_data=told)
        return self.plan

    def _buffers(self) -> dict[str, _Copy]:
        return {
            key: _Copy(
                is_main_replica(tensor.replica_id),
                zlib.crc32(as_bytes(tensor.box)),
                float(tensor.box.double().mean()),
            )
            for key, tensors in self.tensors.items()
            for tensor in tensors
            if tensor.is_buffer
        }

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the first rank: which rank writes which box."""
        _refuse_other_folders(all_plans)
        _refuse_other_content(all_plans)
        _refuse_unsaved(all_plans)
        self.note = _buffers_apart(all_plans)
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The memory of one box."""
        return self.boxes[write_item.index]


def _refuse_other_folders(plans: Sequence[SavePlan]) -> None:
    """Raises CheckpointingException where a rank would save elsewhere than the first."""
    first = plans[0].planner_data.folder
    for rank, plan in enumerate(plans):
        if plan.planner_data.folder != first:
            raise CheckpointingException(
                f"rank 0 would save to {first}, rank {rank} to {plan.planner_data.folder}, and a "
                "checkpoint is one folder; give every rank the same"
            )


def _buffers_apart(plans: Sequence[SavePlan]) -> str:
    """Says which buffers have copies that differ from the one that is saved; "" for none."""
    of_ranks = [plan.planner_data.buffers for plan in plans]
    saved = {
        key: (rank, copy)
        for rank, buffers in reversed(list(enumerate(of_ranks)))
        for key, copy in buffers.items()
        if copy.is_saved
    }
    apart = {
        key: rank
        for rank, buffers in reversed(list(enumerate(of_ranks)))
        for key, copy in buffers.items()
        if key in saved and copy.crc32 != saved[key][1].crc32
    }
    if not apart:
        return ""
    key, rank = min(apart.items())
    first, kept = saved[key]
    return (
        f"{len(apart)} of {len(saved)} buffers, such as {key}, differ between copies of the model: "
        f"rank {first}'s, with mean {kept.mean:.6g}, is saved, rank {rank}'s, with mean "
        f"{of_ranks[rank][key].mean:.6g}, is not, and after a load all have the first; average them "
        "over the copies before they are saved, if all are to count"
    )


def _refuse_other_content(plans: Sequence[SavePlan]) -> None:
    """Raises CheckpointingException where two ranks would save one box with other content."""
    found: dict[MetadataIndex, tuple[int, WriteItem, int]] = {}
    for rank, plan in enumerate(plans):
        for item, crc32 in zip(plan.items, plan.planner_data.crc32s, strict=False):
            first, other, other_crc32 = found.setdefault(item.index, (rank, item, crc32))
            if (item.tensor_data, crc32) != (other.tensor_data, other_crc32):
                ours, theirs = item.tensor_data, other.tensor_data
                raise CheckpointingException(
                    f"{item.index.fqn} at {tuple(ours.chunk.offsets)}: rank {first} would save "
                    f"{_words(theirs, other_crc32)} there, rank {rank} {_words(ours, crc32)}, both "
                    "with replica_id 0; give all ranks but one another replica_id, or each its own key "
                    "or offset, or make the copies alike before they are saved"
                )


def _refuse_unsaved(plans: Sequence[SavePlan]) -> None:
    """Raises CheckpointingException for a key whose first copy (`replica_id` 0) no rank has."""
    given = {
        key: rank
        for rank, plan in reversed(list(enumerate(plans)))
        for key in plan.planner_data.keys
    }
    unsaved = sorted(given.keys() - {item.index.fqn for plan in plans for item in plan.items})
    if unsaved:
        raise CheckpointingException(
            f"{len(unsaved)} of {len(given)} tensors, such as rank {given[unsaved[0]]}'s {unsaved[0]}, "
            f"have replica_id 0 on none of the {len(plans)} ranks, so nobody would save them; give one "
            "rank's copy replica_id 0"
        )


def _words(data: TensorWriteData, crc32: int) -> str:
    sizes = f"{tuple(data.chunk.sizes)} of {tuple(data.size)}"
    return f"{sizes} {data.properties.dtype} with crc32 {crc32:08x}"


class MCoreLoadPlanner(LoadPlanner):
    """Plans to fill every box from whatever saved boxes overlap it.

    Raises ValueError, from `create_local_plan`, for tensors that the checkpoint lacks, has in
    another shape, or has with holes; from `create_global_plan` where ranks read other checkpoints.
    """

    def __init__(self, tensors: Boxes, folder: Path):
        self.tensors, self.folder = tensors, folder

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Called by torch, with what the checkpoint holds."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """One item per overlap of a wanted with a saved box."""
        items: list[ReadItem] = []
        problems: list[str] = []
        for key, tensors in self.tensors.items():
            saved = self.metadata.state_dict_metadata.get(key)
            if saved is None:
                problems.append(f"{key} is not in it")
                continue
            for tensor in tensors:
                tensor.validate_metadata_integrity()
                if not _fits(tensor, tuple(saved.size)):
                    problems.append(
                        f"{key} is {tuple(saved.size)} there but {tensor.global_shape} here"
                    )
                    break
            else:
                chunks = [_chunk(tensor) for tensor in tensors]
                overlaps = create_read_items_for_chunk_list(key, saved, chunks)
                wanted = sum(_common_volume(tensor, saved.size) for tensor in tensors)
                if sum(math.prod(item.lengths) for item in overlaps) != wanted:
                    problems.append(f"{key} has holes")
                items += overlaps
        if problems:
            more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
            raise ValueError(f"the checkpoint does not fit this model: {problems[0]}{more}")
        # It has every box's checksum. Two folders may be copies of one checkpoint.
        content = zlib.crc32((self.folder / METADATA).read_bytes())
        return LoadPlan(items, planner_data=(str(self.folder), content))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself, but from the same checkpoint."""
        ours, content = global_plan[0].planner_data
        for rank, plan in enumerate(global_plan):
            if plan.planner_data[1] != content:
                raise ValueError(
                    f"rank {rank} would load {plan.planner_data[0]}, which is another checkpoint than "
                    f"rank 0's {ours}; give every rank the same"
                )
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: there are only tensors."""
        raise AssertionError(f"{read_item.storage_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The memory that this item is read into."""
        index = read_item.dest_index
        tensor = self.tensors[index.fqn][index.index].box
        for dim, (begin, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, begin, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It was written in place."""


def _fits(tensor: ShardedTensor, saved: tuple[int, ...]) -> bool:
    here = tensor.global_shape
    if tensor.allow_shape_mismatch:
        return len(here) == len(saved) and here[1:] == saved[1:]
    return here == saved


def _common_volume(tensor: ShardedTensor, saved: torch.Size) -> int:
    """Elements of the box that lie within the saved tensor's shape."""
    spans = zip(tensor.global_offset, tensor.box.shape, saved, strict=True)
    return math.prod(max(0, min(offset + size, end) - offset) for offset, size, end in spans)
