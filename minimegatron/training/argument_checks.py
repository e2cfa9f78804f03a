"""What cannot work is refused here, before any process group exists.

Every rank makes the same checks, with the same answer. It uses the checks that `core` makes anyway,
so that each rule is written once. Counterpart: `validate_args` of `megatron.training.arguments`.

Every check raises ValueError with one sentence: the flags, the numbers, what to change.
"""

import argparse
import dataclasses
import importlib.util
import math
import os
import tempfile
import typing

import torch

from minimegatron.core.knobs import check_limits
from minimegatron.core.pipeline_parallel.interleaving_checks import check_interleaving
from minimegatron.core.rerun.states import ResultTracker
from minimegatron.core.transformer.layer_placement import layers_of_virtual_stages
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training import captured_step, checkpoint_args, checkpoint_folder
from minimegatron.training.argument_utils import flag_name, flags_by_name
from minimegatron.training.config import SECTIONS
from minimegatron.training.pipeline_schedule import (
    check_order,
    is_interleaved,
    smallest_of_order,
)
from minimegatron.training.schedule_args import check_schedule

TOO_MANY = 2**31
"""Of anything: it would only overflow somewhere below."""


def check_fields(args: argparse.Namespace) -> None:
    """Every field by itself: required ones are there, numbers are within their limits."""
    for config in SECTIONS.values():
        for field in dataclasses.fields(config):
            if field.metadata["knob"].is_derived:
                continue
            value, name = args.__dict__[field.name], flag_name(field)
            if value is None:
                if field.metadata["knob"].required:
                    raise ValueError(f"{name} is missing; give {name} and a number")
                continue
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int) and abs(number) >= TOO_MANY:
                    raise ValueError(f"{name} is {number}; give less than {TOO_MANY}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} is {value}; give a finite number")
            check_limits(name, value, field.metadata["knob"])


def check_world(args: argparse.Namespace) -> None:
    """The ranks divide into model copies."""
    t, p, world = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.world_size,
    )
    c = args.context_parallel_size
    if not 0 <= args.rank < world:
        raise ValueError(f"RANK is {args.rank}, but WORLD_SIZE is {world}; start with torchrun")
    if world % (t * c * p):
        context = f"--context-parallel-size {c} x " if c > 1 else ""
        raise ValueError(
            f"{world} processes do not divide into models of --tensor-model-parallel-size {t} x "
            f"{context}--pipeline-model-parallel-size {p} = {t * c * p}; start a multiple of "
            f"{t * c * p} processes (torchrun --nproc-per-node {t * c * p}) or change these sizes"
        )
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or t
    if world // p % (ep * etp):
        raise ValueError(
            f"{world} processes over --pipeline-model-parallel-size {p} are {world // p} per stage, "
            f"which do not divide into --expert-model-parallel-size {ep} x "
            f"--expert-tensor-parallel-size {etp} = {ep * etp}; "
            f"start a multiple of {ep * etp * p} processes or change these sizes"
        )
    if args.use_tp_pp_dp_mapping and p > 1 and ep * etp != t * c:
        raise ValueError(
            f"--use-tp-pp-dp-mapping puts the next stage behind the {t * c} ranks of "
            f"--tensor-model-parallel-size {t} x --context-parallel-size {c}, but for experts behind "
            f"{ep * etp} of --expert-model-parallel-size {ep} x --expert-tensor-parallel-size {etp}; "
            "drop --use-tp-pp-dp-mapping, or make these products equal"
        )


def check_batch(args: argparse.Namespace) -> None:
    """The global batch divides into microbatches of every model copy, all along the ramp-up."""
    b, d = args.micro_batch_size, args.data_parallel_size
    for batch in batch_sizes(args):
        if batch % (b * d):
            raise ValueError(
                f"--global-batch-size {batch} is not divisible by --micro-batch-size {b} x "
                f"{d} model copies = {b * d}; try {max(batch // (b * d), 1) * b * d}"
            )


