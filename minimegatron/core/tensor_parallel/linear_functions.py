"""A layer's product for who has a weight and no layer, and further names of Megatron's `layers`.

Counterpart: the functions of these names in `megatron.core.tensor_parallel.layers`.
"""

from typing import Any

import torch

from minimegatron.core.tensor_parallel import layers
from minimegatron.core.tensor_parallel.frozen_weight import linear_with_frozen_weight
from minimegatron.core.tensor_parallel.sharding import (
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from minimegatron.core.tensor_parallel.weight_grad_store import (
    WeightGradStore,
    drain_embedding_wgrad_compute,
)
from minimegatron.core.tensor_parallel.whole_parameters import copy_tensor_model_parallel_attributes

__all__ = [
    "copy_tensor_model_parallel_attributes",
    "drain_embedding_wgrad_compute",
    "linear_with_frozen_weight",
    "linear_with_grad_accumulation_and_async_allreduce",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
]
"""`layers` offers these."""


def linear_with_grad_accumulation_and_async_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: int = 0,
    tp_group: Any = None,
) -> torch.Tensor:
    """`F.linear`, with the exchange of a tensor-parallel layer built into forward and backward.

    Args:
        input: [s, b, h]; [s/t, b, h] with `sequence_parallel`, then gathered first.
        weight: [n, h], local.
        bias: [n], local, or None.
        allreduce_dgrad: sum the input's gradient over the ranks.
        sequence_parallel: gather `input`, reduce-scatter its gradient.
        grad_output_buffer: keep the output's gradients here, and leave the weight's to
            `drain_embedding_wgrad_compute`; None to compute it at once. The caller keeps the inputs.
        wgrad_deferral_limit: how many may be kept; 0 for any number.
        tp_group: None for `parallel_state`'s.
    """
    store = None
    if grad_output_buffer is not None:
        limit = wgrad_deferral_limit
        store = WeightGradStore(None, grad_output_buffer, limit=limit, until_drained=True)
    return layers.linear(input, weight, bias, allreduce_dgrad, sequence_parallel, store, tp_group)
