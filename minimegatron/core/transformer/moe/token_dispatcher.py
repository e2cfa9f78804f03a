"""Tokens on their way to the ranks that hold their experts, and back, in six methods.

Counterpart: `megatron.core.transformer.moe.token_dispatcher`.

    dispatch_preprocess -> token_dispatch -> dispatch_postprocess -> the experts
        -> combine_preprocess -> token_combine -> combine_postprocess

Ranks of the expert group exchange tokens in `token_dispatch` and `token_combine`, and in no other.
So a schedule may start such a call and compute something else until it ends. The other methods
communicate in two cases: `dispatch_preprocess` gathers how many tokens each expert gets, and ranks that
share an expert (expert tensor parallelism) gather its tokens, and reduce-scatter its outputs.

What a dispatcher remembers from call to call belongs to one forward: numbers and indices, no tensor
with a gradient. The next `dispatch_preprocess` replaces it. A backward must not ask for it.

Sizes: T tokens of this rank, s/t * b; E experts, `local` of them here; e ranks of the expert group, etp
that share an expert; n pairs of a token and an expert on their way.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core import collectives
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from minimegatron.core.transformer.moe.moe_utils import get_capacity
from minimegatron.core.transformer.moe.permutation import permute, sort_chunks_by_idxs, unpermute
from minimegatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class TokenExchange:
    """One all-to-all of tokens: over which group, how many rows to each rank, how many from each.

    Megatron has no counterpart. A schedule that starts one and waits for it later needs this:

        exchange = dispatcher.dispatch_exchange     # or combine_exchange; after dispatch_preprocess
        output, handle = exchange.start(tensor)     # no autograd; `tensor` must stay until the wait
        ...                                         # compute something else
        handle.wait()                               # now `output` may be read
        grad, handle = exchange.reversed().start(output_grad)

    A dispatch is two such starts: tokens first, then probabilities. A combine is one. All ranks of the
    group must start theirs in the same order. Keep the exchange for the backward: the dispatcher may be
    in another forward by then.
    """

    group: Any
    input_splits: list[int]
    output_splits: list[int]

    def start(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """[n, ...] -> (output [n', ...], a handle with `wait()`): a tensor of its own, also alone."""
        tensor = tensor.detach().contiguous()
        output = tensor.new_empty((sum(self.output_splits), *tensor.shape[1:]))
        splits = (self.output_splits, self.input_splits)
        handle = collectives.all_to_all(output, tensor, self.group, *splits, async_op=True)
        return output, handle

    def reversed(self) -> "TokenExchange":
        """What came goes back: that of the backward, and that of the combine."""
        return TokenExchange(self.group, self.output_splits, self.input_splits)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same with autograd, and over when it returns."""
        return all_to_all(self.group, tensor, self.output_splits, self.input_splits)


class MoETokenDispatcher(ABC):
    """The six methods.

    Args:
        config: `num_moe_experts`, `moe_router_topk` and the capacity are read.
        pg_collection: with `ep`, `expt_tp` and `tp_ep`.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection):
        self.config = config
        self.ep_group, self.tp_ep_group = pg_collection.ep, pg_collection.tp_ep
        self.tp_group = pg_collection.expt_tp
        self.ep_size, self.tp_size = self.ep_group.size(), self.tp_group.size()
        self.tp_rank = self.tp_group.rank()

    @abstractmethod
    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [s/t, b, h], map bool [T, E] and probabilities [T, E], ready to be sent."""

    @abstractmethod
    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, sent to the ranks of the experts."""

    @abstractmethod
    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(tokens [n, h] in the order of the local experts, int64 [local] how many each gets, on the
        CPU, probabilities [n])"""

    @abstractmethod
    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The experts' outputs [n, h], weighed by the probabilities, ready to be sent back."""

    @abstractmethod
    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """These, sent back to the ranks of the tokens."""

    @abstractmethod
    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """For each token the sum over its experts, [s/t, b, h]."""

    def _flatten(self, hidden_states: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        """[s/t, b, h] -> [T, h]. Raises ValueError for a map of other tokens or experts."""
        self.hidden_shape = hidden_states.shape
        flat = hidden_states.reshape(-1, self.hidden_shape[-1])
        wanted = (flat.size(0), self.config.num_moe_experts)
        if tuple(routing_map.shape) != wanted or routing_map.dtype != torch.bool:
            raise ValueError(
                f"the routing map is {routing_map.dtype} {list(routing_map.shape)}, but there are "
                f"{wanted[0]} tokens and {wanted[1]} experts; give a bool [{wanted[0]}, {wanted[1]}]"
            )
        return flat


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """Every rank gets the tokens of all e * etp, and picks those of its experts.

    Simple, and sends (e * etp - 1) T h elements per direction, however few experts a token chooses.

    Args:
        num_local_experts: experts of this rank.
        local_expert_indices: their numbers in the whole layer, one after the other.
        config: see `MoETokenDispatcher`.
        pg_collection: see `MoETokenDispatcher`.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config, pg_collection)
        _check_local_experts(num_local_experts, local_expert_indices, config, self.ep_group)
        self.local_experts = slice(local_expert_indices[0], local_expert_indices[-1] + 1)

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        self.routing_map = routing_map
        return self._flatten(hidden_states, routing_map), probs

    def token_dispatch(self, hidden_states, probs):
        gather, group = gather_from_sequence_parallel_region, self.tp_ep_group
        self.routing_map = gather(self.routing_map, group=group)
        # Each rank uses its experts' columns of the probabilities: gradients are to be summed.
        probs = gather(probs, group=group)
        return gather(hidden_states, group=group), probs

    def dispatch_postprocess(self, hidden_states, probs):
        local_map, self.routing_map = self.routing_map[:, self.local_experts], None
        self.shape_before_permute, self.probs_dtype = hidden_states.shape, probs.dtype
        tokens, probs, self.sorted_indices = permute(
            hidden_states, local_map, probs[:, self.local_experts]
        )
        return tokens, local_map.sum(dim=0).cpu(), probs

    def combine_preprocess(self, hidden_states):
        return unpermute(hidden_states, self.sorted_indices, self.shape_before_permute)

    def token_combine(self, hidden_states):
        return _reduce_scatter(hidden_states, self.probs_dtype, self.tp_ep_group)

    def combine_postprocess(self, hidden_states):
        return hidden_states.view(self.hidden_shape)


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """A token goes to the ranks of the experts that it chose.

    About T k h (e - 1) / e elements per direction. With a capacity and padding, every rank sends every
    other as many, so nobody asks.

    Args:
        num_local_experts: experts of this rank.
        local_expert_indices: their numbers in the whole layer, one after the other.
        config: see `MoETokenDispatcher`.
        pg_collection: see `MoETokenDispatcher`.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config, pg_collection)
        _check_local_experts(num_local_experts, local_expert_indices, config, self.ep_group)
        self.num_local_experts = num_local_experts
        self.local_experts = slice(local_expert_indices[0], local_expert_indices[-1] + 1)
        self.drop_and_pad = config.moe_pad_expert_input_to_capacity
        # What comes is ordered by source, and by local expert within it; experts want it the other way.
        num_sources = self.ep_size * self.tp_size
        chunks = torch.arange(num_sources * num_local_experts)
        self.sort_input_by_local_experts = chunks.view(num_sources, -1).T.flatten()
        self.restore_output_by_local_experts = chunks.view(num_local_experts, -1).T.flatten()
        self.is_sorted = num_sources == 1 or num_local_experts == 1

    @property
    def dispatch_exchange(self) -> TokenExchange:
        """The all-to-all of `token_dispatch`: first of the tokens, then of the probabilities."""
        return TokenExchange(self.ep_group, self.input_splits, self.output_splits)

    @property
    def combine_exchange(self) -> TokenExchange:
        """The all-to-all of `token_combine`."""
        return self.dispatch_exchange.reversed()

    def _count_tokens(self, routing_map: torch.Tensor) -> torch.Tensor:
        """int64 [etp, e, E] on the CPU: tokens of each of the ranks for each expert."""
        shape = (self.ep_size, self.tp_size, routing_map.size(1))
        if self.drop_and_pad:
            num_pairs = routing_map.size(0) * self.config.moe_router_topk
            factor = self.config.moe_expert_capacity_factor
            capacity = get_capacity(num_pairs, self.config.num_moe_experts, factor)
            counts = torch.full(shape, capacity, dtype=torch.int64)
        else:
            own = routing_map.sum(dim=0)
            counts = own.new_empty((shape[0] * shape[1], *own.shape))
            collectives.all_gather(counts.view(-1), own, self.tp_ep_group)
        return counts.cpu().view(shape).transpose(0, 1)

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        hidden_states = self._flatten(hidden_states, routing_map)
        self.shape_before_permute, self.probs_dtype = hidden_states.shape, probs.dtype
        counts = self._count_tokens(routing_map)
        own = counts[self.tp_rank, self.ep_group.rank()]
        self.input_splits = own.view(self.ep_size, -1).sum(dim=1).tolist()
        # [etp, e, local]: what comes here, and to the ranks that share my experts.
        self.num_tokens = counts[:, :, self.local_experts]
        self.output_splits = self.num_tokens[self.tp_rank].sum(dim=1).tolist()
        self.output_splits_tp = self.num_tokens.sum(dim=(1, 2)).tolist()
        tokens, probs, self.sorted_indices = permute(
            hidden_states,
            routing_map,
            probs=probs,
            num_out_tokens=sum(self.input_splits),
            drop_and_pad=self.drop_and_pad,
        )
        return tokens, probs

    def token_dispatch(self, hidden_states, probs):
        exchange = self.dispatch_exchange
        return exchange(hidden_states), exchange(probs)

    def dispatch_postprocess(self, hidden_states, probs):
        if self.tp_size > 1:
            options = {"group": self.tp_group, "output_split_sizes": self.output_splits_tp}
            hidden_states = gather_from_sequence_parallel_region(hidden_states, **options)
            probs = gather_from_sequence_parallel_region(probs, **options)
        if not self.is_sorted:
            order = self.sort_input_by_local_experts
            hidden_states, probs = sort_chunks_by_idxs(
                hidden_states, self.num_tokens.flatten(), order, probs
            )
        return hidden_states, self.num_tokens.sum(dim=(0, 1)), probs

    def combine_preprocess(self, hidden_states):
        if not self.is_sorted:
            sizes = self.num_tokens.flatten()[self.sort_input_by_local_experts]
            order = self.restore_output_by_local_experts
            hidden_states, _ = sort_chunks_by_idxs(hidden_states, sizes, order)
        if self.tp_size > 1:
            hidden_states = _reduce_scatter(
                hidden_states, self.probs_dtype, self.tp_group, self.output_splits_tp
            )
        return hidden_states

    def token_combine(self, hidden_states):
        return self.combine_exchange(hidden_states)

    def combine_postprocess(self, hidden_states):
        total = unpermute(hidden_states, self.sorted_indices, self.shape_before_permute)
        return total.view(self.hidden_shape)


def _reduce_scatter(
    hidden_states: torch.Tensor, dtype: torch.dtype, group: Any, sizes: Any = None
) -> torch.Tensor:
    """The sum over `group`, taken in the dtype of the router's probabilities."""
    share = reduce_scatter_to_sequence_parallel_region(hidden_states.to(dtype), group, sizes)
    return share.to(hidden_states.dtype)


def _check_local_experts(
    number: int, indices: Sequence[int], config: TransformerConfig, ep_group: Any
) -> None:
    """Raises ValueError unless this rank has its share of the experts, in one piece."""
    share = config.num_moe_experts // ep_group.size()
    wanted = list(range(ep_group.rank() * share, (ep_group.rank() + 1) * share))
    if number != share or list(indices) != wanted:
        raise ValueError(
            f"rank {ep_group.rank()} of {ep_group.size()} in the expert group is given {number} "
            f"experts {list(indices)}, but its share of {config.num_moe_experts} is {wanted}"
        )
