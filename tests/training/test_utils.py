"""Numbers and batches shared between ranks."""

import importlib
from contextlib import nullcontext

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.datasets.utils import DataError
from minimegatron.core.models.T5.stack_split import StackSplit
from minimegatron.training.progress import broadcast_from_last_stage
from minimegatron.training.utils import (
    FIELD_DTYPES,
    GPT_BATCH_KEYS,
    average_losses_across_data_parallel_group,
    batch_keys,
    check_labels,
    get_batch_on_this_tp_rank,
    logical_and_across_model_parallel_group,
    reduce_max_stat_across_model_parallel_group,
    sum_over_microbatches,
)
from tests.ranks import run_ranks
from tests.training.test_arguments import parse


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


WEIGHTS = [[0.0, 0.3, 0.5], [1.0, 1e-30, 2.5]]


def batch_of_stage(rank: int) -> dict:
    """Only the first tensor-parallel rank has an iterator."""
    b, s = 2, 3
    sample = {
        "tokens": torch.arange(b * s).view(b, s),
        "labels": torch.arange(b * s).view(b, s) + 1,
        "loss_mask": torch.tensor([[1.0, 0.0, 1.0]] * b),
        "position_ids": torch.arange(s).expand(b, s),
    }
    is_reader = parallel_state.get_tensor_model_parallel_rank() == 0
    asked = []

    def second_stage(**where):
        asked.append(where)
        return parallel_state.get_pipeline_model_parallel_rank() == 1

    # A model whose last stage predicts further tokens, and has an embedding for them.
    needed = (*GPT_BATCH_KEYS, (second_stage, ("tokens", "labels", "lengths")))
    more = sample | {"lengths": torch.tensor([3, 2])}
    everything = (lambda **_: True, ("loss_mask", "attention_mask", "tokens", "rewards"))
    weighted = sample | {
        "tokens": sample["tokens"].int(),
        "loss_mask": torch.tensor(WEIGHTS),
        "attention_mask": torch.ones(1, 1, s, s).triu(1).bool(),
        "rewards": torch.tensor([-0.25, 0.75], dtype=torch.float64),
    }
    dtypes = FIELD_DTYPES | {"rewards": torch.float64}
    return {
        "usual": get_batch_on_this_tp_rank(iter([sample]) if is_reader else None),
        "more": get_batch_on_this_tp_rank(iter([more]) if is_reader else None, None, needed),
        "keys": batch_keys(None, needed),
        "asked": asked,
        "weighted": get_batch_on_this_tp_rank(
            iter([weighted]) if is_reader else None, None, (everything,), dtypes
        ),
    }


def over_one_model() -> tuple[dict, dict]:
    parallel_state.initialize_model_parallel(2, 2)
    rank = torch.distributed.get_rank()
    return numbers_over_model(rank), batch_of_stage(rank)


@pytest.fixture(scope="module")
def one_model():
    return run_ranks(over_one_model, 4)


