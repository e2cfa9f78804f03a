"""The built-in text as documents of sentences, for BERT and T5: a sentence is a line.

Megatron has no such module; its examples begin with a download.
"""

import functools
import hashlib
import math

import numpy

from minimegatron.core.datasets.bert_dataset import (
    SHOWN_AS_MASK,
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from minimegatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from minimegatron.core.datasets.masked_dataset import IGNORED
from minimegatron.core.datasets.stdlib_corpus import unigram_entropy
from minimegatron.core.datasets.stdlib_text import part_of_stdlib
from minimegatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from minimegatron.core.datasets.utils import Split
from minimegatron.core.datasets.wordpiece_tokenizer import BertWordPieceTokenizer

LINES_PER_DOCUMENT = 40
"""A file makes several documents: what `--split` divides must be many and of about one size."""

ENTROPY_SAMPLES = 2000
"""Many enough to know how often a piece is hidden: 4 times as many move the entropy by 0.04 at most."""


@functools.cache
def documents_of_stdlib() -> list[list[str]]:
    """Documents of up to `LINES_PER_DOCUMENT` lines that are not blank, without their indentation.

    Ordered by a hash: a split cut off the end is then a fair sample of all files. The lines around
    those of a validation document may be in training data, they themselves are not.
    """
    documents = []
    for text in part_of_stdlib():
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        for begin in range(0, len(lines), LINES_PER_DOCUMENT):
            documents.append(lines[begin : begin + LINES_PER_DOCUMENT])
    return sorted(documents, key=_hash)


def _hash(document: list[str]) -> bytes:
    return hashlib.sha256("\n".join(document).encode()).digest()


class StdlibSentences:
    """A quarter of the library as a `LowLevelSentences` in memory: 800,000 tokens of WordPiece."""

    def __init__(self, tokenizer: BertWordPieceTokenizer):
        documents = documents_of_stdlib()
        lines = [line.encode() for document in documents for line in document]
        tokenized = tokenizer.tokenize_batch(lines)
        smallest = numpy.min_scalar_type(tokenizer.vocab_size - 1)
        self.tokens = numpy.concatenate(tokenized, dtype=smallest, casting="unsafe")
        self.sequence_lengths = numpy.array([len(ids) for ids in tokenized], dtype=numpy.int32)
        self.document_indices = numpy.cumsum([0, *map(len, documents)])
        self._begins = numpy.cumsum([0, *self.sequence_lengths.tolist()]).tolist()

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        """Tokens `offset` to `offset + length` (None: to the end) of line `idx`."""
        begin, end = self._begins[idx] + offset, self._begins[idx + 1]
        return self.tokens[begin : end if length is None else min(begin + length, end)]


@functools.cache
def load_stdlib_sentences(tokenizer: BertWordPieceTokenizer) -> StdlibSentences:
    """Read once per process: every chunk of an interleaved stage asks for it."""
    return StdlibSentences(tokenizer)


class StdlibBERTDataset(BERTMaskedWordPieceDataset):
    """A `BERTMaskedWordPieceDataset` over this text; the path it is given is ignored."""

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BERTMaskedWordPieceDatasetConfig
    ) -> StdlibSentences:
        return load_stdlib_sentences(config.tokenizer)


class StdlibT5Dataset(T5MaskedWordPieceDataset):
    """A `T5MaskedWordPieceDataset` over this text; the path it is given is ignored."""

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: T5MaskedWordPieceDatasetConfig
    ) -> StdlibSentences:
        return load_stdlib_sentences(config.tokenizer)


def entropies_of_hidden_pieces(config: BERTMaskedWordPieceDatasetConfig) -> tuple[float, float]:
    """What two models without context lose at the hidden places of validation samples.

    Nats per token; NaN if `split` has no such samples. The first model knows how often each piece is
    hidden: `unigram_entropy`. The second also looks at what is shown at the place, a random piece or,
    as often, the hidden one; only below its loss is something read from other tokens.
    """
    corpus = load_stdlib_sentences(config.tokenizer)
    span = convert_split_vector_to_split_matrix(parse_and_normalize_split(config.split))[1]
    if span is None:
        return math.nan, math.nan
    count = StdlibBERTDataset.numel_low_level_dataset(corpus)
    documents = numpy.arange(*(round(fraction * count) for fraction in span), dtype=numpy.int32)
    samples = StdlibBERTDataset(corpus, None, documents, ENTROPY_SAMPLES, Split.valid, config)
    labels = numpy.concatenate([samples[i]["labels"] for i in range(len(samples))])
    hidden = labels[labels != IGNORED]
    return unigram_entropy(hidden), _loss_at_one_place(
        numpy.bincount(hidden, minlength=config.tokenizer.vocab_size) / len(hidden)
    )


def _loss_at_one_place(share: numpy.ndarray) -> float:
    """H(hidden | shown), where `share` is of each piece in those that are hidden, float64 [v]."""
    v = len(share)
    other, same, shown = share / (2 * v), share / (2 * v) + share / 2, (share + 1 / v) / 2
    of_pairs = _sum_x_ln_x(other) * (v - 1) + _sum_x_ln_x(same)
    not_mask = _sum_x_ln_x(shown) - of_pairs
    return -SHOWN_AS_MASK * _sum_x_ln_x(share) + (1 - SHOWN_AS_MASK) * not_mask


def _sum_x_ln_x(x: numpy.ndarray) -> float:
    return float((x[x > 0] * numpy.log(x[x > 0])).sum())
