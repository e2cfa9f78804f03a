"""Every layer is built once, in order, whatever the rule for placing them."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.core.orders.orders import register_order, unregister
from minimegatron.core.orders.placement import BOTH, Placement, V
from minimegatron.core.transformer.layer_placement import (
    layers_of_virtual_stages,
    num_layers_before_chunk,
    num_layers_of_chunk,
)
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig


def make_config(num_layers: int, p: int = 1, v: int | None = None, **options) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=v,
        **options,
    )


def placed(config: TransformerConfig) -> list[list[int]]:
    """Layer ids of each virtual stage, from what the two functions say about each chunk."""
    p = config.pipeline_model_parallel_size
    v = config.virtual_pipeline_model_parallel_size
    stages = []
    for chunk in range(v or 1):
        for rank in range(p):
            vp_stage = None if v is None else chunk
            first = num_layers_before_chunk(config, vp_stage, rank)
            number = num_layers_of_chunk(config, vp_stage, rank)
            stages.append(list(range(first, first + number)))
    return stages


@st.composite
def configs(draw):
    """Any division that is allowed: even, accounting for embedding and loss, uneven."""
    p = draw(st.integers(1, 6))
    v = draw(st.sampled_from([None, 1, 2, 3])) if p > 1 else None
    chunks, per_chunk = v or 1, draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["even", "account", "uneven"]))
    if kind == "even":
        return make_config(p * chunks * per_chunk, p, v)
    if kind == "account":
        embedding, loss = draw(st.booleans()), draw(st.booleans())
        num_layers = p * chunks * per_chunk - embedding - loss
        if num_layers < 1 or (p * chunks == 1 and per_chunk < embedding + loss):
            num_layers, embedding, loss = p * chunks * per_chunk, False, False
        return make_config(
            num_layers,
            p,
            v,
            account_for_embedding_in_pipeline_split=embedding,
            account_for_loss_in_pipeline_split=loss,
        )
    first = draw(st.none() | st.integers(1, 3))
    last = draw(st.none() | st.integers(1, 3))
    if (first is not None) + (last is not None) > p:
        last = None
    stages = [per_chunk] * p
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    total = chunks * sum(stages)
    if total == 0:
        return make_config(p * chunks, p, v)
    return make_config(
        total,
        p,
        v,
        num_layers_in_first_pipeline_stage=None if first is None else chunks * first,
        num_layers_in_last_pipeline_stage=None if last is None else chunks * last,
    )


@given(configs())
def test_union_of_layer_ids_is_all_in_order(config):
    stages = placed(config)
    assert [layer for stage in stages for layer in stage] == list(range(config.num_layers))
    assert [len(stage) for stage in stages] == layers_of_virtual_stages(config)


def test_documented_examples():
    # Megatron's own comment: 8 layers, 2 stages, 4 chunks each of 1 layer.
    assert placed(make_config(8, 2, 4)) == [[0], [1], [2], [3], [4], [5], [6], [7]]
    # The trap: 8 layers, 2 stages, 2 chunks, uneven last.
    config = make_config(8, 2, 2, num_layers_in_last_pipeline_stage=2)
    assert placed(config) == [[0, 1, 2], [3], [4, 5, 6], [7]]
    config = make_config(7, 4, num_layers_in_first_pipeline_stage=1)
    assert placed(config) == [[0], [1, 2], [3, 4], [5, 6]]
    config = make_config(
        6,
        4,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert placed(config) == [[0], [1, 2], [3, 4], [5]]
    config = make_config(
        2,
        2,
        2,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert placed(config) == [[], [0], [1], []]
    assert placed(make_config(5, 1, num_layers_in_last_pipeline_stage=5)) == [[0, 1, 2, 3, 4]]


def test_layouts():
    for layout in ("Et|tt||tL", PipelineParallelLayerLayout("Et|tt||tL", 2)):
        config = make_config(4, 2, 2, pipeline_model_parallel_layout=layout)
        assert placed(config) == [[0], [1, 2], [], [3]]
    with pytest.raises(ValueError, match="t stands 4 times but --num-layers is 5"):
        placed(make_config(5, 2, 2, pipeline_model_parallel_layout="Et|tt||tL"))
    with pytest.raises(ValueError, match="2 chunks per rank but virtual_pipeline"):
        placed(make_config(4, 2, pipeline_model_parallel_layout="Et|tt||tL"))


def test_divisions_that_do_not_come_out():
    for options, match in [
        ((7, 2), r"num_layers 7 is not divisible .* use 6 or 8 layers"),
        ((6, 2, 2), r"stage 0 has 3 layers, not divisible by virtual_pipeline.* 2"),
    ]:
        with pytest.raises(ValueError, match=match):
            placed(make_config(*options))
    for options, match in [
        ({"num_layers_in_last_pipeline_stage": 3}, "5 layers remain"),
        ({"num_layers_in_first_pipeline_stage": 9}, r"\[9\] do not fit num_layers 8"),
        ({"num_layers_in_first_pipeline_stage": -1}, "is -1; give 1 or more"),
        (
            {
                "account_for_loss_in_pipeline_split": True,
                "account_for_embedding_in_pipeline_split": True,
            },
            r"num_layers 8 \(\+ 2 for embedding and loss\)",
        ),
        (
            {
                "account_for_loss_in_pipeline_split": True,
                "num_layers_in_first_pipeline_stage": 2,
            },
            "use one of the two",
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            placed(make_config(8, 3, **options))
    both = {"num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 4}
    with pytest.raises(ValueError, match="2 or more stages are needed"):
        placed(make_config(8, 1, **both))
    with pytest.raises(ValueError, match="0 other stages"):
        placed(make_config(9, 2, **both))


def shuffled(p: int, v: int | None) -> Placement:
    """A loop over the ranks in another order, the middle ones first."""
    ranks = [*range(1, p), 0]
    return Placement("shuffled", [[c * p + ranks[r] for c in range(v or 1)] for r in range(p)])


def mixed(p: int, v: int | None) -> Placement:
    """For three ranks of two chunks; a rank's first chunk may be the later stage."""
    return Placement("mixed", ((4, 1), (0, 2), (3, 5)))


