"""Attention over sequences whose tokens lie on several ranks. Nothing else in a dense layer mixes them.

Ours: Megatron leaves this to Transformer Engine. With c ranks each has s/c tokens (see `zigzag`), and:

    p2p          rings: keys and values go from rank to rank; each rank attends to those that are here
    all_gather   every rank gathers all keys and values, and attends for its own queries
    a2a          all-to-alls exchange tokens for heads: a rank attends to all tokens for a/(t c) heads

Attention to some of the keys gives an output and `lse`, the logarithm of the sum of its exponentials.
Two such results merge to the attention to both (the "online softmax" of Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867; in rings: Liu et al. 2023, https://arxiv.org/abs/2310.01889).

In the first two ways, a rank keeps between forward and backward its own queries, keys and values, the
output and lse, and a mask that was given, but no probabilities. Sums are taken in float32 at least;
what is sent has the keys' dtype. a2a leaves attention to the function for one process.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.core.tensor_parallel.mappings import all_to_all
from minimegatron.core.tensor_parallel.random import get_rng_state
from minimegatron.core.tensor_parallel.recompute import repeats_from
from minimegatron.core.tracing import traced
from minimegatron.core.transformer.attention_masks import check_is_bool
from minimegatron.core.transformer.enums import CAUSAL, AttnMaskType
from minimegatron.core.transformer.zigzag import positions_of_rank
from minimegatron.core.utils import without_graph

# -- Attention to some of the keys --


@traced("attention-block")
def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    visible: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) of these queries over these keys.

    Args:
        query: [..., s_q, d].
        key, value: [..., s_k, d]; leading dimensions broadcast against the query's.
        visible: bool, broadcastable to [..., s_q, s_k], True where a query may look; None: everywhere.
        keep: dropout's factors on the probabilities, 0 or 1/(1 - p), [..., s_q, s_k]; None: no dropout.

    Returns:
        output [..., s_q, d] and lse [..., s_q] in float32, or float64 for float64. A query that may
        look nowhere has output 0 and lse -inf.
    """
    scores = _scores(query, key, scale, visible)
    lse = scores.logsumexp(dim=-1)
    probabilities = _probabilities(scores, lse)
    if keep is not None:
        probabilities = probabilities * keep
    return probabilities @ value.to(scores.dtype), lse


def merge(
    output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) over the keys of both, from those over each. Shapes: see `block_attention`."""
    both = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((part - _finite(both)).exp()[..., None] for part in (lse, other_lse))
    return output * weight + other * other_weight, both


@traced("attention-block")
def block_gradients(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What these keys add to the gradients of query, key and value, in the shapes of those.

    Args:
        grad_output: of the whole output, [..., s_q, d].
        lse: of the queries over all keys, not over these alone: probabilities are exp(score - lse).
        delta: sum over d of grad_output x output, [..., s_q]: what the softmax's backward subtracts.
        scale, visible, keep: as `block_attention` had them.
    """
    scores = _scores(query, key, scale, visible)
    probabilities = _probabilities(scores, lse)
    grad_output = grad_output.to(scores.dtype)
    grad_probabilities = grad_output @ value.to(scores.dtype).mT
    seen = probabilities
    if keep is not None:
        seen, grad_probabilities = probabilities * keep, grad_probabilities * keep
    grad_scores = probabilities * (grad_probabilities - delta[..., None]) * scale
    return (
        grad_scores @ key.to(scores.dtype),
        (grad_scores.mT @ query.to(scores.dtype)).sum_to_size(key.shape),
        (seen.mT @ grad_output).sum_to_size(value.shape),
    )


