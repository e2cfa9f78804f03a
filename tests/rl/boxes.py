"""Raw gradients of all ranks, put together to those of the whole model."""

import torch

from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.utils import unwrap_model
from minimegatron.training.checkpointing import _sharded


def boxes(model):
    """In a rank: what a step has left, as (name, offset, shape of the whole, gradient)."""
    return [
        (box.key, box.global_offset, box.global_shape, box.data.clone())
        for chunk in model
        for name, param in named_global_parameters(unwrap_model(chunk))
        for box in _sharded(name, param, param.main_grad)
    ]


def whole(per_rank):
    """By name, whole gradients, out of all ranks' boxes; copies must agree."""
    found = {}
    for name, offset, shape, data in (box for rank in per_rank for box in rank):
        here = found.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
        place = tuple(slice(a, a + b) for a, b in zip(offset, data.shape, strict=True))
        assert here[place].isnan().all() or torch.allclose(here[place], data, atol=1e-12)
        here[place] = data
    return found
