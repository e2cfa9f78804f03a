"""Whether the labels of a batch are tokens of the vocabulary: before they travel, and before the loss.

Megatron has no counterpart.
"""

import torch

from minimegatron.core.utils import Recording


def check_labels_have_logits(
    labels: torch.Tensor, loss_mask: torch.Tensor, vocab_size: int
) -> None:
    """Raises ValueError for a label that counts and has no logit; see `label_without_logit`."""
    problem = label_without_logit(labels, loss_mask, vocab_size)
    if problem is not None:
        raise ValueError(problem)


def label_without_logit(
    labels: torch.Tensor, loss_mask: torch.Tensor, vocab_size: int
) -> str | None:
    """What is wrong with the first of `labels` that counts and is not 0 to `vocab_size`; None for none.

    Its loss would be a number, of no token: no rank holds its logit. Labels on a GPU pass, since a look
    at them would wait for it; so they do while a step is recorded.
    """
    if not labels.is_cpu or Recording.is_on or labels.shape != loss_mask.shape:
        return None
    strange = labels[(loss_mask != 0) & ((labels < 0) | (labels >= vocab_size))]
    if strange.numel() == 0:
        return None
    return (
        f"the batch has label {strange[0]} where loss_mask is not 0 ({strange.numel()} such places of "
        f"{labels.numel()}), but the vocabulary is 0 to {vocab_size - 1} (rows that fill it up are "
        "no tokens); give these places 0 in loss_mask, or a token, or take the tokenizer of the data"
    )
