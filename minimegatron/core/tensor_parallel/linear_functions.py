"""A layer's product for who has a weight and no layer; weight gradients that it put off.

Megatron has the first in `megatron.core.tensor_parallel.layers`, the second in `megatron.core.utils`.
"""

from typing import Any

import torch

from minimegatron.core.left_out import accepts_left_out
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.tensor_parallel.layers import linear
from minimegatron.core.tensor_parallel.utils import get_tensor_model_parallel_group_if_none
from minimegatron.core.tensor_parallel.weight_grad_store import WeightGradStore


@accepts_left_out
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
    return linear(input, weight, bias, allreduce_dgrad, sequence_parallel, store, tp_group)


def drain_embedding_wgrad_compute(
    config: ModelParallelConfig,
    embedding_activation_buffer: list[torch.Tensor],
    grad_output_buffer: list[torch.Tensor],
    weight: torch.nn.Parameter,
    tp_group: Any = None,
) -> None:
    """Computes the output layer's weight gradients that backward put off, oldest first.

    Each is added to `weight.grad` and the weight's hooks run, so that it goes where other gradients
    go: to `weight.main_grad` under `DistributedDataParallel`. The two lists end empty. Called by
    `finish_embedding_wgrad_compute` once the pipeline has drained.

    Args:
        config: `sequence_parallel` says whether the inputs are to be gathered.
        embedding_activation_buffer: inputs X, each [s, b, h], or [s/t, b, h] to be gathered.
        grad_output_buffer: gradients dY, each [s, b, v/t]; as many.
        weight: [v/t, h].
        tp_group: None for `parallel_state`'s.

    Raises ValueError if the lists are not of one length.
    """
    group = get_tensor_model_parallel_group_if_none(tp_group)
    if len(embedding_activation_buffer) != len(grad_output_buffer):
        raise ValueError(
            f"{len(embedding_activation_buffer)} inputs of the output layer are kept, but "
            f"{len(grad_output_buffer)} gradients; clear both lists after a step that failed "
            "(clear_embedding_activation_buffer)"
        )
    weight.weight_grad_store = WeightGradStore(
        embedding_activation_buffer,
        grad_output_buffer,
        group if config.sequence_parallel else None,
        until_drained=True,
    )
    while grad_output_buffer:
        weight.weight_grad_store.backward_dw(weight)
