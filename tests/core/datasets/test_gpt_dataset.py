"""Samples cover every token once per epoch, in a seeded order; masks; the cache of indices."""

import pickle
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from minimegatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    MockGPTLowLevelDataset,
    _get_ltor_masks_and_position_ids,
)
from minimegatron.core.datasets.megatron_tokenizer import ByteLevelTokenizer, NullTokenizer
from minimegatron.core.datasets.utils import Split, compile_helpers
from tests.core.datasets.corpora import InMemory, gpt_config, random_documents, write_dataset

EOD = ByteLevelTokenizer.eod


def _dataset(low_level, num_samples=None, split=Split.train, indices=None, **config) -> GPTDataset:
    if indices is None:
        indices = numpy.arange(len(low_level.sequence_lengths), dtype=numpy.int32)
    return GPTDataset(low_level, "corpus", indices, num_samples, split, gpt_config(**config))


_corpora = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda n: sum(n) > 1)


# -- Coverage --


@settings(deadline=None)
@given(_corpora, st.integers(1, 12), st.integers(0, 60), st.integers(0, 99))
def test_every_token_of_every_epoch_is_input_once(lengths, s, num_samples, seed) -> None:
    """In stream order, samples are the shuffled documents end to end, cut every s tokens; only a
    tail too short for one more sample is left over."""
    low_level = InMemory(lengths)
    dataset = _dataset(low_level, num_samples, sequence_length=s, random_seed=seed)
    assert len(dataset) >= num_samples
    assert sorted(dataset.shuffle_index.tolist()) == list(range(len(dataset)))
    counts = Counter(dataset.document_index.tolist())
    assert counts == dict.fromkeys(range(len(lengths)), dataset.num_epochs)
    stream = numpy.concatenate([low_level.get(d) for d in dataset.document_index])
    in_stream_order = numpy.argsort(dataset.shuffle_index)
    samples = [dataset[int(i)] for i in in_stream_order]
    inputs = [t for sample in samples for t in sample["tokens"].tolist()]
    labels = [t for sample in samples for t in sample["labels"].tolist()]
    assert inputs == stream[: len(inputs)].tolist()
    assert labels == stream[1 : len(labels) + 1].tolist()
    assert len(stream) - len(inputs) <= s
    # As many epochs as the samples take, and no more.
    assert num_samples * s + 1 <= len(stream) or dataset.num_epochs == 1
    if dataset.num_epochs > 1:
        assert num_samples * s + 1 > (dataset.num_epochs - 1) * sum(lengths)


@settings(deadline=None)
@given(_corpora, st.integers(1, 12), st.booleans(), st.booleans())
def test_a_partial_last_sample_is_padded_without_loss(lengths, s, drop, extra) -> None:
    low_level = InMemory(lengths, first_token=1)
    dataset = _dataset(
        low_level,
        split=Split.valid,
        sequence_length=s,
        drop_last_partial_validation_sequence=drop,
        add_extra_token_to_sequence=extra,
    )
    stream = [t for d in dataset.document_index for t in low_level.get(d).tolist()]
    samples = [dataset[int(i)] for i in numpy.argsort(dataset.shuffle_index)]
    counted = [
        label
        for sample in samples
        for label, m in zip(sample["labels"].tolist(), sample["loss_mask"].tolist(), strict=True)
        if m
    ]
    if extra:
        expected = stream[1 : len(samples) * s + 1] if drop else stream[1:]
    else:  # the last input of each sample has no label
        size = len(stream) // s * s if drop else len(stream)
        expected = [t for i, t in enumerate(stream[:size]) if i % s]
    assert counted == expected
    assert all(sample["tokens"].min() >= 0 for sample in samples)


