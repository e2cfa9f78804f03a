"""Text that every machine with Python has: the standard library's own source.

Megatron has no such module; its examples begin with a download.

Different Python versions hold different text; one version gives the same on every rank.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy

from minimegatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from minimegatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from minimegatron.core.datasets.megatron_tokenizer import MegatronTokenizer
from minimegatron.core.datasets.stdlib_text import STDLIB, stdlib_files
from minimegatron.exports import lazily

__all__ = ["STDLIB", "stdlib_files"]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "StdlibBERTDataset": "minimegatron.core.datasets.stdlib_sentences:StdlibBERTDataset",
        "StdlibT5Dataset": "minimegatron.core.datasets.stdlib_sentences:StdlibT5Dataset",
    },
)

BLOCK_LENGTH = 4096
"""Tokens per sequence. What `--split` divides and what is shuffled must be many and of one size,
which files are not."""


def num_blocks(files: Sequence[Path]) -> int:
    """Blocks that a byte-level tokenizer makes of `files`, without reading them."""
    return -(-sum(path.stat().st_size + 1 for path in files) // BLOCK_LENGTH)


class StdlibCorpus:
    """The library as a `LowLevelDataset` in memory: one stream of tokens, cut into equal blocks.

    Each file is followed by an end-of-document token. About 12 million bytes, 24 MB of uint16.
    """

    def __init__(self, tokenizer: MegatronTokenizer, files: Sequence[Path] | None = None):
        documents = [path.read_bytes() for path in (files or stdlib_files())]
        end = numpy.array([tokenizer.eod])
        parts = [part for ids in tokenizer.tokenize_batch(documents) for part in (ids, end)]
        smallest = numpy.min_scalar_type(tokenizer.vocab_size - 1)
        self.tokens = numpy.concatenate(parts, dtype=smallest, casting="unsafe")
        begins = numpy.arange(0, len(self.tokens), BLOCK_LENGTH)
        self.sequence_lengths = numpy.diff(begins, append=len(self.tokens)).astype(numpy.int32)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        """Tokens `offset` to `offset + length` (None: to the end) of block `idx`."""
        begin = idx * BLOCK_LENGTH
        end = begin + int(self.sequence_lengths[idx])
        stop = end if length is None else min(begin + offset + length, end)
        return self.tokens[begin + offset : stop]


@functools.cache
def load_stdlib_corpus(tokenizer: MegatronTokenizer) -> StdlibCorpus:
    """Read once per process: every chunk of an interleaved stage asks for it."""
    return StdlibCorpus(tokenizer)


class StdlibGPTDataset(GPTDataset):
    """A `GPTDataset` over this corpus; the path it is given is ignored."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> StdlibCorpus:
        return load_stdlib_corpus(config.tokenizer)


def validation_unigram_entropy(tokenizer: MegatronTokenizer, split: str) -> float:
    """`unigram_entropy` of this corpus's validation text; NaN if `split` gives it none."""
    corpus = load_stdlib_corpus(tokenizer)
    span = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))[1]
    if span is None:
        return math.nan
    num_blocks = len(corpus.sequence_lengths)
    begin, end = (round(fraction * num_blocks) * BLOCK_LENGTH for fraction in span)
    return unigram_entropy(corpus.tokens[begin:end])


def unigram_entropy(tokens: numpy.ndarray) -> float:
    """Nats per token of the best model that knows how often each token occurs and nothing else.

    H = - sum_i p_i ln p_i. A language model has learnt something of order only below it.
    """
    counts = numpy.bincount(tokens)
    p = counts[counts > 0] / len(tokens)
    return float(-(p * numpy.log(p)).sum())
