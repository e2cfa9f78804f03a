"""Token sequences on disk, memory-mapped: one `.bin` of tokens, one `.idx` that says where.

Counterpart: `megatron.core.datasets.indexed_dataset`, the same two files byte for byte, so that
each reads what the other wrote. Object storage and unmapped reading are left out.

The `.bin` is nothing but tokens, one sequence after the other. The `.idx`, little-endian:

    9 bytes   MMIDIDX\\x00\\x00          8 bytes   version, 1
    1 byte    token dtype (`DType`)    8 bytes   s, the number of sequences
    8 bytes   d, the number of entries in the document table
    s x int32 tokens per sequence      s x int64 where in the .bin each begins, in bytes
    d x int64 first sequence of each document, and s at the end: d - 1 documents
    s x int8  modes, in multimodal data only

Nothing in either file is ever executed or unpickled, and every number in the `.idx` is checked
against the size of both files before the first token is read.
"""

import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import accumulate, islice
from pathlib import Path

import numpy

from minimegatron.core.datasets.atomic_file import AtomicFile
from minimegatron.core.datasets.utils import DataError

INDEX_HEADER = b"MMIDIDX\x00\x00"
_PREAMBLE = struct.Struct("<9sQBQQ")
_LONGEST = numpy.iinfo(numpy.int32).max

_REGION_BITS = 21
"""The most a system maps for one touched byte: a huge page of 2 MiB, where the file's cache is made
of such; 64 KiB around it otherwise."""

_REGIONS_RESIDENT = 12
"""Regions of a mapped file a reader touches before it lets their pages go. They stay in the page
cache, which the system may take back, instead of in this process's resident memory."""

_COPIED_AT_ONCE = 16 << 20

_CHECKED_AT_ONCE = 1 << 20
"""Index entries checked in one go, so that checking a huge index stays small in memory."""


