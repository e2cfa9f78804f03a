"""Tells `torch.distributed.checkpoint` what to write and what to read.

The planners of torch share the writing of what several ranks hold alike, check that boxes cover
tensors without overlap, and find which saved boxes overlap which wanted ones. Counterpart:
`MCoreSavePlanner` and `MCoreLoadPlanner` in `megatron.core.dist_checkpointing.strategies.torch`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
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

from minimegatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

Boxes = Mapping[str, list[ShardedTensor]]
"""This rank's boxes of each tensor, by key."""


def _chunk(tensor: ShardedTensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(tensor.global_offset), tensor.box.shape)


class MCoreSavePlanner(DefaultSavePlanner):
    """Plans to write every box that is the one to save; torch drops what another rank writes too."""

    def __init__(self, tensors: Boxes):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors = tensors
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
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The memory of one box."""
        return self.boxes[write_item.index]


class MCoreLoadPlanner(LoadPlanner):
    """Plans to fill every box from whatever saved boxes overlap it.

    Raises ValueError, from `create_local_plan`, for tensors that the checkpoint lacks, has in
    another shape, or has with holes.
    """

    def __init__(self, tensors: Boxes):
        self.tensors = tensors

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
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads for itself."""
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
