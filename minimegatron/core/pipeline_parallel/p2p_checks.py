"""What stages cannot send each other, and the error where one has lost another.

Megatron has no counterpart.
"""

from typing import Any

import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel import user_results


def check_ring(config: ModelParallelConfig, num_stages: int) -> None:
    """Raises ValueError where the nine methods could swap activations and gradients."""
    has_chunks = (config.virtual_pipeline_model_parallel_size or 1) > 1
    if num_stages == 2 and has_chunks and config.batch_p2p_comm:
        raise ValueError(
            "interleaving over 2 pipeline stages with batched messages can swap activations "
            "and gradients: each rank is both neighbours of the other, and a batch pairs "
            "messages by position only; set batch_p2p_comm=False (overlap_p2p_comm may then "
            "be on or off), or use more than 2 stages"
        )


def check_output(output_tensor: Any, shapes: Any, dtype: torch.dtype | None) -> None:
    """Raises ValueError for an output that the next stage would read in another shape or dtype.

    Args:
        output_tensor: a tensor, or a list of some.
        shapes: one, or a list of some; one that is empty is sent ahead of its message.
        dtype: of what the next stage receives; None for torch's default.
    """
    outputs = output_tensor if isinstance(output_tensor, list) else [output_tensor]
    received = dtype or torch.get_default_dtype()
    is_one = len(outputs) == 1 and outputs[0].dtype == received
    if not is_one or outputs[0].shape != (shapes[0] if len(shapes) == 1 else shapes):
        user_results.refuse_other_outputs(outputs, shapes, received)


def refuse_dimensions(tensor: torch.Tensor) -> None:
    """Raises ValueError: three sizes cannot say this tensor's shape."""
    raise ValueError(
        f"three sizes are sent ahead of a message, but this stage's tensor has shape "
        f"{tuple(tensor.shape)}; make it [sequence, batch, hidden]"
    )


def lost_at_start(stage: int, message: Any, error: Exception) -> ConnectionError:
    """The error to raise where a message could not be started."""
    return ConnectionError(
        f"stage {stage} lost stage {message.peer} while starting a message "
        f"({message.payload}): {error}"
    )


def lost_under_way(stage: int, message: Any, error: Exception) -> ConnectionError:
    """The error to raise where a message did not arrive."""
    doing = "sending" if message.is_send else "receiving"
    what = f"{'an' if message.payload.startswith('a') else 'a'} {message.payload}"
    shape = message.shape if message.tensor is None else message.tensor.shape
    return ConnectionError(
        f"stage {stage} lost stage {message.peer} while {doing} {what} of "
        f"shape {tuple(shape)}: {error}"
    )
