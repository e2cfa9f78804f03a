"""A tensor-parallel product with a weight that is not trained.

Megatron has this in `megatron.core.tensor_parallel.layers`.
"""

from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from minimegatron.core.tensor_parallel.standalone_regions import (
    gather_from_sequence_parallel_region,
)


def frozen_product(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
) -> torch.Tensor:
    """`linear_with_frozen_weight`, all by position."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    return F.linear(input, weight.detach(), bias)


def linear_with_frozen_weight(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any = None,
) -> torch.Tensor:
    """`linear_with_grad_accumulation_and_async_allreduce` for a weight that gets no gradient.

    The input is not kept, nor gathered in backward. A bias that requires a gradient gets it.
    In Megatron it gets none.
    """
    return frozen_product(input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group)