def test_the_last_epoch_is_shuffled_apart_below_the_threshold() -> None:
    """10 samples per epoch: 23 wanted leave 3 for a third epoch, 29 leave 9."""
    low_level = InMemory([7] * 13)  # 91 tokens, s = 9
    apart = _dataset(low_level, 23, sequence_length=9)
    assert apart.num_epochs == 3
    before = apart.samples_before_final_epoch
    assert before == (2 * 91 - 1) // 9
    assert sorted(apart.shuffle_index[:before].tolist()) == list(range(before))
    assert sorted(apart.document_index[-13:].tolist()) == list(range(13))
    together = _dataset(low_level, 29, sequence_length=9)
    assert together.num_epochs == 3
    assert together.samples_before_final_epoch is None
    assert sorted(together.shuffle_index[:before].tolist()) != list(range(before))


def test_a_split_without_tokens() -> None:
    low_level = InMemory([5, 5])
    nothing = numpy.arange(0, dtype=numpy.int32)
    assert len(_dataset(low_level, None, indices=nothing)) == 0
    assert len(_dataset(low_level, 0, indices=nothing)) == 0
    with pytest.raises(
        ValueError, match="3 test samples are wanted.* 0 of the 2 documents of corp"
    ):
        _dataset(low_level, 3, Split.test, nothing)


@pytest.mark.parametrize(("documents", "token"), [([[1] * 30, [257] * 9], 257), ([[-2] * 39], -2)])
def test_tokens_of_another_tokenizer_are_refused(tmp_path, documents, token) -> None:
    prefix = write_dataset(tmp_path / "d", documents, numpy.int32)
    low_level = GPTDataset.build_low_level_dataset(prefix, gpt_config())
    dataset = _dataset(low_level, sequence_length=38, tokenizer=ByteLevelTokenizer())
    with pytest.raises(
        ValueError, match=f"corpus holds token {token}, but the tokenizer has 257 from 0"
    ):
        dataset[0]


# -- Order --


def test_the_seed_decides_the_order_and_a_number_always_names_the_same_sample(tmp_path) -> None:
    prefix = write_dataset(tmp_path / "d", random_documents(50, seed=3))
    build = GPTDataset.build_low_level_dataset

    def tokens(dataset, start=0):
        return [dataset[i]["tokens"].tolist() for i in range(start, len(dataset))]

    config = {"sequence_length": 10}
    first = _dataset(build(prefix, gpt_config()), 100, **config)
    again = _dataset(build(prefix, gpt_config()), 100, **config)
    other = _dataset(build(prefix, gpt_config()), 100, random_seed=5, **config)
    assert tokens(first) == tokens(again)
    assert tokens(first) != tokens(other)
    # Resuming at a sample, or reading backwards, or in a worker process, changes nothing.
    assert tokens(again, start=60) == tokens(first)[60:]
    backwards = [first[i]["tokens"].tolist() for i in reversed(range(len(first)))]
    assert backwards == tokens(first)[::-1]
    assert tokens(pickle.loads(pickle.dumps(first))) == tokens(first)


def test_a_filler_sample_has_no_loss() -> None:
    dataset = _dataset(InMemory([40]))
    sample = dataset[None]
    assert sample["loss_mask"].sum() == 0
    assert sample["tokens"].shape == dataset[0]["tokens"].shape


# -- Masks --


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, EOD]), min_size=1, max_size=12),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_masks_and_positions(data, reset_position_ids, reset_attention_mask, eod_mask_loss) -> None:
    """Against their definitions, one element at a time."""
    attention_mask, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
        torch.tensor(data), EOD, reset_position_ids, reset_attention_mask, eod_mask_loss, True
    )
    document = [sum(t == EOD for t in data[:i]) for i in range(len(data))]
    for i, token in enumerate(data):
        start = document.index(document[i]) if reset_position_ids else 0
        assert position_ids[i] == i - start
        assert loss_mask[i] == (0.0 if eod_mask_loss and token == EOD else 1.0)
        for j in range(len(data)):
            hidden = j > i or (reset_attention_mask and document[j] != document[i])
            assert bool(attention_mask[0, i, j]) == hidden


def test_sample_fields() -> None:
    sample = _dataset(InMemory([40]), create_attention_mask=True)[0]
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in sample.items()}
    assert shapes == {
        "tokens": ((8,), torch.int64),
        "labels": ((8,), torch.int64),
        "loss_mask": ((8,), torch.float32),
        "position_ids": ((8,), torch.int64),
        "attention_mask": ((1, 8, 8), torch.bool),
    }
    assert "attention_mask" not in _dataset(InMemory([40]))[0]
    with pytest.raises(ValueError, match="reset_attention_mask needs a mask"):
        gpt_config(reset_attention_mask=True)


