"""What ties an optimizer to its model: checks before it is made, and what it looks at in each step.

Megatron has no counterpart.
"""

from collections.abc import Sequence
from functools import partial

import torch

from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.frozen_alike import OF_ONE_COPY, check_frozen_alike
from minimegatron.core.distributed.setup_checks import (
    check_buffers_alike,
    check_copies_alike,
    check_same_groups,
    note_saved_buffers,
    refuse_shared_weights,
)
from minimegatron.core.distributed.step_checks import (
    forget_reads_of_scale,
    refuse_changed_parameters,
    refuse_unsummed_grads,
)
from minimegatron.core.optimizer.optimizer import MegatronOptimizer
from minimegatron.core.optimizer.optimizer_config import OptimizerConfig
from minimegatron.core.parameter_marks import restore_marks
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.subject_fields import enter_hooks
from minimegatron.core.tensor_parallel.random import check_same_dropout


def check_learning_rate(lr: float | None) -> None:
    """There is one."""
    if lr is None:
        raise ValueError("OptimizerConfig.lr is None; give a learning rate")


def check_model(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection,
) -> None:
    """Refuses chunks that do not fit the configuration, each other, or those of other ranks.

    On the way, parameters get back the marks that a copy of the model has lost: the last check reads
    them. All ranks must call it.
    """
    _check_wrappers(config, model_chunks)
    check_same_groups(model_chunks, pg_collection)
    refuse_shared_weights(model_chunks)
    for chunk in model_chunks:
        restore_marks(chunk)
    check_frozen_alike(model_chunks, pg_collection, OF_ONE_COPY)


def _check_wrappers(config: OptimizerConfig, model_chunks: Sequence[torch.nn.Module]) -> None:
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


def connect(optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module]) -> None:
    """The chunks learn the loss scale; the optimizer, what to check before and in its steps."""
    pg_collection = optimizer.pg_collection
    optimizer.first_checks += [
        partial(check_copies_alike, model_chunks, pg_collection),
        partial(check_buffers_alike, note_saved_buffers(model_chunks), pg_collection),
    ]
    # Before checks that one rank alone may fail.
    optimizer.grad_checks.append(partial(check_same_dropout, model_chunks, pg_collection.tp))
    for chunk in model_chunks:
        chunk.grad_scaler = optimizer.grad_scaler
        if optimizer.grad_scaler is not None and hasattr(chunk, "config"):
            hook = {"before_step_funcs": (forget_reads_of_scale,)}
            enter_hooks(chunk.config, True, hook.copy)
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
