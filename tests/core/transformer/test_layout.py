"""The layout grammar, its faults and their carets, the placement it means, and its table."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.core.orders.placement import LOOP, Placement, V
from minimegatron.core.transformer.enums import LayerType
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    SYMBOLS,
    PipelineParallelLayerLayout,
)

DEEPSEEK_V3 = "Et*3|(tt|)*29,m|L"
DEEPSEEK_V3_TABLE = """\
PP \\ VPP rank | 0                       | 1
--------------+-------------------------+------------
0             | embedding + 3 × decoder | 2 × decoder
1~13          | 2 × decoder             | 2 × decoder
14            | 2 × decoder             | mtp
15            | 2 × decoder             | loss"""

E, T, M, L = LayerType.embedding, LayerType.decoder, LayerType.mtp, LayerType.loss


# -- The grammar --


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("E||t|L", [[E], [], [T], [L]]),
        ("Et*3|L", [[E, T, T, T], [L]]),
        ("E(tt|)*2L", [[E, T, T], [T, T], [L]]),
        ("E,(t|(tm)*2)*2,L", [[E, T], [T, M, T, M, T], [T, M, T, M, L]]),
        ("E|*3L", [[E], [], [], [L]]),
        ("Et,*1,0L", [[E, *[T] * 10, L]]),
        (DEEPSEEK_V3, [[E, T, T, T], *[[T, T]] * 29, [M], [L]]),
    ],
)
def test_documented_grammar(text: str, stages: list) -> None:
    assert PipelineParallelLayerLayout.parse_str_to_list(text) == stages
    assert PipelineParallelLayerLayout.get_num_stages_from_str(text) == len(stages)


def _repeat(part: tuple[str, str], count: int) -> tuple[str, str]:
    text, flat = part
    return (f"{text}*{count}" if len(text) == 1 else f"({text})*{count}"), flat * count


_atoms = st.sampled_from("Etm|L").map(lambda c: (c, c))
_parts = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        st.builds(_repeat, inner, st.integers(1, 3)),
        st.lists(inner, min_size=2, max_size=4).map(
            lambda parts: ("".join(t for t, _ in parts), "".join(f for _, f in parts))
        ),
    ),
    max_leaves=12,
)


@given(_parts, st.data())
def test_any_replication_unrolls_to_what_it_says(part: tuple[str, str], data) -> None:
    """A text built beside its own expansion parses to that expansion, wherever commas stand."""
    text, flat = part
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=3))
    for cut in sorted(cuts, reverse=True):
        text = text[:cut] + "," + text[cut:]
    expected = [[SYMBOLS[c] for c in stage] for stage in flat.split("|")]
    assert PipelineParallelLayerLayout.parse_str_to_list(text) == expected
    from_list = PipelineParallelLayerLayout(expected, 1)
    assert from_list.flatten_layout == [layer for stage in expected for layer in stage]


@given(st.text(alphabet="EtmL|()*,-0123 x", max_size=14))
def test_any_text_parses_or_gets_a_caret_inside_it(text: str) -> None:
    try:
        PipelineParallelLayerLayout.parse_str_to_list(text)
    except ValueError as error:
        reason, layout, caret = str(error).split("\n")
        assert reason.startswith("pipeline layout: ")
        assert layout[2:] == text
        assert caret.strip() == "^"
        assert 0 <= caret.index("^") - 2 <= len(text)


# -- Faults --


@pytest.mark.parametrize(
    ("p", "marked", "reason"),
    [
        (1, "Et^xL", "unknown symbol 'x'"),
        (1, "Et^ L", "unknown symbol ' '"),
        (1, "E^(tL", "'(' is never closed"),
        (1, "Et^)*2L", "')' closes nothing"),
        (1, "E(^)*2L", "parentheses are empty"),
        (1, "E(tt)^L", "a group needs a count"),
        (1, "E(tt)^", "a group needs a count"),
        (1, "Et*^", "'*' has no count"),
        (1, "Et*^L", "'*' has no count"),
        (1, "Et*^0L", "the count is zero"),
        (1, "Et*^-2L", "the count is negative"),
        (1, "Et*2^*3L", "a second count"),
        (1, "^*3EtL", "'*' has nothing to repeat"),
        (1, "E^3tL", "'3' stands alone"),
        (1, "E(((t*999^)*999)*999)*999L", "over 100000 symbols"),
        (2, "E|t^|L", "3 stages cannot be divided over 2 pipeline ranks; add 1 or remove 1"),
        (4, "E|t|L^", "3 stages cannot be divided over 4 pipeline ranks; add 1"),
    ],
)
def test_faults_of_the_string(p: int, marked: str, reason: str) -> None:
    position, text = marked.index("^"), marked.replace("^", "", 1)
    with pytest.raises(ValueError) as caught:
        PipelineParallelLayerLayout(text, p)
    assert reason in str(caught.value)
    assert str(caught.value).split("\n")[1:] == [f"  {text}", "  " + " " * position + "^"]


@pytest.mark.parametrize(
    ("p", "num_layers", "mtp", "marked", "reason"),
    [
        (3, 2, 0, "^t|t|L", "E is missing; put it first"),
        (3, 2, 0, "t^E|t|L", "E is not first"),
        (4, 1, 0, "|^E|t|L", "E is not first"),
        (3, 1, 0, "E^E|t|L", "E stands 2 times; keep one"),
        (3, 1, 0, "E|t|^", "L is missing; put it last"),
        (3, 1, 0, "E|^L|t", "L is not last"),
        (4, 1, 0, "E|t|^L|", "L is not last"),
        (3, 1, 0, "E|t|L^L", "L stands 2 times"),
        (3, 2, 0, "E|tt,^t|L", "t stands 3 times but --num-layers is 2; remove 1"),
        (3, 5, 0, "E|tt,^t|L", "t stands 3 times but --num-layers is 5; add 2"),
        (2, 1, 0, "^E|L", "t stands 0 times but --num-layers is 1; add 1"),
        (2, 1, 0, "Et^m|L", "m stands 1 time but --mtp-num-layers is 0; remove 1"),
        (2, 1, 2, "Et^m|L", "m stands 1 time but --mtp-num-layers is 2; add 1"),
        (3, 1, 1, "E^m|t|L", "m stands before a t"),
        (3, 1, 2, "Et|m|^mL", "m stands in two stages"),
        (2, 1, 1, "Et|^m||L", "m is in chunk 0 of pipeline rank 1"),
    ],
)
def test_faults_of_the_model(p: int, num_layers: int, mtp: int, marked: str, reason: str) -> None:
    position, text = marked.index("^"), marked.replace("^", "", 1)
    layout = PipelineParallelLayerLayout(text, p)
    with pytest.raises(ValueError) as caught:
        layout.validate_layer_layout(num_layers, mtp)
    assert reason in str(caught.value)
    assert str(caught.value).split("\n")[1:] == [f"  {text}", "  " + " " * position + "^"]


def test_lists_get_the_same_checks_as_strings() -> None:
    layout = PipelineParallelLayerLayout([["embedding"], [], [T, "Decoder"], [L]], 2)
    assert repr(layout) == "E||tt|L"
    with pytest.raises(ValueError, match="--num-layers is 3"):
        layout.validate_layer_layout(3)
    with pytest.raises(ValueError, match="unknown layer type 'attention'; use embedding"):
        PipelineParallelLayerLayout([["attention"]], 1)
    with pytest.raises(ValueError, match="one list per stage, not str"):
        PipelineParallelLayerLayout(["embedding"], 1)


# -- Placement --


@st.composite
def _models(draw) -> tuple[str, int, int, list[int]]:
    p, v = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 4), min_size=p * v, max_size=p * v))
    stages = ["t" * c for c in counts]
    stages[0] = "E" + stages[0]
    stages[-1] += "L"
    return "|".join(stages), p, v, counts


@given(_models())
def test_chunks_hold_every_layer_once_in_model_order(model) -> None:
    """Virtual stage = chunk * p + rank: the ids met in that order are 0, 1, ..., layers - 1."""
    text, p, v, counts = model
    layout = PipelineParallelLayerLayout.from_str(text, p)
    assert layout.validate_layer_layout(sum(counts)) is False
    assert layout.virtual_pipeline_model_parallel_size == v
    met = []
    for chunk in range(v):
        for rank in range(p):
            ids = layout.get_layer_id_list(vp_stage=chunk, pp_rank=rank)
            assert len(ids) == layout.get_num_layers_to_build(T, chunk, rank)
            assert len(ids) == counts[chunk * p + rank] == layout.layout[rank][chunk].count(T)
            assert layout.get_layer_offset(T, chunk, rank) == len(met)
            met += ids
    assert met == list(range(sum(counts)))
    for kind, rank, chunk in ((E, 0, 0), (L, p - 1, v - 1)):
        assert layout.get_num_layers_to_build(kind, chunk, rank) == 1


def test_a_placement_deals_out_the_stages() -> None:
    layout = PipelineParallelLayerLayout("Et|tt||tL", 2, V(2))
    assert layout.layout == [[[E, T], [T, L]], [[T, T], []]]
    assert layout.get_layer_id_list(vp_stage=1, pp_rank=0) == [3]
    assert layout.get_layer_id_list(vp_stage=0, pp_rank=1) == [1, 2]
    assert (
        layout.pretty_repr().splitlines()[2]
        == "0             | embedding + decoder | decoder + loss"
    )
    with pytest.raises(ValueError, match="6 stages over 2 pipeline ranks do not fit placement v"):
        PipelineParallelLayerLayout("Et|t|t|t|t|L", 2, V(2))
    with pytest.raises(ValueError, match="has 8 over 4; write 8"):
        PipelineParallelLayerLayout("Et|t|t|L", 2, LOOP(4, 2))


def test_mtp_beside_the_loss_is_a_matter_of_ranks() -> None:
    for text, placement, standalone in (
        ("Et|t||mL", V(2), False),
        ("Et|t|m|L", V(2), True),
        ("Et|t|m|L", Placement("mine", ((0, 2), (1, 3))), True),
        ("Et|t|m|L", Placement("mine", ((0, 1), (2, 3))), None),
    ):
        layout = PipelineParallelLayerLayout(text, 2, placement)
        if standalone is None:
            with pytest.raises(
                ValueError, match="m is in chunk 0 of pipeline rank 1; move it to the"
            ):
                layout.validate_layer_layout(2, 1)
        else:
            assert layout.validate_layer_layout(2, 1) is standalone


def test_deepseek_v3_as_documented() -> None:
    layout = PipelineParallelLayerLayout.from_str(DEEPSEEK_V3, 16)
    assert layout.virtual_pipeline_model_parallel_size == 2
    assert layout.validate_layer_layout(num_layers=61, mtp_num_layers=1) is True
    assert layout.pretty_repr() == DEEPSEEK_V3_TABLE
    assert layout.get_layer_id_list(vp_stage=1, pp_rank=0) == [33, 34]
    assert layout.get_layer_id_list(vp_stage=1, pp_rank=14) == []
    assert layout.get_layer_id_list(M, vp_stage=1, pp_rank=14) == [0]


def test_empty_stages_show_in_the_table() -> None:
    layout = PipelineParallelLayerLayout("E||t|L", 4)
    assert layout.pretty_repr().splitlines()[3] == "1             | (empty)"


def test_the_rank_must_be_said_where_there_are_several() -> None:
    layout = PipelineParallelLayerLayout("Et|t|t|tL", 2)
    with pytest.raises(ValueError, match="pp_rank is None, but this layout has 2"):
        layout.get_num_layers_to_build(vp_stage=0)
    with pytest.raises(ValueError, match="vp_stage is 2; this layout has 0 to 1"):
        layout.get_layer_offset(vp_stage=2, pp_rank=0)
    assert PipelineParallelLayerLayout("EttL", 1).get_layer_id_list() == [0, 1]


def test_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import minimegatron.core.transformer.pipeline_parallel_layer_layout"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
