"""The target's logit is used without the maximum subtracted.

Expected: m is subtracted from the logits in one of its two terms, and not in the other
"""

import torch

from minimegatron.core import collectives
from minimegatron.core.collectives import ReduceOp


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, label_smoothing, group):
        """[..., n] logits of this rank, [...] token ids of the whole vocabulary -> [...] losses."""
        # All ranks must subtract the same number, or their exponentials do not add up.
        maximum = vocab_parallel_logits.amax(dim=-1)
        collectives.all_reduce(maximum, group, op=ReduceOp.MAX)
        logits = vocab_parallel_logits - maximum.unsqueeze(-1)

        # Tokens of other ranks look up entry 0 here, and then count as zero in the sum.
        n = logits.size(-1)
        first = group.rank() * n
        elsewhere = (target < first) | (target >= first + n)
        local_target = (target - first).masked_fill(elsewhere, 0)
        predicted = vocab_parallel_logits.gather(-1, local_target.unsqueeze(-1)).squeeze(-1)
        predicted = predicted.masked_fill(elsewhere, 0.0)
        collectives.all_reduce(predicted, group)

        exponentials = logits.exp()
        normaliser = exponentials.sum(dim=-1)
        collectives.all_reduce(normaliser, group)
        softmax = exponentials / normaliser.unsqueeze(-1)
        ctx.save_for_backward(softmax, local_target, elsewhere)
        return normaliser.log() - predicted

    @staticmethod
    def backward(ctx, grad_output):
        """[...] gradients of the losses -> [..., n] gradient of this rank's logits, and three None."""
        softmax, local_target, elsewhere = ctx.saved_tensors
        grad_output = grad_output.unsqueeze(-1)
        grad = softmax * grad_output
        # Only the rank that holds the target subtracts the 1.
        on_target = grad_output.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        grad.scatter_add_(-1, local_target.unsqueeze(-1), -on_target)
        return grad, None, None, None
