"""Permutation against loops: order, probabilities, gradients, places that nobody chose."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.core.transformer.moe.permutation import permute, sort_chunks_by_idxs, unpermute


def draw(seed: int, num_tokens: int, num_experts: int, density: float):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64)
    routing_map = torch.rand(num_tokens, num_experts, generator=generator) < density
    probs = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    return tokens.requires_grad_(), routing_map, probs.requires_grad_()


def by_hand(routing_map: torch.Tensor, capacity: int | None) -> list[tuple[int, int]]:
    """(token, expert) of each row: by expert, then by token; those that did not choose it come last."""
    pairs = []
    for expert, column in enumerate(routing_map.T.tolist()):
        chosen = [token for token, is_chosen in enumerate(column) if is_chosen]
        if capacity is not None:
            others = [token for token in range(len(column)) if token not in chosen]
            chosen = [*chosen, *others][:capacity]
        pairs += [(token, expert) for token in chosen]
    return pairs


sizes = {
    "seed": st.integers(0, 99),
    "num_tokens": st.integers(1, 7),
    "num_experts": st.integers(1, 5),
    "density": st.sampled_from([0.0, 0.4, 1.0]),
    "padded": st.booleans(),
}


@given(**sizes)
def test_rows_are_in_the_order_of_experts_and_add_up_again(
    seed, num_tokens, num_experts, density, padded
):
    tokens, routing_map, probs = draw(seed, num_tokens, num_experts, density)
    capacity = 1 + seed % num_tokens if padded else None
    options = {} if capacity is None else {"drop_and_pad": True}
    number = None if capacity is None else capacity * num_experts
    rows, weights, indices = permute(tokens, routing_map, probs, number, **options)
    pairs = by_hand(routing_map, capacity)
    assert indices.tolist() == [token for token, _ in pairs]
    assert rows.shape == (len(pairs), 3) and weights.shape == (len(pairs),)
    for row, weight, (token, expert) in zip(rows, weights, pairs, strict=True):
        assert torch.equal(row, tokens[token]) and weight == probs[token, expert]
    # Weighed before or after, the sum is the same, and so are its gradients.
    plain = unpermute(rows * weights.unsqueeze(-1), indices, tokens.shape)
    weighed = unpermute(
        permute(tokens, routing_map, None, number, **options)[0],
        indices,
        tokens.shape,
        probs=probs,
        routing_map=routing_map,
        **options,
    )
    wanted = tokens * 0 + probs.sum() * 0
    for token, expert in pairs:
        wanted = wanted.index_add(
            0, torch.tensor([token]), (tokens * probs[:, expert, None])[[token]]
        )
    found = [
        [total, *torch.autograd.grad(total.sin().sum(), (tokens, probs))]
        for total in (plain, weighed)
    ]
    wanted = [wanted, *torch.autograd.grad(wanted.sin().sum(), (tokens, probs))]
    for results in found:
        for result, want in zip(results, wanted, strict=True):
            assert torch.allclose(result, want, atol=1e-13)
    assert permute(tokens, routing_map)[1] is None


def test_a_sum_has_the_same_bits_however_experts_are_cut_over_ranks():
    """A token's copies are added in the order of its experts, whichever other tokens are there."""
    tokens, routing_map, _ = draw(0, 40, 8, 0.6)
    rows, _, indices = permute(tokens, routing_map)
    rows = rows * torch.rand(rows.size(0), 1, dtype=torch.float64)
    whole = unpermute(rows, indices, tokens.shape)
    for part in (slice(0, 7), slice(7, 40)):
        of_part = [
            place for place, token in enumerate(indices.tolist()) if token in range(40)[part]
        ]
        piece = unpermute(rows[of_part], indices[of_part] - part.start, tokens[part].shape)
        assert torch.equal(piece, whole[part])


def test_chunks_change_places():
    rows = torch.arange(12.0).view(6, 2).requires_grad_()
    sorted_rows, probs = sort_chunks_by_idxs(rows, [1, 0, 3, 2], [2, 1, 3, 0], torch.arange(6.0))
    assert probs.tolist() == [1, 2, 3, 4, 5, 0] and torch.equal(
        sorted_rows, rows[[1, 2, 3, 4, 5, 0]]
    )
    sizes, order = torch.tensor([3, 0, 2, 1]), torch.tensor([3, 1, 0, 2])
    back, nothing = sort_chunks_by_idxs(sorted_rows, sizes, order)
    assert torch.equal(back, rows) and nothing is None
    (back * torch.arange(6.0).view(6, 1)).sum().backward()
    assert rows.grad[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_what_cannot_be_is_refused():
    tokens, routing_map, probs = draw(1, 4, 2, 0.5)
    with pytest.raises(ValueError, match="each expert has 5 places .* which has 4; lower"):
        permute(tokens, routing_map, probs, 10, drop_and_pad=True)
    rows, _, indices = permute(tokens, routing_map)
    with pytest.raises(ValueError, match="needs the routing_map"):
        unpermute(rows, indices, tokens.shape, probs=probs)
