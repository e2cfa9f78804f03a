"""From the command line to a process that knows its place: arguments, device, groups, seeds.

It is the first thing that `pretrain` does. `ending` makes the process take its groups down at its
end. Counterpart: `megatron.training.initialize`.
"""

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import numpy
import torch
import torch.distributed as dist

from minimegatron.backend import in_place_of
from minimegatron.core import parallel_state, tensor_parallel
from minimegatron.core.left_out import accepts_left_out
from minimegatron.core.network import (
    check_interfaces,
    gloo_address_note,
    keep_to_loopback,
    loopback_address,
)
from minimegatron.core.utils import device_is_asynchronous, set_device
from minimegatron.doctor.flight_recorder import turn_on_recorder
from minimegatron.doctor.session import watch_ranks
from minimegatron.training import failures
from minimegatron.training.arguments import params_dtype, parse_args
from minimegatron.training.captured_step import check_ranks_of_graph, describe_graph
from minimegatron.training.config import Arguments
from minimegatron.training.devices import agree_on_device, has_fused_attention, name_of_gpu
from minimegatron.training.ending import end_properly
from minimegatron.training.global_vars import get_train_state, set_global_variables
from minimegatron.training.pipeline_schedule import pipeline_placement
from minimegatron.training.rendezvous import find_each_other, ranks_of_environment
from minimegatron.training.reruns import iterations_to_skip, make_rerun_state_machine
from minimegatron.training.utils import print_rank_0

BAD_ARGUMENTS = 2
"""Exit code where the arguments cannot work; nothing has been started then."""


@accepts_left_out
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
    try:
        args = parse_args(extra_args_provider, args_defaults=args_defaults)
        if check_args is not None:
            check_args(args)
        make_rerun_state_machine(args, os.environ.get("SLURM_JOBID", "N/A"))
    except ValueError as reason:
        _refuse(reason)
    set_global_variables(args)
    _initialize_distributed(args, get_embedding_ranks, get_position_embedding_ranks)
    _warn_of_slow_attention(args)
    get_train_state().iterations_to_skip = iterations_to_skip(args)
    describe_graph(args)
    print_rank_0(f"> setting random seeds to {args.seed} ...")
    set_random_seed(args.seed, args.data_parallel_random_init)


def _refuse(reason: Exception, speaker: str = "RANK") -> NoReturn:
    """Says why, once: on the rank whose variable `speaker` is 0."""
    if not dist.is_torchelastic_launched():
        # Nobody says that another rank 0 is there to speak.
        note = ""
        if os.environ.get("WORLD_SIZE", "1") != "1":
            note = f" ({ranks_of_environment()})"
        print(f"minimegatron: {reason}{note}", file=sys.stderr, flush=True)
    elif os.environ.get(speaker, "0") == "0":
        print(f"minimegatron: {reason}", file=sys.stderr, flush=True)
    else:
        # torchrun ends all ranks when the first one exits. The one that prints should be that; so
        # wait for torchrun's signal, or as long as that rank may need to come this far.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(BAD_ARGUMENTS))
        time.sleep(30)
    sys.exit(BAD_ARGUMENTS)


def _initialize_distributed(
    args: Arguments,
    get_embedding_ranks: Callable | None,
    get_position_embedding_ranks: Callable | None,
) -> None:
    """Device, default process group, all other groups; then every rank knows every other."""
    ours = not dist.is_initialized()
    if ours:
        end_properly()
        failures.watch_launcher()
        _init_process_group(args)
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
    if ours:
        failures.watch_peers()
        if args.hang_timeout is not None:
            watch_ranks(args.hang_timeout, os.environ.get("MASTER_ADDR", "localhost"))
    print_rank_0(
        f"> {args.world_size} ranks: tensor {args.tensor_model_parallel_size} x "
        f"{_context(args)}pipeline {args.pipeline_model_parallel_size} x "
        f"data {args.data_parallel_size}, {dist.get_backend()}"
    )


def _context(args: Arguments) -> str:
    c = args.context_parallel_size
    return f"context {c} x " if c > 1 else ""


def _init_process_group(args: Arguments) -> None:
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    try:
        if args.world_size == args.local_world_size:
            loopback_address()
            keep_to_loopback(os.environ)
        else:
            check_interfaces(os.environ)
        store = find_each_other(args.rank, args.world_size, timeout)
    except (ValueError, ConnectionError, RuntimeError) as reason:
        _refuse(reason, speaker="LOCAL_RANK")
    if args.tensor_model_parallel_size > 1:
        # The GPU then begins kernels in the order in which they were queued: a collective of tensor
        # parallelism before the products that shall hide it. CUDA reads this when it is first used.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    gpu = "" if args.device == "cpu" else name_of_gpu(args.local_rank)
    try:
        chosen = agree_on_device(
            store, args.rank, args.world_size, gpu, args.device, args.distributed_backend
        )
        check_ranks_of_graph(args, chosen.device, chosen.backend)
    except ValueError as reason:
        _refuse(reason)
    set_device(chosen.device, args.local_rank)
    if chosen.device == "cuda":
        torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    if args.hang_timeout is not None:
        turn_on_recorder(os.environ)
    if "gloo" in chosen.backend and args.world_size > args.local_world_size:
        note = gloo_address_note(os.environ, os.environ.get("MASTER_ADDR", ""))
        if note is not None and args.local_rank == 0:
            print(f"minimegatron: {note}", file=sys.stderr, flush=True)
    dist.init_process_group(
        in_place_of(chosen.backend),
        rank=args.rank,
        world_size=args.world_size,
        timeout=timeout,
        store=store,
    )


def _warn_of_slow_attention(args: Arguments) -> None:
    head_size, dtype = args.hidden_size // args.num_attention_heads, params_dtype(args)
    if device_is_asynchronous() and not has_fused_attention(head_size, dtype):
        print_rank_0(
            f"> attention: torch has no fused kernel here for heads of {head_size} elements in "
            f"{dtype}, so it is slow; choose --hidden-size and --num-attention-heads whose quotient "
            "is a multiple of 8, and at most 256"
        )


def set_random_seed(seed: int, data_parallel_random_init: bool = False) -> None:
    """Seeds Python, NumPy and torch. Stages differ, so that their dropout does; copies of the model
    differ if asked for. Within a tensor-parallel group, `model_parallel_cuda_manual_seed` decides.
    """
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    if data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
