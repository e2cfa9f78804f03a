"""Samples of whole sentences in which some words are hidden: what BERT's and T5's have in common.

Counterpart: `megatron.core.datasets.masked_dataset`. Which sentences make up the samples is Megatron's
choice, number for number; the order of the samples and what is hidden follow the same distributions
with other random numbers.
"""

import zlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy

from minimegatron.core.datasets import indexed_dataset as binary
from minimegatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from minimegatron.core.datasets.gpt_dataset import check_token_ids
from minimegatron.core.datasets.helpers import LONGEST_SENTENCE, build_mapping
from minimegatron.core.datasets.megatron_dataset import (
    LowLevelDataset,
    MegatronDataset,
    cached_arrays,
)
from minimegatron.core.datasets.utils import DataError, Split
from minimegatron.core.datasets.wordpiece_tokenizer import BertWordPieceTokenizer

IGNORED = -1
"""The label of a token that nobody has to guess."""

GEOMETRIC = 0.2
"""With `masking_use_geometric_distribution`: the probability that one more word is the last."""

Run = tuple[int, int]
"""First token, and one past the last."""


class LowLevelSentences(LowLevelDataset, Protocol):
    """Sentences, and which of them make up a document: an `IndexedDataset`, or one in memory."""

    @property
    def document_indices(self) -> numpy.ndarray:
        """The first sentence of each document, and the number of sentences at the end."""


