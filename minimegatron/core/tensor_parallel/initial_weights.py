"""Initial weights that do not depend on how the model is cut.

Megatron draws on each GPU from a per-rank generator, so that a run on tp=2 starts from another
model than one on tp=4; with its `--use-cpu-initialization` it draws whole matrices, but in the
order a stage builds them.

Here each weight is drawn whole, on the CPU, in float32, from a generator seeded by the run's seed
and the weight's name in the full model; then cut and cast. Any tp x pp x vp x dp starts from the
same full model, whatever its dtype.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from minimegatron.core.tensor_parallel.sharding import (
    full_shape,
    set_tensor_model_parallel_attributes,
    shard_parameter,
)

VOCABULARY_BLOCK = 128
"""Rows of a vocabulary matrix drawn at once (Megatron's default `make_vocab_size_divisible_by`)."""

_drawn_later = False


@contextmanager
def weights_drawn_later() -> Iterator[None]:
    """Within it, layers leave their weights undrawn: the model built here draws them by name."""
    global _drawn_later
    before, _drawn_later = _drawn_later, True
    try:
        yield
    finally:
        _drawn_later = before


def seed_of(init_seed: int, name: str) -> int:
    """A 63-bit seed for one weight, the same in every process and version of Python."""
    digest = hashlib.blake2b(f"{init_seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def new_weight(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    init_method: Callable[[torch.Tensor], torch.Tensor],
    partition_dim: int,
    tp_group: Any,
    stride: int = 1,
    partition_sizes: Sequence[int] | None = None,
    vocabulary: bool = False,
) -> torch.nn.Parameter:
    """A weight of this rank's `shape`, cut along `partition_dim` (-1: not cut).

    Drawn at once by `init_method`, from the CPU's default generator (in step on all tensor ranks),
    except within `weights_drawn_later`. The parameter keeps `init_method` for that.
    """
    weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
    set_tensor_model_parallel_attributes(
        weight, partition_dim >= 0, partition_dim, stride, partition_sizes
    )
    weight.init_method = init_method
    weight.is_embedding_or_output_parameter = vocabulary
    if not _drawn_later:
        draw_weight(weight, tp_group.rank(), tp_group.size())
    return weight


def draw_weight(weight: torch.nn.Parameter, tp_rank: int, tp_size: int) -> None:
    """Fills `weight` with this rank's piece of one draw of the full matrix."""
    full = torch.empty(full_shape(weight, tp_size), dtype=torch.float32, device="cpu")
    # -- Vocabularies are drawn in blocks of rows --
    # They are padded to a multiple that depends on tp; the real rows must not.
    if getattr(weight, "is_embedding_or_output_parameter", False):
        for first in range(0, full.size(0), VOCABULARY_BLOCK):
            block = full.new_empty(VOCABULARY_BLOCK, *full.shape[1:])
            weight.init_method(block)
            full[first : first + VOCABULARY_BLOCK] = block[: full.size(0) - first]
    else:
        weight.init_method(full)
    with torch.no_grad():
        weight.copy_(shard_parameter(full, weight, tp_rank, tp_size))


def draw_named_weight(
    weight: torch.nn.Parameter, name: str, init_seed: int, tp_rank: int, tp_size: int
) -> None:
    """`draw_weight` from the generator that belongs to `name`; the default generator is restored.

    Init methods take no generator argument, so the default one is lent to them for the draw. Only
    the CPU's: `torch.manual_seed` would reseed every GPU too.
    """
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed_of(init_seed, name))
    try:
        draw_weight(weight, tp_rank, tp_size)
    finally:
        torch.set_rng_state(before)
