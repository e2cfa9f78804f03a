"""From the command line to a process that knows its place: arguments, device, groups, seeds.

It is the first thing that `pretrain` does. `process_group` connects the ranks, and sees to it that the
process takes its groups down when it ends. Counterpart: `megatron.training.initialize`.
"""

import argparse
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
import torch.distributed as dist

from minimegatron.core import parallel_state, tensor_parallel
from minimegatron.exports import lazily
from minimegatron.training.arguments import params_dtype, parse_args
from minimegatron.training.config import Arguments
from minimegatron.training.devices import describe_device
from minimegatron.training.global_vars import get_train_state, set_global_variables
from minimegatron.training.pipeline_schedule import pipeline_placement
from minimegatron.training.process_group import connected, refused_by_all
from minimegatron.training.reruns import iterations_to_skip, make_rerun_state_machine
from minimegatron.training.utils import print_rank_0

__getattr__, __dir__ = lazily(
    __name__, {"BAD_ARGUMENTS": "minimegatron.training.process_group:BAD_ARGUMENTS"}
)


def initialize_megatron(
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    check_args: Callable[[Arguments], None] | None = None,
) -> None:
    """Everything that must be there before a model is built.

    Arguments that cannot work end every rank with exit code 2, before any process group exists;
    rank 0 prints why, in one line (a caret below, for a pipeline layout). `check_args(args)` raises
    ValueError for what the caller's program cannot do. The two arguments before it are those of
    `initialize_model_parallel`.
    """
    with refused_by_all():
        args = parse_args(extra_args_provider, args_defaults=args_defaults)
        if check_args is not None:
            check_args(args)
        make_rerun_state_machine(args, os.environ.get("SLURM_JOBID", "N/A"))
    set_global_variables(args)
    _initialize_distributed(args, get_embedding_ranks, get_position_embedding_ranks)
    describe_device(args, params_dtype(args))
    get_train_state().iterations_to_skip = iterations_to_skip(args)
    print_rank_0(f"> setting random seeds to {args.seed} ...")
    set_random_seed(args.seed, args.data_parallel_random_init)


def _initialize_distributed(
    args: Arguments,
    get_embedding_ranks: Callable | None,
    get_position_embedding_ranks: Callable | None,
) -> None:
    """Device, default process group, all other groups; then every rank knows every other."""
    with connected(args):
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            get_embedding_ranks=get_embedding_ranks,
            get_position_embedding_ranks=get_position_embedding_ranks,
            pipeline_placement=pipeline_placement(args),
        )
    context = f"context {args.context_parallel_size} x " if args.context_parallel_size > 1 else ""
    print_rank_0(
        f"> {args.world_size} ranks: tensor {args.tensor_model_parallel_size} x "
        f"{context}pipeline {args.pipeline_model_parallel_size} x "
        f"data {args.data_parallel_size}, {dist.get_backend()}"
    )


def set_random_seed(seed: int, data_parallel_random_init: bool = False) -> None:
    """Seeds Python, NumPy and torch. Stages differ, so that their dropout does; copies of the model
    differ if asked for. Within a tensor-parallel group, `model_parallel_cuda_manual_seed` decides.
    """
    copy = parallel_state.get_data_parallel_rank() if data_parallel_random_init else 0
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank() + 10 * copy
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
