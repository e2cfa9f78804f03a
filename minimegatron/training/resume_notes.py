"""What a run that loads a checkpoint does otherwise than the run that saved it, where it may.

Another model is refused (`checkpoint_args`). What is told here is allowed, and changes numbers: rows of
the vocabulary, which tokens an expert gets, what is trained for and how, and which samples come next.
Megatron does the same and tells nothing.
"""

import argparse
import math
from collections.abc import Iterable
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

WHICH_EXPERTS = (
    *("moe_router_load_balancing_type", "moe_expert_capacity_factor", "moe_token_drop_policy"),
    "moe_apply_probs_on_input",
)
"""With another value of one, the same weights may compute something else, in an evaluation too."""

WHICH_TRAINING = (
    *("hidden_dropout", "attention_dropout", "mtp_loss_scaling_factor", "eod_mask_loss"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
    *("moe_input_jitter_eps", "moe_router_bias_update_rate"),
    *("calculate_per_token_loss", "rampup_batch_size", "clip_grad"),
    *("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"),
)
"""With another value of one, the same weights and samples give other gradients or updates."""


def notes_on_resuming(args: Arguments, saved: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each difference; `saved` are the checkpoint's arguments, by section."""
    flat = {name: value for section in saved.values() for name, value in section.items()}
    notes = [vocabulary_note(args, flat), experts_note(args, flat)]
    if not args.finetune:
        notes += [training_note(args, flat), data_note(args, flat), samples_note(args, flat)]
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


def experts_note(args: Arguments, saved: dict[str, Any]) -> str | None:
    """Sinkhorn chooses in a way of its own; a capacity drops what was chosen."""
    here = {name: getattr(args, name) for name in (*WHICH_EXPERTS, "num_experts")}
    both = (here, here | saved)
    has_no_effect = {
        "moe_router_load_balancing_type": not any(_has_sinkhorn(run) for run in both),
        "moe_token_drop_policy": not any(run["moe_expert_capacity_factor"] for run in both),
    }
    names = [name for name in WHICH_EXPERTS if not has_no_effect.get(name)]
    found = _differences(args, saved, names) if args.num_experts is not None else ""
    if not found:
        return None
    return (
        f"tokens go to experts otherwise than in the checkpoint's run ({found}): the same weights "
        "compute something else, so the loss jumps; to keep what they were trained for, give the "
        "checkpoint's values"
    )


def training_note(args: Arguments, saved: dict[str, Any]) -> str | None:
    """What is trained for, and how. The schedule of the learning rate is compared elsewhere."""
    found = _differences(args, saved, WHICH_TRAINING)
    if not found:
        return None
    return (
        f"the run trains otherwise than the checkpoint's ({found}): its steps are not those that the "
        "checkpoint's run would have made"
    )


def data_note(args: Arguments, saved: dict[str, Any]) -> str | None:
    """The position in the data counts samples, whatever they are."""
    found = _differences(args, saved, WHICH_DATA)
    if not found:
        return None
    return (
        f"the data are not the checkpoint's ({found}): the run goes on after as many "
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


def _differences(args: Arguments, saved: dict[str, Any], names: Iterable[str]) -> str:
    return "; ".join(
        f"{flags_by_name()[name]} is {_word(getattr(args, name))} here, {_word(saved[name])} there"
        for name in names
        if name in saved and _plain(getattr(args, name)) != _plain(saved[name])
    )


def _has_sinkhorn(run: dict[str, Any]) -> bool:
    return "sinkhorn" in run["moe_router_load_balancing_type"]


def _plain(value: Any) -> Any:
    """A flag that takes several words makes a list of one of them."""
    if isinstance(value, list | tuple):
        return value[0] if len(value) == 1 else list(value)
    return value


def _word(value: Any) -> str:
    if value is None:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
