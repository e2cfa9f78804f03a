"""The length of all weights, as one number of the log: `--log-params-norm`.

Counterpart: `calc_params_l2_norm` of `megatron.training.utils`.
"""

import math
from typing import Any

import torch

from minimegatron.core.optimizer.clip_grads import get_grad_norm_fp32
from minimegatron.core.parameter import KINDS, kind_of, tensor_group
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.sharding import param_is_not_tensor_parallel_duplicate


def calc_params_l2_norm(
    model: torch.nn.Module | list[torch.nn.Module], pg_collection: Any = None
) -> float:
    """2-norm of the weights of the whole model, each counted once, as if they were one vector.

    Args:
        model: this rank's chunks, wrapped or not.
        pg_collection: the groups; by default the global ones.

    In the model's own precision: with fp16 or bf16 the optimizer has finer copies. Every rank must call
    it, and gets the same number.
    """
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    chunks = model if isinstance(model, list) else [model]
    for chunk in chunks:  # weights that are still being gathered are waited for
        if hasattr(chunk, "start_param_sync"):
            chunk.start_param_sync(force_sync=True)
    params = [
        param for chunk in chunks for param in chunk.parameters() if _is_counted(param, groups)
    ]
    return math.hypot(
        *(
            get_grad_norm_fp32(
                [param.detach() for param in params if kind_of(param) is kind],
                grad_stats_parallel_group=getattr(groups, kind.model),
            )
            for kind in KINDS.values()
            if hasattr(groups, kind.model)
        )
    )


def _is_counted(param: torch.nn.Parameter, groups: Any) -> bool:
    """As an optimizer counts gradients: one copy of a word embedding, one rank of a whole parameter."""
    return not getattr(param, "shared", False) and param_is_not_tensor_parallel_duplicate(
        param, tensor_group(param, groups)
    )


def describe_params_norm(models: list[torch.nn.Module], pg_collection: Any) -> dict[str, float]:
    """For a line of the log."""
    return {"params norm": calc_params_l2_norm(models, pg_collection)}
