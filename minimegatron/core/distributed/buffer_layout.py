"""Where each parameter and each bucket lies in a gradient buffer: arithmetic only.

Megatron has this in the constructor of its buffers, in
`megatron.core.distributed.param_and_grad_buffer`, whose counterpart here draws it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PARAM_ALIGNMENT = 64
"""With a distributed optimizer, parameters start at multiples of this (256 bytes of fp32)."""

BUCKET_ALIGNMENT = 128
"""With a distributed optimizer, buckets end at multiples of lcm(ranks, this): equal shards."""


@dataclass(frozen=True)
class BufferLayout:
    """Element ranges within a buffer, half open.

    `params[i]` is (start, end, bucket_id) of parameter i, in the order they were given; `buckets[b]`
    is (start, end) with padding; `buckets_unpadded[b]` is bucket b's length up to its last gradient.
    """

    params: list[tuple[int, int, int]]
    buckets: list[tuple[int, int]]
    buckets_unpadded: list[int]

    @property
    def numel(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _fill_buckets(
    numels: Sequence[int], alone: Sequence[bool], bucket_size: int | None, alignment: int
) -> list[list[int]]:
    """Parameter numbers of each bucket, last parameter first; closes a bucket once it is full."""
    buckets: list[list[int]] = []
    is_open, filled = False, 0
    for i in reversed(range(len(numels))):
        if alone[i] or not is_open:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        is_full = bucket_size is not None and filled + numels[i] >= bucket_size
        is_open = not (alone[i] or is_full)
        filled += _round_up(numels[i], alignment)
    return buckets


def lay_out_buffer(
    numels: Sequence[int],
    alone: Sequence[bool],
    bucket_size: int | None,
    num_shards: int | None = None,
) -> BufferLayout:
    """Where every parameter and bucket lies.

    Args:
        numels: elements of each parameter, in module order.
        alone: which parameters must have a bucket of their own.
        bucket_size: close a bucket at this many elements; None for a single one.
        num_shards: with a distributed optimizer, how many ranks share every bucket.
    """
    param_alignment = PARAM_ALIGNMENT if num_shards else 1
    bucket_alignment = math.lcm(num_shards, BUCKET_ALIGNMENT) if num_shards else 1
    params: list[tuple[int, int, int]] = [(0, 0, 0)] * len(numels)
    buckets, unpadded = [], []
    bucket_start = 0
    for bucket_id, members in enumerate(_fill_buckets(numels, alone, bucket_size, param_alignment)):
        end = bucket_start
        for i in members:
            start = _round_up(end, param_alignment)
            end = start + numels[i]
            params[i] = (start, end, bucket_id)
        unpadded.append(end - bucket_start)
        buckets.append((bucket_start, _round_up(end, bucket_alignment)))
        bucket_start = buckets[-1][1]
    return BufferLayout(params, buckets, unpadded)
