"""Cross-entropy of logits whose vocabulary is cut over the ranks, without gathering them.

Counterpart: `megatron.core.tensor_parallel.cross_entropy`.

With x the logits and y the target, loss = log(sum_j exp(x_j - m)) - (x_y - m), m = max_j x_j. Three
all-reduces of [s, b] suffice: m, x_y (held by one rank, zero elsewhere), and the sum of exponentials.
The logits of a rank are large, v/(t h) times an activation; gathered, they would be t times larger
still.
"""

from typing import Any

import torch

from minimegatron.core import collectives
from minimegatron.core.collectives import ReduceOp
from minimegatron.core.tensor_parallel import label_smoothing as smoothing
from minimegatron.core.tensor_parallel import target_checks
from minimegatron.core.tensor_parallel.utils import (
    VocabUtility,
    get_tensor_model_parallel_group_if_none,
)
from minimegatron.core.utils import without_graph


def _find_target(
    target: torch.Tensor, per_partition_vocab_size: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each target stands in this rank's slice, and True where it stands elsewhere."""
    first, last = VocabUtility.vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size, group.rank(), group.size()
    )
    elsewhere = (target < first) | (target >= last)
    return (target - first).masked_fill(elsewhere, 0), elsewhere


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Forward saves the softmax; its gradient is softmax minus the smoothed one-hot target."""

    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, label_smoothing, group):
        precise = torch.float64 if vocab_parallel_logits.dtype == torch.float64 else torch.float32
        logits = vocab_parallel_logits.to(precise)
        maximum = logits.amax(dim=-1)
        collectives.all_reduce(maximum, group, op=ReduceOp.MAX)
        logits = logits - maximum.unsqueeze(-1)

        # -- x_y - m: from the one rank that holds it --
        per_partition_vocab_size = logits.size(-1)
        vocab_size = per_partition_vocab_size * group.size()
        local_target, elsewhere = _find_target(target, per_partition_vocab_size, group)
        predicted = logits.gather(-1, local_target.unsqueeze(-1)).squeeze(-1)
        predicted = predicted.masked_fill(elsewhere, 0.0)
        collectives.all_reduce(predicted, group)

        # -- Label smoothing takes a share from the target, and spreads it over all classes --
        given = (label_smoothing, predicted, logits, vocab_size, group)
        spread, predicted = smoothing.smooth(*given) if label_smoothing > 0 else (0.0, predicted)

        softmax = logits.exp_()
        normaliser = softmax.sum(dim=-1)
        collectives.all_reduce(normaliser, group)
        loss = normaliser.log() - predicted
        softmax.div_(normaliser.unsqueeze(-1))
        ctx.spread, ctx.vocab_size = spread, vocab_size
        ctx.dtype = vocab_parallel_logits.dtype
        ctx.save_for_backward(softmax, local_target, elsewhere)
        return loss

    @staticmethod
    @without_graph
    def backward(ctx, grad_output):
        softmax, local_target, elsewhere = ctx.saved_tensors
        grad_output = grad_output.unsqueeze(-1)
        # One new tensor as large as the logits; for 16-bit logits a second one, at the end.
        grad = softmax * grad_output
        if ctx.spread:
            grad.sub_(grad_output * (ctx.spread / ctx.vocab_size))
        on_target = (grad_output * (1.0 - ctx.spread)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        grad.scatter_add_(-1, local_target.unsqueeze(-1), -on_target)
        return grad.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    tp_group: Any = None,
) -> torch.Tensor:
    """The loss of each token, the same on every tensor-parallel rank.

    Args:
        vocab_parallel_logits: [..., v/t], this rank's slice of the vocabulary, any float dtype.
        target: [...], global token ids.
        label_smoothing: e in [0, 1); e / (v - 1) goes to each token that is not the target.
        tp_group: None for `parallel_state`'s.

    Returns:
        [...], float32; float64 for float64 logits.

    Raises:
        ValueError: `label_smoothing` is no share; there is not one target for each place. That the
            logits are a slice, no rank can see: whole ones would count as t vocabularies.
    """
    if not 0.0 <= label_smoothing < 1.0 or target.shape != vocab_parallel_logits.shape[:-1]:
        target_checks.refuse_targets(label_smoothing, target, vocab_parallel_logits)
    group = get_tensor_model_parallel_group_if_none(tp_group)
    return VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, label_smoothing, group)
