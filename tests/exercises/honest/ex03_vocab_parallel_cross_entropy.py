"""Vocab-parallel cross-entropy: the loss of each token, without ever holding all of its logits.

Every tensor-parallel rank has the logits of its own slice of the vocabulary: rank r those of the
tokens r*n to (r+1)*n - 1, with n = vocab_parallel_logits.size(-1). The check compares with torch's
cross-entropy of the whole logits, and then trains a small GPT with your class.

    collectives.all_reduce(tensor, group)                    sum, in place
    collectives.all_reduce(tensor, group, op=ReduceOp.MAX)   maximum, in place
"""

import torch

from minimegatron.core import collectives
from minimegatron.core.collectives import ReduceOp


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, label_smoothing, group):
        width = vocab_parallel_logits.size(-1)
        first = group.rank() * width

        peak = vocab_parallel_logits.max(dim=-1).values
        collectives.all_reduce(peak, group, op=ReduceOp.MAX)
        shifted = vocab_parallel_logits - peak.unsqueeze(-1)

        column = target - first
        mine = (column >= 0) & (column < width)
        column = torch.where(mine, column, torch.zeros_like(column))
        hit = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1) * mine
        collectives.all_reduce(hit, group)

        weights = shifted.exp()
        total = weights.sum(dim=-1)
        collectives.all_reduce(total, group)

        ctx.save_for_backward(weights / total.unsqueeze(-1), column, mine)
        return total.log() - hit

    @staticmethod
    def backward(ctx, grad_output):
        softmax, column, mine = ctx.saved_tensors
        grad = softmax.clone()
        one_hot_part = mine.unsqueeze(-1).to(grad.dtype)
        grad.scatter_add_(-1, column.unsqueeze(-1), -one_hot_part)
        return grad * grad_output.unsqueeze(-1), None, None, None


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
