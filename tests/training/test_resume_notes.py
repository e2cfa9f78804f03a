"""What a resumed run may do otherwise is told, and what need not change does not."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from minimegatron.core.dist_checkpointing import core
from minimegatron.training import checkpoint_args, resume_notes
from minimegatron.training.checkpoint_folder import TRACKER, get_checkpoint_name
from minimegatron.training.checkpointing import args_as_json
from minimegatron.training.config import SECTIONS, Arguments
from minimegatron.training.resume_notes import notes_on_resuming
from tests.training.test_arguments import parse


def saved_by(folder: Path, args: Arguments) -> str:
    """A folder whose newest checkpoint is of a run with `args`, without its tensors."""
    place = Path(get_checkpoint_name(folder, 5))
    place.mkdir(parents=True)
    common = {
        "iteration": 5,
        "train_state": dict.fromkeys(checkpoint_args.SAVED_STATE, 5),
        "opt_param_scheduler": None,
        "optimizer": None,
        "rng": None,
        "args": args_as_json(args),
    }
    (place / core.COMMON).write_text(json.dumps(common))
    (folder / TRACKER).write_text("5")
    return f"--load {folder} --no-load-optim"


@pytest.fixture(autouse=True)
def _without_tensors(monkeypatch):
    monkeypatch.setattr(checkpoint_args, "check_files", lambda folder: None)


def resumed(
    tmp_path: Path, before: str, after: str, t: tuple[int, int] = (1, 1)
) -> tuple[Any, list[str]]:
    first = parse(f"--tensor-model-parallel-size {t[0]} {before}", t[0])
    load = saved_by(tmp_path, first)
    second = parse(f"--tensor-model-parallel-size {t[1]} {after} {load}", t[1])
    return second, notes_on_resuming(second, args_as_json(first))


@pytest.mark.parametrize("t", [(2, 1), (1, 2), (4, 2), (1, 1)])
def test_s2_a_resumed_run_keeps_the_rows_of_the_checkpoint(tmp_path, t):
    """Was: padded for the new t, and the loss of the same weights moved."""
    rows = {1: 384, 2: 512, 4: 512}[t[0]]
    args, notes = resumed(tmp_path, "", "", t)
    assert (args.padded_vocab_size, notes) == (rows, [])


@pytest.mark.parametrize(
    ("before", "after", "t", "rows", "words"),
    [
        ("", "--padded-vocab-size 260", (1, 1), 260, "--padded-vocab-size 384 would keep it"),
        (
            "--make-vocab-size-divisible-by 1",
            "",
            (1, 2),
            512,
            "257 rows do not divide by --tensor-model-parallel-size 2; those of a run that begins "
            "with --make-vocab-size-divisible-by 2 would",
        ),
    ],
)
def test_s2_other_rows_are_told(tmp_path, before, after, t, rows, words):
    args, notes = resumed(tmp_path, before, after, t)
    assert args.padded_vocab_size == rows
    assert len(notes) == 1 and words in notes[0] and f"{rows} rows here" in notes[0]


def test_s2_more_tokens_than_the_checkpoint_has_rows(tmp_path):
    null = "--tokenizer-type NullTokenizer --vocab-size"
    args, notes = resumed(tmp_path, "", f"{null} 1000 --finetune")
    assert args.padded_vocab_size == 1024 and "384 in the checkpoint" in notes[0]


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ("--seed 7", "--seed is 7 here, 1234 there"),
        ("--split 90,5,5", "--split is 90,5,5 here, 949,50,1 there"),
        ("--seq-length 4", "--seq-length is 4 here, 64 there"),
        ("--dataloader-type cyclic", "--dataloader-type is cyclic here, single there"),
        ("--train-iters 40", "asks for 80 training and"),
        ("--global-batch-size 4", "asks for 40 training and"),
        ("--eval-iters 7", "and 14 validation"),
        ("--micro-batch-size 2", None),
        ("--num-workers 1", None),
        ("--train-iters 20 --finetune --seed 7", None),
    ],
)
def test_s6_other_data_are_told(tmp_path, after, words):
    """Was: nothing said, and the samples behind the position were those of another order."""
    before = "--train-iters 10 --global-batch-size 2 --eval-iters 1"
    _, notes = resumed(tmp_path, before, f"{before} {after}")
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


EXPERTS = "--num-experts 4 --disable-bias-linear"
ONE = f"{EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax"
SINKHORN, CAPACITY = "--moe-router-load-balancing-type sinkhorn", "--moe-expert-capacity-factor"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (f"{EXPERTS} {SINKHORN}", EXPERTS, "-type is aux_loss here, sinkhorn there"),
        (EXPERTS, f"{EXPERTS} {SINKHORN} --finetune", "-type is sinkhorn here, aux_loss there"),
        (f"{EXPERTS} {CAPACITY} 1", EXPERTS, f"{CAPACITY} is not given here, 1.0 there"),
        (
            f"{EXPERTS} {CAPACITY} 1",
            f"{EXPERTS} {CAPACITY} 2",
            f"{CAPACITY} is 2.0 here, 1.0 there",
        ),
        (
            f"{EXPERTS} {CAPACITY} 1",
            f"{EXPERTS} {CAPACITY} 1 --moe-token-drop-policy position",
            "--moe-token-drop-policy is position here, probs there",
        ),
        (f"{ONE} --moe-apply-probs-on-input", ONE, "on-input is False here, True there"),
        (EXPERTS, f"{EXPERTS} --moe-router-load-balancing-type aux_loss", None),
        (EXPERTS, f"{EXPERTS} --moe-token-drop-policy position", None),
        (EXPERTS, f"{EXPERTS} --moe-token-dispatcher-type alltoall", None),
    ],
)
def test_f4_experts_that_get_other_tokens_are_told(tmp_path, before, after, words):
    """Was: nothing said, and the weights were evaluated, or trained on, with other tokens."""
    _, notes = resumed(tmp_path, before, after)
    notes = [note for note in notes if "tokens go to experts otherwise" in note]
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ("--clip-grad 7", "--clip-grad is 7.0 here, 1.0 there"),
        ("--adam-beta2 0.9", "--adam-beta2 is 0.9 here, 0.999 there"),
        ("--attention-dropout 0.5", "--attention-dropout is 0.5 here, 0.1 there"),
        ("--calculate-per-token-loss", "--calculate-per-token-loss is True here, False there"),
        ("--clip-grad 7 --finetune", None),
        ("--recompute-granularity selective --bf16", None),
    ],
)
def test_f4_another_way_to_train_is_told(tmp_path, after, words):
    _, notes = resumed(tmp_path, "", after)
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0] and "trains otherwise" in notes[0]


MAY_DIFFER = {
    # How a layer is computed, or rounded
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("moe_router_dtype", "moe_token_dispatcher_type", "moe_pad_expert_input_to_capacity"),
    "pipeline_model_parallel_split_rank",
    # Read before the first step, or told by another note
    *("init_method_std", "make_vocab_size_divisible_by", "padded_vocab_size", "model_family"),
    "unpadded_vocab_size",
    # How a step is divided, and when a run ends
    *("micro_batch_size", "exit_interval", "exit_duration_in_mins", "sample_tokens"),
    *("train_samples", "empty_unused_memory_level"),
    # How the same step is queued
    *("cuda_graph_impl", "enable_cuda_graph", "cuda_graph_scope", "cuda_graph_warmup_steps"),
    # Where the data are kept, and who reads them
    *("data_cache_path", "num_workers"),
    # Compared with the optimizer's state and schedule (`check_against_checkpoint`)
    *("optimizer", "lr", "weight_decay"),
}


def test_f4_every_argument_that_may_change_numbers_is_refused_or_told():
    """A new field of these sections belongs into one of the tables."""
    sections = ("model", "bert", "t5", "mamba", "moe", "training", "optimization", "data")
    fields = {field.name for name in sections for field in dataclasses.fields(SECTIONS[name])}
    told = {*resume_notes.WHICH_DATA, *resume_notes.WHICH_EXPERTS, *resume_notes.WHICH_TRAINING}
    seen = {*checkpoint_args.COMPARED, *told, *resume_notes._COUNTS}
    assert fields - seen - {"seed"} == MAY_DIFFER