class DType(Enum):
    """The dtype codes of the `.idx`."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: type[numpy.number]) -> int:
        """The code of a numpy dtype. Raises ValueError for one without."""
        name = numpy.dtype(value).name
        if name not in cls.__members__:
            raise ValueError(f"dtype {name} has no code; use one of {', '.join(cls.__members__)}")
        return cls[name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> type[numpy.number]:
        """The numpy type of a code. Raises ValueError for an unknown code."""
        return getattr(numpy, cls(value).name)

    @staticmethod
    def size(key: int | type[numpy.number]) -> int:
        """Bytes per token, of a code or a numpy type."""
        return numpy.dtype(DType.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[numpy.number]:
        """The dtype for a vocabulary of this size: uint16 below 65,500, int32 from there on."""
        return numpy.uint16 if cardinality is not None and cardinality < 65500 else numpy.int32


def get_idx_path(path_prefix: str | Path) -> str:
    """`prefix.idx`"""
    return f"{path_prefix}.idx"


def get_bin_path(path_prefix: str | Path) -> str:
    """`prefix.bin`"""
    return f"{path_prefix}.bin"


# -- Reading --


class _Mapped:
    """A file mapped read-only. About 24 MiB of it, and what is being read, are resident."""

    def __init__(self, path: str):
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                # An empty file cannot be mapped, and needs no mapping.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        self._map = mapped
        self._regions: set[int] = set()

    def read(self, dtype: type[numpy.number], count: int, offset: int) -> numpy.ndarray:
        """A read-only view, no copy: `count` items from byte `offset` on."""
        self.touch(offset, count * numpy.dtype(dtype).itemsize)
        return numpy.frombuffer(self._map, dtype=dtype, count=count, offset=offset)

    def touch(self, offset: int, size: int) -> None:
        """Notes that `size` bytes from `offset` on are about to be read."""
        last = offset + max(size, 1) - 1
        self._regions.update(range(offset >> _REGION_BITS, (last >> _REGION_BITS) + 1))
        if len(self._regions) > _REGIONS_RESIDENT:
            self.release()

    def release(self) -> None:
        """Lets the pages read so far go. Views stay valid: what they need is mapped anew."""
        self._regions.clear()
        if isinstance(self._map, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class _IndexReader:
    """The `.idx` of a dataset, checked against itself and against the size of the `.bin`."""

    def __init__(self, idx_path: str, bin_path: str, bin_size: int, multimodal: bool):
        self._idx_path, self._bin_path, self._bin_size = idx_path, bin_path, bin_size
        self._file = _Mapped(idx_path)
        self._read_preamble()
        s, d = self.sequence_count, self.document_count
        lengths_at = _PREAMBLE.size
        pointers_at = lengths_at + 4 * s
        documents_at = pointers_at + 8 * s
        modes_at = documents_at + 8 * d
        expected = modes_at + (s if multimodal else 0)
        # Modes that nobody asked for are skipped, as Megatron does.
        if self._file.size != expected and self._file.size != modes_at + s:
            raise self._corrupt(
                f"{s} sequences and {d} document entries take {expected} bytes, "
                f"but it has {self._file.size}"
            )
        self.sequence_lengths = self._file.read(numpy.int32, s, lengths_at)
        self.sequence_pointers = self._file.read(numpy.int64, s, pointers_at)
        self.document_indices = self._file.read(numpy.int64, d, documents_at)
        self.sequence_modes = self._file.read(numpy.int8, s, modes_at) if multimodal else None
        self._check_sequences()
        self._check_documents()
        self._file.release()

    def __getitem__(self, idx: int) -> tuple[int, int, int | None]:
        """Where sequence `idx` begins, in bytes, how many tokens it has, and its mode."""
        self._file.touch(_PREAMBLE.size + 4 * idx, 4)
        self._file.touch(_PREAMBLE.size + 4 * self.sequence_count + 8 * idx, 8)
        mode = None if self.sequence_modes is None else int(self.sequence_modes[idx])
        return int(self.sequence_pointers[idx]), int(self.sequence_lengths[idx]), mode

    def _corrupt(self, reason: str) -> DataError:
        return DataError(
            f"{self._idx_path} is corrupt: {reason}; write the dataset again with "
            "`minimegatron preprocess`"
        )

    def _read_preamble(self) -> None:
        if self._file.size < _PREAMBLE.size:
            raise self._corrupt(
                f"it has {self._file.size} bytes, fewer than the {_PREAMBLE.size} of its header"
            )
        preamble = self._file.read(numpy.uint8, _PREAMBLE.size, 0).tobytes()
        header, version, code, self.sequence_count, self.document_count = _PREAMBLE.unpack(preamble)
        if header != INDEX_HEADER:
            raise self._corrupt(f"it begins with {header!r}, not with {INDEX_HEADER!r}")
        if version != 1:
            raise self._corrupt(f"its version is {version}, not 1")
        if code not in [dtype.value for dtype in DType]:
            raise self._corrupt(f"its dtype code is {code}, not one of 1 to {len(DType)}")
        self.dtype = DType.dtype_from_code(code)
        self.dtype_size = DType.size(code)

    def _check_sequences(self) -> None:
        """Lengths not negative, and pointers where those lengths put them, up to the last byte."""
        expected = 0
        for start in range(0, self.sequence_count, _CHECKED_AT_ONCE):
            part = slice(start, start + _CHECKED_AT_ONCE)
            lengths = self.sequence_lengths[part].astype(numpy.int64)
            if lengths.min() < 0:
                worst = start + int(lengths.argmin())
                raise self._corrupt(f"sequence {worst} has length {lengths.min()}")
            ends = expected + numpy.cumsum(lengths) * self.dtype_size
            wrong = numpy.flatnonzero(
                self.sequence_pointers[part] != ends - lengths * self.dtype_size
            )
            if wrong.size:
                i = int(wrong[0])
                raise self._corrupt(
                    f"sequence {start + i} is said to begin at byte "
                    f"{self.sequence_pointers[start + i]}, not at "
                    f"{ends[i] - lengths[i] * self.dtype_size} where the one before it ends"
                )
            expected = int(ends[-1])
            self._file.release()
        if expected != self._bin_size:
            raise DataError(
                f"{self._bin_path} has {self._bin_size} bytes, but {self._idx_path} describes "
                f"{expected}: one of them is truncated or belongs to another dataset; write both "
                "again with `minimegatron preprocess`"
            )

    def _check_documents(self) -> None:
        documents, s = self.document_indices, self.sequence_count
        if len(documents) == 0 or documents[0] != 0 or documents[-1] != s:
            ends = f"{documents[0]} to {documents[-1]}" if len(documents) else "nothing"
            raise self._corrupt(f"its document table runs over {ends}, not 0 to {s}")
        if (numpy.diff(documents) < 0).any():
            raise self._corrupt("its document table decreases")


class IndexedDataset:
    """Sequences of tokens at `path_prefix.bin` and `.idx`.

    `dataset[i]` is sequence i, a read-only 1-D view of the file; `dataset[i:j]` the list of several;
    `get` a part of one. With `multimodal`, each comes with its mode(s). Raises ValueError, with path
    and numbers, for missing, truncated or corrupt files, and IndexError past the end.
    """

    def __init__(self, path_prefix: str | Path, multimodal: bool = False):
        self.path_prefix = str(path_prefix)
        self.multimodal = multimodal
        idx_path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        for path in (idx_path, bin_path):
            if not os.path.isfile(path):
                raise DataError(
                    f"{path} does not exist; a dataset is named by what comes before .bin and .idx, "
                    "as `minimegatron preprocess` prints it"
                )
        self._bin = _Mapped(bin_path)
        self.index = _IndexReader(idx_path, bin_path, self._bin.size, multimodal)

    # A map cannot be sent to a loader's worker process; its path can.
    def __getstate__(self) -> tuple[str, bool]:
        return self.path_prefix, self.multimodal

    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.__init__(*state)

    def __len__(self) -> int:
        """The number of sequences."""
        return self.index.sequence_count

    @property
    def sequence_lengths(self) -> numpy.ndarray:
        """Tokens per sequence, int32."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> numpy.ndarray:
        """The first sequence of each document, and the number of sequences at the end; int64."""
        return self.index.document_indices

    @property
    def sequence_modes(self) -> numpy.ndarray | None:
        """The mode of each sequence, int8; None unless multimodal."""
        return self.index.sequence_modes

    def __getitem__(self, idx: int | slice):
        if not isinstance(idx, slice):
            return self.get(idx)
        start, stop, step = idx.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of sequences is contiguous; its step is {step}, not 1")
        sequences = [self._read(i, 0, None) for i in range(start, stop)]
        return (sequences, self.sequence_modes[idx]) if self.multimodal else sequences

    def get(self, idx: int, offset: int = 0, length: int | None = None):
        """`length` tokens (all that follow, for None) of sequence `idx`, from token `offset` on."""
        sequence = self._read(int(idx), int(offset), length)
        return (sequence, self.sequence_modes[idx]) if self.multimodal else sequence

    def _read(self, idx: int, offset: int, length: int | None) -> numpy.ndarray:
        start, size, _ = self.index[idx]
        length = size - offset if length is None else int(length)
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {idx} of {self.path_prefix}, "
                f"which has {size}"
            )
        return self._bin.read(self.index.dtype, length, start + offset * self.index.dtype_size)

    @staticmethod
    def exists(path_prefix: str | Path) -> bool:
        """Whether both files are there."""
        return os.path.isfile(get_idx_path(path_prefix)) and os.path.isfile(
            get_bin_path(path_prefix)
        )


