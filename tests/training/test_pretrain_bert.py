"""`pretrain_bert`: its loss, what each stage reads, runs in other layouts and precisions, checkpoints.

Runs read made-up samples, with a small vocabulary of their own.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch

from minimegatron import pretrain_bert
from minimegatron.core import parallel_state
from minimegatron.core.tensor_parallel import data
from minimegatron.training.families import masked_text
from tests.ranks import run_ranks
from tests.training import short_runs
from tests.training.short_runs import PP2, PP4, TP2, VP2, ZERO1

USER_ORDERS = Path(__file__).with_name("user_orders.py")
SEQ, PIECES = 8, 200
KEYS = ["text", "types", "labels", "is_random", "loss_mask", "padding_mask"]

# -- One microbatch --


def loss_of(losses, mask, logits=None, order=(0, 1)):
    """`loss_func` on one rank: (loss, report)."""
    with (
        mock.patch.object(pretrain_bert, "check_loss"),
        mock.patch.object(
            pretrain_bert, "average_losses_across_data_parallel_group", lambda found: found
        ),
    ):
        mask, order = torch.tensor(mask), torch.tensor(order)
        return pretrain_bert.loss_func(mask, order, (torch.tensor(losses), logits))


def test_the_loss_is_of_masked_tokens():
    losses = [[1.0, 100.0, 3.0], [100.0, 100.0, 5.0]]
    loss, report = loss_of(losses, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    assert loss.item() == 3.0 and report == {"lm loss": 3.0}
    nothing, _ = loss_of(losses, [[0.0] * 3] * 2)
    assert nothing.item() == 0.0


def test_the_binary_heads_loss_is_added():
    logits = torch.tensor([[1.0, 3.0], [50.0, 0.0]])
    loss, report = loss_of([[2.0], [2.0]], [[1.0], [1.0]], logits, order=(1, -1))
    assert report["lm loss"] == 2.0
    assert report["sop loss"].item() == pytest.approx(math.log1p(math.exp(-2.0)))
    assert loss.item() == pytest.approx(2.0 + report["sop loss"].item())


def test_every_stage_reads_all_of_a_batch(monkeypatch):
    """The mask is needed everywhere: whether a rank reads depends on its tensor rank alone."""
    for rank in range(2):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: rank)  # noqa: B023
        assert pretrain_bert.is_dataset_built_on_rank() == (rank == 0)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    monkeypatch.setattr(data, "get_tensor_model_parallel_group_if_none", lambda _: group)
    monkeypatch.setattr(data.collectives, "broadcast", lambda *_: None)
    sample = {key: torch.full((2, 3), number) for number, key in enumerate(KEYS)}
    args = SimpleNamespace(unpadded_vocab_size=64)
    monkeypatch.setattr(pretrain_bert, "get_args", lambda: args)
    batch = pretrain_bert.get_batch(iter([sample]))
    sample["labels"][0, 0], sample["loss_mask"][0, 0] = -100, 1
    with pytest.raises(ValueError, match="has label -100 where loss_mask is not 0"):  # S20
        pretrain_bert.get_batch(iter([sample]))
    assert [tensor[0, 0].item() for tensor in batch] == [0, 1, 3, 4, 2, 5]
    assert [tensor.dtype for tensor in batch].count(torch.float32) == 1


# -- Runs --


class MadeUpSamples:
    """The samples of `BERTMaskedWordPieceDataset`, of numbers; some are shorter than the rest."""

    def __len__(self):
        return 1000

    def __getitem__(self, idx):
        rng = numpy.random.RandomState(idx)
        tokens, places = rng.randint(10, 30, SEQ), numpy.arange(SEQ)
        tokens[1::2] = tokens[::2] + 1  # something to learn
        is_token = places < rng.randint(3, SEQ + 1)
        is_hidden = is_token & (places % 3 == idx % 3)
        text = numpy.where(is_hidden, 4, tokens)
        return {
            "text": numpy.where(is_token, text, 0),
            "types": (is_token & (places > 1)).astype(numpy.int64),
            "labels": numpy.where(is_hidden, tokens, -1),
            "is_random": idx % 2,
            "loss_mask": is_hidden.astype(numpy.int64),
            "padding_mask": is_token.astype(numpy.int64),
            "truncated": 0,
        }


PROGRAM = SimpleNamespace(
    get_embedding_ranks=pretrain_bert.get_embedding_ranks,
    model_provider=pretrain_bert.model_provider,
    forward_step=pretrain_bert.forward_step,
    train_valid_test_datasets_provider=lambda *_, **__: [MadeUpSamples()] * 3,
)
STEPS = 3


def run(folder: str, flags: str, steps: int = STEPS) -> list[float]:
    """The losses of the masked tokens."""
    flags = f"--vocab-file {folder}/vocabulary.txt --padded-vocab-size 512 {flags}"
    if "dropout" not in flags:
        flags = f"{flags} --hidden-dropout 0 --attention-dropout 0"
    with mock.patch.object(masked_text, "documents_of_stdlib", lambda: [["not read"]] * 100):
        found = short_runs.run(
            flags,
            steps,
            program=PROGRAM,
            model_family="bert",
            tokenizer_type="BertWordPieceLowerCase",
        )
    return found["losses"]


SAVED = f"{TP2} {PP2} --sequence-parallel"
UNEVEN = "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1"
SCHEDULES = {
    "interleaved": f"{PP2} {VP2}",
    "in a V": f"{PP2} --pipeline-schedule {USER_ORDERS}:fold",
}
SIXTEEN_BITS = {"fp16": f"{PP2} --fp16 --initial-loss-scale 1024", "bf16": f"{PP2} --bf16"}


def on_four_ranks(folder: str) -> dict[str, list[float]]:
    return {
        "saved": run(folder, f"{SAVED} --save {folder}/saved", 1),
        "whole": run(folder, SAVED),
        "four copies": run(folder, f"{ZERO1} --load {folder}/saved"),
        "four stages": run(folder, f"{PP4} --load {folder}/saved"),
    }


def on_three_ranks(folder: str) -> list[float]:
    return run(folder, f"{UNEVEN} --pipeline-model-parallel-size 3 --load {folder}/saved")


def on_two_ranks(folder: str) -> dict[str, list[float]]:
    found = {name: run(folder, flags) for name, flags in (SCHEDULES | SIXTEEN_BITS).items()}
    found["dropout"] = run(
        folder, f"{TP2} --recompute-granularity selective --hidden-dropout 0.3", 1
    )
    found["no binary head"] = run(folder, f"{TP2} --sequence-parallel --bert-no-binary-head", 1)
    return found


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = specials + [f"word{number}" for number in range(PIECES)]
    Path(folder, "vocabulary.txt").write_text("\n".join(pieces) + "\n")
    found = run_ranks(on_four_ranks, 4, str(folder), timeout=200)[0]
    found["three stages"] = run_ranks(on_three_ranks, 3, str(folder), timeout=200)[0]
    return found | run_ranks(on_two_ranks, 2, str(folder), timeout=200)[0]


def test_the_first_steps(losses):
    """Near the logarithm of the vocabulary's size: nothing is learnt yet."""
    assert losses["saved"] == losses["whole"][:1]
    assert losses["whole"][0] == pytest.approx(math.log(512), abs=0.2)
    assert losses["whole"][-1] < losses["whole"][0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_takes_the_pair_of_the_last_stage(losses, name):
    assert losses[name] == pytest.approx(losses["whole"], abs=1e-4)


@pytest.mark.parametrize("name", ["four copies", "four stages", "three stages"])
def test_a_checkpoint_of_one_layout_goes_on_in_another(losses, name):
    assert losses[name] == pytest.approx(losses["whole"][1:], abs=1e-4)


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_sixteen_bits(losses, name):
    assert losses[name] == pytest.approx(losses["whole"], abs=0.05)


@pytest.mark.parametrize("name", ["dropout", "no binary head"])
def test_options_of_a_run(losses, name):
    (loss,) = losses[name]
    assert loss != losses["whole"][0] and loss == pytest.approx(losses["whole"][0], abs=0.3)
