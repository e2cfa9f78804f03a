"""Against NVIDIA's megatron-core: the same files, the same samples, the same blends.

Skipped where megatron-core (the `conformance` extra) is not installed.
"""

import dataclasses
from pathlib import Path

import numpy
import pytest
import torch

from minimegatron.core.datasets import helpers
from minimegatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from minimegatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
)
from minimegatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from minimegatron.core.datasets.megatron_tokenizer import ByteLevelTokenizer, NullTokenizer
from tests.core.datasets.corpora import random_documents, write_dataset

pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="megatron-core is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES = [
    # split, samples wanted, sequence length, other settings
    ("949,50,1", [100, 10, 5], 16, {}),
    ("8,1,1", [700, 33, 0], 7, {"reset_position_ids": True, "eod_mask_loss": True}),
    ("1,1,1", [40, 300, 77], 33, {"reset_attention_mask": True, "reset_position_ids": True}),
    ("1,1,0", [50, None, None], 9, {"drop_last_partial_validation_sequence": False}),
    ("1,1,0", [90, 20, None], 9, {"add_extra_token_to_sequence": False}),
]


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory):
    """megatron-core asks torch.distributed who is rank 0, even in one process."""
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def _theirs(config: GPTDatasetConfig, sizes: list, cache: Path) -> list:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if settings["blend"] is not None:
        settings["blend"] = tuple(settings["blend"])
    theirs = GPTDatasetConfig(**settings | {"path_to_cache": str(cache)})
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, theirs).build()


def _same_samples(ours, theirs) -> None:
    if ours is None or theirs is None:
        assert not theirs and not ours
        return
    assert len(ours) == len(theirs)
    for i in range(len(ours)):
        a, b = ours[i], theirs[i]
        assert set(a) == set(b)
        for name, value in a.items():
            if isinstance(value, int):
                assert value == int(b[name])
            else:
                assert value.dtype == b[name].dtype
                assert torch.equal(value, b[name]), (i, name)


@pytest.mark.parametrize(("split", "sizes", "sequence_length", "settings"), EXAMPLES)
def test_same_samples_from_one_corpus(tmp_path, split, sizes, sequence_length, settings) -> None:
    prefix = write_dataset(
        tmp_path / "corpus", random_documents(1000 if split == "949,50,1" else 60, seed=5)
    )
    config = GPTDatasetConfig(
        random_seed=7,
        sequence_length=sequence_length,
        tokenizer=ByteLevelTokenizer(),
        blend=([prefix], None),
        split=split,
        **settings,
    )
    ours = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    theirs = _theirs(config, sizes, tmp_path / "cache")
    for a, b in zip(ours, theirs, strict=True):
        _same_samples(a, b)


@pytest.mark.parametrize(
    ("weights", "sizes"), [([0.3, 0.7], [200, 20, 10]), (None, [90, 5, 3]), (None, [None] * 3)]
)
@pytest.mark.parametrize("per_split", [False, True])
def test_same_samples_from_a_blend(tmp_path, weights, sizes, per_split: bool) -> None:
    prefixes = [
        write_dataset(tmp_path / name, random_documents(90, seed=seed))
        for seed, name in enumerate("ab")
    ]
    blend = (prefixes, weights)
    parts = (
        {"blend_per_split": [blend, ([prefixes[1]], [2.0]), None]}
        if per_split
        else {"blend": blend, "split": "8,1,1"}
    )
    if per_split and sizes[1] is None:
        parts["blend_per_split"][1] = ([prefixes[1]], None)
    config = GPTDatasetConfig(
        random_seed=99, sequence_length=12, tokenizer=ByteLevelTokenizer(), **parts
    )
    ours = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    theirs = _theirs(config, sizes, tmp_path / "cache")
    for a, b in zip(ours, theirs, strict=True):
        _same_samples(a, b)


