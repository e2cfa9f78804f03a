"""A cut that stacked matrices do not allow, in words.

Megatron has no counterpart.
"""

from collections.abc import Sequence


def refuse_sections(dim: int, length: int, sizes: Sequence[int], tp_size: int) -> None:
    """Raises ValueError: dimension `dim`, of `length`, is no whole number of such matrices."""
    raise ValueError(
        f"dimension {dim} has {length} elements, which cannot be "
        f"{len(sizes)} stacked matrices of sizes {':'.join(map(str, sizes))}, each cut over "
        f"{tp_size} ranks; make it a multiple of {tp_size * sum(sizes)} (partition_sizes are "
        "those of one rank's pieces)"
    )
