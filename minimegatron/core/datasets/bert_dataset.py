"""BERT's samples: two pieces of text, in their order or swapped, with hidden words.

Counterpart: `megatron.core.datasets.bert_dataset`; see `masked_dataset` for what is the same.

    [CLS] the first piece [SEP] the second piece [SEP] [PAD] ...
"""

from dataclasses import dataclass
from typing import Any

import numpy

from minimegatron.core.datasets.masked_dataset import (
    IGNORED,
    MaskedWordPieceDataset,
    MaskedWordPieceDatasetConfig,
    Run,
)

SHOWN_AS_MASK = 0.8
"""Of the hidden tokens, this share is [MASK]; half of the others is a random token, half stays."""


@dataclass(frozen=True)
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """What a sample asks for besides its hidden words."""

    classification_head: bool = True
    """Make two pieces of the text, swapped in half of the samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length < 5:
            raise ValueError(
                f"sequence_length is {self.sequence_length}; give 5 or more: [CLS], two [SEP], and "
                "two tokens"
            )


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset):
    """Samples for BERT; the arguments are those of `MaskedWordPieceDataset`.

    `dataset[i]` holds, for s = sequence_length, int64 arrays [s]: `text`, padded with [PAD]; `types`,
    0 up to the first [SEP], 1 for the second piece, 0 for padding; `labels`, the token at each hidden
    place, elsewhere -1; `padding_mask`, 1 at tokens, 0 at padding; `loss_mask`, 1 at hidden places.
    And two numbers: `is_random`, 1 if the pieces are swapped; `truncated`, 1 if tokens were cut off.
    """

    config: BERTMaskedWordPieceDatasetConfig
    num_special_tokens = 3

    @property
    def min_sentences(self) -> int:
        """Two where a sample is cut in two."""
        return 2 if self.config.classification_head else 1

    def __getitem__(self, idx: int) -> dict[str, Any]:
        tokenizer = self.config.tokenizer
        sentences, target_sequence_length, rng = self._read_sentences(idx)
        first, second, is_random = self._two_pieces(sentences, rng)
        num_tokens = len(first) + len(second)
        first, second = _truncate(first, second, target_sequence_length, rng)

        cls, sep = [tokenizer.cls], [tokenizer.sep]
        parts = [cls, first, sep] + ([second, sep] if len(second) else [])
        tokens = numpy.concatenate(parts, dtype=numpy.int64)
        is_fixed = (tokens == tokenizer.cls) | (tokens == tokenizer.sep)
        runs = self._choose_runs(tokens, is_fixed, target_sequence_length, rng)
        shown, labels = self._hide(tokens, runs, rng)

        length, s = len(tokens), self.config.sequence_length
        types = numpy.zeros(s, dtype=numpy.int64)
        types[len(first) + 2 : length] = 1
        padding_mask = numpy.zeros(s, dtype=numpy.int64)
        padding_mask[:length] = 1
        labels = _pad(labels, s, IGNORED)
        return {
            "text": _pad(shown, s, tokenizer.pad),
            "types": types,
            "labels": labels,
            "is_random": int(is_random),
            "padding_mask": padding_mask,
            "loss_mask": (labels != IGNORED).astype(numpy.int64),
            "truncated": int(num_tokens > len(first) + len(second)),
        }

    def _two_pieces(
        self, sentences: list[numpy.ndarray], rng: numpy.random.RandomState
    ) -> tuple[numpy.ndarray, numpy.ndarray, bool]:
        """Whole sentences on both sides, in half of the cases swapped."""
        if not self.config.classification_head:
            return numpy.concatenate(sentences), numpy.empty(0, dtype=numpy.int64), False
        pivot = rng.randint(1, len(sentences))
        first, second = numpy.concatenate(sentences[:pivot]), numpy.concatenate(sentences[pivot:])
        if rng.randint(2):
            return second, first, True
        return first, second, False

    def _hide(
        self, tokens: numpy.ndarray, runs: list[Run], rng: numpy.random.RandomState
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """What the model sees of `tokens`, and what it has to guess."""
        places = numpy.array([place for run in runs for place in range(*run)], dtype=numpy.int64)
        labels = numpy.full(len(tokens), IGNORED, dtype=numpy.int64)
        labels[places] = tokens[places]
        kind = rng.random_sample(len(places))
        replaced = rng.randint(self._vocab_size, size=len(places))
        replaced = numpy.where(kind < (1 + SHOWN_AS_MASK) / 2, replaced, tokens[places])
        shown = tokens.copy()
        shown[places] = numpy.where(kind < SHOWN_AS_MASK, self.config.tokenizer.mask, replaced)
        return shown, labels


def _truncate(
    first: numpy.ndarray, second: numpy.ndarray, length: int, rng: numpy.random.RandomState
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Cuts tokens off, one by one, at a random end of the longer piece, until there are `length`."""
    begins, lengths = [0, 0], [len(first), len(second)]
    for in_front in rng.randint(2, size=max(0, sum(lengths) - length)).tolist():
        longer = 0 if lengths[0] > lengths[1] else 1
        begins[longer] += in_front
        lengths[longer] -= 1
    return first[begins[0] :][: lengths[0]], second[begins[1] :][: lengths[1]]


def _pad(values: numpy.ndarray, length: int, value: int) -> numpy.ndarray:
    """`values`, int64, with `value` after them up to `length`."""
    return numpy.concatenate([values, numpy.full(length - len(values), value, dtype=numpy.int64)])
