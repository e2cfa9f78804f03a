"""Small things around a training step: numbers over ranks, sharing a batch.

Counterpart: `megatron.training.utils`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch

from minimegatron.core import collectives, parallel_state
from minimegatron.core.collectives import ReduceOp
from minimegatron.core.tensor_parallel.data import broadcast_data
from minimegatron.core.transformer.part_of_batch import get_batch_on_this_cp_rank  # noqa: F401
from minimegatron.core.utils import get_device
from minimegatron.exports import all_of
from minimegatron.training import batch_checks, report_checks
from minimegatron.training.result_checks import check_labels

__getattr__, __dir__ = all_of(__name__, "minimegatron.training.one_rank")

# -- Numbers over ranks --


def reduce_max_stat_across_model_parallel_group(stat: float | None) -> float | None:
    """The largest `stat` of the model's ranks; None where all have None (nothing to train there)."""
    group = parallel_state.get_model_parallel_group()
    if group.size() == 1:
        return None if stat is None else float(stat)  # nobody to ask, and nothing to wait for
    number = -1.0 if stat is None else float(stat)
    value = torch.tensor([number], dtype=torch.float32, device=get_device())
    collectives.all_reduce(value, group, op=ReduceOp.MAX)
    largest = value.item()
    return None if largest == -1.0 else largest


def logical_and_across_model_parallel_group(value: bool) -> bool:
    """True if it is true on all of the model's ranks."""
    group = parallel_state.get_model_parallel_group()
    if group.size() == 1:
        return value
    number = torch.tensor([int(value)], dtype=torch.int32, device=get_device())
    collectives.all_reduce(number, group, op=ReduceOp.MIN)
    return bool(number.item())


