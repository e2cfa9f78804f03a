"""A normaliser that no layout changes: what a loss function returns, so that each token weighs 1 / N.

Started by: you, and `minimegatron exercises check`. The step's gradient shall be that of

    (sum of the losses of all tokens that count) / N

with N tokens that count in the whole global batch: of all microbatches, copies and context ranks. The
schedule and the gradient buffers divide too (exercise 8):

    returned               calculate_per_token_loss   schedule        at the end, over d * c ranks
    (loss, report)         off                        loss * c / M    the mean of the gradients
    (loss, n, report)      on                         loss            their sum, / max(sum of n, 1)

    M    microbatches of each copy
    d    copies of the model
    c    context ranks: each has its part of every sequence, and losses and mask of that part alone
"""

import torch
import torch.distributed as dist

Report = dict[str, torch.Tensor]
"""{"lm loss": the tensor [sum, number] of this microbatch's part}: plain numbers, without a graph."""


def tokens_of_all(masks: list[torch.Tensor], dp_cp_group: dist.ProcessGroup) -> torch.Tensor:
    """N, on every rank; it is called once, before the step.

    Args:
        masks: this rank's, [b, s / c] for each of its M microbatches. Leave them as they are.
        dp_cp_group: the d * c ranks that share the global batch.
    """
    raise NotImplementedError("Write tokens_of_all: who else has tokens?")


def two_values(
    token_loss: torch.Tensor, mask: torch.Tensor, N: torch.Tensor, M: int, d: int, c: int
) -> tuple[torch.Tensor, Report]:
    """(loss, report) of one microbatch, with `calculate_per_token_loss` off.

    Args:
        token_loss, mask: [b, s / c]; there may be no token that counts.
        N: what `tokens_of_all` gave. It may be 0; the loss is 0 then.
    """
    raise NotImplementedError("Write two_values: what divides later, and must be undone now?")


def three_values(
    token_loss: torch.Tensor, mask: torch.Tensor, N: torch.Tensor, M: int, d: int, c: int
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """(loss, n, report) of one microbatch, with `calculate_per_token_loss` on. Arguments as above."""
    raise NotImplementedError("Write three_values: what is divided later, and by what?")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
