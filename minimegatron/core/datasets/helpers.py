"""The loops over all samples that Megatron runs in C++: where samples begin, and blending.

Torch-free. Counterpart: `megatron.core.datasets.helpers`, with the same results, number for number:
the sample index needs no loop (a cumulative sum and a binary search), blending is a Python loop
kept short, and samples of sentences take a binary search each. Those come in an order of our own.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy

_BLENDED_AT_ONCE = 1 << 14
_DRAWN_AT_ONCE = 1 << 14

LONGEST_SENTENCE = 512
"""A document with a sentence of more tokens is left out: it is no text."""


def build_sample_idx(
    sizes: numpy.ndarray,
    document_indices: numpy.ndarray,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> numpy.ndarray:
    """Where each sample begins in the stream of all documents, and where the last one ends.

    Args:
        sizes: tokens per sequence of the whole dataset, int32.
        document_indices: which sequences make up the stream, in order; every epoch.
        sequence_length: s, tokens a sample moves on by. It reads one more if
            `add_extra_token_to_sequence`, the label of its last token, which the next begins with.
        num_epochs, tokens_per_epoch: their product is the length of the stream.
        drop_last_partial_sequence: leave out a last sample that the stream does not fill.

    Returns [samples + 1, 2]: a position in `document_indices` and an offset into that sequence;
    int32 where the numbers fit.
    """
    extra = int(add_extra_token_to_sequence)
    total = num_epochs * tokens_per_epoch
    num_samples = max(0, total - extra) // sequence_length
    if not drop_last_partial_sequence:
        num_samples = math.ceil(max(0, total - extra) / sequence_length)
    lengths = sizes[document_indices].astype(numpy.int64)
    ends = numpy.cumsum(lengths)
    # Sample i >= 1 begins right after the last token that sample i - 1 moved past, in the sequence
    # that holds that token, even at its very end; empty sequences hold none.
    moved_past = numpy.arange(1, num_samples + 1, dtype=numpy.int64) * sequence_length
    last_read = numpy.minimum(moved_past + extra, total) - 1
    position = numpy.searchsorted(ends, last_read, side="right")
    offset = last_read - (ends - lengths)[position] + 1 - extra
    largest = max(len(document_indices), int(sizes.max(initial=0)))
    dtype = numpy.int32 if largest <= numpy.iinfo(numpy.int32).max else numpy.int64
    sample_idx = numpy.zeros((num_samples + 1, 2), dtype=dtype)
    sample_idx[1:, 0], sample_idx[1:, 1] = position, offset
    return sample_idx


def build_blending_indices(
    weights: Sequence[float], size: int, limits: Sequence[int] | None = None
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Sample after sample from the dataset furthest behind its weight.

    Before sample n, dataset d is behind by `weights[d] * max(n, 1) - taken[d]`; the first of those
    with the largest error gives the sample, its own next one. So at any moment no dataset is off
    its share by more than a sample or two.

    Args:
        weights: one per dataset, adding up to 1.
        size: samples in all.
        limits: samples each dataset has; one that is used up is passed over.

    Returns the dataset of each sample, int16, and which of that dataset's samples it is, int64.
    """
    dataset_index = numpy.zeros(size, dtype=numpy.int16)
    weight = numpy.array(weights, dtype=numpy.float64)
    taken = [0] * len(weights)
    for begin in range(0, size, _BLENDED_AT_ONCE):
        n = numpy.arange(begin, min(begin + _BLENDED_AT_ONCE, size), dtype=numpy.float64)
        chosen = _blend(numpy.outer(numpy.maximum(n, 1.0), weight).tolist(), taken, limits)
        dataset_index[begin : begin + len(chosen)] = chosen
    # Each dataset is read in its own order: its samples are numbered as they come.
    sample_index = numpy.zeros(size, dtype=numpy.int64)
    in_turn = numpy.argsort(dataset_index, kind="stable")
    sample_index[in_turn] = numpy.concatenate([numpy.arange(count) for count in taken])
    return dataset_index, sample_index


def _blend(shares: list[list[float]], taken: list[int], limits: Sequence[int] | None) -> list[int]:
    """The dataset of each row of `shares` (weights x samples so far); counts them in `taken`."""
    chosen = []
    for row in shares:
        behind = [share - count for share, count in zip(row, taken, strict=True)]
        if limits is not None:
            behind = [
                error if count < limit else -math.inf
                for error, count, limit in zip(behind, taken, limits, strict=True)
            ]
        furthest = behind.index(max(behind))
        taken[furthest] += 1
        chosen.append(furthest)
    return chosen


