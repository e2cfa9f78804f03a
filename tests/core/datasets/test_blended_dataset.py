"""Blends keep to their weights; splits and blends are read as written; rank 0 builds first."""

import os
from pathlib import Path

import numpy
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.core.datasets.blended_dataset import BlendedDataset
from minimegatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from minimegatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from minimegatron.core.datasets.gpt_dataset import GPTDataset
from minimegatron.core.datasets.helpers import (
    build_blending_indices,
    build_exhaustive_blending_indices,
)
from minimegatron.core.datasets.utils import Split, get_blend_from_list, normalize
from tests.core.datasets.corpora import InMemory, gpt_config, random_documents, write_dataset
from tests.ranks import run_ranks

_weights = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6).map(normalize)

# -- Proportions --


@settings(deadline=None)
@given(_weights, st.integers(1, 400))
def test_a_blend_keeps_to_its_weights_at_every_moment(weights: list[float], size: int) -> None:
    dataset_index, sample_index = build_blending_indices(weights, size)
    for d, weight in enumerate(weights):
        taken = numpy.cumsum(dataset_index == d)
        due = weight * numpy.arange(1, size + 1)
        assert abs(taken - due).max() < len(weights)
        assert sample_index[dataset_index == d].tolist() == list(range(taken[-1]))
    # The rule itself: each sample comes from the dataset furthest behind.
    taken = numpy.zeros(len(weights))
    for n, chosen in enumerate(dataset_index.tolist()):
        behind = numpy.array(weights) * max(n, 1) - taken
        assert behind[chosen] == behind.max()
        taken[chosen] += 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_without_weights_every_sample_comes_once(sizes: list[int]) -> None:
    dataset_index, sample_index = build_exhaustive_blending_indices(sizes)
    pairs = list(zip(dataset_index.tolist(), sample_index.tolist(), strict=True))
    assert sorted(pairs) == [(d, i) for d, size in enumerate(sizes) for i in range(size)]
    # Interleaved, not one after the other.
    if len(sizes) == 2 and sizes[0] == sizes[1] > 3:
        assert dataset_index[:4].tolist() == [0, 1, 0, 1]


def test_samples_of_a_blend() -> None:
    config = gpt_config()
    parts = []
    for first_token in (0, 1000):
        corpus = InMemory([50, 50], first_token)
        indices = numpy.arange(2, dtype=numpy.int32)
        parts.append(GPTDataset(corpus, f"at {first_token}", indices, 20, Split.train, config))
    blend = BlendedDataset(parts, [3, 1], 24, config)
    assert len(blend) == 24
    ids = [blend[i]["dataset_id"] for i in range(24)]
    assert ids.count(0) == 18
    for i, d in enumerate(ids):
        assert (int(blend[i]["tokens"].min()) >= 1000) == bool(d)
    with pytest.raises(
        ValueError, match="the train blend takes .* of at 0, which has 24; raise mid"
    ):
        BlendedDataset(parts, [9, 1], 40, config)
    with pytest.raises(ValueError, match="2 datasets has 1 weights"):
        BlendedDataset(parts, [1.0], 4, config)
    with pytest.raises(ValueError, match="at 1000 has weight 0 in the train blend; give one above"):
        BlendedDataset(parts, [1, 0], 4, config)


# -- What the flags mean --


@pytest.mark.parametrize(
    ("split", "matrix"),
    [
        ("1,0,0", [(0, 1.0), None, None]),
        ("1", [(0, 1.0), None, None]),
        ("3, 1", [(0, 0.75), (0.75, 1.0), None]),
        ("3/1/0", [(0, 0.75), (0.75, 1.0), None]),
        (" 3 1 ", [(0, 0.75), (0.75, 1.0), None]),
        ("1,0,1", [(0, 0.5), None, (0.5, 1.0)]),
    ],
)
def test_b9_split_matrix(split: str, matrix: list) -> None:
    assert convert_split_vector_to_split_matrix(parse_and_normalize_split(split)) == matrix
    assert gpt_config(split=split).split_matrix == matrix


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,-1,1", "1,2,3,4", "nan", "inf,1", "1;2"])
def test_split_faults(split: str) -> None:
    with pytest.raises(ValueError, match="is not up to three numbers.*write for example 949,50,1"):
        parse_and_normalize_split(split)