def batch_sizes(args: argparse.Namespace) -> list[int]:
    """Every global batch size of the run, smallest first. Raises ValueError for a bad ramp-up."""
    if args.rampup_batch_size is None:
        return [args.global_batch_size]
    start, step, samples = args.rampup_batch_size
    whole = f"--rampup-batch-size {start} {step} {samples}"
    if min(start, step) < 1 or samples < 0:
        raise ValueError(f"{whole} has a negative or zero part; give start, step and samples")
    if start > args.global_batch_size or (args.global_batch_size - start) % step:
        raise ValueError(
            f"{whole} does not reach --global-batch-size {args.global_batch_size}: "
            f"{args.global_batch_size} - {start} must be a multiple of {step}, and not negative"
        )
    return list(range(start, args.global_batch_size + 1, step))


def check_pipeline(args: argparse.Namespace) -> None:
    """Interleaving and overlap, where there are stages to interleave; microbatches for any order."""
    if args.virtual_pipeline_model_parallel_size is None:
        if args.overlap_p2p_comm:
            raise ValueError(
                "--overlap-p2p-communication needs interleaving; add "
                "--num-virtual-stages-per-pipeline-rank 2 (or more), or drop it"
            )
        if args.microbatch_group_size_per_vp_stage is not None:
            raise ValueError(
                "--microbatch-group-size-per-virtual-pipeline-stage "
                f"{args.microbatch_group_size_per_vp_stage} needs interleaving; add "
                "--num-virtual-stages-per-pipeline-rank 2 (or more), or drop it"
            )
    if is_interleaved(args):
        _check_interleaving(args)
    p, smallest = args.pipeline_model_parallel_size, smallest_of_order(args)
    for batch in batch_sizes(args):
        num_microbatches, count = _count_microbatches(args, batch)
        if num_microbatches < smallest:
            raise ValueError(
                f"{count}, but --pipeline-schedule {args.pipeline_schedule} over "
                f"--pipeline-model-parallel-size {p} needs {smallest} or more; raise the global "
                "batch size or lower the micro batch size"
            )
        check_order(args, num_microbatches)
    if args.sample_tokens:  # the shortest step there is, without backwards
        check_order(args, smallest, forward_only=True)


def _count_microbatches(args: argparse.Namespace, batch: int) -> tuple[int, str]:
    """The number of microbatches in a global batch, and how it comes about."""
    num_microbatches = batch // (args.micro_batch_size * args.data_parallel_size)
    return num_microbatches, (
        f"--global-batch-size {batch} / (--micro-batch-size {args.micro_batch_size} x "
        f"{args.data_parallel_size} model copies) = {num_microbatches} microbatches"
    )


def _check_interleaving(args: argparse.Namespace) -> None:
    p = args.pipeline_model_parallel_size
    if p == 2 and not args.overlap_p2p_comm:
        raise ValueError(
            "interleaving over --pipeline-model-parallel-size 2 sends both ways between the same "
            "two ranks, and one batch of such messages can cross; use --overlap-p2p-communication"
        )
    group = args.microbatch_group_size_per_vp_stage
    for batch in batch_sizes(args):
        num_microbatches, count = _count_microbatches(args, batch)
        if num_microbatches < p:
            raise ValueError(
                f"{count}, but interleaving over --pipeline-model-parallel-size {p} needs {p} or "
                "more; raise the global batch size or lower the micro batch size"
            )
        try:
            check_interleaving(p, num_microbatches, p if group is None else group)
        except ValueError as error:
            raise ValueError(f"{count}: {error}") from None


def check_layers(args: argparse.Namespace, config: TransformerConfig) -> None:
    """Every chunk gets a whole number of layers, and all layers are somewhere."""
    layers_of_virtual_stages(config)
    _check_further_tokens(args)