def test_over_one_model(one_model):
    for rank, (numbers, batches) in enumerate(one_model):
        batch, more = batches["usual"], batches["more"]
        assert numbers["max"] == 7.0 and numbers["none"] is None
        assert numbers["and"] is False and numbers["true"] is True
        assert numbers["loss"] == {"lm loss": 1.5}
        first_stage = rank < 2
        assert (batch["tokens"] is not None) == first_stage
        assert (batch["labels"] is not None) == (not first_stage)
        assert batch["attention_mask"] is None and "lengths" not in batch
        assert batches["asked"] == [{"ignore_virtual": False, "vp_stage": None}] * 2
        if first_stage:
            assert batch["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]]
            assert batch["position_ids"].tolist() == [[0, 1, 2]] * 2
            assert batches["keys"] == ["tokens", "position_ids"] and more["lengths"] is None
        else:
            assert batches["keys"] == ["labels", "loss_mask", "tokens", "lengths"]
            assert more["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]]
            assert more["lengths"].tolist() == [3, 2] and more["position_ids"] is None
            assert batch["loss_mask"].dtype == torch.float32
            assert batch["loss_mask"].tolist() == [[1.0, 0.0, 1.0]] * 2


def test_a7_each_field_arrives_as_it_is(one_model):
    """Weights in the loss's mask, too: all of a batch once travelled as whole numbers."""
    for _, batches in one_model:
        batch = batches["weighted"]
        assert batch["loss_mask"].tolist() == torch.tensor(WEIGHTS).tolist()
        assert batch["loss_mask"].dtype == torch.float32
        assert batch["attention_mask"].dtype == torch.bool
        assert batch["attention_mask"].equal(torch.ones(1, 1, 3, 3).triu(1).bool())
        assert batch["tokens"].dtype == torch.int64
        assert batch["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert batch["rewards"].tolist() == [-0.25, 0.75]


def test_a7_fractions_are_not_made_whole_numbers(monkeypatch):
    """A key of one's own, an attention mask that is a bias, tokens in float: refused, not cut off."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    for key, goal in (("rewards", "int64"), ("attention_mask", "bool"), ("tokens", "int64")):
        needed = ((lambda **_: True, (key,)),)
        with pytest.raises(ValueError, match=f"'{key}' .* torch.float32, .* torch.{goal}, which"):
            get_batch_on_this_tp_rank(iter([{key: torch.tensor([0.5])}]), None, needed)


def test_f2_fields_come_in_megatrons_order(one_model):
    """Programs unpack `batch.values()`; where two fields change places, positions become labels."""
    megatrons = ["tokens", "labels", "loss_mask", "attention_mask", "position_ids"]
    for _, batches in one_model:
        assert list(batches["usual"]) == megatrons
        assert list(batches["more"]) == [*megatrons, "lengths"]
        assert list(batches["weighted"]) == [*megatrons, "rewards"]


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
        assert summed == {"lm loss": [22.0, 14.0], "aux": [12.0, 4.0]}


def test_nothing_reported_where_there_is_no_loss():
    assert sum_over_microbatches([]) == {}


# -- Labels that count are tokens --


@pytest.mark.parametrize(
    ("label", "weight", "counts"),
    [(-100, 1.0, True), (-1, 0.3, True), (8, 1.0, True), (7, 1.0, False), (-100, 0.0, False)],
)
def test_s20_a_label_that_counts_and_is_no_token_is_refused(label, weight, counts):
    """Was: a number, the same on all ranks: the loss of no token."""
    labels, loss_mask = torch.arange(8).view(2, 4), torch.ones(2, 4)
    labels[1, 2], loss_mask[1, 2] = label, weight
    sample = {"labels": labels, "loss_mask": loss_mask}
    with pytest.raises(DataError) if counts else nullcontext() as refused:
        check_labels(sample, 8)
    if counts:
        assert f"has label {label} where" in str(refused.value)
        assert "1 such places of 8" in str(refused.value) and "is 0 to 7" in str(refused.value)
    check_labels(sample, None)  # a program of its own that says no size
    check_labels({"tokens": labels}, 8)  # a chunk without labels


def test_s20_a_batch_is_looked_at_where_it_is_read(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parallel_state, "is_pipeline_first_stage", lambda **_: True)
    everywhere = [(lambda **_: True, ("labels", "loss_mask"))]
    sample = {"labels": torch.tensor([[-100, 3]]), "loss_mask": torch.ones(1, 2)}
    with pytest.raises(DataError, match="has label -100 where loss_mask is not 0"):
        get_batch_on_this_tp_rank(iter([sample]), None, everywhere, vocab_size=8)


def test_u1_a_row_that_fills_the_vocabulary_up_is_no_label(monkeypatch):
    """Was: compared with the rows of the embedding, so that padding was learnt without a word."""
    flags = "--tokenizer-type NullTokenizer --vocab-size 50256"  # and one that ends a document
    args = parse(flags)
    assert (args.unpadded_vocab_size, args.padded_vocab_size) == (50257, 50304)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    everywhere = [(lambda **_: True, ("labels", "loss_mask"))]
    for name in ("gpt", "bert", "t5"):
        program = importlib.import_module(f"minimegatron.pretrain_{name}")
        monkeypatch.setattr(program, "get_args", lambda: args)
        monkeypatch.setattr(program, "keys_of_chunks", lambda: everywhere, raising=False)
        monkeypatch.setattr(program, "split_of_stages", lambda: StackSplit(1, None), raising=False)
        sample = dict.fromkeys(("labels", "text", "tokens"), torch.tensor([[50300, 3]]))
        sample["loss_mask"] = torch.ones(1, 2)
        with pytest.raises(DataError, match="has label 50300 .* is 0 to 50256 "):
            program.get_batch(iter([sample]))
    # Who says how many rows there are says how many tokens: a program's own.
    assert parse(f"{flags} --padded-vocab-size 60000").unpadded_vocab_size == 60000
