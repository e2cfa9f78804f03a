"""Which copy of the model sees which sample, and what is counted as seen."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.training import data_iterators, evaluation
from minimegatron.training.datasets.data_samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    build_pretraining_data_loader,
)


def take(sampler, count: int) -> list[list[int]]:
    iterator = iter(sampler)
    return [next(iterator) for _ in range(count)]


@given(
    total=st.integers(1, 60),
    consumed=st.integers(0, 59),
    micro=st.integers(1, 4),
    copies=st.integers(1, 4),
)
def test_copies_share_the_samples_in_order(total, consumed, micro, copies):
    if consumed >= total:
        return
    per_copy = [
        list(MegatronPretrainingSampler(total, consumed, micro, rank, copies))
        for rank in range(copies)
    ]
    dealt = [
        sample for batches in zip(*per_copy, strict=True) for part in batches for sample in part
    ]
    step = micro * copies
    assert dealt == list(range(consumed, consumed + (total - consumed) // step * step))


def test_last_partial_step_is_kept_if_asked_for():
    parts = [list(MegatronPretrainingSampler(7, 0, 2, rank, 2, drop_last=False)) for rank in (0, 1)]
    assert parts == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_nothing_left():
    with pytest.raises(ValueError, match="8 samples are consumed, but the dataset has 8"):
        MegatronPretrainingSampler(8, 8, 1, 0, 1)


def row(kind, total, consumed, micro, copies, count) -> list[int]:
    """The next `count` samples as all copies together take them, microbatch by microbatch."""
    classes = {"single": MegatronPretrainingSampler, "cyclic": MegatronPretrainingRandomSampler}
    samplers = [classes[kind](total, consumed, micro, rank, copies) for rank in range(copies)]
    per_copy = [take(sampler, -(-count // (micro * copies))) for sampler in samplers]
    assert {len(part) for parts in per_copy for part in parts} == {micro}
    dealt = [x for parts in zip(*per_copy, strict=True) for part in parts for x in part]
    return dealt[:count]


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 5))
"""Micro-batch size, and copies of the model."""


@given(
    kind=st.sampled_from(["single", "cyclic"]),
    total=st.integers(1, 30),
    consumed=st.integers(0, 70),
    before=SHAPES,
    after=SHAPES,
)
def test_a11_any_number_of_copies_goes_on_at_the_same_sample(kind, total, consumed, before, after):
    """Also near an epoch's end, in the middle of a global batch, and for less than one step of data."""
    if kind == "single":
        total += 200  # it ends; what is left is enough for both
    together = row(kind, total, 0, *before, consumed + 12)
    assert row(kind, total, consumed, *after, 12) == together[consumed:]


@given(total=st.integers(1, 20), shape=SHAPES, seed=st.integers(0, 3))
def test_an_epoch_has_every_sample_once(total, shape, seed):
    micro, copies = shape
    samplers = [
        iter(MegatronPretrainingRandomSampler(total, 0, micro, rank, copies, seed))
        for rank in range(copies)
    ]
    dealt = []
    while len(dealt) < 2 * total:
        dealt += [sample for sampler in samplers for sample in next(sampler)]
    first, second = dealt[:total], dealt[total : 2 * total]
    assert sorted(first) == sorted(second) == list(range(total))


def test_each_epoch_has_another_order():
    whole = row("cyclic", 12, 0, 2, 2, 24)
    assert whole[:12] != whole[12:]
    assert take(MegatronPretrainingRandomSampler(12, 0, 12, 0, 1, seed=1), 1)[0] != whole[:12]


def test_a11_no_samples_at_all():
    with pytest.raises(ValueError, match="the dataset has 0 samples"):
        MegatronPretrainingRandomSampler(0, 0, 2, 0, 2)


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_loader_gives_microbatches_and_leaves_the_default_generator_alone(kind):
    dataset = [{"tokens": torch.full((3,), i)} for i in range(8)]
    loader = build_pretraining_data_loader(
        dataset,
        2,
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
        dataloader_type=kind,
    )
    before = torch.get_rng_state()
    batch = next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)
    assert batch["tokens"].shape == (2, 3)
    if kind == "single":
        assert batch["tokens"][:, 0].tolist() == [2, 3]


def test_no_dataset_no_loader():
    nothing = build_pretraining_data_loader(
        None, 0, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1
    )
    assert nothing is None


def test_a11_data_that_are_used_up_are_said_to_be(monkeypatch):
    """Not by a bare StopIteration out of the loader."""

    def loader(samples: int):
        share = {"micro_batch_size": 2, "data_parallel_rank": 1, "data_parallel_size": 2}
        return build_pretraining_data_loader(list(range(samples)), 1, **share)

    monkeypatch.setattr(
        data_iterators,
        "build_train_valid_test_data_loaders",
        lambda provider: (loader(8), None, loader(9)),
    )
    train, valid, test = data_iterators.build_train_valid_test_data_iterators(None)
    assert valid is None
    assert next(train).tolist() == [3, 4] and next(test).tolist() == [3, 4]
    with pytest.raises(
        ValueError, match="training data set has 8 samples.* at sample 1,.* takes 4;"
    ):
        next(train)
    assert next(test).tolist() == [7, 8]
    with pytest.raises(
        ValueError, match="test data set has 9 samples.* lower --eval-iters, or use"
    ):
        next(test)


@pytest.mark.parametrize("collects", [False, True])
def test_a11_an_evaluation_counts_every_batch_that_it_reads(monkeypatch, collects):
    """Else a run that stopped and goes on validates on other samples than one that did not."""
    args = SimpleNamespace(
        global_batch_size=6,
        micro_batch_size=1,
        data_parallel_size=2,
        seq_length=8,
        decoder_seq_length=None,
        eval_iters=2,
    )
    state, batches = SimpleNamespace(consumed_valid_samples=12), iter(range(100))

    def schedule(data_iterator, num_microbatches, **_):
        for _ in range(num_microbatches):
            next(data_iterator)
        return []

    monkeypatch.setattr(evaluation, "get_args", lambda: args)
    monkeypatch.setattr(evaluation, "get_train_state", lambda: state)
    monkeypatch.setattr(evaluation, "schedule_of_run", lambda: schedule)
    monkeypatch.setattr(evaluation, "broadcast_from_last_stage", lambda means: means)
    monkeypatch.setattr(evaluation.dist, "get_rank", lambda: 1)
    collect = print if collects else None
    evaluation.evaluate(None, batches, [], collect, SimpleNamespace())
    assert state.consumed_valid_samples == 12 + args.data_parallel_size * next(batches)