RULES = {"a-v": V, "a-shuffled-loop": shuffled, "a-mixture": mixed, "both-ways": BOTH}


@pytest.fixture
def other_placements():
    for name, rule in RULES.items():
        register_order(name, placement=rule)(lambda rank: iter(()))
    yield
    for name in RULES:
        unregister(name)


def layers_of_chunks(config: TransformerConfig) -> list[list[list[int]]]:
    """Layer ids per rank and chunk."""
    p, v = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    return [
        [
            list(
                range(
                    offset := num_layers_before_chunk(config, chunk, rank),
                    offset + num_layers_of_chunk(config, chunk, rank),
                )
            )
            for chunk in range(v or 1)
        ]
        for rank in range(p)
    ]


def test_layers_follow_the_placement(other_placements):
    config = make_config(8, 2, 2, pipeline_schedule="a-v")
    assert layers_of_chunks(config) == [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]
    config = make_config(6, 3, 2, pipeline_schedule="a-shuffled-loop")
    assert layers_of_chunks(config) == [[[1], [4]], [[2], [5]], [[0], [3]]]
    config = make_config(6, 3, 2, pipeline_schedule="a-mixture")
    assert layers_of_chunks(config) == [[[4], [1]], [[0], [2]], [[3], [5]]]
    config = make_config(
        6,
        2,
        2,
        pipeline_schedule="a-v",
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert layers_of_chunks(config) == [[[0], [5]], [[1, 2], [3, 4]]]
    config = make_config(
        4, 2, 2, pipeline_schedule="a-v", pipeline_model_parallel_layout="Et|tt||tL"
    )
    assert layers_of_chunks(config) == [[[0], [3]], [[1, 2], []]]


@given(st.sampled_from(["a-v", "a-shuffled-loop"]), st.integers(2, 6), st.integers(1, 3))
def test_every_placement_builds_each_layer_once(name, p, per_chunk):
    register_order(name, placement=RULES[name])(layers_of_chunks)
    config = make_config(2 * p * per_chunk, p, 2, pipeline_schedule=name)
    built = [layer for chunks in layers_of_chunks(config) for chunk in chunks for layer in chunk]
    unregister(name)
    assert sorted(built) == list(range(config.num_layers))


def test_uneven_ranks_need_ranks_that_take_turns(other_placements):
    """In a loop of any ranks the first stage's rank has the first stage of each turn."""
    first = {"num_layers_in_first_pipeline_stage": 2}
    config = make_config(10, 3, 2, pipeline_schedule="a-shuffled-loop", **first)
    assert layers_of_chunks(config) == [[[1, 2], [6, 7]], [[3, 4], [8, 9]], [[0], [5]]]
    for name, p, stages in (("a-v", 3, r"\[0, 5\]"), ("a-mixture", 3, r"\[0, 2\]")):
        with pytest.raises(ValueError, match=rf"has the stages {stages}; use pipeline_model_par"):
            layers_of_chunks(make_config(10, p, 2, pipeline_schedule=name, **first))


def test_sizes_that_a_placement_cannot_have(other_placements):
    for name, p, v, match in (
        ("a-v", 2, 3, "a-v: placement v has 2 chunks on each rank, but 3 are asked for; use 2"),
        ("a-v", 2, None, "2 chunks per stage; set virtual_pipeline_model_parallel_size=2, not Non"),
        ("both-ways", 2, 2, "2 copies of the model, which can be planned but not trained"),
        ("a-mixture", 2, 2, "on 3 ranks, but pipeline_model_parallel_size is 2"),
        ("no-pipelining", 2, None, "runs on one stage, but pipeline_model_parallel_size is 2"),
        ("interleaved", 2, None, "set virtual_pipeline_model_parallel_size to 2"),
        ("1f1b", 2, 2, "placement line has 1 chunk on each rank, but 2 are asked for"),
        ("no-such", 2, None, "unknown schedule 'no-such'; known are"),
    ):
        with pytest.raises(ValueError, match=match):
            make_config(12, p, v, pipeline_schedule=name)


def test_a_chunk_must_be_named():
    with pytest.raises(ValueError, match="vp_stage is None but each stage has 2 chunks"):
        num_layers_of_chunk(make_config(4, 2, 2), None, 0)
    with pytest.raises(ValueError, match="pipeline rank 1 is not one of the 1 that"):
        num_layers_before_chunk(make_config(4), None, 1)


def test_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; "
        "import minimegatron.core.transformer.layer_placement"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
