"""Around a step: routers forget what they counted; after it, biases for the choice of experts move.

Counterpart: the functions of the same names in `megatron.core.distributed.finalize_model_grads`, which
has them here too. There one call in the middle of `finalize_model_grads` updates and forgets.

`MoEConfig` enters the first two functions in the hooks of a step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from minimegatron.core.utils import get_model_config

__all__ = ["_update_router_expert_bias", "reset_model_temporary_tensors"]
"""What `finalize_model_grads` offers, where Megatron has them."""


def forget_step(models: list[torch.nn.Module]) -> Callable[[], None]:
    """Before a step: what the last one counted is not this one's. Returns what puts it back."""
    before = [(router, router.sums_of_step()) for router in routers_of(models)]
    reset_model_temporary_tensors(get_model_config(models[0]), models)

    def put_back() -> None:
        for router, sums in before:
            vars(router).update(sums)

    return put_back


def update_biases(models: list[torch.nn.Module], pg_collection: Any) -> None:
    """When gradients are final, once per step, however many microbatches it has."""
    config = get_model_config(models[0])
    if config.moe_router_enable_expert_bias:
        _update_router_expert_bias(models, config, pg_collection.tp_dp_cp)
    # A loop without a schedule has nobody who says that a step begins. The log may still ask.
    for router in routers_of(models):
        router.step_is_over = True


def routers_of(models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The routers of these chunks, wrapped or not, in the order of their layers on this rank."""
    modules = (module for chunk in models for module in chunk.modules())
    return [module for module in modules if hasattr(module, "local_tokens_per_expert")]


def reset_model_temporary_tensors(config: Any, model: list[torch.nn.Module]) -> None:
    """Sets what the routers of `model` have counted and added up to zero."""
    for router in routers_of(model):
        router.forget_step()


def _update_router_expert_bias(
    model: list[torch.nn.Module], config: Any, tp_dp_cp_group: dist.ProcessGroup
) -> None:
    """One message for all layers of this stage. A stage without experts has none, on all its ranks."""
    routers = routers_of(model)
    if not routers:
        return
    counts = torch.stack([router.local_tokens_per_expert for router in routers])
    biases = torch.stack([router.expert_bias for router in routers])
    rate = config.moe_router_bias_update_rate
    updated = get_updated_expert_bias(counts, biases, rate, tp_dp_cp_group)
    for router, bias in zip(routers, updated, strict=True):
        router.expert_bias.copy_(bias)


@torch.no_grad()
def get_updated_expert_bias(
    tokens_per_expert: torch.Tensor,
    expert_bias: torch.Tensor,
    expert_bias_update_rate: float,
    tp_dp_cp_group: dist.ProcessGroup,
) -> torch.Tensor:
    """The bias up by the rate for experts with fewer tokens than the mean, down for those with more.

    Counts and biases are [..., E]. Counts are summed over `tp_dp_cp_group` as whole numbers: in 16 bits
    the difference of two large ones may have the wrong sign. Source: https://arxiv.org/abs/2408.15664.
    """
    counts = reduce_from_tensor_model_parallel_region(tokens_per_expert, tp_dp_cp_group)
    missing = counts.sum(dim=-1, keepdim=True) - counts * counts.size(-1)
    return expert_bias + torch.sign(missing) * expert_bias_update_rate
