"""A linear layer that is not cut: every tensor-parallel rank has all of it.

Counterpart: `megatron.core.transformer.utils`.
"""

from typing import Any

import torch

from minimegatron.core.parameter_marks import note_marks
from minimegatron.core.tensor_parallel.initial_weights import new_weight
from minimegatron.core.tensor_parallel.layers import InitMethod
from minimegatron.core.tensor_parallel.utils import get_tensor_model_parallel_group_if_none


def get_linear_layer(
    rows: int,
    columns: int,
    init_method: InitMethod,
    *,
    dtype: torch.dtype,
    gradient_is_partial: bool = False,
    tp_group: Any = None,
) -> torch.nn.Linear:
    """[..., rows] -> [..., columns], with a bias that starts at zero.

    Args:
        init_method: draws the [columns, rows] weight.
        dtype: of weight and bias.
        gradient_is_partial: each tensor-parallel rank sees other tokens, so that gradients must be
            summed over the ranks, as those of norms under sequence parallelism.
        tp_group: None for `parallel_state`'s.
    """
    group = get_tensor_model_parallel_group_if_none(tp_group)
    layer = torch.nn.Linear(rows, columns, device="meta")
    layer.weight = new_weight((columns, rows), dtype, init_method, -1, group)
    layer.bias = torch.nn.Parameter(torch.zeros(columns, dtype=dtype))
    layer.bias.init_method = torch.nn.init.zeros_
    for param in layer.parameters():
        param.sequence_parallel = gradient_is_partial
    note_marks(layer)
    return layer