# -- The cache --


class _Planted:
    def __reduce__(self):
        return open, ("/nonexistent/executed", "w")


def test_cached_indices_are_read_and_damaged_ones_built_again(tmp_path: Path, monkeypatch) -> None:
    low_level, cache = InMemory([9, 30, 14]), tmp_path / "cache"
    cached = {"path_to_cache": str(cache)}
    plain = _dataset(low_level, 12)
    names = ("document_index", "sample_index", "shuffle_index")

    def same(dataset) -> bool:
        return all(numpy.array_equal(getattr(dataset, n), getattr(plain, n)) for n in names)

    assert same(_dataset(low_level, 12, **cached))
    files = sorted(cache.iterdir())
    assert len(files) == 4
    with monkeypatch.context() as patch:
        patch.setattr(GPTDataset, "_build_document_sample_shuffle_indices", lambda self: 1 / 0)
        hit = _dataset(low_level, 12, **cached)
        assert same(hit)
        assert isinstance(hit.sample_index, numpy.memmap)
        # Anything that changes the indices changes the name; here, the corpus behind the path.
        for other in (InMemory([9, 31, 13]), InMemory([30, 9, 14])):
            with pytest.raises(ZeroDivisionError):
                _dataset(other, 12, **cached)
        for change in ({"random_seed": 2}, {"sequence_length": 7}):
            with pytest.raises(ZeroDivisionError):
                _dataset(low_level, 12, **cached | change)
    for path in files:
        good = path.read_bytes()
        planted = pickle.dumps(_Planted())
        for damaged in (good[: len(good) // 2], b"", planted, good.replace(b"<i4", b"|O8")):
            if path.suffix == ".npy":
                path.write_bytes(damaged)
                assert same(_dataset(low_level, 12, **cached))
                assert path.read_bytes() == good
    # Killed before the marker: no entry.
    next(p for p in files if p.suffix == ".txt").unlink()
    assert same(_dataset(low_level, 12, **cached))
    assert sorted(cache.iterdir()) == files


# -- Made-up data --


def test_made_up_sequences_count_up_to_the_end_of_document():
    made_up = MockGPTLowLevelDataset(NullTokenizer(5))
    whole = made_up[0]
    length = int(made_up.sequence_lengths[0])
    assert whole.dtype == numpy.int64 and len(whole) == length > 6
    assert whole[:6].tolist() == [1, 2, 3, 4, 5, 0] and whole[-1] == 5
    for begin, size in ((0, 3), (2, 4), (length - 2, 2), (length, 0), (1, None)):
        stop = None if size is None else begin + size
        assert made_up.get(0, begin, size).tolist() == whole[begin:stop].tolist()


def test_without_a_blend_the_builder_makes_data_up():
    compile_helpers()
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=64,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=NullTokenizer(vocab_size=64),
        mid_level_dataset_surplus=0.005,
        num_dataset_builder_threads=1,
    )
    assert config.mock and config.split == "1,1,1"
    sizes = [1000, None, 0]
    train, valid, test = BlendedMegatronDatasetBuilder(
        MockGPTDataset, sizes, lambda: True, config
    ).build()
    assert len(train) >= 1000 and len(valid) > 100_000 and len(test) > 0
    sample = train[3]
    assert sample["attention_mask"].shape == (1, 64, 64)
    is_end = sample["labels"] == 64
    follows = sample["labels"] == (sample["tokens"] + 1) % 65
    begins = sample["tokens"] == 64
    assert (is_end | follows | begins).all() and follows.sum() > 50
    with pytest.raises(ValueError, match="give one, or use MockGPTDataset"):
        BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    with pytest.raises(ValueError, match="MockGPTDataset makes its data up, but blend"):
        MockGPTDataset(train.dataset, None, train.indices, 3, Split.train, gpt_config())