def _scores(
    query: torch.Tensor, key: torch.Tensor, scale: float, visible: torch.Tensor | None
) -> torch.Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).mT * scale
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return (scores - _finite(lse)[..., None]).exp()


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """0 for -inf, where all scores are -inf too: -inf - -inf would be NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


# -- Which keys a rank attends to --


class Block(NamedTuple):
    """Queries and keys, as slices of what a rank has; whether a query looks up to itself only."""

    rows: slice
    columns: slice
    causal: bool


WHOLE = slice(None)


def block_of(rank: int, source: int, length: int, causal: bool = True) -> Block:
    """What rank `rank` attends to of the keys of rank `source`; each has `length` tokens.

    Causal attention needs half of another rank's block, and no causal mask there. Of a lower rank's
    two chunks (see `zigzag`), the first lies before all our tokens, the second after them. Of our own
    two, the second lies after all tokens of a higher rank, the first before them.
    """
    if not causal or source == rank:
        return Block(WHOLE, WHOLE, causal)
    if source < rank:
        return Block(WHOLE, slice(length // 2), False)
    return Block(slice(length // 2, None), WHOLE, False)


@dataclass(frozen=True)
class Sharing:
    """One attention over the ranks of `group`. `layer` counts from 1; `dropout` is a probability."""

    group: dist.ProcessGroup
    layer: int
    scale: float
    causal: bool = True
    dropout: float = 0.0

    def visible(
        self, mask: torch.Tensor | None, block: Block, like: torch.Tensor, source: int
    ) -> torch.Tensor | None:
        """Where the block's queries may look, [b, g, n, rows, columns], or what broadcasts to it.

        `mask`: of all keys of the sequence, True where a query must not look, [b, g, n, s/c, s] or
        what broadcasts to it; None for none. `like`: keys of one rank, [b, g, 1, s/c, d].
        """
        length, visible = like.size(-2), None
        if mask is not None:
            ranks, count = self.group.size(), mask.size(-1)
            columns = positions_of_rank(count, source, ranks, mask.device)[block.columns]
            visible = ~mask[..., block.rows, :].index_select(-1, columns)
        if block.causal:
            before = torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
            visible = before if visible is None else visible & before
        return visible

    def draw(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """Dropout's next factors, [b, g, n, s_q, s_k]; None without dropout."""
        if self.dropout == 0.0:
            return None
        dtype = torch.promote_types(query.dtype, torch.float32)
        keep = query.new_empty((*query.shape[:-1], key.size(-2)), dtype=dtype)
        return keep.bernoulli_(1.0 - self.dropout).div_(1.0 - self.dropout)


# -- p2p --


class _Hop:
    """A tensor on its way to the next rank, while that of the rank before comes here."""

    def __init__(self, tensor: torch.Tensor, sharing: Sharing, hop: int, way: str, payload: str):
        self._arriving = torch.empty_like(tensor)
        self._handle = collectives.pass_to_next(
            self._arriving,
            tensor,
            sharing.group,
            hop=hop,
            layer=sharing.layer,
            direction=way,
            payload=payload,
        )

    def wait(self) -> torch.Tensor:
        self._handle.wait()
        return self._arriving


