"""Small datasets on disk and in memory, for the tests beside this file."""

from collections.abc import Sequence
from pathlib import Path

import numpy

from minimegatron.core.datasets.gpt_dataset import GPTDatasetConfig
from minimegatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from minimegatron.core.datasets.megatron_tokenizer import ByteLevelTokenizer


class InMemory:
    """A low-level dataset of given lengths; its tokens count up through all sequences."""

    def __init__(self, lengths: Sequence[int], first_token: int = 0):
        self.sequence_lengths = numpy.array(lengths, dtype=numpy.int32)
        ends = first_token + numpy.cumsum(self.sequence_lengths)
        self.sequences = [numpy.arange(e - n, e) for e, n in zip(ends, lengths, strict=True)]

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        return self.sequences[idx][offset : None if length is None else offset + length]


def write_dataset(prefix: Path, documents: Sequence[Sequence[int]], dtype=numpy.uint16) -> str:
    """Writes one sequence per document; returns the prefix as text."""
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def random_documents(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    rng = numpy.random.default_rng(seed)
    return [rng.integers(0, 257, rng.integers(1, longest)).tolist() for _ in range(count)]


class WideTokenizer(ByteLevelTokenizer):
    """So many ids that each token of a test can have its own."""

    vocab_size = 1 << 40


def gpt_config(**settings) -> GPTDatasetConfig:
    """A configuration for tests that do not look at files: a prefix that nobody opens."""
    defaults = {
        "random_seed": 1234,
        "sequence_length": 8,
        "tokenizer": WideTokenizer(),
        "blend": (["unused"], None),
        "split": "1,0,0",
        "create_attention_mask": False,
    }
    return GPTDatasetConfig(**defaults | settings)
