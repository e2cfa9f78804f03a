"""All-to-all with uneven splits: tokens travel to other ranks' experts and back, and so do gradients.

Started by: you, and `minimegatron exercises check`. A layer has E experts, and each of the e ranks of a
group holds `local = E / e` of them: rank r those from r * local on. A token goes to the ranks of the
experts that it chose. How many that are, nobody knows before. Write the exchange with its backward, the
order of the tokens, and both together.

    collectives.all_to_all(output, input, group, output_splits, input_splits)
        Sends the first input_splits[0] rows of `input` to rank 0 of the group, the next input_splits[1]
        to rank 1, and so on; fills `output` with what comes, rank 0's rows first, output_splits[j] rows
        from rank j. Splits are lists of ints, and may hold 0. No gradient comes through it.
    collectives.all_gather(output, input, group)
        Each rank's `input` [n], in `output` [e * n], one after the other.
    group.size(), group.rank()
        The group is not always the whole job; a rank is counted within its group here.
"""

from typing import Any

import torch

from minimegatron.core import collectives  # noqa: F401


class _AllToAll(torch.autograd.Function):
    """The exchange, with a backward."""

    @staticmethod
    def forward(ctx, group, input_, output_split_sizes, input_split_sizes):
        """[n, ...] -> [n', ...], a new tensor. Keep in ctx what backward needs."""
        raise NotImplementedError("Write _AllToAll.forward: make an output, and exchange")

    @staticmethod
    def backward(ctx, grad_output):
        """Returns one gradient per argument of forward: the input's, and None for the others."""
        raise NotImplementedError("Write _AllToAll.backward: which rank needs which gradient?")


def all_to_all(group, input_, output_split_sizes, input_split_sizes):
    return _AllToAll.apply(group, input_, output_split_sizes, input_split_sizes)


def permute(
    tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of the tokens in the order of the experts that they chose, expert 0's first.

    Args:
        tokens: [T, h].
        routing_map: [T, E], bool; True where a token chose an expert. A token may have chosen none.
        probs: [T, E], how much an expert counts for a token; may be 0 for one that it chose, too.

    Returns (tokens [n, h], probs [n], numbers of the tokens [n]), n being the number of choices.
    Gradients go through the first two.
    """
    raise NotImplementedError("Write permute: a row for each choice, ordered by expert")


def unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """The way back, [n, h] -> [T, h]: for each token the sum of its rows, 0 where it has none.

    `sorted_indices` [n] are the numbers of the tokens that `permute` has returned.
    """
    raise NotImplementedError("Write unpermute: add each row to its token")


def dispatch(
    hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor, group: Any
) -> tuple[torch.Tensor, list[int], torch.Tensor, Any]:
    """Sends this rank's tokens to the ranks of their experts.

    Args: as for `permute`, with the tokens of this rank; E is `routing_map.size(1)`.

    Returns:
        tokens: [n', h], what came for this rank's experts: all of its first expert, then all of its
            second, ...; within an expert in any order.
        tokens_per_expert: `local` ints, how many that are of each.
        probs: [n'], in the same order, each of them the one of its token and expert.
        state: whatever your `combine` needs. Other tokens may be dispatched before it is called.

    Every rank of the group calls it, also one that sends nothing or gets nothing.
    """
    raise NotImplementedError("Write dispatch: permute, count, exchange, sort by local expert")


def combine(outputs: torch.Tensor, state: Any) -> torch.Tensor:
    """Sends the experts' outputs [n', h], in the order of `dispatch`, back to where the tokens are.

    They are multiplied by probs already. Returns for each token of this rank the sum, [T, h].
    """
    raise NotImplementedError("Write combine: dispatch, line by line in reverse")


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