def _by_tokens(output: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same [b, g, n, s/c, d], lying in memory as [s/c, b, g, n, d].

    What comes next takes it in this order, and without a copy: a layer keeps it once.
    """
    return output.permute(3, 0, 1, 2, 4).to(dtype).contiguous().permute(1, 2, 3, 0, 4)


class RingAttention(torch.autograd.Function):
    """Rank r attends in round i to the keys and values of rank (r - i) mod c.

    The next ones are on their way while a round computes. Backward sends keys and values round again;
    their gradients follow them and grow on each rank, and take one hop more to be home.
    """

    @staticmethod
    def forward(ctx, query, key, value, mask, sharing):
        """query [b, g, n, s/c, d]; key, value [b, g, 1, s/c, d]; returns as `query`."""
        ctx.sharing, ctx.rng_state = sharing, get_rng_state() if sharing.dropout else None
        rank, num_ranks = sharing.group.rank(), sharing.group.size()
        dtype = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(query.shape, dtype=dtype, device=query.device)
        lse = torch.full(query.shape[:-1], float("-inf"), dtype=dtype, device=query.device)
        pair = torch.stack((key, value))
        for step in range(num_ranks):
            is_last = step == num_ranks - 1
            hop = None if is_last else _Hop(pair, sharing, step, "forward", "kv")
            source = (rank - step) % num_ranks
            block = block_of(rank, source, key.size(-2), sharing.causal)
            rows, some = block.rows, query[..., block.rows, :]
            keys, values = pair[..., block.columns, :]
            result = block_attention(
                some,
                keys,
                values,
                scale=sharing.scale,
                visible=sharing.visible(mask, block, key, source),
                keep=sharing.draw(some, keys),
            )
            output[..., rows, :], lse[..., rows] = merge(
                output[..., rows, :], lse[..., rows], *result
            )
            pair = pair if is_last else hop.wait()
        output = _by_tokens(output, query.dtype)
        ctx.save_for_backward(query, key, value, mask, output, lse)
        return output

    @staticmethod
    @without_graph
    def backward(ctx, grad_output):
        with repeats_from(ctx.rng_state):
            grads = RingAttention._gradients(ctx.sharing, grad_output, *ctx.saved_tensors)
        return *grads, None, None

    @staticmethod
    def _gradients(sharing, grad_output, query, key, value, mask, output, lse):
        rank, num_ranks = sharing.group.rank(), sharing.group.size()
        delta = (grad_output.to(lse.dtype) * output).sum(dim=-1)
        grad_query = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        pair, grads_hop = torch.stack((key, value)), None
        for step in range(num_ranks):
            is_last = step == num_ranks - 1
            hop = None if is_last else _Hop(pair, sharing, step, "backward", "kv")
            source = (rank - step) % num_ranks
            block = block_of(rank, source, key.size(-2), sharing.causal)
            rows, some = block.rows, query[..., block.rows, :]
            keys, values = pair[..., block.columns, :]
            grad_some, *grads = block_gradients(
                grad_output[..., rows, :],
                some,
                keys,
                values,
                lse=lse[..., rows],
                delta=delta[..., rows],
                scale=sharing.scale,
                visible=sharing.visible(mask, block, key, source),
                keep=sharing.draw(some, keys),
            )
            grad_query[..., rows, :] += grad_some
            # What the ranks before have added to the gradients of these keys comes one hop after them.
            grad_pair = torch.zeros_like(pair) if grads_hop is None else grads_hop.wait()
            grad_pair[..., block.columns, :] += torch.stack(grads)
            grads_hop = _Hop(grad_pair, sharing, step, "backward", "dkv")
            pair = pair if is_last else hop.wait()
        return grad_query.to(query.dtype), *grads_hop.wait()


# -- all_gather --


class GatherAttention(torch.autograd.Function):
    """All keys and values at once; backward gathers them again, and reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx, query, key, value, mask, sharing):
        """Shapes as `RingAttention.forward`."""
        ctx.sharing, ctx.rng_state = sharing, get_rng_state() if sharing.dropout else None
        keys, values = _gather_pair(key, value, sharing.group)
        output, lse = block_attention(
            query,
            keys,
            values,
            scale=sharing.scale,
            visible=_visible_of_all(mask, keys, sharing),
            keep=sharing.draw(query, keys),
        )
        output = _by_tokens(output, query.dtype)
        ctx.save_for_backward(query, key, value, mask, output, lse)
        return output

    @staticmethod
    @without_graph
    def backward(ctx, grad_output):
        query, key, value, mask, output, lse = ctx.saved_tensors
        sharing = ctx.sharing
        keys, values = _gather_pair(key, value, sharing.group)
        with repeats_from(ctx.rng_state):
            keep = sharing.draw(query, keys)
        grad_query, *grads = block_gradients(
            grad_output,
            query,
            keys,
            values,
            lse=lse,
            delta=(grad_output.to(lse.dtype) * output).sum(dim=-1),
            scale=sharing.scale,
            visible=_visible_of_all(mask, keys, sharing),
            keep=keep,
        )
        grad_pair = torch.stack(grads).to(key.dtype)
        ranks = sharing.group.size()
        order = _order(keys.size(-2), ranks, grad_pair.device)
        by_rank = grad_pair.index_select(-2, order).unflatten(-2, (ranks, -1)).movedim(-3, 0)
        mine = torch.empty_like(by_rank[0], memory_format=torch.contiguous_format)
        collectives.reduce_scatter(mine, by_rank.reshape(-1, *mine.shape[1:]), sharing.group)
        return grad_query.to(query.dtype), *mine, None, None


def _order(length: int, num_ranks: int, device: torch.device) -> torch.Tensor:
    """Positions in the sequence of all tokens, those of the first rank first."""
    ranks = range(num_ranks)
    return torch.cat([positions_of_rank(length, rank, num_ranks, device) for rank in ranks])