def open_tokens(path_prefix: str | Path) -> IndexedDataset:
    """The dataset at `path_prefix`, whose items are tokens. Raises ValueError where they are not whole
    numbers, as an index of features may be, and as `IndexedDataset`."""
    dataset = IndexedDataset(path_prefix)
    dtype = numpy.dtype(dataset.index.dtype)
    if dtype.kind not in "iu":
        raise DataError(
            f"{get_idx_path(path_prefix)} says that {get_bin_path(path_prefix)} holds {dtype}, but "
            "tokens are whole numbers; make the dataset from text with `minimegatron preprocess`"
        )
    return dataset


# -- Writing --


class IndexedDatasetBuilder:
    """Writes a dataset: `add_item` and `end_document`, or `add_document`; then `finalize`.

    Both files are written aside and take their names in `finalize`, the `.idx` last: a reader
    finds the old dataset, no `.idx`, or the new one, whenever the writer was killed. As a context
    manager, it removes what is unfinished when the block raises.

    Args:
        bin_path: where the tokens go.
        dtype: of the stored tokens; a token outside its range raises ValueError.
        multimodal: store a mode with each sequence.
    """

    def __init__(
        self,
        bin_path: str | Path,
        dtype: type[numpy.number] = numpy.int32,
        multimodal: bool = False,
    ):
        self.dtype = numpy.dtype(dtype)
        self._code = DType.code_from_dtype(dtype)
        self.multimodal = multimodal
        self.bin_path = str(bin_path)
        self.sequence_lengths: list[int] = []
        self.document_indices = [0]
        self.sequence_modes: list[int] | None = [] if multimodal else None
        self._file = AtomicFile(self.bin_path)

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.discard()

    def add_item(self, tensor: Sequence[int] | numpy.ndarray, mode: int = 0) -> None:
        """Adds one sequence (a list, array or CPU tensor) to the document under way."""
        self._write([tensor], None if self.sequence_modes is None else [mode])

    def end_document(self) -> None:
        """Ends the document that the items since the last end make up."""
        self.document_indices.append(len(self.sequence_lengths))

    def add_document(
        self,
        tensor: Sequence[int] | numpy.ndarray,
        lengths: Sequence[int],
        modes: Sequence[int] | None = None,
    ) -> None:
        """Adds a document of `len(lengths)` sequences, which follow each other in `tensor`."""
        tokens = numpy.asarray(tensor)
        if sum(lengths) != tokens.size:
            raise ValueError(
                f"lengths add up to {sum(lengths)}, but there are {tokens.size} tokens"
            )
        parts = numpy.split(tokens, numpy.cumsum(lengths)[:-1]) if len(lengths) else []
        self._write(parts, modes)
        self.end_document()

    def add_tokenized(
        self, tokens: bytes, lengths: Sequence[int], sequences: Sequence[int]
    ) -> None:
        """Adds documents of as many sequences each, already in this builder's dtype, as bytes."""
        self._file.write(tokens)
        ends = accumulate(sequences, initial=len(self.sequence_lengths))
        self._extend(lengths)
        self.document_indices.extend(islice(ends, 1, None))

    def add_index(self, path_prefix: str | Path) -> None:
        """Adds every document of another dataset of the same dtype."""
        other = IndexedDataset(path_prefix, self.multimodal)
        if other.index.dtype != self.dtype:
            raise ValueError(
                f"{path_prefix} holds {numpy.dtype(other.index.dtype)}, not {self.dtype}; "
                "write both with the same tokenizer"
            )
        begin = len(self.sequence_lengths)
        self.sequence_lengths.extend(other.sequence_lengths.tolist())
        self.document_indices.extend((begin + other.document_indices[1:]).tolist())
        if self.sequence_modes is not None:
            self.sequence_modes.extend(other.sequence_modes.tolist())
        with open(get_bin_path(path_prefix), "rb") as tokens:
            while part := tokens.read(_COPIED_AT_ONCE):
                self._file.write(part)

    def _write(self, parts: Iterable, modes: Sequence[int] | None) -> None:
        parts = [as_dtype(part, self.dtype) for part in parts]
        for part in parts:
            self._file.write(part)
        self._extend([part.size for part in parts])
        if self.sequence_modes is not None:
            self.sequence_modes.extend(modes if modes is not None else [0] * len(parts))

    def _extend(self, lengths: Sequence[int]) -> None:
        if lengths and max(lengths) > _LONGEST:
            raise ValueError(
                f"a sequence of {max(lengths)} tokens is too long for an index, which counts to "
                f"{_LONGEST}; split the document"
            )
        self.sequence_lengths.extend(lengths)

    def finalize(self, idx_path: str | Path) -> None:
        """Writes the `.idx` and gives both files their names."""
        lengths = numpy.array(self.sequence_lengths, dtype=numpy.int64)
        pointers = numpy.zeros_like(lengths)
        numpy.cumsum(lengths[:-1] * self.dtype.itemsize, out=pointers[1:])
        index = AtomicFile(str(idx_path))
        try:
            index.write(
                _PREAMBLE.pack(
                    INDEX_HEADER, 1, self._code, len(lengths), len(self.document_indices)
                )
            )
            index.write(lengths.astype("<i4"))
            index.write(pointers.astype("<i8"))
            index.write(numpy.array(self.document_indices, dtype="<i8"))
            if self.sequence_modes is not None:
                index.write(numpy.array(self.sequence_modes, dtype="<i1"))
            index.complete()
            self._file.complete()
            # Without its index, the old .bin is not a dataset: nobody can pair it with the new index.
            Path(idx_path).unlink(missing_ok=True)
            self._file.publish()
            index.publish()
        finally:
            index.discard()
            self._file.discard()


def as_dtype(tokens: Sequence[int] | numpy.ndarray, dtype: numpy.dtype) -> numpy.ndarray:
    """`tokens` as a contiguous 1-D array of `dtype`. Raises ValueError where one does not fit."""
    array = numpy.asarray(tokens).reshape(-1)
    if array.dtype == dtype:
        return numpy.ascontiguousarray(array)
    if array.size and dtype.kind in "iu":
        low, high = numpy.iinfo(dtype).min, numpy.iinfo(dtype).max
        if array.dtype.kind not in "iub":
            raise ValueError(f"tokens are {array.dtype}, not whole numbers; store them as float32")
        if array.min() < low or array.max() > high:
            raise ValueError(
                f"tokens from {array.min()} to {array.max()} do not fit {dtype} "
                f"({low} to {high}); choose a wider dtype"
            )
    return array.astype(dtype)
