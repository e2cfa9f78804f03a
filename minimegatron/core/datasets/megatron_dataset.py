"""What the datasets of one split of one corpus share: their parts, and index arrays kept on disk.

Counterpart: `megatron.core.datasets.megatron_dataset`; and the `path_to_cache` halves of
`GPTDataset._build_document_sample_shuffle_indices` and `BlendedDataset._build_indices`.

An entry of the cache is one `.npy` per array and a `description.txt`, written last: without it there
is no entry. Two ranks that build the same entry write the same bytes, so either's files may stay.
"""

import hashlib
import json
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

from minimegatron.core.datasets import atomic_file
from minimegatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from minimegatron.core.datasets.utils import Split

logger = logging.getLogger(__name__)

Arrays = dict[str, numpy.ndarray]


def describe(identifiers: dict[str, Any]) -> str:
    """`identifiers` as text; its hash names the entry."""
    return json.dumps(identifiers, indent=1, default=lambda obj: obj.unique_identifiers)


def cached_arrays(
    path_to_cache: str | Path | None,
    identifiers: dict[str, Any],
    shapes: dict[str, tuple[int | None, ...]],
    build: Callable[[], Arrays],
) -> Arrays:
    """What `build()` returns, from the cache if it is there, into the cache if it is not.

    Args:
        path_to_cache: the folder; None for no cache.
        identifiers: everything the arrays depend on.
        shapes: name and shape of each array, None where only building tells. A cached one that is
            unreadable or of another shape is built again. Arrays are mapped, and nothing in them is
            unpickled.
    """
    if path_to_cache is None:
        return build()
    description = describe(identifiers)
    key = hashlib.sha256(description.encode()).hexdigest()[:32]
    base = Path(path_to_cache) / f"{key}-{identifiers['class']}-{identifiers['split']}"
    paths = {name: Path(f"{base}-{name}.npy") for name in shapes}
    marker = Path(f"{base}-description.txt")
    if marker.is_file():
        arrays = _load(paths, shapes)
        if arrays is not None:
            return arrays
        logger.warning("the cached indices %s-*.npy are damaged; building them again", base)
    arrays = build()
    for name, path in paths.items():
        _save(path, arrays[name])
    atomic_file.write_atomically(marker, description.encode())
    return arrays


def _load(paths: dict[str, Path], shapes: dict[str, tuple[int | None, ...]]) -> Arrays | None:
    arrays = {}
    for name, path in paths.items():
        try:
            arrays[name] = numpy.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        if not _fits(arrays[name].shape, shapes[name]) or arrays[name].dtype.kind not in "iu":
            return None
    return arrays


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        size == want or want is None for size, want in zip(shape, wanted, strict=True)
    )


def _save(path: Path, array: numpy.ndarray) -> None:
    file = atomic_file.AtomicFile(path)
    try:
        numpy.save(file, array, allow_pickle=False)
        file.publish()
    finally:
        file.discard()


class LowLevelDataset(Protocol):
    """Sequences of tokens: an `IndexedDataset`, or anything in memory that looks like one."""

    @property
    def sequence_lengths(self) -> numpy.ndarray: ...

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray: ...


class MegatronDataset(ABC, torch.utils.data.Dataset):
    """Samples cut from some of the sequences of a low-level dataset.

    Args:
        dataset: the sequences.
        dataset_path: where they come from, for messages.
        indices: which of them belong to this split, int32.
        num_samples: how many samples are wanted, over as many epochs as that takes; None for one
            epoch.
        index_split: the split.
        config: the settings.
    """

    def __init__(
        self,
        dataset: LowLevelDataset,
        dataset_path: str | None,
        indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ):
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Everything the indices depend on. Megatron names the path only, and reads stale indices
        when the file behind it changes; the lengths of the sequences tell."""
        lengths = numpy.ascontiguousarray(self.dataset.sequence_lengths)
        return {
            "class": type(self).__name__,
            "split": self.index_split.name,
            "sequences": [int(self.indices[0]), int(self.indices[-1])] if self.indices.size else [],
            "lengths": f"{lengths.size} of crc32 {zlib.crc32(lengths):08x}",
            "num_samples": self.num_samples,
            "random_seed": self.config.random_seed,
            "sequence_length": self.config.sequence_length,
        }

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples, `num_samples` or a few more."""

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Sample `idx`; the same every time and in every process."""
