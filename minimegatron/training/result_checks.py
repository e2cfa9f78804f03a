"""Looks at each microbatch: at its labels when they are read, at its loss when it arises.

Counterpart: the end of `loss_func` in Megatron's `pretrain_gpt.py`; it does not look at labels.
Gradients are looked at in their buckets, by `DistributedDataParallel`.
"""

from collections.abc import Mapping
from functools import partial

import torch

from minimegatron.core.datasets.utils import DataError
from minimegatron.core.models.common.language_module.labels import label_without_logit
from minimegatron.core.rerun_state_machine import get_rerun_state_machine
from minimegatron.training import result_words
from minimegatron.training.global_vars import get_args

SPIKY_LOSS_FACTOR = 10
"""A loss is spiky if it is this many times the largest of the first hundred."""


def check_loss(loss: torch.Tensor, model: torch.nn.Module | None) -> None:
    """As far as the arguments say so: RuntimeError for a NaN or Inf, a line for a sudden jump.

    With `--rerun-mode validate_results` either has the step run again.
    `loss` is one microbatch's mean loss, a scalar; `model` the chunk that computed it, or None: then
    the words name no microbatch, and a step is one of training where gradients are recorded.
    """
    args, machine = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        # One check of both: on a GPU each is a wait for the microbatch.
        machine.validate_result(
            loss,
            _is_not_finite,
            "loss is not finite",
            describe=lambda: result_words.not_finite(loss, model),
        )
    is_training = torch.is_grad_enabled() if model is None else model.training
    if args.check_for_spiky_loss and is_training:
        is_spiky = partial(
            machine.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss"
        )
        machine.validate_result(
            loss, is_spiky, "spiky loss", fatal=False, describe=lambda: result_words.spiky(model)
        )


def _is_not_finite(loss: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(loss)


def check_labels(sample: Mapping[str, torch.Tensor] | None, vocab_size: int | None) -> None:
    """Raises DataError if a label is not a token of the vocabulary, though its "loss_mask" is not 0.

    Give `args.unpadded_vocab_size`. The rows after it have logits too, and would learn to be
    predicted; Megatron takes such a label without a word. This is for what a loader has made, where it
    still is on the CPU.
    """
    if vocab_size is None or sample is None or not {"labels", "loss_mask"} <= sample.keys():
        return
    problem = label_without_logit(sample["labels"], sample["loss_mask"], vocab_size)
    if problem is not None:
        raise DataError(problem)
