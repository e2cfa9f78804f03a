"""Positions as T5 has them: a number for each head and distance, added to the scores of attention.

Counterpart: `megatron.core.models.common.embeddings.relative_pos_embedding`. Source: Raffel et al. 2020
(https://arxiv.org/abs/1910.10683), section 2.1.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from minimegatron.core.tensor_parallel.initial_weights import new_weight
from minimegatron.core.tensor_parallel.utils import get_tensor_model_parallel_group_if_none


def relative_position_bucket(
    relative_position: torch.Tensor, bidirectional: bool, num_buckets: int, max_distance: int
) -> torch.Tensor:
    """The row of the table for each distance: int64 in, int64 out, of one shape.

    `relative_position` is the key's place minus the query's. With `bidirectional` half of the rows are
    for keys after the query; else all are for keys up to it, and a later one has row 0. Half of the
    rows of a direction are for one distance each. The others share what is left, up to `max_distance`,
    on a logarithmic scale; the last has all that is farther.

    >>> relative_position_bucket(torch.tensor([0, -1, -3, -4, -7, -100, 5]), False, 8, 16).tolist()
    [0, 1, 3, 4, 5, 7, 0]
    """
    first_row = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        first_row = (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
    else:
        distance = (-relative_position).clamp(min=0)
    one_each = num_buckets // 2
    share = torch.log(distance.clamp(min=1).float() / one_each) / math.log(max_distance / one_each)
    far = one_each + (share * (num_buckets - one_each)).long()
    return first_row + torch.where(distance < one_each, distance, far.clamp(max=num_buckets - 1))


class RelativePositionEmbedding(torch.nn.Module):
    """A table of a number for each bucket of distances and each head; a rank has a/t columns.

    Args:
        bidirectional: keys may stand after the query: the encoder's.
        init_method: draws the whole table.
        num_attention_heads: a.
        relative_attention_num_buckets, relative_attention_max_distance: see `relative_position_bucket`.
        dtype: of the table.
        tp_group: None for `parallel_state`'s.
    """

    def __init__(
        self,
        bidirectional: bool,
        init_method: Callable[[torch.Tensor], torch.Tensor],
        num_attention_heads: int,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        *,
        dtype: torch.dtype = torch.float32,
        tp_group: Any = None,
    ):
        super().__init__()
        group = get_tensor_model_parallel_group_if_none(tp_group)
        self.bidirectional = bidirectional
        self.num_buckets = relative_attention_num_buckets
        self.max_distance = relative_attention_max_distance
        shape = (self.num_buckets, num_attention_heads // group.size())
        self.relative_attention_bias = torch.nn.Embedding(*shape, device="meta")
        # Cut by heads, as the scores are: each rank gets the whole gradient of its own columns.
        self.relative_attention_bias.weight = new_weight(shape, dtype, init_method, 1, group)

    def forward(self, query_seq_length: int, key_seq_length: int) -> torch.Tensor:
        """What is added to the scores: [1, a/t, query length, key length]."""
        device = self.relative_attention_bias.weight.device
        queries = torch.arange(query_seq_length, device=device)[:, None]
        keys = torch.arange(key_seq_length, device=device)[None, :]
        rows = relative_position_bucket(
            keys - queries, self.bidirectional, self.num_buckets, self.max_distance
        )
        return self.relative_attention_bias(rows).permute(2, 0, 1).unsqueeze(0)
