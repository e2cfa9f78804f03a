"""Which tokens a context-parallel rank has, and that every rank has as much to attend to."""

from unittest import mock

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.models.gpt import GPTModel
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.context_parallel import block_of
from minimegatron.core.transformer.rope_utils import get_pos_emb_on_this_cp_rank
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.zigzag import chunks_of_rank, positions_of_rank, take_part
from minimegatron.core.utils import get_batch_on_this_cp_rank
from minimegatron.training import data_iterators
from tests.fake_transport import FakeGroup
from tests.figures import figure


def test_two_ranks_with_sixteen_tokens():
    assert positions_of_rank(16, 0, 2).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert positions_of_rank(16, 1, 2).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert [chunks_of_rank(rank, 4) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_token_is_on_one_rank(num_ranks):
    length = 2 * num_ranks * 3
    parts = [positions_of_rank(length, rank, num_ranks) for rank in range(num_ranks)]
    assert {len(part) for part in parts} == {length // num_ranks}
    assert sorted(torch.cat(parts).tolist()) == list(range(length))


def pairs(positions: torch.Tensor) -> int:
    """How many (query, key) these queries have when they look at themselves and all before."""
    return int((positions + 1).sum())


def test_every_rank_has_as_many_pairs():
    zigzag = [pairs(positions_of_rank(32, rank, 4)) for rank in range(4)]
    contiguous = [pairs(part) for part in torch.arange(32).chunk(4)]
    figure(f"pairs of 4 ranks, 32 tokens: zig-zag {zigzag}, contiguous {contiguous}")
    assert zigzag == [132] * 4
    assert contiguous == [36, 100, 164, 228]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_blocks_are_what_causal_attention_needs(num_ranks):
    """Of each rank and source: the slices hold all visible pairs, and no other but of the diagonal."""
    length = 4 * num_ranks
    for rank in range(num_ranks):
        own = positions_of_rank(length, rank, num_ranks)
        for source in range(num_ranks):
            keys = positions_of_rank(length, source, num_ranks)
            wanted = keys[None, :] <= own[:, None]
            block = block_of(rank, source, len(keys))
            found = torch.zeros_like(wanted)
            found[block.rows, block.columns] = True
            if block.causal:
                found = found.tril()
            assert torch.equal(found, wanted), (rank, source)
            assert block_of(rank, source, len(keys), causal=False) == (slice(None),) * 2 + (False,)
    computed = [
        sum(
            len(range(4)[block.rows]) * len(range(4)[block.columns])
            for source in range(num_ranks)
            for block in [block_of(rank, source, 4)]
        )
        for rank in range(num_ranks)
    ]
    assert computed == [16 + 8 * (num_ranks - 1)] * num_ranks


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="18 tokens .* 2 x 2 chunks.* multiple of 4"):
        positions_of_rank(18, 0, 2)


def test_parts_of_any_dimension():
    tensor = torch.arange(48).view(3, 8, 2)
    part = take_part(tensor, 1, FakeGroup(1, 2))
    assert torch.equal(part, tensor[:, 2:6])
    assert take_part(tensor, 1, FakeGroup()) is tensor


def test_a_batch_keeps_all_columns_of_its_mask():
    """Each field's sequence is cut; of the mask, the rows."""
    tokens = torch.arange(16).view(2, 8)
    mask = torch.arange(64).view(1, 1, 8, 8).expand(2, 1, 8, 8)
    batch = {"tokens": tokens, "labels": tokens, "loss_mask": None, "attention_mask": mask}
    part = get_batch_on_this_cp_rank(batch, FakeGroup(0, 2))
    for name in ("tokens", "labels"):
        assert part[name].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert part["loss_mask"] is None
    assert torch.equal(part["attention_mask"], mask[:, :, [0, 1, 6, 7]])
    assert get_batch_on_this_cp_rank(batch, FakeGroup()) is batch
    padding = mask[:, :, :1]  # one row for all tokens
    part = get_batch_on_this_cp_rank({"attention_mask": padding}, FakeGroup(0, 2))
    assert torch.equal(part["attention_mask"], padding)


def test_angles_are_those_of_the_places_in_the_sequence():
    angles = torch.arange(8.0).view(8, 1, 1, 1)
    parts = [get_pos_emb_on_this_cp_rank(angles, 0, FakeGroup(rank, 2)) for rank in range(2)]
    assert [part.flatten().tolist() for part in parts] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert get_pos_emb_on_this_cp_rank(angles, 0, FakeGroup()) is angles


def model_on(rank: int, **options) -> GPTModel:
    """Of two context-parallel ranks."""
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, context_parallel_size=2
    )
    groups = ProcessGroupCollection(tp=FakeGroup(), pp=FakeGroup(), cp=FakeGroup(rank, 2))
    spec = get_gpt_layer_local_spec()
    return GPTModel(
        config, spec, 32, 8, position_embedding_type="rope", pg_collection=groups, **options
    )


def test_a_model_turns_by_the_places_in_the_sequence():
    for rank in range(2):
        model = model_on(rank)
        found = model._rotary_angles(torch.zeros(4, 1, 8))
        whole = model.rotary_pos_emb(8)
        assert torch.equal(found, whole[positions_of_rank(8, rank, 2)])


def test_a_whole_batch_is_refused():
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(
        ValueError, match="8 tokens on each of 2 .* a sequence of 16, .* is 8; give"
    ):
        model_on(0)(tokens, tokens, None)
    with pytest.raises(ValueError, match="3 tokens, .* not two equal chunks; .* 2 x 2 = 4"):
        model_on(0)(tokens[:, :3], tokens[:, :3], None)


def test_ranks_that_share_sequences_read_the_same_samples(monkeypatch):
    """The sampler of a rank is told its place among copies of the model."""
    places = {"dp": (1, 2), "dp_cp": (3, 4), "tp": (0, 1)}
    monkeypatch.setattr(parallel_state, "rank_of", lambda kind: places[kind][0])
    monkeypatch.setattr(parallel_state, "size_of", lambda kind: places[kind][1])
    args = mock.MagicMock(train_iters=1, eval_iters=0)
    state = mock.MagicMock(iteration=0, do_train=0, do_valid=0, do_test=0)
    told = {}
    for name, value in {
        "get_args": lambda: args,
        "get_train_state": lambda: state,
        "get_train_valid_test_num_samples": lambda: (1, 0, 0),
        "build_pretraining_data_loader": lambda *_, **options: told.update(options),
        "dist": mock.MagicMock(),
        "collectives": mock.MagicMock(),
    }.items():
        monkeypatch.setattr(data_iterators, name, value)
    data_iterators.build_train_valid_test_data_loaders(lambda _: ("train", None, None))
    assert (told["data_parallel_rank"], told["data_parallel_size"]) == (1, 2)