def _gather_pair(key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Keys and values of the sequence, in its order: [2, b, g, 1, s, d] from [b, g, 1, s/c, d]."""
    pair, ranks = torch.stack((key, value)), group.size()
    whole = pair.new_empty((ranks * 2, *pair.shape[1:]))
    collectives.all_gather(whole, pair, group)
    in_order = _order(ranks * key.size(-2), ranks, key.device).argsort()
    return whole.unflatten(0, (ranks, 2)).movedim(0, -3).flatten(-3, -2).index_select(-2, in_order)


def _visible_of_all(
    mask: torch.Tensor | None, keys: torch.Tensor, sharing: Sharing
) -> torch.Tensor | None:
    """As `Sharing.visible`, of all keys in the order of the sequence."""
    visible = None if mask is None else ~mask
    if sharing.causal:
        length, group = keys.size(-2), sharing.group
        own = positions_of_rank(length, group.rank(), group.size(), keys.device)
        before = torch.arange(length, device=keys.device) <= own[:, None]
        visible = before if visible is None else visible & before
    return visible


# -- a2a --


def _tokens_of_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[s/c, b, heads, d] -> [s, b, heads/c, d]: all tokens, in their order, of this rank's heads."""
    ranks = group.size()
    by_rank = tensor.unflatten(2, (ranks, -1)).movedim(2, 0)
    tokens = all_to_all(group, by_rank.contiguous()).flatten(0, 1)
    return tokens.index_select(0, _order(len(tokens), ranks, tensor.device).argsort())


def _heads_of_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The way back: [s, b, n] -> [s/c, b, c n]."""
    ranks = group.size()
    by_rank = tensor.index_select(0, _order(len(tensor), ranks, tensor.device))
    by_rank = by_rank.unflatten(0, (ranks, -1))
    return all_to_all(group, by_rank).movedim(0, 2).flatten(2)


def _whole_mask(mask: torch.Tensor | None, group: dist.ProcessGroup) -> torch.Tensor | None:
    """[b, heads or 1, s/c, s] -> [b, heads/c or 1, s, s] for this rank's heads."""
    if mask is None:
        return None
    ranks, rows = group.size(), mask.movedim(2, 0).to(torch.uint8).contiguous()
    whole = rows.new_empty((ranks * len(rows), *rows.shape[1:]))
    collectives.all_gather(whole, rows, group)
    in_order = _order(len(whole), ranks, mask.device).argsort()
    whole = whole.index_select(0, in_order).movedim(0, 2).bool()
    return whole if whole.size(1) == 1 else whole.chunk(ranks, dim=1)[group.rank()]


# -- What attention calls --


def _by_function(
    function: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sharing: Sharing,
) -> torch.Tensor:
    groups = key.size(2)
    # [s, b, heads, d] -> [b, g, heads/g, s, d]: the queries of a group share its keys.
    query, key, value = (
        tensor.permute(1, 2, 0, 3).unflatten(1, (groups, -1)) for tensor in (query, key, value)
    )
    if mask is not None:
        mask = mask[:, :, None] if mask.size(1) == 1 else mask.unflatten(1, (groups, -1))
    with torch.autocast(query.device.type, enabled=False):  # sums stay in float32
        output = function.apply(query, key, value, mask, sharing)
    return output.flatten(1, 2).permute(2, 0, 1, 3).flatten(2)


def _by_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sharing: Sharing,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    group = sharing.group
    query, key, value = (_tokens_of_all(tensor, group) for tensor in (query, key, value))
    return _heads_of_all(attend(query, key, value, _whole_mask(mask, group)), group)


def attention_over_ranks(
    kind: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sharing: Sharing,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Attention of this rank's tokens to those of all ranks of `sharing.group`.

    Dropout draws from the generator as it stands, and backward repeats it. The ranks of a context
    group draw the same numbers (see `random`), each for its own tokens or heads, so what a token drops
    depends on c.

    Args:
        kind: one of `activation_config.COMM_TYPES`.
        query: [s/c, b, a/t, d].
        key, value: [s/c, b, g/t, d].
        attention_mask: bool, [b or 1, a/t or 1, s/c or 1, s], True where attention must not look:
            this rank's rows, and all columns in the order of the sequence; None for none.
        attend: (query, key, value, mask) -> [s, b, heads d], attention within one process, which a2a
            calls with all tokens of its heads; other ways do not.

    Returns:
        [s/c, b, (a/t) d].
    """
    if attention_mask is not None:
        # All rows.
        attention_mask = attention_mask.bool().expand(-1, -1, len(query), -1)
    arguments = (query, key, value, attention_mask, sharing)
    if kind == "a2a":
        return _by_heads(*arguments, attend)
    return _by_function(FUNCTIONS[kind], *arguments)


FUNCTIONS = {"p2p": RingAttention, "all_gather": GatherAttention}


def attend_over_ranks(
    attend_here: Callable[..., torch.Tensor],
    core: Any,
    dropout: float,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    """What `DotProductAttention`, `core`, does where ranks share a sequence.

    Args:
        attend_here: attention within one process, given `core` and `dropout` too.
        query: [s/c, b, a/t, d].
        key, value: [s/c, b, g/t, d].
        attention_mask: as that layer takes it.

    Returns [s/c, b, (a/t) d].
    """
    scale = core.softmax_scale
    sharing = Sharing(
        core.cp_group,
        core.layer_number,
        1.0 / math.sqrt(query.size(-1)) if scale is None else scale,
        core.attn_mask_type in CAUSAL,
        dropout,
    )
    if core.attn_mask_type == AttnMaskType.no_mask:
        attention_mask = None
    if attention_mask is not None:
        check_is_bool(attention_mask)
    attend = partial(attend_here, core, dropout)
    return attention_over_ranks(
        core.cp_comm_type, query, key, value, attention_mask, sharing, attend
    )
