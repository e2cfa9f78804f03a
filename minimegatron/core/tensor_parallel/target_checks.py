"""Targets that the loss over a cut vocabulary refuses, in words.

Megatron has no counterpart.
"""

import torch


def refuse_targets(label_smoothing: float, target: torch.Tensor, logits: torch.Tensor) -> None:
    """Raises ValueError: `label_smoothing` is no share, or there is not one target for each place."""
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; give a value in [0, 1)")
    raise ValueError(
        f"targets are {list(target.shape)}, but logits are {list(logits.shape)}; "
        "give one target for each place, and the vocabulary last"
    )
