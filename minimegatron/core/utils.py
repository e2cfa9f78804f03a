"""Small helpers that know no layer: model wrappers, exact division, sizes of groups, logging.

Called by: schedules, tensor-parallel layers, training. Calls: `torch.distributed`. Counterpart:
`megatron.core.utils`, a few of its many.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist

# -- Wrappers --
# A model chunk stands inside wrappers: DistributedDataParallel(Float16Module(GPTModel)). Each wrapper
# keeps what it wraps in `.module`.


def unwrap_model(
    model: torch.nn.Module | list[torch.nn.Module],
    module_instances: type | tuple[type, ...] | None = None,
) -> torch.nn.Module | list[torch.nn.Module]:
    """The model under its wrappers; a list of chunks for a list.

    Takes off every wrapper with a `.module`, or only those of the classes in `module_instances`.
    """
    if isinstance(model, list):
        return [unwrap_model(chunk, module_instances) for chunk in model]
    while hasattr(model, "module"):
        if module_instances is not None and not isinstance(model, module_instances):
            break
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
        raise ValueError(f"model is a list of {len(model)} chunks; ask each chunk for {attr!r}")
    layer = model
    while not _has(layer, attr, allow_none):
        if not hasattr(layer, "module"):
            raise RuntimeError(f"neither {type(model).__name__} nor what it wraps has {attr!r}")
        layer = layer.module
    return layer if return_model_obj else getattr(layer, attr)


def _has(layer: torch.nn.Module, attr: str, allow_none: bool) -> bool:
    return hasattr(layer, attr) if allow_none else getattr(layer, attr, None) is not None


def get_model_config(model: torch.nn.Module) -> Any:
    """The `TransformerConfig` (or `ModelParallelConfig`) the chunk was built with."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def get_model_type(model: torch.nn.Module) -> Any:
    """The chunk's `ModelType`."""
    return get_attr_wrapped_model(model, "model_type", allow_none=False)


# -- Arithmetic --


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises ValueError, with the nearest sizes that work, unless the division comes out even."""
    if numerator % denominator:
        below = numerator // denominator * denominator
        raise ValueError(
            f"{numerator} is not divisible by {denominator}; "
            f"the nearest sizes that are: {below} and {below + denominator}"
        )


def divide(numerator: int, denominator: int) -> int:
    """The quotient of a division that must come out even. Raises as `ensure_divisibility`."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


# -- Groups that may be missing --


def get_pg_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks in `group`; 1 without `torch.distributed` or without a group."""
    return 1 if group is None or not dist.is_initialized() else group.size()


def get_pg_rank(group: dist.ProcessGroup | None = None) -> int:
    """Our place in `group`; 0 without `torch.distributed` or without a group."""
    return 0 if group is None or not dist.is_initialized() else group.rank()


def get_pg_src_rank(group: dist.ProcessGroup | None = None) -> int:
    """Global rank of the first member of `group`; 0 without a group."""
    if group is None or not dist.is_initialized():
        return 0
    return dist.get_process_group_ranks(group)[0]


# -- Logging --


def log_single_rank(
    logger: logging.Logger, level: int, message: str, *args: Any, rank: int = 0
) -> None:
    """Logs on one global rank only; without `torch.distributed`, always."""
    if not dist.is_initialized() or dist.get_rank() == rank:
        logger.log(level, message, *args)


def log_on_each_pipeline_stage(
    logger: logging.Logger,
    level: int,
    message: str,
    *args: Any,
    tp_group: dist.ProcessGroup | None,
    dp_cp_group: dist.ProcessGroup | None,
) -> None:
    """Logs on one rank of every stage: the first of its tensor and data groups."""
    if get_pg_rank(tp_group) == 0 and get_pg_rank(dp_cp_group) == 0:
        logger.log(level, message, *args)
