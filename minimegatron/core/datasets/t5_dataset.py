"""T5's samples: text from which runs of words were taken out, and what was taken out.

Counterpart: `megatron.core.datasets.t5_dataset`; see `masked_dataset` for what is the same.

    text           a b c d e f
    encoder reads  a <0> d e <1>
    decoder reads  [BOS] <0> b c <1> f
    and writes     <0> b c <1> f [EOS]
"""

from dataclasses import dataclass
from typing import Any

import numpy

from minimegatron.core.datasets.masked_dataset import (
    IGNORED,
    MaskedWordPieceDataset,
    MaskedWordPieceDatasetConfig,
    Run,
    max_hidden_tokens,
)

NUM_SPECIAL_TOKENS = 2
"""The text is that much shorter than the encoder's sequence, as in Megatron."""


@dataclass(frozen=True)
class T5MaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Two lengths."""

    masking_max_ngram: int = 10
    masking_use_geometric_distribution: bool = True
    sequence_length_encoder: int | None = None
    """By default `sequence_length`; nothing else will do."""
    sequence_length_decoder: int | None = None
    """By default `sequence_length`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length_encoder not in (None, self.sequence_length):
            raise ValueError(
                f"sequence_length_encoder is {self.sequence_length_encoder}, but sequence_length is "
                f"{self.sequence_length}; they mean the same, leave one out"
            )
        object.__setattr__(self, "sequence_length_encoder", self.sequence_length)
        if self.sequence_length_decoder is None:
            object.__setattr__(self, "sequence_length_decoder", self.sequence_length)
        check_room_for_runs(
            self.masking_probability,
            self.sequence_length_encoder,
            self.sequence_length_decoder,
            len(self.tokenizer.additional_special_tokens_ids),
        )


def check_room_for_runs(
    masking_probability: float,
    sequence_length_encoder: int,
    sequence_length_decoder: int,
    vocab_extra_ids: int,
) -> None:
    """Every run that may be taken out has a sentinel, and what is taken out has room in the decoder.

    Raises ValueError, in Megatron's words for the fields, with the numbers and the remedy.
    """
    if sequence_length_encoder < NUM_SPECIAL_TOKENS + 2:
        raise ValueError(
            f"sequence_length_encoder is {sequence_length_encoder}; give "
            f"{NUM_SPECIAL_TOKENS + 2} or more"
        )
    most = max_hidden_tokens(masking_probability, sequence_length_encoder - NUM_SPECIAL_TOKENS)
    taken = (
        f"masking_probability {masking_probability} of sequence_length_encoder "
        f"{sequence_length_encoder} takes out up to {most} tokens"
    )
    if vocab_extra_ids < most:
        raise ValueError(
            f"{taken}, each perhaps by itself, but vocab_extra_ids gives {vocab_extra_ids} sentinels; "
            f"give {most} or more"
        )
    if sequence_length_decoder < most + 2:
        raise ValueError(
            f"{taken}, which with a sentinel and an end do not fit sequence_length_decoder "
            f"{sequence_length_decoder}; give {most + 2} or more"
        )


class T5MaskedWordPieceDataset(MaskedWordPieceDataset):
    """Samples for T5; the arguments are those of `MaskedWordPieceDataset`.

    `dataset[i]` holds int64 arrays, for the encoder of s = sequence_length_encoder: `text_enc` and
    `enc_mask` [s]; for the decoder of d = sequence_length_decoder: `text_dec`, `labels`, `loss_mask`
    and `dec_mask` [d]. The masks are 1 at tokens and 0 at padding; they follow from lengths, since any
    id may be a token. Text is padded with [PAD], labels with -1. `truncated` is 1 if tokens were cut
    off.
    """

    config: T5MaskedWordPieceDatasetConfig
    min_sentences = 1
    num_special_tokens = NUM_SPECIAL_TOKENS

    def __getitem__(self, idx: int) -> dict[str, Any]:
        tokenizer = self.config.tokenizer
        sentences, target_sequence_length, rng = self._read_sentences(idx)
        text = numpy.concatenate(sentences, dtype=numpy.int64)
        tokens = text[:target_sequence_length]
        nothing_fixed = numpy.zeros(len(tokens), dtype=bool)
        runs = self._choose_runs(tokens, nothing_fixed, target_sequence_length, rng)
        encoder_input, taken_out = self._take_out(tokens, self._fitting(runs))

        encoder_length = self.config.sequence_length_encoder
        decoder_length = self.config.sequence_length_decoder
        text_enc, enc_mask = _padded(encoder_input, encoder_length, tokenizer.pad)
        text_dec, dec_mask = _padded([tokenizer.bos, *taken_out], decoder_length, tokenizer.pad)
        labels, loss_mask = _padded([*taken_out, tokenizer.eos], decoder_length, IGNORED)
        return {
            "text_enc": text_enc,
            "text_dec": text_dec,
            "labels": labels,
            "loss_mask": loss_mask,
            "enc_mask": enc_mask,
            "dec_mask": dec_mask,
            "truncated": int(len(text) > len(tokens)),
        }

    def _fitting(self, runs: list[Run]) -> list[Run]:
        """As many of the runs as the decoder has room for; all, but for many short ones."""
        room, fitting = self.config.sequence_length_decoder - 1, []
        for begin, end in runs:
            room -= 1 + end - begin
            if room >= 0:
                fitting.append((begin, end))
        return fitting

    def _take_out(self, tokens: numpy.ndarray, runs: list[Run]) -> tuple[list[int], list[int]]:
        """The text with a sentinel in place of each run; the runs, each after its sentinel."""
        left, taken_out, before = [], [], 0
        sentinels = self.config.tokenizer.additional_special_tokens_ids
        for sentinel, (begin, end) in zip(sentinels, runs, strict=False):
            left += [*tokens[before:begin].tolist(), sentinel]
            taken_out += [sentinel, *tokens[begin:end].tolist()]
            before = end
        return left + tokens[before:].tolist(), taken_out


def _padded(values: list[int], length: int, pad: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """`values` with `pad` after them up to `length`, and 1 where the values are; int64 [length]."""
    padded = numpy.full(length, pad, dtype=numpy.int64)
    padded[: len(values)] = values
    mask = numpy.zeros(length, dtype=numpy.int64)
    mask[: len(values)] = 1
    return padded, mask