@dataclass(frozen=True)
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """How much is hidden, and in what pieces."""

    masking_probability: float = 0.15
    """Share of the tokens to hide."""
    short_sequence_probability: float = 0.1
    """Share of samples that are shorter than they could be."""
    masking_max_ngram: int = 3
    """The most words to hide in a row."""
    masking_do_full_word: bool = True
    """Hide all pieces of a word or none."""
    masking_use_geometric_distribution: bool = False
    """The number of words in a row is geometric, on average five, in place of P(n) ~ 1 / n."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tokenizer, BertWordPieceTokenizer):
            raise ValueError(
                f"tokenizer is {type(self.tokenizer).__name__}, which has no token for a hidden word; "
                "give a BertWordPieceTokenizer"
            )
        if not 0 < self.masking_probability < 1:
            raise ValueError(
                f"masking_probability is {self.masking_probability}; give more than 0 and less than 1"
            )
        if not 0 <= self.short_sequence_probability <= 1:
            raise ValueError(
                f"short_sequence_probability is {self.short_sequence_probability}; give 0 to 1"
            )
        if self.masking_max_ngram < 1:
            raise ValueError(f"masking_max_ngram is {self.masking_max_ngram}; give 1 or more")


def max_hidden_tokens(masking_probability: float, target_sequence_length: int) -> int:
    """The most tokens that a sample of this length hides: 19 of 128 at 15 percent."""
    return max(1, round(masking_probability * target_sequence_length))


class MaskedWordPieceDataset(MegatronDataset):
    """Samples of whole sentences with hidden words; `--split` divides the documents.

    Args:
        indexed_dataset: sentences, and which of them make up a document.
        dataset_path: where they come from, for messages.
        indexed_indices: which documents belong to this split, int32, one after the other.
        num_samples: how many samples are wanted, over as many whole epochs as that takes; None for
            one epoch.
        index_split: the split.
        config: the settings.

    Sample i depends on the seed, on the documents and, since all epochs are shuffled together, on the
    number of epochs. Raises ValueError if samples are wanted of a split without a usable document.
    """

    config: MaskedWordPieceDatasetConfig
    min_sentences: int
    """Sentences that a sample needs."""
    num_special_tokens: int
    """Tokens that are added to the text of a sample."""

    def __init__(
        self,
        indexed_dataset: LowLevelSentences,
        dataset_path: str | None,
        indexed_indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: MaskedWordPieceDatasetConfig,
    ):
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        tokenizer = config.tokenizer
        self._begins_word = tokenizer.begins_word
        self._vocab_size = tokenizer.vocab_size
        self._document_indices = self.dataset.document_indices[
            numpy.append(indexed_indices, indexed_indices[-1:] + 1)
        ]
        self.sample_index = cached_arrays(
            config.path_to_cache,
            self.unique_identifiers,
            {"sample_index": (None, 3)},
            self._build_sample_index,
        )["sample_index"]
        if num_samples and not len(self.sample_index):
            raise DataError(
                f"{num_samples} {index_split.name} samples are wanted, but of the "
                f"{len(indexed_indices)} documents of {dataset_path} in this split none has "
                f"{self.min_sentences} or more sentences, each of at most {LONGEST_SENTENCE} tokens; "
                "write them with `minimegatron preprocess --split-sentences`, or give the split a "
                "larger share in --split"
            )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelSentences) -> int:
        """What `--split` divides: documents."""
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: MaskedWordPieceDatasetConfig
    ) -> "binary.IndexedDataset":
        """The dataset of one path prefix. Raises ValueError where no data is named."""
        if dataset_path is None:
            raise DataError(
                "neither blend nor blend_per_split names data; give one: no sentences are made up"
            )
        return binary.open_tokens(dataset_path)

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        documents = numpy.ascontiguousarray(self._document_indices)
        return super().unique_identifiers | {
            "documents": f"{documents.size} of crc32 {zlib.crc32(documents):08x}",
            "short_sequence_probability": self.config.short_sequence_probability,
            "min_sentences": self.min_sentences,
            "num_special_tokens": self.num_special_tokens,
        }

    def _build_sample_index(self) -> dict[str, numpy.ndarray]:
        rows = build_mapping(
            self._document_indices,
            self.dataset.sequence_lengths,
            self.num_samples,
            self.config.sequence_length - self.num_special_tokens,
            self.config.short_sequence_probability,
            self.config.random_seed,
            self.min_sentences,
        )
        return {"sample_index": rows}

    # -- One sample --

    def __len__(self) -> int:
        return len(self.sample_index)

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Sample `idx`; the same every time and in every process."""

    def _read_sentences(
        self, idx: int
    ) -> tuple[list[numpy.ndarray], int, numpy.random.RandomState]:
        """The sentences of sample `idx`, the length it is meant to have, and its random numbers."""
        begin, end, target_sequence_length = self.sample_index[idx].tolist()
        sentences = [self.dataset.get(sentence) for sentence in range(begin, end)]
        check_token_ids(self.dataset_path, numpy.concatenate(sentences), self._vocab_size)
        seed = (self.config.random_seed + idx) % 2**32
        return sentences, target_sequence_length, numpy.random.RandomState(seed)

    # -- What to hide --

    def _choose_runs(
        self,
        token_ids: numpy.ndarray,
        is_fixed: numpy.ndarray,
        target_sequence_length: int,
        rng: numpy.random.RandomState,
    ) -> list[Run]:
        """Which runs of tokens to hide, in the order of the text.

        Words are tried in random order, each with a random number of those after it, fewer where that
        many are hidden already or too long.

        Args:
            token_ids: int64 [n].
            is_fixed: tokens between words that are never hidden, bool [n].
            target_sequence_length: the length that the sample was meant to have; it may be longer than
                the sample.
        """
        probability = self.config.masking_probability
        most = max_hidden_tokens(probability, target_sequence_length)
        left = min(most, max_hidden_tokens(probability, len(token_ids)))
        words = self._words(token_ids, is_fixed)
        numbers = self._draw_ngram_sizes(len(words), rng)
        hidden = [False] * len(words)
        runs: list[Run] = []
        for first, wanted in zip(rng.permutation(len(words)).tolist(), numbers, strict=True):
            number = min(wanted, len(words) - first)
            while number and not _may_hide(words, hidden, first, number, left):
                number -= 1
            if number:
                hidden[first : first + number] = [True] * number
                runs.append((words[first][0], words[first + number - 1][1]))
                left -= runs[-1][1] - runs[-1][0]
            if not left:
                break
        return sorted(runs)

    def _words(self, token_ids: numpy.ndarray, is_fixed: numpy.ndarray) -> list[Run]:
        begins = numpy.ones(len(token_ids), dtype=bool)
        if self.config.masking_do_full_word:
            # What stands after a fixed token is a word, even if its begin was cut off.
            begins[1:] = self._begins_word[token_ids[1:]] | is_fixed[1:] | is_fixed[:-1]
        bounds = [*numpy.flatnonzero(begins).tolist(), len(token_ids)]
        fixed = is_fixed.tolist()
        return [
            (begin, end)
            for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
            if not fixed[begin]
        ]

    def _draw_ngram_sizes(self, count: int, rng: numpy.random.RandomState) -> list[int]:
        """`count` numbers of words, 1 to `masking_max_ngram`."""
        most = self.config.masking_max_ngram
        if self.config.masking_use_geometric_distribution:
            return numpy.minimum(rng.geometric(GEOMETRIC, count), most).tolist()
        weights = 1 / numpy.arange(1, most + 1)
        return rng.choice(numpy.arange(1, most + 1), size=count, p=weights / weights.sum()).tolist()


def _may_hide(words: list[Run], hidden: list[bool], first: int, number: int, left: int) -> bool:
    """Whether these words are not hidden yet, stand side by side and are short enough."""
    chosen = words[first : first + number]
    size = sum(end - begin for begin, end in chosen)
    together = chosen[-1][1] - chosen[0][0] == size
    return together and size <= left and not any(hidden[first : first + number])
