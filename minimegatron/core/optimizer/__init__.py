"""Optimizers: how the pieces of this package become the one that fits a model and a configuration.

Counterpart: `megatron.core.optimizer`.
"""

from collections.abc import Callable

import torch

from minimegatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from minimegatron.core.optimizer.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from minimegatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from minimegatron.core.optimizer.optimizer_config import OptimizerConfig
from minimegatron.core.optimizer.optimizer_setup import check_learning_rate, check_model, connect
from minimegatron.core.optimizer.param_groups import get_param_groups, is_bias_or_norm
from minimegatron.core.process_groups_config import ProcessGroupCollection, groups_of
from minimegatron.exports import lazily

__all__ = [
    "ConstantGradScaler",
    "DistributedOptimizer",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "MegatronGradScaler",
    "MegatronOptimizer",
    "OptimizerConfig",
    "get_megatron_optimizer",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Adam": "torch.optim:AdamW",
        "AdamOptimizerConfig": "minimegatron.core.optimizer.update_rule_configs:AdamOptimizerConfig",
        "ChainedOptimizer": "minimegatron.core.optimizer.chained_optimizer:ChainedOptimizer",
        "MegatronModule": "minimegatron.core.transformer.module:MegatronModule",
        "ParamShard": "minimegatron.core.optimizer.optimizer:ParamShard",
        "SGD": "torch.optim:SGD",
        "SGDOptimizerConfig": "minimegatron.core.optimizer.update_rule_configs:SGDOptimizerConfig",
    },
)


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
    check_learning_rate(config.lr)
    pg_collection = groups_of(model_chunks[0], pg_collection)
    check_model(config, model_chunks, pg_collection)
    groups = get_param_groups(model_chunks, no_weight_decay_cond or is_bias_or_norm)
    scaler = _get_grad_scaler(config)
    if config.use_distributed_optimizer:
        optimizer = DistributedOptimizer(groups, config, scaler, pg_collection, model_chunks)
    elif config.fp16 or config.bf16:
        optimizer = Float16OptimizerWithFloat16Params(groups, config, scaler, pg_collection)
    else:
        optimizer = FP32Optimizer(groups, config, None, pg_collection)
    connect(optimizer, model_chunks)
    return optimizer
