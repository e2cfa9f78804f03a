"""What ranks that share a sequence send for attention, compute, and hold: counts and bytes.

Megatron has no counterpart for these counts.

Letters as in `memory`, and g key/value groups; d the width of a head; u = 2 (s/c) b (g/t) d, the
elements of the keys and values of one rank: what a hop of the ring carries forward.

| way        | forward                         | backward                          |
|------------|---------------------------------|-----------------------------------|
| p2p        | (c - 1) u                       | (c - 1) u + c u                   |
| all_gather | (c - 1) u                       | 2 (c - 1) u                       |
| a2a        | 2 (s/c) b ((a+g)/t) d (c - 1)/c | the same                          |

These are elements that one rank sends to others for one layer and microbatch. p2p: keys and values make
c - 1 hops; backward they go round once more, and their gradients make c hops, one more, to be home.
all_gather: a rank sends its keys and values to c - 1 others; backward it gathers them once more, and
sends c - 1 parts of their gradients. a2a: of queries, keys, values and output a rank keeps 1/c.
"""

from fractions import Fraction
from typing import NamedTuple

from minimegatron.core.transformer.activation_config import COMM_TYPES
from minimegatron.planner.memory import Bytes


class SentBytes(NamedTuple):
    """What one rank sends to others for the attention of one layer and one microbatch."""

    forward: Bytes
    backward: Bytes

    @property
    def total(self) -> Bytes:
        return self.forward + self.backward


def key_value_elements(
    seq_length: int,
    micro_batch_size: int,
    num_query_groups: int,
    kv_channels: int,
    context_parallel_size: int,
    tensor_model_parallel_size: int = 1,
) -> Fraction:
    """u: elements of one rank's keys and values together, those of one layer and microbatch."""
    tokens = Fraction(seq_length, context_parallel_size) * micro_batch_size
    return 2 * tokens * Fraction(num_query_groups, tensor_model_parallel_size) * kv_channels


def context_parallel_bytes(
    cp_comm_type: str,
    seq_length: int,
    micro_batch_size: int,
    num_attention_heads: int,
    num_query_groups: int,
    kv_channels: int,
    context_parallel_size: int,
    tensor_model_parallel_size: int = 1,
    bytes_per_element: int = 2,
) -> SentBytes:
    """Bytes by the table above. Raises ValueError for an unknown way.

    >>> ring = context_parallel_bytes("p2p", 32, 1, 8, 2, 4, 4)
    >>> ring.forward, ring.backward
    (768, 1792)
    """
    if cp_comm_type not in COMM_TYPES:
        raise ValueError(
            f"cp_comm_type {cp_comm_type!r} is unknown; use one of {', '.join(COMM_TYPES)}"
        )
    c = context_parallel_size
    sizes = (kv_channels, c, tensor_model_parallel_size)
    u = key_value_elements(seq_length, micro_batch_size, num_query_groups, *sizes)
    if cp_comm_type == "p2p":
        forward, backward = (c - 1) * u, (c - 1) * u + c * u * (c > 1)
    elif cp_comm_type == "all_gather":
        forward, backward = (c - 1) * u, 2 * (c - 1) * u
    else:
        # Queries and output are as wide as all heads, keys and values as their groups.
        wide = key_value_elements(seq_length, micro_batch_size, num_attention_heads, *sizes)
        forward = backward = (wide + u) * Fraction(c - 1, c)
    return SentBytes(_whole(forward * bytes_per_element), _whole(backward * bytes_per_element))


# -- What a rank computes --


def pairs_of_tokens(
    seq_length: int, context_parallel_size: int = 1, contiguous: bool = False
) -> list[int]:
    """Of each rank: pairs of a query and a key that it may see, for which it computes a score.

    If the sequence is cut into 2c pieces, and each rank has one from the front and one from the back
    (`zigzag`), all ranks have the same number. With c pieces in order, the last rank has almost twice
    that.

    Raises ValueError where the pieces are not equal.

    >>> pairs_of_tokens(32, 4), pairs_of_tokens(32, 4, contiguous=True)
    ([132, 132, 132, 132], [36, 100, 164, 228])
    """
    c = context_parallel_size
    num_chunks = c if contiguous else 2 * c
    if seq_length % num_chunks:
        raise ValueError(
            f"seq_length {seq_length} does not divide into {num_chunks} equal chunks for "
            f"{c} context-parallel ranks; use a multiple of {num_chunks}"
        )
    size = seq_length // num_chunks

    def of_chunk(chunk: int) -> int:
        """The token at position p sees p + 1 of them."""
        return size * (2 * chunk * size + size + 1) // 2

    return [
        of_chunk(rank) if contiguous else of_chunk(rank) + of_chunk(num_chunks - 1 - rank)
        for rank in range(c)
    ]


# -- What a rank holds --


def ring_buffer_bytes(
    seq_length: int,
    micro_batch_size: int,
    num_query_groups: int,
    kv_channels: int,
    context_parallel_size: int,
    tensor_model_parallel_size: int = 1,
    bytes_per_element: int = 2,
) -> SentBytes:
    """Bytes of keys and values of *other* ranks, and of gradients, that a ring holds while it runs.

    Beside what a layer keeps for its backward: forward the block that is here and the one that comes,
    so 2u; backward these two and, of gradients, the block that leaves and the one that comes, 4u. One
    layer at a time has them, so they grow neither with the layers nor with the microbatches in flight.

    >>> ring_buffer_bytes(4096, 1, 8, 128, 4)
    SentBytes(forward=8388608, backward=16777216)
    """
    if context_parallel_size == 1:
        return SentBytes(0, 0)
    u = key_value_elements(
        seq_length,
        micro_batch_size,
        num_query_groups,
        kv_channels,
        context_parallel_size,
        tensor_model_parallel_size,
    )
    return SentBytes(_whole(2 * u * bytes_per_element), _whole(4 * u * bytes_per_element))


def _whole(value: Fraction) -> Bytes:
    return value.numerator if value.denominator == 1 else value
