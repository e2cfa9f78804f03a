"""From path prefixes to train, validation and test datasets.

Counterpart: `megatron.core.datasets.blended_megatron_dataset_builder`, the same datasets for the
same settings; builder threads are left out, and the ranks that wait raise an error if rank 0 fails.

For each split:

    one prefix                          that dataset, as many epochs as the size takes
    several, with weights and a size    a blend by weights, each dataset as long as its share
    several, without weights            a blend by length of one epoch of each, cut at the size
    none, in all splits                 what the dataset class makes up, a third for each split
"""

import math
from collections.abc import Callable, Sequence
from typing import Union

import numpy
import torch

from minimegatron.core import collectives
from minimegatron.core.datasets import blended_dataset
from minimegatron.core.datasets.blended_megatron_dataset_config import (
    BlendedMegatronDatasetConfig,
    Span,
)
from minimegatron.core.datasets.megatron_dataset import MegatronDataset
from minimegatron.core.datasets.utils import Blend, DataError, Split, normalize
from minimegatron.core.utils import get_device

TopLevelDataset = Union["blended_dataset.BlendedDataset", MegatronDataset]


class BlendedMegatronDatasetBuilder:
    """Builds the datasets of all splits.

    Args:
        cls: `GPTDataset`, or another `MegatronDataset`; `MockGPTDataset` where no data is named.
        sizes: samples wanted per split; None for one epoch.
        is_built_on_rank: whether this process needs the datasets. True on rank 0.
        config: the settings.
        group: the ranks that call `build` together. Its rank 0 builds first and fills the cache, the
            others then find it there. None, or no cache: each rank builds for itself.
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
        group: torch.distributed.ProcessGroup | None = None,
    ):
        self.cls = cls
        self.sizes = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        self.group = group if config.path_to_cache is not None else None
        blends = config.blend_per_split or [config.blend] * len(Split)
        for split, blend in zip(Split, blends, strict=True):
            if blend is not None and blend[1] is not None and self.sizes[split.value] is None:
                raise DataError(
                    f"the {split.name} blend has weights but no size; say how many samples, or "
                    "leave out the weights"
                )

    def build(self) -> list[TopLevelDataset | None]:
        """The three datasets; None for a split without data, and where this rank needs none.

        Every rank of `group` must call it. Raises what the dataset class raises; the other ranks
        then raise ValueError.
        """
        if self.group is None:
            return self._build_here()
        datasets: list[TopLevelDataset | None] = [None] * len(Split)
        failure: Exception | None = None
        if self.group.rank() == 0:
            try:
                datasets = self._build_here()
            except Exception as error:  # raised below, once nobody waits for this rank any more
                failure = error
        failed = torch.tensor([int(failure is not None)], device=get_device())
        collectives.all_reduce(failed, self.group, op=collectives.ReduceOp.MAX)
        if failure is not None:
            raise failure
        if failed.item():
            raise DataError("rank 0 could not build the datasets; its own message says why")
        return datasets if self.group.rank() == 0 else self._build_here()

    def _build_here(self) -> list[TopLevelDataset | None]:
        if not self.is_built_on_rank():
            return [None] * len(Split)
        if self.config.mock:
            spans = self.config.split_matrix
            return self._build_megatron_dataset_splits(None, spans, self.sizes)
        if self.config.blend is not None:
            return self._build_blend(self.config.blend, self.config.split_matrix, self.sizes)
        datasets: list[TopLevelDataset | None] = []
        for split, blend in zip(Split, self.config.blend_per_split, strict=True):
            only = [(0.0, 1.0) if other is split else None for other in Split]
            if blend is None:
                datasets.append(None)
                continue
            if len(blend[0]) == 1:
                blend = blend[0], None  # the weight of the only dataset says nothing
            datasets.append(self._build_blend(blend, only, self.sizes)[split.value])
        return datasets

    def _build_blend(
        self, blend: Blend, spans: list[Span | None], sizes: list[int | None]
    ) -> list[TopLevelDataset | None]:
        prefixes, weights = blend
        if len(prefixes) == 1 and weights is None:
            return self._build_megatron_dataset_splits(prefixes[0], spans, sizes)
        shares: list[list[int | None]] = [[None] * len(Split) for _ in prefixes]
        built = shares
        if weights is not None:
            surplus = self.config.mid_level_dataset_surplus
            shares = _get_size_per_split_per_dataset(normalize(weights), sizes)
            built = _get_size_per_split_per_dataset(normalize(weights), sizes, surplus)
        per_prefix = [
            self._build_megatron_dataset_splits(prefix, spans, wanted)
            for prefix, wanted in zip(prefixes, built, strict=True)
        ]
        blended: list[TopLevelDataset | None] = [None] * len(Split)
        for i, span in enumerate(spans):
            if span is None:
                continue
            datasets = [splits[i] for splits in per_prefix]
            if weights is not None:
                size = sum(share[i] for share in shares)
                blended[i] = (
                    blended_dataset.BlendedDataset(datasets, weights, size, self.config)
                    if size
                    else None
                )
                continue
            # A corpus too small for this split has no samples, and no place in its blend.
            datasets = [dataset for dataset in datasets if len(dataset)]
            lengths = [len(dataset) for dataset in datasets]
            size = None if sizes[i] is None else min(sizes[i], sum(lengths))
            if datasets:
                blended[i] = blended_dataset.BlendedDataset(datasets, lengths, size, self.config)
        return blended

    def _build_megatron_dataset_splits(
        self, dataset_path: str | None, spans: list[Span | None], sizes: list[int | None]
    ) -> list[MegatronDataset | None]:
        """The splits of one prefix: consecutive runs of its sequences."""
        low_level_dataset = self.cls.build_low_level_dataset(dataset_path, self.config)
        num_elements = self.cls.numel_low_level_dataset(low_level_dataset)
        datasets: list[MegatronDataset | None] = []
        for split, span, size in zip(Split, spans, sizes, strict=True):
            if span is None:
                datasets.append(None)
                continue
            begin, end = (round(fraction * float(num_elements)) for fraction in span)
            indices = numpy.arange(begin, end, dtype=numpy.int32)
            datasets.append(
                self.cls(low_level_dataset, dataset_path, indices, size, split, self.config)
            )
        return datasets


def _get_size_per_split_per_dataset(
    normalized_weights: Sequence[float], target_size_per_split: Sequence[int], surplus: float = 0.0
) -> list[list[int]]:
    """Each dataset's share of each split, rounded up, and the surplus on top."""
    return [
        [math.ceil(math.ceil(size * weight) * (1 + surplus)) for size in target_size_per_split]
        for weight in normalized_weights
    ]