def test_data_path_is_prefixes_or_weights_and_prefixes() -> None:
    assert get_blend_from_list(None) is None
    assert get_blend_from_list(["a"]) == (["a"], None)
    assert get_blend_from_list(["a", "b"]) == (["a", "b"], None)
    assert get_blend_from_list(["30", " a", "70.5", "b"]) == (["a", "b"], [30.0, 70.5])
    with pytest.raises(ValueError, match="'a' stands before 'b' where its weight should"):
        get_blend_from_list(["a", "b", "3", "c"])
    for weight in ("0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match=f"the weight of 'a' is {weight}; give one above 0"):
            get_blend_from_list([weight, "a"])


def test_configurations_that_cannot_be() -> None:
    for settings_, reason in [
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"blend_per_split": [None] * 3}, "give blend or blend_per_split, and not both"),
        ({"tokenizer": None}, "tokenizer is None; give one"),
        ({"blend": None, "blend_per_split": [(["a"], None)] * 3}, "it goes with blend, and only"),
        ({"split": None}, "split is None; it goes with blend"),
        ({"blend": (["a", "b"], [1.0])}, "2 prefixes but 1 weights"),
        ({"blend": None, "split": None, "blend_per_split": [None]}, "has 1 entries; give 3"),
    ]:
        with pytest.raises(ValueError, match=reason):
            gpt_config(**settings_)
    with pytest.raises(ValueError, match="the valid blend has weights but no size"):
        config = gpt_config(blend=(["a", "b"], [1.0, 2.0]))
        BlendedMegatronDatasetBuilder(GPTDataset, [9, None, 9], lambda: True, config)


# -- The builder --


def test_splits_do_not_overlap(tmp_path: Path) -> None:
    documents = [[i] * 20 for i in range(100)]
    config = gpt_config(blend=([write_dataset(tmp_path / "d", documents)], None), split="80,15,5")
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [300, 10, None], lambda: True, config)
    seen = [
        {t for i in range(len(dataset)) for t in dataset[i]["tokens"].tolist()}
        for dataset in builder.build()
    ]
    assert seen == [set(range(80)), set(range(80, 95)), set(range(95, 100))]


def test_ranks_without_data_get_none(tmp_path: Path) -> None:
    config = gpt_config(blend=([str(tmp_path / "absent")], None))
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [1, 1, 1], lambda: False, config)
    assert builder.build() == [None, None, None]


def _build_on_ranks(folder: str, prefix: str) -> tuple[list[int], list[str], str]:
    """First tokens, the files written by this rank, and what a missing corpus says."""
    written: list[str] = []
    real_replace = os.replace

    def replace(source, target):
        written.append(Path(target).name)
        real_replace(source, target)

    os.replace = replace
    config = gpt_config(blend=([prefix], None), split="8,1,1", path_to_cache=f"{folder}/cache")
    world = dist.group.WORLD

    def build(config):
        return BlendedMegatronDatasetBuilder(
            GPTDataset, [40, 5, 5], lambda: dist.get_rank() != 1, config, group=world
        ).build()

    train = build(config)[0]
    tokens = [] if train is None else train[7]["tokens"].tolist()
    try:
        build(gpt_config(blend=([f"{folder}/absent"], None), path_to_cache=f"{folder}/cache"))
        message = ""
    except ValueError as error:
        message = str(error)
    return tokens, written, message


def test_one_rank_writes_the_cache_and_a_failure_reaches_all(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(80, seed=1))
    (first, wrote, why), *others = run_ranks(_build_on_ranks, 3, str(tmp_path), prefix)
    assert len(wrote) == 12  # three splits, three arrays and a description each
    assert [tokens for tokens, _, _ in others] == [[], first]
    assert all(not written for _, written, _ in others)
    assert "absent.idx does not exist" in why
    assert all(message.startswith("rank 0 could not build") for _, _, message in others)
