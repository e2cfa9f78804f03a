"""Whether a checkpoint is of the model that the command line describes.

It runs before any process group exists. Counterpart: `check_checkpoint_args` of
`megatron.training.checkpointing`.

Layout, precision and batch may differ: a checkpoint is of the full model. What the model computes
may not.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from minimegatron.core.dist_checkpointing.core import (
    COMMON,
    CheckpointingException,
    check_files,
    load_common_state_dict,
)
from minimegatron.core.left_out_record import known_fields
from minimegatron.training.argument_utils import flags_by_name
from minimegatron.training.checkpoint_folder import find_checkpoint
from minimegatron.training.config import SECTIONS
from minimegatron.training.schedule_args import check_schedule

SAVED_STATE = (
    "iteration",
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
)
"""What of the train state a checkpoint brings back."""

COMPARED = {
    field.name: field.metadata["knob"].compared
    for config in SECTIONS.values()
    for field in dataclasses.fields(config)
    if field.metadata["knob"].compared
}
"""What makes another model of the same weights, or has weights of another shape."""
COMMON_KEYS = {
    "iteration": int,
    "train_state": dict,
    "opt_param_scheduler": dict | None,
    "optimizer": dict | None,
    "rng": dict | None,
    "args": dict,
}
"""What `checkpointing` writes beside the tensors. `convert` has weights only: no state, no schedule."""
OPTIMIZER_KEYS = {"kind": str, "step": int, "grad_scaler": dict | None}


def load_common(folder: Path) -> dict[str, Any]:
    """All but the tensors of the checkpoint. Raises CheckpointingException if some is missing."""
    common = load_common_state_dict(folder)
    wrong = _not_as_written(common, COMMON_KEYS)
    if not wrong:
        wrong += _not_as_written(common["args"], dict.fromkeys(common["args"], dict))
        if common["train_state"]:
            wrong += _not_as_written(common["train_state"], dict.fromkeys(SAVED_STATE, int))
        if common["optimizer"] is not None:
            wrong += _not_as_written(common["optimizer"], OPTIMIZER_KEYS)
            steps = common["optimizer"].get("steps", {})  # older checkpoints have none
            wrong += ["steps"] if not isinstance(steps, dict) else []
            wrong += _not_as_written(common, {"opt_param_scheduler": dict})
    if wrong:
        raise CheckpointingException(
            f"{folder / COMMON} is damaged ({wrong[0]} is not as it was written); "
            "use another checkpoint"
        )
    return common


def saved_padded_vocab_size(args: argparse.Namespace) -> int | None:
    """Rows of the embedding in the checkpoint that `--load` names; None where that is not known.

    What is wrong with the checkpoint, `check_against_checkpoint` says.
    """
    try:
        folder = None if args.load is None else find_checkpoint(args.load)
        common = None if folder is None else load_common(folder)
    except (ValueError, CheckpointingException):
        return None
    rows = None if common is None else common["args"].get("model", {}).get("padded_vocab_size")
    return rows if isinstance(rows, int) else None


def _not_as_written(section: dict[str, Any], kinds: dict[str, Any]) -> list[str]:
    return [
        name
        for name, kind in kinds.items()
        if name not in section or not isinstance(section[name], kind)
    ]


def check_against_checkpoint(args: argparse.Namespace, folder: Path) -> None:
    """Raises ValueError if the checkpoint in `folder` is damaged or of another model."""
    try:
        check_files(folder)
        common = load_common(folder)
    except CheckpointingException as error:
        raise ValueError(str(error)) from None
    saved = {name: value for section in common["args"].values() for name, value in section.items()}
    known_fields(SECTIONS["model"], common["args"].get("model", {}))
    here, there = args.model_family, saved.get("model_family")
    if here != there and None not in (here, there):
        raise ValueError(
            f"this program trains {here}, but {folder} has {there}; run pretrain_{there}"
        )
    for name, compared in COMPARED.items():
        # Unless another argument says that it does not matter.
        if compared is not True and args.__dict__[compared[0]] == compared[1]:
            continue
        if name in saved and saved[name] != args.__dict__[name]:
            raise ValueError(_difference(name, args.__dict__[name], saved[name], folder))
    if not args.finetune and not common["train_state"]:
        raise ValueError(f"{folder} holds weights only; add --finetune to begin with them")
    if args.no_load_optim or args.finetune:
        return
    if common["optimizer"] is None:
        raise ValueError(
            f"{folder} holds no optimizer state; add --no-load-optim, or --finetune to begin at "
            "iteration 0"
        )
    if common["optimizer"]["kind"] != args.optimizer:
        raise ValueError(
            f"--optimizer is {args.optimizer}, but {common['optimizer']['kind']} in {folder}; "
            "use that, or --no-load-optim"
        )
    try:
        check_schedule(args, common["opt_param_scheduler"])
    except ValueError as error:
        raise ValueError(f"--load {args.load}: {error}") from None


def _difference(name: str, here: Any, there: Any, folder: Path) -> str:
    flag = flags_by_name()[name]
    if isinstance(here, bool):
        # A flag that turns something off is called otherwise than what it turns off.
        given = here != flag.startswith(("--no-", "--disable-"))
        return (
            f"{flag} is {'given' if given else 'not given'} here, but {folder} was made "
            f"{'without' if given else 'with'} it; {'drop' if given else 'add'} it"
        )
    words = ["not given" if value is None else value for value in (here, there)]
    remedy = f"drop {flag}" if there is None else f"use {flag} {there}"
    return f"{flag} is {words[0]}, but {words[1]} in the checkpoint {folder}; {remedy}"
