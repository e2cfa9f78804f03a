"""Against megatron-core: which tokens and which angles a rank has that shares its sequence, bit by bit.

Attention itself is left out: megatron-core has it from Transformer Engine alone, and its own
`DotProductAttention` refuses context parallelism.
"""

from unittest import mock

import pytest
import torch

from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.core.transformer.rope_utils import get_pos_emb_on_this_cp_rank
from minimegatron.training.utils import get_batch_on_this_cp_rank
from tests.conformance.megatron import cuda_calls_on_cpu, megatron_module
from tests.fake_transport import FakeGroup

utils = megatron_module("utils")
rope_utils = megatron_module("models.common.embeddings.rope_utils")
attention = megatron_module("transformer.dot_product_attention")
configs = megatron_module("transformer.transformer_config")
pytestmark = pytest.mark.filterwarnings("ignore")

GROUPS = [FakeGroup(rank, size) for size in (1, 2, 3, 4) for rank in range(size)]
BATCH, SEQUENCE = 2, 24


def batch() -> dict[str, torch.Tensor | None]:
    tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE)
    scores = torch.arange(BATCH * SEQUENCE * SEQUENCE).view(BATCH, 1, SEQUENCE, SEQUENCE)
    return {
        "tokens": tokens,
        "labels": None,
        "loss_mask": tokens.float() / 7,
        "position_ids": torch.arange(SEQUENCE).expand(BATCH, -1).contiguous(),
        "attention_mask": scores % 3 == 0,
    }


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group.my_rank} of {group.my_size}")
def test_same_tokens(group: FakeGroup):
    mine = get_batch_on_this_cp_rank(batch(), group)
    # Theirs takes every group for one rank where there are no processes.
    sizes = {"get_pg_size": FakeGroup.size, "get_pg_rank": FakeGroup.rank}
    with mock.patch.multiple(utils, **sizes):
        other = utils.get_batch_on_this_cp_rank(batch(), group)
    assert list(mine) == list(other)
    for name, value in other.items():
        assert (mine[name] is None) == (value is None)
        assert value is None or torch.equal(mine[name], value), name
        assert value is None or mine[name].dtype == value.dtype


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group.my_rank} of {group.my_size}")
def test_same_angles(group: FakeGroup, seq_dim: int):
    shape = (SEQUENCE, 1, 1, 6) if seq_dim == 0 else (BATCH, SEQUENCE, 6)
    angles = torch.arange(torch.Size(shape).numel()).view(shape) / 7
    mine = get_pos_emb_on_this_cp_rank(angles, seq_dim, group)
    with cuda_calls_on_cpu(), mock.patch.object(torch, "tensor", _not_pinned(torch.tensor)):
        other = rope_utils.get_pos_emb_on_this_cp_rank(angles, seq_dim, group)
    assert torch.equal(mine, other)


def _not_pinned(make):
    """Memory is pinned for a GPU alone."""
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def test_their_attention_refuses_ranks_that_share_a_sequence():
    """Without Transformer Engine: nothing is left with which ours could be compared."""
    config = configs.TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, context_parallel_size=2
    )
    with pytest.raises(AssertionError, match="only supported by TEDotProductAttention"):
        attention.DotProductAttention(config, 1, AttnMaskType.causal, "self")