def _check_further_tokens(args: argparse.Namespace) -> None:
    """The places for further tokens have positions, and sequences are long enough to predict them."""
    num_depths, p = args.mtp_num_layers, args.pipeline_model_parallel_size
    if num_depths is None:
        return
    if args.position_embedding_type == "learned_absolute" and p > 1:
        raise ValueError(
            f"--mtp-num-layers {num_depths} with --pipeline-model-parallel-size {p}: the stage that "
            "predicts further tokens would need a copy of the learned positions; use "
            "--position-embedding-type rope or none, or 1 stage"
        )
    if args.seq_length <= num_depths:
        raise ValueError(
            f"--seq-length {args.seq_length} is too short for --mtp-num-layers {num_depths}: depth "
            f"{num_depths} would have no token to predict; give {num_depths + 1} or more"
        )


def check_model(args: argparse.Namespace) -> None:
    """What `TransformerConfig` does not know: sequences and the vocabulary."""
    t = args.tensor_model_parallel_size
    if args.seq_length > args.max_position_embeddings:
        raise ValueError(
            f"--seq-length {args.seq_length} is more than --max-position-embeddings "
            f"{args.max_position_embeddings}; raise the second to {args.seq_length}"
        )
    c = args.context_parallel_size
    if c > 1 and args.sample_tokens:
        raise ValueError(
            f"--sample-tokens {args.sample_tokens} writes text one token at a time, which "
            f"--context-parallel-size {c} ranks cannot share; give 0, or sample from the checkpoint "
            "with --context-parallel-size 1"
        )
    if c > 1 and args.seq_length % (2 * c):
        raise ValueError(
            f"--seq-length {args.seq_length} is not divisible by 2 x --context-parallel-size {c} = "
            f"{2 * c}, two chunks for each rank; try {args.seq_length // (2 * c) * 2 * c or 2 * c}"
        )
    if args.sequence_parallel and c > 1 and args.seq_length // c % t:
        raise ValueError(
            f"--seq-length {args.seq_length} / --context-parallel-size {c} = {args.seq_length // c} is "
            f"not divisible by --tensor-model-parallel-size {t}, as --sequence-parallel needs; try "
            f"{args.seq_length // (2 * c * t) * 2 * c * t or 2 * c * t}"
        )
    if args.sequence_parallel and args.seq_length % t:
        raise ValueError(
            f"--seq-length {args.seq_length} is not divisible by --tensor-model-parallel-size {t}, "
            f"as --sequence-parallel needs; try {args.seq_length // t * t or t}"
        )
    if args.padded_vocab_size % t:
        raise ValueError(
            f"--padded-vocab-size {args.padded_vocab_size} is not divisible by "
            f"--tensor-model-parallel-size {t}; try {-(-args.padded_vocab_size // t) * t}"
        )
    if args.swiglu and args.openai_gelu and args.model_family != "t5":
        raise ValueError("--swiglu and --openai-gelu are two activation functions; keep one")
    if args.rotary_percent > 1.0:
        raise ValueError(f"--rotary-percent is {args.rotary_percent}; give at most 1.0")
    channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    turned = int(channels * args.rotary_percent)
    if args.position_embedding_type == "rope" and (turned < 2 or turned % 2):
        raise ValueError(
            f"--rotary-percent {args.rotary_percent} of a head's {channels} features (--kv-channels) "
            f"turns {turned}; they are turned in pairs, so make it an even number of 2 or more"
        )


