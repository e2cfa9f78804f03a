"""Numbers and batches shared between ranks."""

import torch

from minimegatron.core import parallel_state
from minimegatron.training.utils import (
    average_losses_across_data_parallel_group,
    broadcast_from_last_stage,
    get_batch_on_this_tp_rank,
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
    sum_over_microbatches,
)
from tests.ranks import run_ranks


def numbers_over_model(rank: int) -> dict:
    """tp = 2, pp = 2: the four ranks hold one model."""
    stats = [None, 2.0, 7.0, None][rank]
    last = parallel_state.is_pipeline_last_stage()
    return {
        "max": reduce_max_stat_across_model_parallel_group(stats),
        "none": reduce_max_stat_across_model_parallel_group(None),
        "and": logical_and_across_model_parallel_group(rank != 2),
        "true": logical_and_across_model_parallel_group(True),
        "loss": broadcast_from_last_stage({"lm loss": 1.5} if last else {}),
    }


def batch_of_stage(rank: int) -> dict:
    """Only the first tensor-parallel rank has an iterator."""
    b, s = 2, 3
    sample = {
        "tokens": torch.arange(b * s).view(b, s),
        "labels": torch.arange(b * s).view(b, s) + 1,
        "loss_mask": torch.tensor([[1.0, 0.0, 1.0]] * b),
        "position_ids": torch.arange(s).expand(b, s),
    }
    iterator = iter([sample]) if parallel_state.get_tensor_model_parallel_rank() == 0 else None
    return get_batch_on_this_tp_rank(iterator)


def over_one_model() -> tuple[dict, dict]:
    parallel_state.initialize_model_parallel(2, 2)
    rank = torch.distributed.get_rank()
    return numbers_over_model(rank), batch_of_stage(rank)


def test_over_one_model():
    results = run_ranks(over_one_model, 4)
    for rank, (numbers, batch) in enumerate(results):
        assert numbers["max"] == 7.0 and numbers["none"] is None
        assert numbers["and"] is False and numbers["true"] is True
        assert numbers["loss"] == {"lm loss": 1.5}
        first_stage = rank < 2
        assert (batch["tokens"] is not None) == first_stage
        assert (batch["labels"] is not None) == (not first_stage)
        assert batch["attention_mask"] is None
        if first_stage:
            assert batch["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]]
            assert batch["position_ids"].tolist() == [[0, 1, 2]] * 2
        else:
            assert batch["loss_mask"].dtype == torch.float32
            assert batch["loss_mask"].tolist() == [[1.0, 0.0, 1.0]] * 2


def over_two_copies() -> tuple[list[float], dict]:
    parallel_state.initialize_model_parallel(1, 1)
    rank = torch.distributed.get_rank()
    averaged = average_losses_across_data_parallel_group(
        [torch.tensor(1.0 + rank), torch.tensor([4.0])]
    )
    # Copy 0 has 1 token in the second microbatch, copy 1 has 3: every token weighs the same.
    reports = [
        {"lm loss": torch.tensor([10.0, 5.0]), "aux": torch.tensor(2.0)},
        {"lm loss": torch.tensor([1.0, 1.0 + 2 * rank]), "aux": torch.tensor(4.0)},
    ]
    summed = {key: pair.tolist() for key, pair in sum_over_microbatches(reports).items()}
    return averaged.tolist(), summed


def test_over_two_copies():
    for averaged, summed in run_ranks(over_two_copies, 2):
        assert averaged == [1.5, 4.0]
        assert summed == {"lm loss": [22.0, 14.0], "aux": [6.0, 2.0]}


def test_nothing_reported_where_there_is_no_loss():
    assert sum_over_microbatches([]) == {}
