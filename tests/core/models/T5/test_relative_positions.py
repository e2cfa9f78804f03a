"""Positions as distances: T5 with them equals one process, and is refused where it cannot be."""

import pytest
import torch

from minimegatron.core.models.common.embeddings.relative_pos_embedding import (
    RelativePositionEmbedding,
)
from minimegatron.core.transformer.biased_attention import (
    BiasedDotProductAttention,
    bias_with_mask,
)
from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.training.arguments import parse_args
from tests.core.models.gpt_support import Case as Gpt
from tests.groups import PretendGroup
from tests.parity import Case
from tests.test_parity import check

CASES = [
    Case(tp=2, num_layers=2, model="t5_relative", recompute="selective"),
    Case(tp=2, num_layers=2, model="t5_relative", sp=True, recompute="full", llama=True),
    Case(dp=2, num_layers=2, model="t5_relative", dist_opt=True),
]


def test_equal_to_one_process(tmp_path_factory):
    check(CASES, 2, tmp_path_factory.getbasetemp())


def test_a_rank_has_the_columns_of_its_heads():
    def table(rank: int, size: int) -> torch.Tensor:
        torch.manual_seed(1)
        group = PretendGroup(rank, size)
        new = RelativePositionEmbedding(True, torch.nn.init.normal_, 4, 8, 20, tp_group=group)
        return new(6, 9)

    whole = table(0, 1)
    assert whole.shape == (1, 4, 6, 9)
    assert torch.equal(torch.cat([table(0, 2), table(1, 2)], dim=1), whole)
    # It depends on the distance alone.
    assert torch.equal(whole[..., :-1, :-1], whole[..., 1:, 1:])
    assert not torch.equal(whole[..., 0, 1], whole[..., 1, 0])


@pytest.mark.parametrize("mask_type", [AttnMaskType.padding, AttnMaskType.causal])
def test_the_bias_is_added_to_the_scores(mask_type):
    config = Gpt().make_config()
    s, b, heads, width = 5, 2, 8, 4
    generator = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, s, b, heads, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(1, heads, s, s, generator=generator, dtype=torch.float64)
    hidden = torch.zeros(b, 1, 1, s, dtype=torch.bool)
    hidden[1, ..., 3:] = True
    core = BiasedDotProductAttention(config, 1, mask_type)
    found = core(q, k, v, bias_with_mask(bias, hidden))

    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / width**0.5 + bias
    scores = scores.masked_fill(hidden, -torch.inf)
    if mask_type == AttnMaskType.causal:
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf)
    wanted = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v).flatten(2)
    assert torch.allclose(found, wanted, atol=1e-12)


RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--max-position-embeddings 16 --train-iters 1 --lr 1 --sample-tokens 0 "
    "--tokenizer-type BertWordPieceLowerCase --position-embedding-type relative"
)
REFUSED = {
    "gpt": ("", "relative is for pretrain_t5; use learned_absolute or rope"),
    "t5 on two stages": (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-split-rank 1",
        "relative needs one table in all layers of a stack, but --pipeline-model-parallel-size is 2",
    ),
    "t5 with too many rows": (
        "--relative-attention-num-buckets 128",
        "--relative-attention-num-buckets 128 are not fewer than the distances",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case):
    flags, words = REFUSED[case]
    sentinels = ["--vocab-extra-ids", "10"] if case.startswith("t5") else []
    world = {"WORLD_SIZE": "2", "RANK": "0"} if "stages" in case else {}
    with pytest.raises(ValueError, match=words) as caught:
        parse_args(
            args_defaults={"model_family": case.split()[0]},
            argv=[*RUN.split(), *flags.split(), *sentinels],
            environ=world,
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(5, 5), (1, 5), (8, 5, 5), (1, 1, 5, 1), (2, 4, 5, 5)])
def test_a6_a_mask_of_another_shape_is_refused_before_it_joins_the_bias(shape):
    """Filled into the bias, it would have the right shape."""
    bias = torch.zeros(1, 8, 5, 5)
    with pytest.raises(ValueError, match=r"give \[any or 1, 8 or 1, 5 or 1, 5\]: sequences, heads"):
        bias_with_mask(bias, torch.zeros(shape, dtype=torch.bool))
