"""Label smoothing of the loss over a vocabulary that is cut.

Counterpart: in `megatron.core.tensor_parallel.cross_entropy`.
"""

from typing import Any

import torch

from minimegatron.core import collectives


def smooth(
    label_smoothing: float,
    predicted: torch.Tensor,
    logits: torch.Tensor,
    vocab_size: int,
    group: Any,
) -> tuple[float, torch.Tensor]:
    """The share a of the loss that is spread over all classes; and the smoothed target's logit, [...].

    (1 - e) on y and e / (V - 1) on each other is (1 - a) on y and a / V on all, a = e V/(V-1).

    Args:
        label_smoothing: e.
        predicted: [...], the target's logit.
        logits: [..., v/t], this rank's.
        vocab_size: V.
    """
    spread = label_smoothing * vocab_size / (vocab_size - 1)
    mean_logit = logits.sum(dim=-1) / vocab_size
    collectives.all_reduce(mean_logit, group)
    return spread, (1.0 - spread) * predicted + spread * mean_logit
