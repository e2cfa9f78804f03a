"""Small helpers that know no layer: model wrappers, exact division, the device.

Counterpart: `megatron.core.utils`, a few of its many; the device is ours: Megatron's tensors are on
CUDA devices, and here every program also runs on a laptop.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import util_checks
from minimegatron.exports import lazily

# Megatron has these functions here. In this package each stands with what it works on.
__getattr__, __dir__ = lazily(
    __name__,
    {
        "StragglerDetector": "minimegatron.core.straggler_detector:StragglerDetector",
        "choose_backend": "minimegatron.core.device_choice:choose_backend",
        "configure_nvtx_profiling": "minimegatron.core.nvtx_ranges:configure_nvtx_profiling",
        "drain_embedding_wgrad_compute": (
            "minimegatron.core.tensor_parallel.weight_grad_store:drain_embedding_wgrad_compute"
        ),
        "get_batch_on_this_cp_rank": (
            "minimegatron.core.transformer.part_of_batch:get_batch_on_this_cp_rank"
        ),
        "get_tensor_model_parallel_group_if_none": (
            "minimegatron.core.tensor_parallel.utils:get_tensor_model_parallel_group_if_none"
        ),
        "get_pg_rank": "minimegatron.core.missing_groups:get_pg_rank",
        "get_pg_size": "minimegatron.core.missing_groups:get_pg_size",
        "get_pg_src_rank": "minimegatron.core.missing_groups:get_pg_src_rank",
        "has_gpu_for_each": "minimegatron.core.device_choice:has_gpu_for_each",
        "init_method_normal": (
            "minimegatron.core.transformer.transformer_config:init_method_normal"
        ),
        "log_on_each_pipeline_stage": (
            "minimegatron.core.missing_groups:log_on_each_pipeline_stage"
        ),
        "log_single_rank": "minimegatron.core.missing_groups:log_single_rank",
        "make_viewless_tensor": "minimegatron.core.tensor_parallel.utils:make_viewless_tensor",
        "nvtx_range_pop": "minimegatron.core.nvtx_ranges:nvtx_range_pop",
        "nvtx_range_push": "minimegatron.core.nvtx_ranges:nvtx_range_push",
        "scaled_init_method_normal": (
            "minimegatron.core.transformer.transformer_config:scaled_init_method_normal"
        ),
        "set_device": "minimegatron.core.device_choice:set_device",
    },
)

# -- Wrappers --
# A model chunk stands inside wrappers: DistributedDataParallel(Float16Module(GPTModel)). Each wrapper
# keeps what it wraps in `.module`.

HALF_DTYPES = (torch.bfloat16, torch.float16)


def unwrap_model(
    model: torch.nn.Module | list[torch.nn.Module],
    module_instances: type | tuple[type, ...] | None = None,
) -> torch.nn.Module | list[torch.nn.Module]:
    """The model under its wrappers; a list of chunks for a list.

    Takes off every wrapper with a `.module`, or only those of the classes in `module_instances`.
    """
    if isinstance(model, list):
        return [unwrap_model(chunk, module_instances) for chunk in model]
    wrappers = object if module_instances is None else module_instances
    while hasattr(model, "module") and isinstance(model, wrappers):
        model = model.module
    return model


def get_attr_wrapped_model(
    model: torch.nn.Module, attr: str, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """`attr` of the outermost layer of wrapping that has it; with `return_model_obj`, that layer.

    `allow_none=False` passes over layers where it is None. Raises ValueError for a list of chunks,
    RuntimeError if no layer has it.
    """
    if isinstance(model, list):
        util_checks.refuse_chunks(model, attr)
    layer = model
    while not (hasattr(layer, attr) if allow_none else getattr(layer, attr, None) is not None):
        if not hasattr(layer, "module"):
            util_checks.refuse_without(model, attr)
        layer = layer.module
    return layer if return_model_obj else getattr(layer, attr)


def get_model_config(model: torch.nn.Module) -> Any:
    """The `TransformerConfig` (or `ModelParallelConfig`) the chunk was built with."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


HOOKS = (
    *("aux_loss_scale_funcs", "before_step_funcs", "around_step_funcs"),
    *("after_grads_funcs", "log_funcs", "schedule_plan_builders"),
)
"""Fields of a configuration in which several subjects enter functions of theirs."""


def config_of_run(models: torch.nn.Module | list[torch.nn.Module]) -> Any:
    """The configuration of a step over a stage's chunks: the first one's, with the hooks of all.

    Where another chunk has entered functions that the first has not, as a model does whose experts are
    in its later layers, it is a copy with all.
    """
    if not isinstance(models, list) or len(models) == 1:
        return get_model_config(models[0] if isinstance(models, list) else models)
    first = get_model_config(models[0])
    of_all: dict[str, dict] = {name: {} for name in HOOKS}
    for model in models:
        of_chunk = vars(get_model_config(model))
        for name, entered in of_all.items():
            entered |= dict.fromkeys(of_chunk.get(name, ()))
    more = {name: tuple(x) for name, x in of_all.items() if len(x) > len(vars(first).get(name, ()))}
    run = copy.copy(first) if more else first
    vars(run).update(more)
    return run


def get_model_type(model: torch.nn.Module) -> Any:
    """The chunk's `ModelType`."""
    return get_attr_wrapped_model(model, "model_type", allow_none=False)


# -- Arithmetic --


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises ValueError, with the nearest sizes that work, unless the division comes out even."""
    if numerator % denominator:
        util_checks.refuse_division(numerator, denominator)


def divide(numerator: int, denominator: int) -> int:
    """The quotient of a division that must come out even. Raises as `ensure_divisibility`."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


# -- The device --
# One GPU per rank, several ranks per GPU, or CPU only.

_device: torch.device | None = None


def get_device() -> torch.device:
    """This process's device; chosen as by `set_device("auto")` if nobody has chosen."""
    return __getattr__("set_device")() if _device is None else _device


def device_is_asynchronous() -> bool:
    """Whether this rank's device is a GPU: it does its work later than the program asks for it.

    To read a number out of a tensor then means to wait for all work that is queued.
    """
    return get_device().type == "cuda"


class Recording:
    """Whether a step is being recorded: then its numbers, even on a CPU, are not to be looked at."""

    is_on = False


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Returns when every rank of `group` has come; None stands for all ranks.

    NCCL's barrier is a small all-reduce on a GPU. It is told which GPU is this rank's: the guess it
    makes otherwise is wrong where a process sees other GPUs than its neighbours do.
    """
    on_nccl = dist.get_backend(group) == "nccl"
    dist.barrier(group, device_ids=[get_device().index] if on_nccl else None)


# -- Gradients --


def without_graph(backward: Callable) -> Callable:
    """Decorator of a `backward` that computes with what forward kept, of which autograd sees nothing.

    It raises RuntimeError for `create_graph=True`. Torch's `once_differentiable` only does where the
    incoming gradient has a graph, which a loss's has not: gradients of gradients would miss a part.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            util_checks.refuse_graph_of(backward)
        return backward(ctx, *grads)

    return checked


# -- Numbers --


def or_one(count: torch.Tensor) -> torch.Tensor:
    """A number of tokens to divide by: where it is 0 the sum is 0 too, and 1 leaves it so.

    Weights of tokens may add up to less than 1; so it is no minimum, which would change their mean. For
    counts it is the same.
    """
    return count.masked_fill(count == 0, 1)
