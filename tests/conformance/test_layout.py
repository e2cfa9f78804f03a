"""Against NVIDIA's megatron-core: the same layouts from the same strings.

Skipped where megatron-core (the `conformance` extra) is not installed.
"""

import random

import pytest

from minimegatron.core.transformer.enums import LayerType
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)

theirs = pytest.importorskip(
    "megatron.core.transformer.pipeline_parallel_layer_layout",
    reason="megatron-core is not installed",
)
pytestmark = pytest.mark.filterwarnings("ignore")


def _names(stages) -> list[list[str]]:
    return [[layer.name for layer in stage] for stage in stages]


def _random_layout(rng: random.Random) -> str:
    """Groups, counts and commas in the places both allow; megatron-core cannot nest groups."""
    parts = []
    for _ in range(rng.randrange(1, 8)):
        part = "".join(rng.choice("ttm|,|") for _ in range(rng.randrange(1, 5))) or "t"
        if rng.random() < 0.4 and part.strip(","):
            part = f"({part})*{rng.randrange(1, 13)}"
        elif rng.random() < 0.4:
            part = f"{rng.choice('t|m')}*{rng.randrange(1, 13)}"
        parts.append(part)
    return "E" + rng.choice(["", ","]).join(parts) + "L"


def test_same_stages_from_the_same_string() -> None:
    rng = random.Random(0)
    for text in ["Et*3|(tt|)*29,m|L", "E||t|L", *(_random_layout(rng) for _ in range(500))]:
        ours = PipelineParallelLayerLayout.parse_str_to_list(text)
        their = theirs.PipelineParallelLayerLayout.parse_str_to_list(text)
        assert _names(ours) == _names(their), text


def test_same_layers_on_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, p in [("Et*3|(tt|)*29,m|L", 16), ("E||t|L", 4), ("Et|t||tt|t|L", 3), ("EttL", 1)]:
        ours = PipelineParallelLayerLayout(text, p)
        their = theirs.PipelineParallelLayerLayout(text, p)
        v = ours.virtual_pipeline_model_parallel_size
        assert v == their.virtual_pipeline_model_parallel_size
        monkeypatch.setattr(
            theirs.parallel_state,
            "get_virtual_pipeline_model_parallel_world_size",
            lambda v=v: v if v > 1 else None,
        )
        num_layers, num_mtp = (
            ours.flatten_layout.count(kind) for kind in (LayerType.decoder, LayerType.mtp)
        )
        standalone = their.validate_layer_layout(num_layers, num_mtp)
        assert ours.validate_layer_layout(num_layers, num_mtp) == bool(standalone)
        for rank in range(p):
            assert _names(ours.layout[rank]) == _names(their.layout[rank])
            for chunk in range(v):
                for kind in LayerType:
                    place = {"vp_stage": chunk, "pp_rank": rank}
                    assert ours.get_layer_id_list(kind, **place) == their.get_layer_id_list(
                        theirs.LayerType[kind.name], **place
                    )


@pytest.mark.parametrize(
    ("text", "p", "num_layers"),
    [
        ("t|L", 2, 1),
        ("E|t", 2, 1),
        ("E|t|L", 2, 1),
        ("E|t|L", 3, 2),
        ("E|x|L", 3, 0),
        ("E|(t|L", 3, 1),
        ("EE|t|L", 3, 1),
        ("Em|t|L", 3, 1),
        ("Et*|L", 2, 1),
    ],
)
def test_what_they_refuse_we_refuse(text: str, p: int, num_layers: int) -> None:
    with pytest.raises(AssertionError):
        theirs.PipelineParallelLayerLayout(text, p).validate_layer_layout(num_layers, None)
    with pytest.raises(ValueError, match=r"\^"):
        PipelineParallelLayerLayout(text, p).validate_layer_layout(num_layers, None)
