"""Which copy of the model sees which sample."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 3))
def test_random_order_goes_on_where_it_stopped(consumed_steps, micro, copies):
    total, step = 20, micro * copies
    for rank in range(copies):
        whole = take(MegatronPretrainingRandomSampler(total, 0, micro, rank, copies), 50)
        later = MegatronPretrainingRandomSampler(total, consumed_steps * step, micro, rank, copies)
        assert take(later, 5) == whole[consumed_steps : consumed_steps + 5]


def test_an_epoch_has_every_sample_once_and_each_is_another():
    copies = [take(MegatronPretrainingRandomSampler(12, 0, 2, rank, 2), 6) for rank in (0, 1)]
    epochs = [
        [s for rank in (0, 1) for batch in copies[rank][part] for s in batch]
        for part in (slice(0, 3), slice(3, 6))
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert epochs[0] != epochs[1]


def test_too_little_for_one_step():
    with pytest.raises(ValueError, match="3 samples, but a step of 2 on 2 copies takes 4"):
        MegatronPretrainingRandomSampler(3, 0, 2, 0, 2)


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
