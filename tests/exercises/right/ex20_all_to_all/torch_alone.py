"""torch.distributed exchanges the rows, and counts are gathered as objects."""

from typing import Any

import torch
import torch.distributed as dist


class _AllToAll(torch.autograd.Function):
    """The exchange, with a backward."""

    @staticmethod
    def forward(ctx, group, input_, output_split_sizes, input_split_sizes):
        ctx.group = group
        ctx.sent, ctx.received = input_split_sizes, output_split_sizes
        return _exchange(input_, group, output_split_sizes, input_split_sizes)

    @staticmethod
    def backward(ctx, grad_output):
        grad_input = _exchange(grad_output, ctx.group, ctx.sent, ctx.received)
        return None, grad_input, None, None


def _exchange(rows, group, output_splits, input_splits):
    output = rows.new_empty((sum(output_splits), *rows.shape[1:]))
    dist.all_to_all_single(output, rows.contiguous(), output_splits, input_splits, group)
    return output


def all_to_all(group, input_, output_split_sizes, input_split_sizes):
    return _AllToAll.apply(group, input_, output_split_sizes, input_split_sizes)


def permute(
    tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies of the tokens in the order of the experts that they chose, expert 0's first."""
    experts, sorted_indices = routing_map.t().nonzero(as_tuple=True)
    return tokens[sorted_indices], probs[sorted_indices, experts], sorted_indices


def unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """The way back, [n, h] -> [T, h]: for each token the sum of its rows, 0 where it has none."""
    total = permuted_tokens.new_zeros(num_tokens, permuted_tokens.size(1))
    return total.index_add(0, sorted_indices, permuted_tokens)


def dispatch(
    hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor, group: Any
) -> tuple[torch.Tensor, list[int], torch.Tensor, Any]:
    """Sends this rank's tokens to the ranks of their experts."""
    tokens, weights, sorted_indices = permute(hidden, routing_map, probs)
    counts = _counts_of_all(routing_map, group)
    rank = group.rank()
    sent = counts[rank].sum(dim=1).tolist()
    chunks = counts[:, rank]  # [source, local expert]
    received = chunks.sum(dim=1).tolist()
    tokens = all_to_all(group, tokens, received, sent)
    weights = all_to_all(group, weights, received, sent)
    by_expert = _order(chunks)
    state = (group, sent, received, by_expert, sorted_indices, len(hidden))
    return tokens[by_expert], chunks.sum(dim=0).tolist(), weights[by_expert], state


def _counts_of_all(routing_map: torch.Tensor, group: Any) -> torch.Tensor:
    """Tokens by [source rank, rank of the expert, local expert]."""
    own = routing_map.sum(dim=0)
    counts = [None] * group.size()
    dist.all_gather_object(counts, own.tolist(), group)
    return torch.tensor(counts).view(group.size(), group.size(), -1)


def _order(chunks: torch.Tensor) -> torch.Tensor:
    """Places, among what came, of the first expert's rows, of the second's, ..."""
    num_local = chunks.size(1)
    expert_of_row = torch.arange(num_local).repeat(chunks.size(0))
    return expert_of_row.repeat_interleave(chunks.reshape(-1)).argsort(stable=True)


def combine(outputs: torch.Tensor, state: Any) -> torch.Tensor:
    """Sends the experts' outputs [n', h], in the order of `dispatch`, back to where the tokens are."""
    group, sent, received, by_expert, sorted_indices, num_tokens = state
    by_source = outputs[by_expert.argsort()]
    returned = all_to_all(group, by_source, sent, received)
    return unpermute(returned, sorted_indices, num_tokens)


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
