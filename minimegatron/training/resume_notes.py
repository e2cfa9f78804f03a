"""What a run that loads a checkpoint does otherwise than the run that saved it, where it may.

Another model is refused (`checkpoint_args`). What is told here is allowed, and changes numbers: rows of
the vocabulary, and which samples come next. Megatron does the same and tells nothing.
"""

import argparse
import math
from types import SimpleNamespace
from typing import Any

from minimegatron.training.argument_utils import flags_by_name
from minimegatron.training.config import Arguments
from minimegatron.training.data_iterators import get_train_valid_test_num_samples

WHICH_DATA = (
    *("data_path", "split", "seq_length", "seed", "dataloader_type"),
    *("tokenizer_file", "vocab_file", "vocab_extra_ids", "vocab_size"),
    *("encoder_seq_length", "decoder_seq_length", "mask_prob", "short_seq_prob"),
)
"""Another value of one makes other samples, or the same ones in another order."""


def notes_on_resuming(args: Arguments, saved: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each difference; `saved` are the checkpoint's arguments, by section."""
    flat = {name: value for section in saved.values() for name, value in section.items()}
    notes = [vocabulary_note(args, flat)]
    if not args.finetune:
        notes += [data_note(args, flat), samples_note(args, flat)]
    return [note for note in notes if note is not None]


def vocabulary_note(args: argparse.Namespace | Arguments, saved: dict[str, Any]) -> str | None:
    """Rows that stand for no token are in the softmax too, so their number changes the loss."""
    rows, t = saved.get("padded_vocab_size"), args.tensor_model_parallel_size
    if rows is None or args.padded_vocab_size == rows:
        return None
    if rows % t == 0:
        remedy = f"--padded-vocab-size {rows} would keep it, if there are no more tokens"
    else:
        whole = math.lcm(saved.get("make_vocab_size_divisible_by", 1), t)
        remedy = (
            f"{rows} rows do not divide by --tensor-model-parallel-size {t}; those of a run that "
            f"begins with --make-vocab-size-divisible-by {whole} would"
        )
    return (
        f"the vocabulary has {args.padded_vocab_size} rows here, {rows} in the checkpoint: rows of no "
        f"token are in the softmax too, so the loss of the same weights is another; {remedy}"
    )


def data_note(args: Arguments, saved: dict[str, Any]) -> str | None:
    """The position in the data counts samples, whatever they are."""
    found = [
        f"{flags_by_name()[name]} is {_word(getattr(args, name))} here, {_word(saved[name])} there"
        for name in WHICH_DATA
        if name in saved and _plain(getattr(args, name)) != saved[name]
    ]
    if not found:
        return None
    return (
        f"the data are not the checkpoint's ({'; '.join(found)}): the run goes on behind as many "
        "samples, but some of these were seen before, and some that were left out never come"
    )


def samples_note(args: Arguments, saved: dict[str, Any]) -> str | None:
    """Samples of several epochs are shuffled together: their number is part of the order."""
    there = SimpleNamespace(**{name: saved.get(name, getattr(args, name)) for name in _COUNTS})
    (train, valid, _), (old_train, old_valid, _) = map(
        get_train_valid_test_num_samples, (args, there)
    )
    if (train, valid) == (old_train, old_valid):
        return None
    return (
        f"the run asks for {train} training and {valid} validation samples, the checkpoint's for "
        f"{old_train} and {old_valid}: where these take another number of epochs, their order is "
        "another, and some come again; to keep it, keep --train-iters x --global-batch-size and the "
        "flags of evaluation (--exit-interval ends a run early)"
    )


_COUNTS = ("train_iters", "global_batch_size", "eval_iters", "eval_interval")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _word(value: Any) -> str:
    if value is None:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