def test_same_samples_of_made_up_data(tmp_path) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder as TheirBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig as TheirConfig
    from megatron.core.datasets.gpt_dataset import MockGPTDataset as TheirDataset

    settings = {
        "random_seed": 3,
        "sequence_length": 512,
        "split": "990,9,1",
        "reset_position_ids": True,
        "reset_attention_mask": False,
        "eod_mask_loss": True,
        "tokenizer": NullTokenizer(100),
    }
    sizes = [100, 20, None]
    ours = BlendedMegatronDatasetBuilder(
        MockGPTDataset, sizes, lambda: True, GPTDatasetConfig(**settings)
    ).build()
    theirs = TheirBuilder(
        TheirDataset, sizes, lambda: True, TheirConfig(**settings, path_to_cache=str(tmp_path))
    ).build()
    for a, b in zip(ours, theirs, strict=True):
        assert len(a) == len(b)
        for i in (0, 1, len(a) - 1):
            assert set(a[i]) == set(b[i])
            assert all(torch.equal(value, b[i][name]) for name, value in a[i].items())


@pytest.mark.parametrize("dtype", [numpy.uint8, numpy.uint16, numpy.int32, numpy.int64])
@pytest.mark.parametrize("multimodal", [False, True])
def test_each_reads_what_the_other_wrote_and_both_write_the_same(tmp_path, dtype, multimodal):
    from megatron.core.datasets.indexed_dataset import IndexedDataset as TheirDataset
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder as TheirBuilder

    paths = {}
    for name, builder_class in (("ours", IndexedDatasetBuilder), ("theirs", TheirBuilder)):
        prefix = paths[name] = str(tmp_path / name)
        builder = builder_class(f"{prefix}.bin", dtype, multimodal)
        for tokens in ([1, 2, 3], [], [250]):
            builder.add_item(torch.tensor(tokens, dtype=torch.int64), mode=len(tokens))
        builder.end_document()
        builder.add_document([5, 6, 7, 8], [3, 1], [1, 0] if multimodal else None)
        builder.finalize(f"{prefix}.idx")
    for suffix in (".bin", ".idx"):
        assert (
            Path(paths["ours"] + suffix).read_bytes() == Path(paths["theirs"] + suffix).read_bytes()
        )
    ours, theirs = (
        IndexedDataset(paths["theirs"], multimodal),
        TheirDataset(paths["ours"], multimodal),
    )
    assert len(ours) == len(theirs) == 5
    assert ours.document_indices.tolist() == theirs.document_indices.tolist() == [0, 3, 5]
    for i in range(5):
        last = max(0, int(ours.sequence_lengths[i]) - 1)
        for a, b in ((ours[i], theirs[i]), (ours.get(i, last), theirs.get(i, last))):
            if multimodal:
                assert int(a[1]) == int(b[1])
                a, b = a[0], b[0]
            assert a.dtype == b.dtype
            assert a.tolist() == b.tolist()


def test_index_helpers_agree_on_random_input() -> None:
    from megatron.core.datasets import helpers as theirs

    rng = numpy.random.default_rng(0)
    for trial in range(2000):
        count, epochs = int(rng.integers(1, 12)), int(rng.integers(1, 4))
        sizes = rng.integers(trial % 2, 12, count).astype(numpy.int32)
        documents = rng.permutation(numpy.tile(numpy.arange(count), epochs)).astype(numpy.int32)
        drop, extra = bool(rng.integers(2)), bool(rng.integers(2))
        if sizes.sum() < 2 or (not drop and sizes[documents[-1]] == 0):
            continue  # megatron-core gives a negative offset for an empty last document
        arguments = (sizes, documents, int(rng.integers(1, 9)), epochs, int(sizes.sum()))
        a = helpers.build_sample_idx(*arguments, drop, extra)
        b = theirs.build_sample_idx(*arguments, drop, extra)
        assert a.dtype == b.dtype
        assert numpy.array_equal(a, b), (arguments, drop, extra)
    for _ in range(200):
        weights = rng.random(int(rng.integers(1, 7))) + 0.01
        weights = (weights / weights.sum()).tolist()
        size = int(rng.integers(1, 3000))
        b = numpy.zeros(size, numpy.int16), numpy.zeros(size, numpy.int64)
        theirs.build_blending_indices(*b, weights, len(weights), size, False)
        assert all(map(numpy.array_equal, helpers.build_blending_indices(weights, size), b))
