"""Which parameters share hyperparameters, and the update rule that works on such groups.

Megatron has this in `megatron.core.optimizer`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core.distributed.data_parallel_base import named_parameters_inside
from minimegatron.core.optimizer.optimizer_config import OptimizerConfig
from minimegatron.core.utils import device_is_asynchronous


@dataclass(frozen=True)
class NamedParamGroup:
    """Parameters that share hyperparameters, before an optimizer has made main parameters of them."""

    params: Sequence[tuple[str, torch.nn.Parameter]]
    wd_mult: float = 1.0


def is_bias_or_norm(name: str, param: torch.nn.Parameter) -> bool:
    """True for biases and norm weights, which are not decayed."""
    return name.endswith(".bias") or param.dim() == 1


def get_param_groups(
    model_chunks: list[torch.nn.Module],
    no_weight_decay_cond: Callable[[str, torch.nn.Parameter], bool],
) -> list[NamedParamGroup]:
    """Two groups on every rank, with weight decay and without, also where one is empty."""
    decayed, undecayed = [], []
    for chunk_id, chunk in enumerate(model_chunks):
        for name, param in named_parameters_inside(chunk):
            if not param.requires_grad:
                continue
            group = undecayed if no_weight_decay_cond(name, param) else decayed
            group.append((f"model{chunk_id}.{name}", param))
    return [NamedParamGroup(decayed, wd_mult=1.0), NamedParamGroup(undecayed, wd_mult=0.0)]


def make_torch_optimizer(
    param_groups: list[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """The update rule alone. Groups carry `params` and `wd_mult`; a group may be empty.

    On a GPU, one kernel updates all parameters (`fused`). On a CPU not: the vectorised middle and the
    scalar ends of that kind round differently, so that a sharded parameter would not get the same
    bits as a whole one.
    """
    fused = device_is_asynchronous()
    for group in param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            param_groups, lr=config.lr, momentum=config.sgd_momentum, fused=fused
        )
    kind = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    betas = (config.adam_beta1, config.adam_beta2)
    return kind(param_groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=fused)
