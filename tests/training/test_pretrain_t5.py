"""`pretrain_t5`: its loss, what each stage reads, runs over a split pipeline, checkpoints.

Runs read made-up samples, with a small vocabulary of their own. Answers are shorter than questions.
"""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch

from minimegatron import pretrain_t5
from minimegatron.core import parallel_state
from minimegatron.core.models.T5.stack_split import StackSplit
from minimegatron.core.models.T5.t5_model import T5Model
from minimegatron.core.tensor_parallel import data
from minimegatron.training.arguments import parse_args
from minimegatron.training.families import masked_text
from tests.groups import pretend_groups
from tests.ranks import run_ranks
from tests.training import short_runs
from tests.training.short_runs import PP2, PP4, TP2, ZERO1

S_ENC, S_DEC, PIECES = 8, 6, 200
PP3 = "--pipeline-model-parallel-size 3"
SPLIT = "--pipeline-model-parallel-split-rank"

# -- One microbatch --


def test_the_loss_is_of_the_decoders_tokens():
    losses, mask = torch.tensor([[1.0, 5.0, 100.0], [3.0, 100.0, 100.0]]), torch.zeros(2, 3)
    mask[0, :2] = mask[1, 0] = 1.0
    with mock.patch.object(pretrain_t5, "check_loss"):
        total, num_tokens, report = pretrain_t5.loss_func(mask, losses)
    assert total.item() == 9.0 and num_tokens.item() == 3
    assert report["lm loss"].tolist() == [9.0, 3.0]


@pytest.mark.parametrize(
    "split, keys",
    [
        ((1, None), [{"enc_mask", "text_enc", "dec_mask", "text_dec", "labels", "loss_mask"}]),
        (
            (2, 1),
            [{"enc_mask", "text_enc"}, {"enc_mask", "dec_mask", "text_dec", "labels", "loss_mask"}],
        ),
        (
            (4, 2),
            [
                {"enc_mask", "text_enc"},
                {"enc_mask"},
                {"enc_mask", "dec_mask", "text_dec"},
                {"enc_mask", "dec_mask", "labels", "loss_mask"},
            ],
        ),
    ],
)
def test_what_each_stage_reads(split, keys):
    split = StackSplit(*split)
    assert [set(pretrain_t5.batch_keys(split, rank)) for rank in range(split.pp_size)] == keys


def test_f2_masks_are_of_padding_and_not_of_an_id(monkeypatch):
    """Id 0 may be a token; the sample's mask says that there is none. The order is Megatron's."""
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    monkeypatch.setattr(data, "get_tensor_model_parallel_group_if_none", lambda _: group)
    monkeypatch.setattr(data.collectives, "broadcast", lambda *_: None)
    monkeypatch.setattr(pretrain_t5, "split_of_stages", lambda: StackSplit(1, None))
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    sample = {
        "text_enc": torch.tensor([[0, 0, 7]]),
        "text_dec": torch.tensor([[0, 3]]),
        "labels": torch.tensor([[3, -1]]),
        "loss_mask": torch.tensor([[1, 0]]),
        "enc_mask": torch.tensor([[1, 1, 0]]),
        "dec_mask": torch.tensor([[1, 0]]),
    }
    args = SimpleNamespace(unpadded_vocab_size=64)
    monkeypatch.setattr(pretrain_t5, "get_args", lambda: args)
    batch = pretrain_t5.get_batch(iter([sample]))
    sample["labels"][0, 0], sample["loss_mask"][0, 0] = -100, 1
    with pytest.raises(ValueError, match="has label -100 where loss_mask is not 0"):  # S20
        pretrain_t5.get_batch(iter([sample]))
    text_enc, _, loss_mask, labels, enc_mask, dec_mask, enc_dec_mask = batch
    assert text_enc.tolist() == [[0, 0, 7]] and labels.tolist() == [[3, -1]]
    assert enc_mask.tolist() == enc_dec_mask.tolist() == [[[[False, False, True]]]]
    assert dec_mask.tolist() == [[[[False, True]]]]
    assert loss_mask.dtype == torch.float32 and loss_mask.tolist() == [[1, 0]]


@pytest.mark.parametrize("base", [10000, 7])
def test_rotary_positions_have_the_base_that_is_given(base, monkeypatch):
    flags = f"{short_runs.MODEL} --position-embedding-type rope --rotary-base {base}"
    defaults = {"model_family": "t5", "tokenizer_type": "BertWordPieceLowerCase"}
    args = parse_args(
        args_defaults=defaults,
        argv=[*flags.replace("size 512", "size 4096").split(), "--vocab-extra-ids", "9"],
        environ={},
    )
    monkeypatch.setattr(pretrain_t5, "get_args", lambda: args)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(pretrain_t5, "T5Model", partial(T5Model, pg_collection=pretend_groups()))
    model = pretrain_t5.model_provider()
    assert model.rotary_pos_emb.inv_freq.tolist() == pytest.approx([1.0, base**-0.5])


