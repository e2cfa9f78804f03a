"""A block whose whole layers are recomputed.

Megatron has this in `megatron.core.transformer.transformer_block`.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

from minimegatron.core.tensor_parallel.recompute import checkpoint


def checkpointed_forward(
    run: Callable[..., torch.Tensor],
    layers: torch.nn.ModuleList,
    recompute: Any,
    hidden_states: torch.Tensor,
    *arguments: torch.Tensor | None,
) -> torch.Tensor:
    """Whole layers recomputed in backward, as `recompute`, a `transformer_block.Recompute`, tells.

    `run(first, last, hidden_states, *arguments)` is the forward of the layers [first, last).

    "uniform" keeps the input of each group of `num_layers` layers. "block" keeps the input of
    each of the first `num_layers` layers, and everything of the others, for which there is room.
    """
    uniform = recompute.method == "uniform"
    step = recompute.num_layers if uniform else 1
    recomputed = len(layers) if uniform else min(recompute.num_layers, len(layers))
    for first in range(0, recomputed, step):
        hidden_states = checkpoint(
            run,
            False,
            first,
            first + step,
            hidden_states,
            *arguments,
            modules=islice(layers, first, first + step),
        )
    return run(recomputed, len(layers), hidden_states, *arguments)
