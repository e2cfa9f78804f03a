"""Vocab-parallel cross-entropy: the loss of each token, without ever holding all of its logits.

Every tensor-parallel rank has the logits of its own slice of the vocabulary: rank r those of the
tokens r*n to (r+1)*n - 1, with n = vocab_parallel_logits.size(-1). The check compares with torch's
cross-entropy of the whole logits, and then trains a small GPT with your class.

    collectives.all_reduce(tensor, group)                    sum, in place
    collectives.all_reduce(tensor, group, op=ReduceOp.MAX)   maximum, in place
"""

import torch

from minimegatron.core import collectives  # noqa: F401
from minimegatron.core.collectives import ReduceOp  # noqa: F401


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits, target, label_smoothing, group):
        """[..., n] logits of this rank, [...] token ids of the whole vocabulary -> [...] losses.

        The losses are the same on every rank. `label_smoothing` is 0.0 in this exercise. Keep what
        backward needs with `ctx.save_for_backward(...)`. Do not change the logits or the targets:
        they are the model's. Nor is `grad_output` backward's own.
        """
        raise NotImplementedError("Write forward: log(sum of exp(x - m)) - (x_target - m)")

    @staticmethod
    def backward(ctx, grad_output):
        """[...] gradients of the losses -> [..., n] gradient of this rank's logits, and three None."""
        raise NotImplementedError(
            "Write backward: softmax, minus 1 at the target, times grad_output"
        )


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