def check_optimizer(args: argparse.Namespace) -> None:
    """Lengths in steps, which the scheduler counts in samples; then what it refuses itself."""
    if args.lr_warmup_iters and args.lr_warmup_fraction is not None:
        raise ValueError("--lr-warmup-iters and --lr-warmup-fraction are both given; keep one")
    if args.train_iters and args.lr_warmup_iters >= args.lr_decay_iters:
        raise ValueError(
            f"--lr-warmup-iters {args.lr_warmup_iters} is not less than the {args.lr_decay_iters} "
            "steps of --lr-decay-iters (by default --train-iters); shorten the warm-up"
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        raise ValueError("--lr-decay-style WSD needs --lr-wsd-decay-iters, the length of its end")
    warmup_iters = args.lr_warmup_iters or int(
        (args.lr_warmup_fraction or 0.0) * args.lr_decay_iters
    )
    most = args.lr_decay_iters - warmup_iters
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters > most:
        raise ValueError(
            f"--lr-wsd-decay-iters {args.lr_wsd_decay_iters} is more than the {most} steps from "
            "warm-up to the end of --lr-decay-iters (by default --train-iters); shorten it"
        )
    check_schedule(args)


def check_gradients(args: argparse.Namespace) -> None:
    """What torch's DistributedDataParallel cannot do; what ours cannot, its configuration knows."""
    if args.DDP_impl == "local":
        return
    for name in (
        "use_distributed_optimizer",
        "overlap_grad_reduce",
        "bf16",
        "fp16",
        "accumulate_allreduce_grads_in_fp32",
        "delay_wgrad_compute",
        "defer_embedding_wgrad_compute",
    ):
        if args.__dict__[name]:
            raise ValueError(
                f"{flags_by_name()[name]} needs Megatron's gradient buffers; use --DDP-impl local"
            )
    if args.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"--DDP-impl torch with --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}: torch's reducer is armed in forward, but the "
            "last backward of a pipeline belongs to an earlier forward; use --DDP-impl local"
        )


def check_folder(flag: str, path: str) -> None:
    """The folder is there or can be made, and takes files."""
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"{flag} {path} takes no files ({error.strerror}); give a writable folder"
        ) from None


def check_checkpoint(args: argparse.Namespace) -> None:
    """The folders to write to take files, the folder to load from exists."""
    if args.save_interval is not None and args.save is None:
        raise ValueError(f"--save-interval {args.save_interval} needs --save and a folder")
    for flag, path in (("--save", args.save), ("--data-cache-path", args.data_cache_path)):
        if path is not None:
            check_folder(flag, path)
    if args.load is None:
        return
    folder = checkpoint_folder.find_checkpoint(args.load)
    if folder is not None:
        checkpoint_args.check_against_checkpoint(args, folder)
    elif args.save is None or os.path.realpath(args.save) != os.path.realpath(args.load):
        # A run that is started again and again saves where it loads; its first start finds nothing.
        raise ValueError(
            f"--load {args.load} holds no checkpoint; drop --load, or give the same folder as "
            "--save to begin there"
        )


def check_tensorboard(args: argparse.Namespace) -> None:
    """Its writer is installed, and the folder takes files."""
    if args.tensorboard_dir is None:
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            f"--tensorboard-dir {args.tensorboard_dir} needs the package tensorboard; "
            "pip install 'minimegatron[tensorboard]', or drop it"
        )
    check_folder("--tensorboard-dir", args.tensorboard_dir)


def _check_trace_lines(args: argparse.Namespace) -> None:
    """The step whose lines are wanted is recorded, and comes."""
    step, first, num_steps = args.trace_lines, args.trace_first_step, args.trace_num_steps
    if step is None:
        return
    # Without a number of steps all are recorded, whichever comes first.
    begin, end = (0, args.train_iters) if num_steps is None else (first, first + num_steps)
    end = min(end, args.train_iters or end)
    if not begin <= step < end:
        raise ValueError(
            f"--trace-lines {step} is no recorded step: with --trace-first-step {first}, "
            f"--trace-num-steps {num_steps} and --train-iters {args.train_iters}, give {begin} to "
            f"{end - 1}"
        )


