"""What the datasets of one split of one corpus share: their parts, and a name for the cache.

Counterpart: `megatron.core.datasets.megatron_dataset`.
"""

import zlib
from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy
import torch

from minimegatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from minimegatron.core.datasets.utils import Split


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
