"""`--cuda-graph-impl full_iteration`: a run whose steps are captured once and replayed.

What cannot be captured is refused here, before any process group exists. Counterpart: the lines of
`megatron.training.training` and of `megatron.training.arguments` that have to do with
`FullCudaGraphWrapper`; fewer options are refused there, and some of those fail later, or change what a
run computes.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.core import full_cuda_graph
from minimegatron.core.utils import device_is_asynchronous
from minimegatron.training.config import Arguments
from minimegatron.training.global_vars import get_args
from minimegatron.training.result_checks import check_labels
from minimegatron.training.utils import print_rank_0

FULL_ITERATION = "full_iteration"
FLAG = "--cuda-graph-impl full_iteration"


def captured(forward_backward_func: Callable) -> Callable:
    """The schedule, captured after `--cuda-graph-warmup-steps` calls; labels are checked as they are
    read, since a captured step does not look at them."""
    return full_cuda_graph.FullCudaGraphWrapper(
        forward_backward_func, get_args().cuda_graph_warmup_steps, check_inputs=_check_inputs
    )


def _check_inputs(inputs: Any) -> None:
    if isinstance(inputs, dict):
        check_labels(inputs, get_args().unpadded_vocab_size)


def describe_graph(args: Arguments) -> None:
    """Prints, once, what a run on a CPU has in place of a CUDA graph."""
    if args.cuda_graph_impl == FULL_ITERATION and not device_is_asynchronous():
        print_rank_0(
            f"> no GPU: after {args.cuda_graph_warmup_steps} steps one is recorded, and its tensor "
            "operations are repeated; on a GPU they would be a CUDA graph"
        )


# -- What is asked for --


def graph_impl(args: argparse.Namespace) -> str:
    """`full_iteration` or `none`, from three flags that Megatron has had for it.

    Raises ValueError for another kind of graph, and for a scope of nothing.
    """
    impl, scope = args.cuda_graph_impl, args.cuda_graph_scope
    if impl not in ("none", "local", FULL_ITERATION):
        raise ValueError(
            f"--cuda-graph-impl is {impl}, but here a graph is of a whole step; give full_iteration "
            "or none"
        )
    if scope not in (None, FULL_ITERATION):
        raise ValueError(
            f"--cuda-graph-scope is {scope}, but here a graph is of a whole step; give full_iteration, "
            "or drop it"
        )
    is_asked = args.enable_cuda_graph or impl == "local"
    if is_asked and scope is None:
        flag = "--cuda-graph-impl local" if impl == "local" else "--enable-cuda-graph"
        raise ValueError(
            f"{flag} without --cuda-graph-scope would capture each layer by itself, which is not here; "
            "add --cuda-graph-scope full_iteration"
        )
    if scope is not None and not is_asked and impl == "none":
        raise ValueError(
            f"--cuda-graph-scope {scope} says what to capture, but nothing is captured; add "
            "--enable-cuda-graph, or drop it"
        )
    return FULL_ITERATION if is_asked or impl == FULL_ITERATION else "none"


def check_graph(args: argparse.Namespace) -> None:
    """Raises ValueError for what a captured step cannot do, with the remedy."""
    if args.cuda_graph_impl != FULL_ITERATION:
        return
    for found, reason, remedy in (*_reads_numbers(args), *_acts_in_python(args), *_unshown(args)):
        raise ValueError(f"{FLAG} with {found}, which {reason}; {remedy}")
    is_on_cpu = args.device == "cpu" or torch.cuda.device_count() == 0
    check_ranks_of_graph(args, "cpu" if is_on_cpu else "cuda", args.distributed_backend or "nccl")


def check_ranks_of_graph(args: Any, device: str, backend: str) -> None:
    """Raises ValueError where ranks would exchange tensors by ways that no graph can hold.

    `device` and `backend` are those of all ranks; see `devices.DeviceChoice`.
    """
    if args.cuda_graph_impl != FULL_ITERATION or args.world_size == 1:
        return
    remedy = "start one process for each GPU (nccl), or one process"
    if device == "cpu":
        raise ValueError(
            f"{FLAG} with {args.world_size} processes on CPUs, where a recorded step is one process's "
            f"alone; {remedy}"
        )
    if backend != "nccl":
        raise ValueError(
            f"{FLAG} with {args.world_size} processes over {backend}, whose messages go through the "
            f"memory of the CPU, past any graph; {remedy}"
        )


# -- Each yields (what was asked for, why that cannot be, what to do) --

Refusals = Iterator[tuple[str, str, str]]


def _reads_numbers(args: argparse.Namespace) -> Refusals:
    if args.check_for_nan_in_loss_and_grad:
        reason = "reads numbers of each microbatch"
        yield "the check for NaN", reason, "add --no-check-for-nan-in-loss-and-grad"
    if args.check_for_spiky_loss:
        yield "--check-for-spiky-loss", "reads each microbatch's loss", "drop it"
    if args.num_experts is not None:
        given = f"--num-experts {args.num_experts}"
        yield given, "has sizes that depend on the tokens", "drop it"
    reason = "exchanges states of the random generator"
    if args.attention_dropout > 0:
        given = f"--attention-dropout {args.attention_dropout}"
        yield given, reason, "give 0"
    if args.hidden_dropout > 0 and args.sequence_parallel:
        given = f"--hidden-dropout {args.hidden_dropout} and --sequence-parallel"
        yield given, reason, "give --hidden-dropout 0"
    if args.recompute_granularity is not None:
        given = f"--recompute-granularity {args.recompute_granularity}"
        yield given, "puts the random generator back to where it was", "drop it"
    if args.empty_unused_memory_level:
        given = f"--empty-unused-memory-level {args.empty_unused_memory_level}"
        yield given, "gives memory back that the graph uses", "give 0"


def _acts_in_python(args: argparse.Namespace) -> Refusals:
    """A replay does nothing in Python."""
    if args.fp16 and args.loss_scale is None:
        reason = "changes, while a graph keeps the number that it was"
        yield "the loss scale of --fp16", reason, "give --loss-scale and a number, or use --bf16"
    if args.rampup_batch_size is not None:
        sizes = " ".join(map(str, args.rampup_batch_size))
        reason = "changes the number of microbatches, of which a graph has one"
        yield f"--rampup-batch-size {sizes}", reason, "drop it"
    if args.overlap_param_gather:
        reason = "launches messages from the optimizer and waits for them in a forward"
        yield "--overlap-param-gather", reason, "drop it"
    if args.DDP_impl == "torch":
        reason = "counts gradients in each backward"
        yield "--DDP-impl torch", reason, "use --DDP-impl local"
    if args.mtp_num_layers is not None:
        reason = "counts its losses for the log in each step"
        yield f"--mtp-num-layers {args.mtp_num_layers}", reason, "drop it"
    if args.rerun_mode != "disabled":
        reason = "looks at each result as it arises"
        yield f"--rerun-mode {args.rerun_mode}", reason, "give --rerun-mode disabled"
    watching = "sees no call of a replayed step"
    if args.timing_log_level > 0:
        given = f"--timing-log-level {args.timing_log_level}"
        yield given, watching, "give 0"
    if args.log_straggler:
        yield "--log-straggler", watching, "drop it"
    for name in ("trace", "pace_forward_ms"):
        if vars(args)[name] is not None:
            yield f"--{name.replace('_', '-')} {vars(args)[name]}", watching, "drop it"


def _unshown(args: argparse.Namespace) -> Refusals:
    reason = "sends messages that nobody has yet shown in a graph here"
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        if vars(args)[name] > 1:
            yield f"--{name.replace('_', '-')} {vars(args)[name]}", reason, "give 1"