def sum_over_microbatches(reports: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What the loss function reported, as one [sum, count] pair per key, float32.

    Over M microbatches and all copies of the model. A report is either a [loss sum, number of tokens]
    pair, so that every token weighs the same; or one number, a tensor or not, which counts as one.
    Source: the end of Megatron's `train_step` and `evaluate`; there, one number is of this copy alone.

    Raises ValueError where microbatches or copies have reported other keys, or other sizes under one.
    """
    kinds = [_sizes(report) for report in reports]
    if any(kind != kinds[0] or set(kind.values()) - {1, 2} for kind in kinds):
        report_checks.refuse_kinds(kinds)
    if not reports:
        return {}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    # The first row of the table tells whether all copies have reported the same keys: a digest of them,
    # and its square. The sums of both are right only where all are equal.
    keys, digest = sorted(kinds[0]), _digest(kinds[0])
    # One message, whose size depends little on the keys.
    num_rows = 16 * (1 + len(keys) // 16)
    table = torch.zeros(num_rows, 2, dtype=torch.float64, device=get_device())
    # Assigning a number to an element would wait for the GPU, filling it does not.
    table[0, 0].fill_(digest)
    table[0, 1].fill_(digest**2)
    for row, key in enumerate(keys, 1):
        table[row] = torch.stack([_as_pair(report[key]) for report in reports]).sum(dim=0)
    collectives.all_reduce(table, group)
    if group.size() > 1 and table[0].tolist() != [group.size() * digest, group.size() * digest**2]:
        report_checks.refuse_kind_of_copy(group, kinds[0])
    sums = dict(zip(keys, table[1:].float(), strict=False))
    return {key: sums[key] for key in kinds[0]}


def _sizes(report: Any) -> dict[str, int]:
    """How many numbers stand under each key of a report."""
    try:
        return {key: torch.as_tensor(value).numel() for key, value in report.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        report_checks.refuse_report(report)


def _as_pair(value: Any) -> torch.Tensor:
    numbers = torch.as_tensor(value).detach().to(get_device()).float().view(-1)
    return numbers if numbers.numel() == 2 else torch.cat([numbers, torch.ones_like(numbers)])


def _digest(kind: dict[str, int]) -> float:
    """20 bits of what was reported: its sum and its squares' sum over 4,096 copies are exact."""
    digest = sha256(repr(sorted(kind.items())).encode()).digest()
    return float(int.from_bytes(digest[:3]) >> 4)


# -- Batches --


GPT_FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
"""Of a GPT's batch, in Megatron's order."""

FIELD_DTYPES = {"loss_mask": torch.float32, "attention_mask": torch.bool}
"""Fields of a batch that do not arrive as int64. Masks of the loss may be weights."""

BatchKeys = Sequence[tuple[Callable[..., bool], Sequence[str]]]
"""Rows of (which chunks, keys of the batch that they need). The function is called as those of
`parallel_state` are: `(ignore_virtual=False, vp_stage=vp_stage)`."""

GPT_BATCH_KEYS: BatchKeys = (
    (parallel_state.is_pipeline_first_stage, ("tokens", "position_ids")),
    (parallel_state.is_pipeline_last_stage, ("labels", "loss_mask")),
)
"""A model whose chunks need more has rows of its own after these."""


def batch_keys(vp_stage: int | None = None, needed: BatchKeys = GPT_BATCH_KEYS) -> list[str]:
    """What this chunk needs of a batch: every key once; nothing for a chunk that reads no data."""
    rows = [keys for is_here, keys in needed if is_here(ignore_virtual=False, vp_stage=vp_stage)]
    return list(dict.fromkeys(key for keys in rows for key in keys))


def get_batch_on_this_tp_rank(
    data_iterator: Iterator | None,
    vp_stage: int | None = None,
    needed: BatchKeys = GPT_BATCH_KEYS,
    dtypes: Mapping[str, torch.dtype] = FIELD_DTYPES,
    vocab_size: int | None = None,
) -> dict[str, torch.Tensor | None]:
    """The next microbatch's fields that this chunk uses, the same on all tensor-parallel ranks.

    The first tensor-parallel rank reads the iterator and broadcasts. What `needed` has for this chunk
    is there; the rest is None. Keys come in the order of `GPT_FIELDS`, then what else `needed` names.
    By default `loss_mask` arrives as float32, `attention_mask` (only where it is asked for: causal
    attention needs none) as bool, True where attention must not look, and all others as int64.

    Args:
        dtypes: of fields that are not int64, the same on all ranks.
        vocab_size: tokens of the vocabulary, without padding, for `check_labels`; None checks nothing.

    Raises:
        ValueError: a field of fractions is to arrive as integers; a label that counts is no token.
    """
    keys = batch_keys(vp_stage, needed)
    names = [key for _, row in needed for key in row]
    batch: dict[str, Any] = dict.fromkeys([*GPT_FIELDS, *names])
    if not keys:
        return batch
    data = None
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        sample, device = next(data_iterator), get_device()
        check_labels({key: sample[key] for key in keys}, vocab_size)
        # The loader's memory is pinned for a GPU, which copies it while the program goes on.
        here = {key: sample[key].to(device, non_blocking=True) for key in keys}
        data = _as_integers(here, dtypes)
    group = parallel_state.get_tensor_model_parallel_group()
    received = broadcast_data(keys, data, torch.int64, group, sizes_vary=False)
    for key, integers in received.items():
        dtype = dtypes.get(key, torch.int64)
        numbers = integers.view(torch.float64) if dtype.is_floating_point else integers
        batch[key] = numbers.to(dtype)
    return batch


def _as_integers(
    fields: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """All fields travel as one message, so as one dtype: of a fraction, the bits of float64 do."""
    integers = {}
    for key, field in fields.items():
        dtype = dtypes.get(key, torch.int64)
        has_fractions = dtype.is_floating_point
        if field.is_floating_point() and not has_fractions:
            batch_checks.refuse_fractions(key, field, dtype)
        integers[key] = field.double().view(torch.int64) if has_fractions else field.long()
    return integers


def check_loss_mask(loss_mask: torch.Tensor, losses: torch.Tensor) -> None:
    """Raises ValueError unless `loss_mask` has a number for each of `losses`, [b, s], or [b s] of both.

    A loss function takes both as one row of numbers, where [b, 1] would broadcast, and [s, b] would
    weigh other tokens.
    """
    if loss_mask.shape not in (losses.shape, (losses.numel(),)):
        batch_checks.refuse_loss_mask(loss_mask, losses)
