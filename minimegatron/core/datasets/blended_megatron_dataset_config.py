"""Settings of all datasets: which files, how split, how blended, how long, which seed.

Torch-free. Counterpart: `megatron.core.datasets.blended_megatron_dataset_config`, without the settings
for object storage, builder threads and deferred maps.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from minimegatron.core.datasets.megatron_tokenizer import MegatronTokenizer
from minimegatron.core.datasets.utils import Blend, Split, normalize

Span = tuple[float, float]
"""Where a split begins and ends in a corpus, as fractions of its sequences."""

MOCK_SPLIT = "1,1,1"
"""How made-up data is divided, whatever `split` says; as in Megatron."""


@dataclass(frozen=True)
class BlendedMegatronDatasetConfig:
    """Either one `blend` that `split` divides, or `blend_per_split`; with neither, made-up data."""

    random_seed: int
    """The seed of every shuffle."""
    sequence_length: int
    """Tokens per sample."""
    blend: Blend | None = None
    blend_per_split: Sequence[Blend | None] | None = None
    """Train, validation and test data of their own."""
    split: str | None = None
    """Shares of the three splits, such as "949,50,1"."""
    path_to_cache: str | None = None
    """A folder for finished indices; None builds them anew each time."""
    tokenizer: MegatronTokenizer | None = None
    """The datasets need its `eod`, and what names it in the cache."""
    mid_level_dataset_surplus: float = 0.005
    """Samples each dataset of a weighted blend builds beyond its share, as a fraction."""

    def __post_init__(self) -> None:
        """Raises ValueError, with the numbers and the remedy, for what cannot be."""
        if self.sequence_length < 1:
            raise ValueError(f"sequence_length is {self.sequence_length}; give 1 or more")
        if self.blend is not None and self.blend_per_split is not None:
            raise ValueError("give blend or blend_per_split, and not both")
        if self.mock:
            object.__setattr__(self, "split", MOCK_SPLIT)
        elif (self.blend is None) != (self.split is None):
            raise ValueError(f"split is {self.split!r}; it goes with blend, and only with it")
        if self.blend_per_split is not None and len(self.blend_per_split) != len(Split):
            raise ValueError(
                f"blend_per_split has {len(self.blend_per_split)} entries; give {len(Split)}, for "
                "train, validation and test, None where there is no data"
            )
        for prefixes, weights in filter(None, [self.blend, *(self.blend_per_split or ())]):
            if weights is not None and len(weights) != len(prefixes):
                raise ValueError(
                    f"a blend has {len(prefixes)} prefixes but {len(weights)} weights; "
                    "give one weight per prefix"
                )
        if self.split is not None:
            parse_and_normalize_split(self.split)

    @property
    def mock(self) -> bool:
        """True where no data is named; `MockGPTDataset` then makes it up."""
        return self.blend is None and not any(self.blend_per_split or ())

    @property
    def split_matrix(self) -> list[Span | None]:
        """The span of each split; None for one without a share."""
        if self.split is None:
            return [None if blend is None else (0.0, 1.0) for blend in self.blend_per_split]
        return convert_split_vector_to_split_matrix(parse_and_normalize_split(self.split))


def parse_and_normalize_split(split: str) -> list[float]:
    """`"949,50,1"`, or `"949/50/1"`, as shares that add up to one; missing ones are 0. Raises
    ValueError for what is no list of up to three numbers of 0 or more, one of them above 0."""
    try:
        shares = [float(word) for word in re.split(r"[,/\s]+", split.strip())]
    except ValueError:
        shares = []
    usable = all(0 <= share < float("inf") for share in shares) and sum(shares) > 0
    if not usable or len(shares) > len(Split):
        raise ValueError(
            f"split {split!r} is not up to three numbers of 0 or more, for train, validation and "
            "test; write for example 949,50,1"
        )
    return normalize(shares + [0.0] * (len(Split) - len(shares)))


def convert_split_vector_to_split_matrix(vector_a: Sequence[float]) -> list[Span | None]:
    """Shares to spans: `[0.5, 0, 0.5]` becomes `[(0, 0.5), None, (0.5, 1)]`."""
    ends = list(accumulate(vector_a, initial=0))
    return [
        None if end <= begin else (begin, end)
        for begin, end in zip(ends[:-1], ends[1:], strict=True)
    ]
