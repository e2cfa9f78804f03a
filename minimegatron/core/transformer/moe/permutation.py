"""Tokens in the order of their experts, and back: indices, no communication.

Counterpart: `megatron.core.transformer.moe.moe_utils`, same names and values, without fused kernels.

A token stands in the result once for each expert that it chose. The order is by expert, and by token
within an expert, so that what a sum over a token's copies adds, and in which order, depends on no
layout. T: tokens, E: experts, n: pairs of a token and an expert that it chose.
"""

from collections.abc import Sequence
from typing import Any

import torch

from minimegatron.core.tracing import traced

MOVED = ("tokens", "permuted_tokens", "input")
"""What the functions below call the tensor that they move."""


def _describe(arguments: dict[str, Any]) -> dict[str, Any]:
    (tensor,) = (arguments[name] for name in MOVED if name in arguments)
    return {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


@traced("moe-permute", _describe)
def permute(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    *,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Copies of the tokens, [T, h] -> [n, h], in the order of their experts.

    Args:
        routing_map: bool [T, E], which experts a token chose.
        probs: [T, E].
        num_out_tokens: with `drop_and_pad`, n; else not read.
        drop_and_pad: give each expert n / E places: its first tokens, and then, if it has fewer, tokens
            that did not choose it, whose probabilities the router has set to 0.

    Returns:
        (tokens, probabilities [n] or None, the token's number of each copy [n] int64). Gradients flow
        through the first two.

    Raises:
        ValueError: an expert has more places than there are tokens.
    """
    if drop_and_pad and num_out_tokens is not None:
        num_tokens, num_experts = routing_map.shape
        capacity = num_out_tokens // num_experts
        if capacity > num_tokens:
            raise ValueError(
                f"each expert has {capacity} places for tokens of this rank, which has {num_tokens}; "
                "lower moe_expert_capacity_factor"
            )
        # Stable: an expert's own tokens come first, in their order.
        of_experts = routing_map.T.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        sorted_indices = of_experts[:, :capacity].flatten()
    else:
        drop_and_pad = False
        sorted_indices = routing_map.bool().T.nonzero()[:, 1]
    if probs is not None:
        probs = _chosen(probs, routing_map, sorted_indices, drop_and_pad)
    return tokens.index_select(0, sorted_indices), probs, sorted_indices


@traced("moe-permute", _describe)
def unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: torch.Size,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    *,
    drop_and_pad: bool = False,
) -> torch.Tensor:
    """Each token's copies added up, [n, h] -> `restore_shape` [T, h]; with `probs` [T, E], weighed.

    Sums have the dtype of the products, the result has that of `permuted_tokens`.

    Raises:
        ValueError: there are probabilities, but no `routing_map` that says whose.
    """
    dtype = permuted_tokens.dtype
    if probs is not None:
        if routing_map is None:
            raise ValueError("unpermute with probs needs the routing_map of permute; give both")
        weights = _chosen(probs, routing_map, sorted_indices, drop_and_pad)
        permuted_tokens = permuted_tokens * weights.unsqueeze(-1)
    # On a CPU, and with deterministic algorithms on a GPU, added in the order of the experts.
    total = permuted_tokens.new_zeros(restore_shape)
    return total.index_add_(0, sorted_indices, permuted_tokens).to(dtype)


def _chosen(
    probs: torch.Tensor, routing_map: torch.Tensor, sorted_indices: torch.Tensor, drop_and_pad: bool
) -> torch.Tensor:
    """[T, E] -> [n]: the probabilities of the pairs, in the order of `permute`."""
    if drop_and_pad:
        of_experts = sorted_indices.view(routing_map.size(1), -1)
        return probs.T.gather(1, of_experts).flatten()
    return probs.T.masked_select(routing_map.bool().T)


@traced("moe-permute", _describe)
def sort_chunks_by_idxs(
    input: torch.Tensor,
    split_sizes: torch.Tensor | Sequence[int],
    sorted_idxs: torch.Tensor | Sequence[int],
    probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cuts [n, h] into chunks of `split_sizes` rows and puts chunk `sorted_idxs[i]` at place i.

    `probs` [n], if given, likewise. Returns both. Sizes may be 0.
    """
    sizes, order = torch.as_tensor(split_sizes).tolist(), torch.as_tensor(sorted_idxs).tolist()

    def sort(rows: torch.Tensor) -> torch.Tensor:
        chunks = rows.split(sizes)
        return torch.cat([chunks[place] for place in order])

    return sort(input), None if probs is None else sort(probs)
