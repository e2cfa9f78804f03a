"""Several datasets read as one, in proportion to weights.

Counterpart: `megatron.core.datasets.blended_dataset`.
"""

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from minimegatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from minimegatron.core.datasets.helpers import (
    build_blending_indices,
    build_exhaustive_blending_indices,
)
from minimegatron.core.datasets.megatron_dataset import MegatronDataset, cached_arrays
from minimegatron.core.datasets.utils import DataError, normalize

MAX_DATASETS = numpy.iinfo(numpy.int16).max


class BlendedDataset(torch.utils.data.Dataset):
    """`size` samples from `datasets`, at every moment as near to `weights` as whole numbers allow.

    `blend[i]` is a sample of one of them, with its number as `dataset_id`.

    Args:
        datasets: of one split.
        weights: one above 0 for each.
        size: samples in all; None takes exactly `weights[d]` samples, a whole number, of each.
        config: the settings.

    Raises ValueError for weights that do not match, and for datasets with fewer samples than their
    share.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ):
        self.datasets = list(datasets)
        self.split = self.datasets[0].index_split
        self.size = size
        self.config = config
        self._check(weights)
        if size is None:
            self.weights = [int(weight) for weight in weights]
        else:
            self.weights = normalize(weights)
        length = sum(self.weights) if size is None else size
        arrays = cached_arrays(
            config.path_to_cache,
            self.unique_identifiers,
            {"dataset_index": (length,), "dataset_sample_index": (length,)},
            self._build_indices,
        )
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]
        self._check_supply()

    def _check(self, weights: Sequence[float]) -> None:
        if len(weights) != len(self.datasets) or len(weights) > MAX_DATASETS:
            raise DataError(
                f"a blend of {len(self.datasets)} datasets has {len(weights)} weights; give one "
                f"weight each, for at most {MAX_DATASETS} datasets"
            )
        for dataset, weight in zip(self.datasets, weights, strict=True):
            if not weight > 0 or (self.size is None and weight != int(weight)):
                raise DataError(
                    f"{dataset.dataset_path} has weight {weight} in the {self.split.name} blend; "
                    + ("give one above 0" if self.size else "without a size, give whole samples")
                )

    def _check_supply(self) -> None:
        taken = numpy.bincount(self.dataset_index, minlength=len(self.datasets))
        for dataset, count in zip(self.datasets, taken.tolist(), strict=True):
            if count > len(dataset):
                raise DataError(
                    f"the {self.split.name} blend takes {count} samples of {dataset.dataset_path}, "
                    f"which has {len(dataset)}; raise mid_level_dataset_surplus, which is "
                    f"{self.config.mid_level_dataset_surplus}"
                )

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Everything the indices depend on."""
        return {
            "class": type(self).__name__,
            "split": self.split.name,
            "weights": self.weights,
            "size": self.size,
        }

    def _build_indices(self) -> dict[str, numpy.ndarray]:
        if self.size is None:
            dataset_index, sample_index = build_exhaustive_blending_indices(self.weights)
        else:
            dataset_index, sample_index = build_blending_indices(self.weights, self.size)
        return {"dataset_index": dataset_index, "dataset_sample_index": sample_index}

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        dataset_id = int(self.dataset_index[idx])
        sample = self.datasets[dataset_id][int(self.dataset_sample_index[idx])]
        return {"dataset_id": dataset_id, **sample}
