"""Optimizers: how the pieces of this package become the one that fits a model and a configuration.

Counterpart: `megatron.core.optimizer`.
"""

from collections.abc import Callable
from functools import partial

import torch

from minimegatron.core.distributed.data_parallel_base import (
    forget_reads_of_scale,
    named_parameters_inside,
    refuse_changed_parameters,
    refuse_unsummed_grads,
)
from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.frozen_alike import OF_ONE_COPY, check_frozen_alike
from minimegatron.core.distributed.setup_checks import (
    check_buffers_alike,
    check_copies_alike,
    check_same_groups,
    note_saved_buffers,
    refuse_shared_weights,
)
from minimegatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from minimegatron.core.optimizer.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from minimegatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    NamedParamGroup,
    ParamShard,
)
from minimegatron.core.optimizer.optimizer_config import (
    AdamOptimizerConfig,
    OptimizerConfig,
    SGDOptimizerConfig,
)
from minimegatron.core.parameter_marks import restore_marks
from minimegatron.core.process_groups_config import ProcessGroupCollection, groups_of
from minimegatron.core.second_subjects import enter_hooks
from minimegatron.core.tensor_parallel.random import check_same_dropout
from minimegatron.exports import lazily

__all__ = [
    "AdamOptimizerConfig",
    "ChainedOptimizer",
    "ConstantGradScaler",
    "DistributedOptimizer",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "MegatronGradScaler",
    "MegatronOptimizer",
    "OptimizerConfig",
    "ParamShard",
    "SGDOptimizerConfig",
    "get_megatron_optimizer",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Adam": "torch.optim:AdamW",
        "MegatronModule": "minimegatron.core.transformer.module:MegatronModule",
        "SGD": "torch.optim:SGD",
    },
)


def _is_bias_or_norm(name: str, param: torch.nn.Parameter) -> bool:
    """True for biases and norm weights, which are not decayed."""
    return name.endswith(".bias") or param.dim() == 1


def _get_param_groups(
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


def _get_grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    """A constant scale if one is given, a dynamic one for fp16; bf16 has fp32's range: none."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def _check_wrappers(config: OptimizerConfig, model_chunks: list[torch.nn.Module]) -> None:
    """Optimizer and data-parallel wrapper must mean the same: otherwise ranks silently diverge."""
    for chunk in model_chunks:
        ddp_config = chunk.ddp_config if hasattr(chunk, "ddp_config") else None
        for name in ("use_distributed_optimizer", "overlap_param_gather"):
            ours = getattr(config, name)
            theirs = ddp_config is not None and getattr(ddp_config, name)
            if ours != theirs:
                raise ValueError(
                    f"{name} is {ours} in OptimizerConfig but {theirs} for the model's "
                    f"{type(chunk).__name__}; set both alike"
                )


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: list[torch.nn.Module],
    *,
    no_weight_decay_cond: Callable[[str, torch.nn.Parameter], bool] | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> MegatronOptimizer:
    """The optimizer for this rank's model chunks.

    Args:
        config: decides the kind: `use_distributed_optimizer`, then `fp16` or `bf16`, else fp32.
        model_chunks: as the schedules get them, each in its data-parallel wrapper.
        no_weight_decay_cond: (name within the chunk, parameter) -> True for no weight decay; None
            for biases and one-dimensional parameters, as Megatron does.
        pg_collection: see `MegatronOptimizer`; None for the model's, or `parallel_state`'s.

    All ranks must call it. Raises ValueError for no learning rate, where model and configuration
    contradict each other, or where ranks freeze other parameters than their peers.
    """
    if config.lr is None:
        raise ValueError("OptimizerConfig.lr is None; give a learning rate")
    pg_collection = groups_of(model_chunks[0], pg_collection)
    _check_wrappers(config, model_chunks)
    check_same_groups(model_chunks, pg_collection)
    refuse_shared_weights(model_chunks)
    for chunk in model_chunks:
        restore_marks(chunk)
    check_frozen_alike(model_chunks, pg_collection, OF_ONE_COPY)
    groups = _get_param_groups(model_chunks, no_weight_decay_cond or _is_bias_or_norm)
    scaler = _get_grad_scaler(config)
    if config.use_distributed_optimizer:
        optimizer = DistributedOptimizer(groups, config, scaler, pg_collection, model_chunks)
    elif config.fp16 or config.bf16:
        optimizer = Float16OptimizerWithFloat16Params(groups, config, scaler, pg_collection)
    else:
        optimizer = FP32Optimizer(groups, config, None, pg_collection)
    optimizer.first_checks += [
        partial(check_copies_alike, model_chunks, pg_collection),
        partial(check_buffers_alike, note_saved_buffers(model_chunks), pg_collection),
    ]
    # Before checks that one rank alone may fail.
    optimizer.grad_checks.append(partial(check_same_dropout, model_chunks, pg_collection.tp))
    for chunk in model_chunks:
        chunk.grad_scaler = optimizer.grad_scaler
        if scaler is not None and hasattr(chunk, "config"):
            enter_hooks(chunk.config, True, {"before_step_funcs": (forget_reads_of_scale,)})
        if isinstance(chunk, DistributedDataParallel):
            chunk.optimizer_checks_grads = True
            optimizer.grad_checks.append(chunk.check_grads)
        else:
            places = {param: (param.dtype, param.device, None) for param in optimizer.model_params}
            optimizer.grad_checks.append(partial(refuse_changed_parameters, chunk, places))
            if hasattr(chunk, "check_grads"):
                optimizer.grad_checks.append(chunk.check_grads)
            else:
                unsummed = partial(refuse_unsummed_grads, optimizer.model_params, pg_collection)
                optimizer.grad_checks.append(unsummed)
    return optimizer
