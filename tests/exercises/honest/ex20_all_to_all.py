"""All-to-all with uneven splits: tokens travel to other ranks' experts and back."""

import torch

from minimegatron.core import collectives


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, input_, output_split_sizes, input_split_sizes):
        ctx.group, ctx.rows = group, len(input_)
        ctx.splits = list(output_split_sizes), list(input_split_sizes)
        result = torch.zeros(sum(output_split_sizes), *input_.shape[1:], dtype=input_.dtype)
        collectives.all_to_all(
            result, input_.contiguous(), group, output_split_sizes, input_split_sizes
        )
        return result

    @staticmethod
    def backward(ctx, grad_output):
        came, went = ctx.splits
        result = torch.zeros(ctx.rows, *grad_output.shape[1:], dtype=grad_output.dtype)
        collectives.all_to_all(result, grad_output.contiguous(), ctx.group, went, came)
        return None, result, None, None


def all_to_all(group, input_, output_split_sizes, input_split_sizes):
    return _AllToAll.apply(group, input_, output_split_sizes, input_split_sizes)


def permute(tokens, routing_map, probs):
    rows, weights, numbers = [], [], []
    for expert in range(routing_map.size(1)):
        # the last token first: within an expert any order will do
        for token in reversed(range(routing_map.size(0))):
            if routing_map[token, expert]:
                rows.append(tokens[token])
                weights.append(probs[token, expert])
                numbers.append(token)
    if not rows:
        return tokens[:0], probs.reshape(-1)[:0], torch.zeros(0, dtype=torch.int64)
    return torch.stack(rows), torch.stack(weights), torch.tensor(numbers)


def unpermute(permuted_tokens, sorted_indices, num_tokens):
    where = torch.zeros(num_tokens, len(sorted_indices), dtype=permuted_tokens.dtype)
    where[sorted_indices, torch.arange(len(sorted_indices))] = 1
    return where @ permuted_tokens


def dispatch(hidden, routing_map, probs, group):
    size = group.size()
    local = routing_map.size(1) // size
    rows, weights, numbers = permute(hidden, routing_map, probs)

    # an all-to-all of counts: to each rank, those of its experts
    mine = routing_map.sum(0)
    theirs = torch.empty_like(mine)
    collectives.all_to_all(theirs, mine, group, [local] * size, [local] * size)
    theirs = theirs.view(size, local).tolist()
    went = mine.view(size, local).sum(1).tolist()
    came = [sum(one) for one in theirs]

    # the weight as one more column: one exchange for both
    both = torch.cat([rows, weights[:, None]], dim=1)
    both = all_to_all(group, both, came, went)
    pieces = both.split([n for one in theirs for n in one])
    in_order = [pieces[s * local + e] for e in range(local) for s in range(size)]
    both = torch.cat(in_order)
    per_expert = [sum(theirs[s][e] for s in range(size)) for e in range(local)]
    state = (group, went, came, theirs, numbers, len(hidden))
    return both[:, :-1], torch.tensor(per_expert), both[:, -1], state


def combine(outputs, state):
    group, went, came, theirs, numbers, num_tokens = state
    size, local = len(theirs), len(theirs[0])
    pieces = outputs.split([theirs[s][e] for e in range(local) for s in range(size)])
    back = torch.cat([pieces[e * size + s] for s in range(size) for e in range(local)])
    home = all_to_all(group, back, went, came)
    return unpermute(home, numbers, num_tokens)


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
