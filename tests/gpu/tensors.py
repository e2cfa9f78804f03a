"""What parts do with tensors: compare them, and wait for the GPU.

Called by: the modules of parts.
"""

import torch

from minimegatron.core.utils import get_device


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest, in units of the largest wanted number, or of 1 if that is smaller."""
    scale = max(1.0, wanted.abs().max().item())
    return (found.double().cpu() - wanted.double().cpu()).abs().max().item() / scale


def settle() -> None:
    """In a rank: waits until its GPU has done all that is queued."""
    if get_device().type == "cuda":
        torch.cuda.synchronize()
