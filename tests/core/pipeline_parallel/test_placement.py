"""Where stages are: each rule's table, its neighbours and ends, and tables that are none."""

import re

import pytest

from minimegatron.core import model_parallel_config, subject_fields
from minimegatron.core.orders.orders import (
    placement_of,
    register_order,
    schedule_names,
    unregister,
)
from minimegatron.core.orders.placement import (
    BOTH,
    LINE,
    LOOP,
    Place,
    Placement,
    V,
    usual_placement,
)
from minimegatron.core.schedule_of_config import check_stages
from minimegatron.core.transformer.transformer_config import TransformerConfig


def every_placement():
    for p in (1, 2, 3, 4, 8):
        yield LINE(p)
        yield V(p)
        yield BOTH(p)
        for v in (1, 2, 3):
            yield LOOP(p, v)


def test_every_stage_has_one_place_and_its_neighbours_know_each_other():
    for placement in every_placement():
        p, v, last = placement.pp_size, placement.num_model_chunks, placement.num_stages - 1
        assert placement.num_stages * placement.num_copies == p * v
        for rank in range(p):
            for chunk in range(v):
                stage, copy = placement.stage_of(rank, chunk), placement.copy_of(chunk)
                assert placement.place_of(stage, copy) == Place(rank, chunk)
                assert placement.is_first(rank, chunk) == (stage == 0)
                assert placement.is_last(rank, chunk) == (stage == last)
                after = placement.next_of(rank, chunk)
                assert (after is None) == (stage == last)
                if after is not None:
                    assert placement.stage_of(*after) == stage + 1
                    assert placement.previous_of(*after) == (rank, chunk)
                    assert after.rank == rank or after.rank in placement.peers_of(rank)


def test_places_of_a_v():
    v = V(4)
    assert v.stages == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert v.first_rank == v.last_rank == 0
    assert [v.is_first_rank(rank) for rank in range(4)] == [True, False, False, False]
    assert [v.is_last_rank(rank) for rank in range(4)] == [True, False, False, False]
    assert v.next_of(3, 0) == (3, 1)  # handed over, no message
    assert [v.peers_of(rank) for rank in range(4)] == [[1], [0, 2], [1, 3], [2]]


def test_line_and_loop_are_megatrons():
    for p in (1, 2, 5):
        assert usual_placement(p).stages == tuple((rank,) for rank in range(p))
        for v in (2, 3):
            loop = usual_placement(p, v)
            assert loop == LOOP(p, v)
            assert all(
                loop.stage_of(rank, chunk) == chunk * p + rank
                for rank in range(p)
                for chunk in range(v)
            )
            assert (loop.first_rank, loop.last_rank) == (0, p - 1)


def test_two_directions_share_the_microbatches():
    both = BOTH(4)
    assert both.num_copies == 2 and both.num_stages == 4
    assert [both.is_first(rank, 1) for rank in range(4)] == [False, False, False, True]
    assert [[both.has(m, chunk, 5) for m in range(5)] for chunk in range(2)] == [
        [True, True, True, False, False],
        [False, False, False, True, True],
    ]
    assert all(LOOP(4, 2).has(m, chunk, 5) for m in range(5) for chunk in range(2))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[0, 1], [2]], "same number of chunks, 1 or more, but they have [2, 1]"),
        ([], "they have []"),
        ([[0], [2]], "the stages [0, 2] are placed, but [0, 1, 2] are needed"),
        ([[0, 1], [1, 3]], "each once"),
    ],
)
def test_a_table_that_is_no_placement_is_refused(table, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Placement("mine", table)


@pytest.mark.parametrize(("rule", "v"), [(LINE, 2), (V, 3), (BOTH, 1)])
def test_a_rule_says_how_many_chunks_it_has(rule, v):
    with pytest.raises(ValueError, match=f"placement {rule.name} has .* but {v} are asked for"):
        rule(4, v)


def test_a_config_knows_its_placement():
    sizes = {"num_layers": 8, "hidden_size": 8, "num_attention_heads": 2}
    config = TransformerConfig(pipeline_model_parallel_size=4, **sizes)
    assert placement_of(config) == LINE(4)
    assert "mine" not in schedule_names()
    register_order("mine", placement=V)(lambda rank: [])
    try:
        config = TransformerConfig(
            pipeline_model_parallel_size=4,
            virtual_pipeline_model_parallel_size=2,
            pipeline_schedule="mine",
            **sizes,
        )
        assert placement_of(config) == V(4)
    finally:
        unregister("mine")


def test_a_config_of_no_schedule_is_refused_also_if_it_was_made_before_there_were_any(monkeypatch):
    unknown = {"pipeline_schedule": "nonsense"}
    with pytest.raises(ValueError, match="unknown schedule 'nonsense'"):
        model_parallel_config.ModelParallelConfig(**unknown)
    monkeypatch.setattr(subject_fields, "schedule_checks", [])
    config = model_parallel_config.ModelParallelConfig(**unknown)
    with pytest.raises(ValueError, match="unknown schedule 'nonsense'"):
        check_stages(config, 1)
    with pytest.raises(ValueError, match="the pipeline group has 2 ranks; make them equal"):
        check_stages(config, 2)