def check_tracing(args: argparse.Namespace) -> None:
    """Steps to record need a folder, which takes files; a pace has both lengths."""
    if args.trace is None:
        for flag, value in (
            ("--trace-first-step", args.trace_first_step or None),
            ("--trace-num-steps", args.trace_num_steps),
            ("--trace-lines", args.trace_lines),
        ):
            if value is not None:
                raise ValueError(f"{flag} {value} needs --trace and a folder")
    else:
        check_folder("--trace", args.trace)
        if args.trace_first_step >= args.train_iters > 0:
            raise ValueError(
                f"--trace-first-step {args.trace_first_step} is never reached in --train-iters "
                f"{args.train_iters}, counted from 0; give {args.train_iters - 1} or less"
            )
        _check_trace_lines(args)
    for given, other in (("forward", "backward"), ("backward", "forward")):
        if (
            getattr(args, f"pace_{given}_ms") is not None
            and getattr(args, f"pace_{other}_ms") is None
        ):
            raise ValueError(f"--pace-{given}-ms is given without --pace-{other}-ms; give both")
    for name in ("attention", "mlp", "all_to_all", "ring_block", "ring_hop"):
        if getattr(args, f"pace_{name}_ms") is not None and args.pace_forward_ms is None:
            raise ValueError(
                f"--pace-{name.replace('_', '-')}-ms is given without --pace-forward-ms; give it, and "
                "--pace-backward-ms, for what else a step computes"
            )


def check_reruns(args: argparse.Namespace) -> None:
    """Raises ValueError, with the remedy, for the first flag that would do nothing."""
    wrong = [number for number in args.iterations_to_skip or () if number < 1]
    if wrong:
        raise ValueError(f"--iterations-to-skip is {wrong[0]}; give 1 or more: 1 is the first")
    if args.error_injection_rate and args.rerun_mode != "validate_results":
        raise ValueError(
            f"--error-injection-rate {args.error_injection_rate} with --rerun-mode "
            f"{args.rerun_mode}, in which no step is run again for a bad result; add --rerun-mode "
            "validate_results"
        )
    if args.error_injection_type != "transient_error" and not args.error_injection_rate:
        raise ValueError(
            f"--error-injection-type {args.error_injection_type} without --error-injection-rate, so "
            "nothing is injected; add --error-injection-rate 1000, or another rate"
        )
    ResultTracker(args.result_rejected_tracker_filename)  # raises where it cannot be appended to


def _check_stragglers(args: argparse.Namespace) -> None:
    """What the detector times is a forward that runs in one piece."""
    if args.log_straggler and args.overlap_moe_expert_parallel_comm:
        raise ValueError(
            "--log-straggler times forwards, and with --overlap-moe-expert-parallel-comm a forward "
            "runs in pieces beside a backward; drop one of them"
        )


def check_backend(args: argparse.Namespace) -> None:
    """NCCL and --device cuda need GPUs. Which rank has which is found out where the ranks meet
    (`devices`); here is what one process can tell for all of its machine."""
    needs = [("--distributed-backend nccl", "nccl"), ("--device cuda", "cuda")]
    asked = [name for name, value in needs if value in (args.distributed_backend, args.device)]
    if args.device == "cpu" and args.distributed_backend == "nccl":
        raise ValueError(
            "--distributed-backend nccl moves tensors between GPUs, but --device is cpu; use gloo"
        )
    if asked and args.world_size == args.local_world_size and torch.cuda.device_count() == 0:
        raise ValueError(
            f"{asked[0]} needs a GPU for each of the {args.world_size} processes, but torch sees "
            "none here; use --distributed-backend gloo and --device cpu, or leave both out"
        )


def _check_graph(args: argparse.Namespace) -> None:
    if args.cuda_graph_impl != "none":
        captured_step.check_graph(args)


CHECKS: tuple[typing.Callable[[argparse.Namespace], None], ...] = (
    check_model,
    check_batch,
    check_pipeline,
    check_optimizer,
    check_gradients,
    check_checkpoint,
    check_tensorboard,
    check_tracing,
    _check_graph,
    check_reruns,
    _check_stragglers,
)
"""In this order, once `check_fields`, `check_world` and the derived values are done."""
