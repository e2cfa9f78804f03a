"""A checkpoint's files: boxes as raw bytes in safetensors files, everything else as JSON.

In Megatron torch's own `FileSystemWriter` and `FileSystemReader` are here; those describe a
checkpoint in a pickle, which can execute code when it is read, and notice no flipped bit.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from minimegatron.core.dist_checkpointing.core import (
    COMMON,
    FORMAT,
    METADATA,
    REPLACED,
    CheckpointingException,
    read_json,
    sync_folder,
    write_json,
)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""As the safetensors format names them."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in row-major order, as this machine stores them."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def safetensors_header(entries: dict[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """What stands before the data: {name: (dtype, shape, bytes)} in the order of the data."""
    header, begin = {}, 0
    for name, (dtype, shape, size) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class SafetensorsWriter(StorageWriter):
    """Writes a checkpoint aside and, once all of it is on disk, gives it its name.

    Args:
        aside: a folder for it; the same on every rank, and every rank's to write to.
        target: the name it gets; what bears it is replaced.
        common: everything but the tensors; JSON. The first rank's is written.
    """

    def __init__(self, aside: Path, target: Path, common: dict[str, Any]):
        self.aside, self.target, self.common = aside, target, common

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing to forget: one writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Makes the folder."""
        self.aside.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is. Raises CheckpointingException for a dtype that the files have no name for."""
        for item in plan.items:
            dtype = item.tensor_data.properties.dtype
            if dtype not in NAMES:
                raise CheckpointingException(
                    f"{item.index.fqn} is {dtype}, and the files hold {', '.join(NAMES.values())} "
                    "only; convert it, or save a view of it (torch.view_as_real, .view(dtype))"
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives each rank's file its name."""
        return [
            SavePlan(plan.items, storage_data=f"rank_{rank:05d}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file, on disk when it returns."""
        if not plan.items:
            return _done([])
        entries = {}
        for item in plan.items:
            data, offset = item.tensor_data, ",".join(map(str, item.index.offset))
            shape, dtype = tuple(data.chunk.sizes), data.properties.dtype
            size = data.chunk.sizes.numel() * dtype.itemsize
            entries[f"{item.index.fqn}@{offset}"] = (NAMES[dtype], shape, size)
        results = []
        with open(self.aside / plan.storage_data, "wb") as file:
            file.write(safetensors_header(entries))
            for item in plan.items:
                content, begin = as_bytes(planner.resolve_data(item)), file.tell()
                file.write(content)
                where = {
                    "file": plan.storage_data,
                    "begin": begin,
                    "bytes": len(content),
                    "crc32": zlib.crc32(content),
                }
                results.append(WriteResult(item.index, len(content), where))
            file.flush()
            os.fsync(file.fileno())
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, once every rank has written: the JSON files, then the name."""
        where = {result.index: result.storage_data for rank in results for result in rank}
        tensors = {
            key: {
                "dtype": NAMES[tensor.properties.dtype],
                "shape": list(tensor.size),
                "chunks": [
                    {"offset": list(chunk.offsets), "shape": list(chunk.sizes)}
                    | where[MetadataIndex(key, chunk.offsets)]
                    for chunk in tensor.chunks
                ],
            }
            for key, tensor in metadata.state_dict_metadata.items()
        }
        files = {}
        for name in sorted({result["file"] for result in where.values()}):
            if not (self.aside / name).is_file():
                raise FileNotFoundError(
                    f"{self.aside / name} was written by another machine and is not to be seen "
                    "here; save to a folder that all machines share"
                )
            files[name] = (self.aside / name).stat().st_size
        write_json(self.aside / COMMON, self.common)
        write_json(self.aside / METADATA, {"format": FORMAT, "files": files, "tensors": tensors})
        sync_folder(self.aside)
        self._publish()

    def _publish(self) -> None:
        replaced = self.aside.with_name(f"{self.aside.name}{REPLACED}")
        if self.target.exists():
            os.replace(self.target, replaced)
        os.replace(self.aside, self.target)
        sync_folder(self.target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Any path will do."""
        return True


def read_metadata(checkpoint_dir: Path) -> Metadata:
    """What the checkpoint holds, in torch's terms. Raises CheckpointingException."""
    described = read_json(checkpoint_dir / METADATA)
    metadata = Metadata({}, storage_data={})
    try:
        for key, tensor in described["tensors"].items():
            chunks = []
            for chunk in tensor["chunks"]:
                offset = torch.Size(chunk["offset"])
                chunks.append(ChunkStorageMetadata(offset, torch.Size(chunk["shape"])))
                metadata.storage_data[MetadataIndex(key, offset)] = chunk
            properties = TensorProperties(dtype=DTYPES[tensor["dtype"]])
            size = torch.Size(tensor["shape"])
            if sum(chunk.sizes.numel() for chunk in chunks) != size.numel():
                raise KeyError(f"boxes of {key}")
            metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, size, chunks)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointingException(
            f"{checkpoint_dir / METADATA} is damaged ({error!r}); use another checkpoint"
        ) from None
    return metadata


class SafetensorsReader(StorageReader):
    """Reads what `SafetensorsWriter` wrote. Raises CheckpointingException for damaged files."""

    def __init__(self, checkpoint_dir: Path):
        self.checkpoint_dir = checkpoint_dir
        self.metadata = read_metadata(checkpoint_dir)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Nothing to forget."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds."""
        return self.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills every planned part of this rank's tensors; each saved box is read once."""
        for name, boxes in self._by_file(plan).items():
            path = self.checkpoint_dir / name
            try:
                with open(path, "rb") as file:
                    for index, items in boxes.items():
                        saved = self._read_box(file, index)
                        for item in items:
                            target = planner.resolve_tensor(item)
                            target.copy_(_narrowed(saved, item))
                            planner.commit_tensor(item, target)
            except OSError as error:
                raise CheckpointingException(
                    f"{path} cannot be read ({error.strerror}); use another checkpoint"
                ) from None
        return _done(None)

    def _by_file(self, plan: LoadPlan) -> dict[str, dict[MetadataIndex, list[ReadItem]]]:
        files: dict[str, dict[MetadataIndex, list[ReadItem]]] = {}
        for item in plan.items:
            name = self.metadata.storage_data[item.storage_index]["file"]
            files.setdefault(name, {}).setdefault(item.storage_index, []).append(item)
        return files

    def _read_box(self, file: BinaryIO, index: MetadataIndex) -> torch.Tensor:
        where = self.metadata.storage_data[index]
        file.seek(where["begin"])
        content = bytearray(file.read(where["bytes"]))
        if len(content) != where["bytes"] or zlib.crc32(content) != where["crc32"]:
            raise CheckpointingException(
                f"{file.name} is damaged: {index.fqn} at byte {where['begin']:,} is not what was "
                "written; copy the file again or use another checkpoint"
            )
        dtype = self.metadata.state_dict_metadata[index.fqn].properties.dtype
        return torch.frombuffer(content, dtype=dtype).reshape(where["shape"])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Any path will do."""
        return True


def _narrowed(saved: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        saved = saved.narrow(dim, begin, length)
    return saved


def tensors_of(metadata: Metadata) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
    """Name, global shape and dtype of everything in the checkpoint."""
    for key, tensor in metadata.state_dict_metadata.items():
        yield key, tensor.size, tensor.properties.dtype
