"""What a loader has made is looked at before it goes to other ranks.

Megatron has no counterpart.
"""

from collections.abc import Mapping

import torch

from minimegatron.core.datasets.utils import DataError
from minimegatron.core.models.common.language_module.labels import label_without_logit


def check_labels(sample: Mapping[str, torch.Tensor] | None, vocab_size: int | None) -> None:
    """Raises DataError if a label is not a token of the vocabulary, though its "loss_mask" is not 0.

    Give `args.unpadded_vocab_size`. The rows behind it have logits too, and would learn to be
    predicted; Megatron takes such a label without a word. This is for what a loader has made, where it
    still is on the CPU.
    """
    if vocab_size is None or sample is None or not {"labels", "loss_mask"} <= sample.keys():
        return
    problem = label_without_logit(sample["labels"], sample["loss_mask"], vocab_size)
    if problem is not None:
        raise DataError(problem)