def build_exhaustive_blending_indices(
    sizes: Sequence[int],
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Every sample of every dataset once, blended in proportion to `sizes`."""
    total = sum(sizes)
    return build_blending_indices([size / total for size in sizes], total, limits=sizes)


def build_mapping(
    document_indices: numpy.ndarray,
    sizes: numpy.ndarray,
    num_samples: int | None,
    max_length: int,
    short_seq_prob: float,
    seed: int,
    min_sentences: int,
) -> numpy.ndarray:
    """Which sentences make up each sample of a dataset of documents of sentences.

    A sample is a run of sentences of one document. It ends with the sentence that reaches the length
    it was meant to have; not before `min_sentences` are in, and not where a single sentence would be
    left over. A document's last sample may be shorter. Left out are documents of fewer than
    `min_sentences` sentences, and those with a sentence of more than `LONGEST_SENTENCE` tokens.

    Args:
        document_indices: the first sentence of each document, and where the last one ends.
        sizes: tokens per sentence of the whole dataset, int32.
        num_samples: as many whole epochs as it takes to have that many; None for one.
        max_length: tokens that most samples are meant to have.
        short_seq_prob: share of those that are meant to have fewer.
        seed: of those lengths, and of the order.
        min_sentences: 2 where a sample is cut in two.

    Returns [samples, 3]: first sentence, one past the last, meant length; int32 where the numbers fit.
    The rows are Megatron's, number for number; their order is as random, but another.
    """
    usable = usable_documents(document_indices, sizes, min_sentences)
    documents = numpy.stack([document_indices[:-1], document_indices[1:]], axis=1)[usable].tolist()
    before = memoryview(numpy.append(0, numpy.cumsum(sizes, dtype=numpy.int64)))
    lengths = _meant_lengths(max_length, short_seq_prob, seed)
    dtype = numpy.dtype("int32" if len(sizes) <= numpy.iinfo(numpy.int32).max else "int64")
    rows = array(dtype.char)
    while documents and len(rows) < 3 * max(1, num_samples or 0):
        _add_an_epoch(rows, documents, before, lengths, min_sentences)
    mapping = numpy.array(rows, dtype=dtype).reshape(-1, 3)
    return mapping[numpy.random.RandomState((seed + 1) % 2**32).permutation(len(mapping))]


def usable_documents(
    document_indices: numpy.ndarray, sizes: numpy.ndarray, min_sentences: int
) -> numpy.ndarray:
    """Of which documents `build_mapping` makes samples, bool [documents]; its arguments."""
    too_long = numpy.cumsum(numpy.append(0, sizes > LONGEST_SENTENCE))
    return (numpy.diff(document_indices) >= min_sentences) & (
        numpy.diff(too_long[document_indices]) == 0
    )


def _add_an_epoch(
    rows: array,
    documents: list[list[int]],
    before: memoryview,
    lengths: Iterator[int],
    min_sentences: int,
) -> None:
    """Three numbers for each sample after `rows`. `before`: the tokens before each sentence."""
    for begin, last in documents:
        length = next(lengths)
        while begin < last:
            reached = bisect_left(before, before[begin] + length, begin + 1, last + 1)
            end = max(reached, begin + min_sentences)
            if end >= last - 1:
                end = last
            rows.extend((begin, end, length))
            begin, length = end, next(lengths)


def _meant_lengths(max_length: int, short_seq_prob: float, seed: int) -> Iterator[int]:
    """Without end: `max_length`, or for one in 1 / `short_seq_prob` numbers something from 2 to it.

    As in Megatron one number decides both. If `max_length - 1` and 1 / `short_seq_prob` have a common
    divisor, short samples have a few lengths only: 2, 12, 22, ... for 61 and 0.1.
    """
    # RandomState and C++'s mt19937 are one generator, and these are its numbers as they come.
    rng = numpy.random.RandomState(seed % 2**32)
    # The numbers have 32 bits, and so has what they are divided by.
    ratio = round(min(1 / short_seq_prob, 2**32 - 1)) if short_seq_prob else 0
    while True:
        if not ratio:
            yield max_length
            continue
        drawn = rng.randint(0, 2**32, _DRAWN_AT_ONCE, dtype=numpy.uint32)
        yield from numpy.where(drawn % ratio, max_length, 2 + drawn % (max_length - 1)).tolist()