# -- Runs --


class MadeUpSamples:
    """The samples of `T5MaskedWordPieceDataset`, of numbers; some are shorter than the rest."""

    def __len__(self):
        return 1000

    def __getitem__(self, idx):
        rng = numpy.random.RandomState(idx)
        question = rng.randint(10, 30, S_ENC)
        enc_mask = numpy.arange(S_ENC) < rng.randint(4, S_ENC + 1)
        dec_mask = numpy.arange(S_DEC) < rng.randint(2, S_DEC + 1)
        answer = question[: S_DEC + 1] + 1  # something to learn
        return {
            "text_enc": numpy.where(enc_mask, question, 0),
            "text_dec": numpy.where(dec_mask, answer[:S_DEC], 0),
            "labels": numpy.where(dec_mask, answer[1 : S_DEC + 1], -1),
            "loss_mask": dec_mask.astype(numpy.int64),
            "enc_mask": enc_mask.astype(numpy.int64),
            "dec_mask": dec_mask.astype(numpy.int64),
            "truncated": 0,
        }


PROGRAM = SimpleNamespace(
    get_embedding_ranks=pretrain_t5.get_embedding_ranks,
    get_position_embedding_ranks=pretrain_t5.get_position_embedding_ranks,
    model_provider=pretrain_t5.model_provider,
    forward_step=pretrain_t5.forward_step,
    train_valid_test_datasets_provider=lambda *_, **__: [MadeUpSamples()] * 3,
)
STEPS = 3


def run(folder: str, flags: str, steps: int = STEPS) -> list[float]:
    """The losses of the steps made here."""
    flags = (
        f"--vocab-file {folder}/vocabulary.txt --padded-vocab-size 512 --decoder-seq-length {S_DEC} "
        f"--hidden-dropout 0 --attention-dropout 0 {flags}"
    )
    with mock.patch.object(masked_text, "documents_of_stdlib", lambda: [["not read"]] * 100):
        found = short_runs.run(
            flags,
            steps,
            program=PROGRAM,
            model_family="t5",
            tokenizer_type="BertWordPieceLowerCase",
            vocab_extra_ids=100,
        )
    return found["losses"]


SAVED = f"{PP3} {SPLIT} 1"


def on_three_ranks(folder: str) -> dict[str, list[float]]:
    return {
        "saved": run(folder, f"{SAVED} --save {folder}/saved", 1),
        "whole": run(folder, SAVED),
    }


def on_four_ranks(folder: str) -> dict[str, list[float]]:
    load = f"--load {folder}/saved"
    found = {
        "four copies": run(folder, f"{ZERO1} {load}"),
        "four stages": run(folder, f"{PP4} {SPLIT} 2 {load}"),
        "two by two": run(
            folder,
            f"{TP2} {PP2} --sequence-parallel {SPLIT} 1 {load} --save {folder}/two_by_two",
            2,
        ),
    }
    found["and back"] = run(folder, f"{PP2} {SPLIT} 1 {ZERO1} --load {folder}/two_by_two")
    bf16 = f"{PP2} {SPLIT} 1 --bf16 {ZERO1} --overlap-grad-reduce"
    found["bf16"] = run(folder, bf16)
    found["no split"] = run(folder, f"{TP2} --recompute-granularity selective")
    return found


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = specials + [f"word{number}" for number in range(PIECES)]
    Path(folder, "vocabulary.txt").write_text("\n".join(pieces) + "\n")
    found = run_ranks(on_three_ranks, 3, str(folder), timeout=200)[0]
    return found | run_ranks(on_four_ranks, 4, str(folder), timeout=200)[0]


def test_the_first_steps(losses):
    """Near the logarithm of the vocabulary's size: nothing is learnt yet."""
    assert losses["saved"] == losses["whole"][:1]
    assert losses["whole"][0] == pytest.approx(math.log(512), abs=0.2)
    assert losses["whole"][-1] < losses["whole"][0]


def test_one_stage_computes_what_three_do(losses):
    assert losses["no split"] == pytest.approx(losses["whole"], abs=1e-4)


@pytest.mark.parametrize("name", ["four copies", "four stages"])
def test_a_checkpoint_of_one_layout_goes_on_in_another(losses, name):
    assert losses[name] == pytest.approx(losses["whole"][1:], abs=1e-4)


def test_a_checkpoint_goes_through_three_layouts(losses):
    assert losses["two by two"] + losses["and back"] == pytest.approx(losses["whole"][1:], abs=1e-4)


def test_sixteen_bits(losses):
    assert losses["bf16"] == pytest.approx(losses["whole"], abs=0.05)
