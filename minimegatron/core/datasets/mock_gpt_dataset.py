"""Made-up sequences, for programs that shall run without data.

Counterpart: `MockGPTDataset` of `megatron.core.datasets.gpt_dataset`, the same samples.
"""

import numpy

from minimegatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from minimegatron.core.datasets.megatron_tokenizer import MegatronTokenizer
from minimegatron.core.datasets.utils import Split


class MockGPTLowLevelDataset:
    """Made-up sequences: each counts up from 1, after the largest token goes on with 0, and ends with
    the end of document.

    A token is then known from the one before it, so a loss that falls says that training works.

    Args:
        tokenizer: says how many tokens there are, and which one ends a document.
    """

    seed = 0
    size = 100_000
    """Sequences."""
    max_sequence_length = 4096
    """Each is shorter."""

    def __init__(self, tokenizer: MegatronTokenizer):
        self.vocab_size, self.eod_token = tokenizer.vocab_size, tokenizer.eod
        rng = numpy.random.default_rng(seed=self.seed)
        self.sequence_lengths = rng.integers(
            1, self.max_sequence_length, size=self.size, dtype=numpy.int32
        )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> numpy.ndarray:
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        """`length` tokens (all that follow, for None) of sequence `idx`, from `offset` on, int64."""
        end = int(self.sequence_lengths[idx])
        stop = end if length is None else min(offset + length, end)
        tokens = numpy.arange(offset + 1, stop + 1) % self.vocab_size
        if stop == end:
            tokens[-1:] = self.eod_token
        return tokens


class MockGPTDataset(GPTDataset):
    """A `GPTDataset` of made-up sequences, the same as Megatron's; `dataset_path` says nothing.

    For programs that shall run without data. Raises ValueError for settings that name data.
    """

    def __init__(
        self,
        dataset: MockGPTLowLevelDataset,
        dataset_path: str | None,
        indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ):
        if not config.mock:
            raise ValueError(
                "MockGPTDataset makes its data up, but blend or blend_per_split names some; leave "
                "it out, or use GPTDataset"
            )
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: MockGPTLowLevelDataset) -> int:
        """Sequences."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> MockGPTLowLevelDataset:
        """Made-up sequences of `config`'s tokenizer."""
        return MockGPTLowLevelDataset(config.tokenizer)
