"""The command line, read once: flags and launcher's environment in, frozen dataclasses out.

It runs before anything else. Counterpart: `megatron.training.arguments`. After this, nothing reads
`sys.argv` again; of the environment, only the launcher's variables are read.
"""

import argparse
import bisect
import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core import activations
from minimegatron.core.distributed.distributed_data_parallel import gradient_scaling_factor
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.knobs import Knob
from minimegatron.core.left_out_record import known_fields
from minimegatron.core.optimizer import OptimizerConfig
from minimegatron.core.orders import orders
from minimegatron.core.subject_fields import enter_hooks
from minimegatron.core.transformer import pipeline_parallel_layer_layout
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training import captured_step, checkpoint_args, params_norm
from minimegatron.training.argument_checks import (
    CHECKS,
    batch_sizes,
    check_backend,
    check_fields,
    check_world,
)
from minimegatron.training.argument_utils import (
    ArgumentGroupFactory,
    OneLineParser,
    in_flags,
    refuse_unknown,
)
from minimegatron.training.config import SECTIONS, Arguments
from minimegatron.training.devices import give_memory_back
from minimegatron.training.families import check_family
from minimegatron.training.function_checks import check_args_provider
from minimegatron.training.older_arguments import add_old_flags, check_old_flags, print_old_flags
from minimegatron.training.pipeline_schedule import registered_name
from minimegatron.training.schedule_args import samples_in
from minimegatron.training.tokenizer.tokenizer import build_tokenizer, vocab_size_with_padding


def parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
    *,
    args_defaults: Mapping[str, Any] | None = None,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Arguments:
    """Everything the run is told, checked.

    `extra_args_provider(parser)` adds the user's own flags, and may append to `parser.checks` functions
    `(args)` that raise ValueError for values that cannot work; `args_defaults` replaces defaults, and
    flags replace both. `argv` and `environ` stand in for the process's own. Raises ValueError, with
    one line that names the flags, the numbers and the remedy, for what cannot work. In Megatron,
    checking is a second call, and the defaults are its.
    """
    parser = _build_parser(extra_args_provider, args_defaults or {})
    args, unknown = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    refuse_unknown(unknown, parser)
    _read_launcher(args, os.environ if environ is None else environ)
    check_old_flags(args)
    complete = validate_args(args)
    for check in parser.checks:
        check(complete)
    if complete.rank == 0:
        print_old_flags(complete)
    return complete


def validate_args(args: Arguments | argparse.Namespace) -> Arguments:
    """The arguments, completed and checked; what `parse_args` returned is, and comes back as it is.

    Raises ValueError as `parse_args` does. In Megatron `args` itself changes; ours are frozen.
    """
    if isinstance(args, Arguments):
        return args
    try:
        check_fields(args)
        check_world(args)
        check_backend(args)
        derive(args)
        config = core_transformer_config_from_args(args)
        check_family(args, config)
        for check in CHECKS:
            check(args)
        # What `core` would refuse only when processes are running and the model is built.
        optimizer_config_from_args(args)
        gradient_scaling_factor(config, ddp_config_from_args(args), args.data_parallel_size)
    except ValueError as error:
        raise ValueError(in_flags(str(error))) from None
    return _freeze(args)


def _build_parser(
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None,
    args_defaults: Mapping[str, Any],
) -> OneLineParser:
    parser = OneLineParser(description="minimegatron arguments", allow_abbrev=False)
    for config in SECTIONS.values():
        ArgumentGroupFactory(config).build_group(parser)
    add_old_flags(parser)
    check_args_provider(extra_args_provider)
    if extra_args_provider is not None:
        extra_args_provider(parser)
    known = {action.dest for action in parser._actions} | {"model_family"}
    parser.set_defaults(model_family=None)
    parser.set_defaults(**known_fields(Arguments, args_defaults, also=known))
    return parser


def _read_launcher(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """What torchrun tells each process; a process started alone is rank 0 of 1."""
    for name, default in (
        ("RANK", 0),
        ("WORLD_SIZE", 1),
        ("LOCAL_RANK", 0),
        ("LOCAL_WORLD_SIZE", 1),
    ):
        value = environ.get(name, str(default))
        if not value.isdecimal():
            raise ValueError(f"{name} is {value!r} in the environment; start with torchrun")
        setattr(args, name.lower(), int(value))


def derive(args: argparse.Namespace) -> None:
    """Fills in what follows from other arguments, in place. Raises ValueError where it cannot."""
    t, p = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    args.data_parallel_size = args.world_size // (t * p * args.context_parallel_size)
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    args.train_iters = _train_iters(args)
    if args.ffn_hidden_size is None:
        # SwiGLU has three matrices where GELU has two: two thirds of the width keep the size.
        wide = 4 * args.hidden_size
        args.ffn_hidden_size = max(wide * 2 // 3 // 64 * 64, 64) if args.swiglu else wide
    if isinstance(args.moe_layer_freq, list) and len(args.moe_layer_freq) == 1:
        (args.moe_layer_freq,) = args.moe_layer_freq
    if args.bf16:
        args.accumulate_allreduce_grads_in_fp32 = True
    if args.fp16 and args.loss_scale is None:
        # A dynamic loss scale finds its size by overflowing.
        args.check_for_nan_in_loss_and_grad = False
    if args.pipeline_schedule is not None:
        args.pipeline_schedule = registered_name(args.pipeline_schedule)
    flags = (args.enable_cuda_graph, args.cuda_graph_impl, args.cuda_graph_scope)
    if flags != (False, "none", None):
        args.cuda_graph_impl = captured_step.graph_impl(args)
    args.virtual_pipeline_model_parallel_size = _num_chunks(args)
    if args.overlap_p2p_comm is None:
        args.overlap_p2p_comm = args.virtual_pipeline_model_parallel_size is not None
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters
    if args.start_weight_decay is None:
        args.start_weight_decay = args.weight_decay
    if args.end_weight_decay is None:
        args.end_weight_decay = args.weight_decay
    vocab_size = _vocab_size(args)
    args.unpadded_vocab_size = args.padded_vocab_size or vocab_size
    if args.padded_vocab_size is None:
        args.padded_vocab_size = _padded_vocab_size(args, vocab_size)
    if args.padded_vocab_size < vocab_size:
        raise ValueError(
            f"--padded-vocab-size {args.padded_vocab_size} is less than the tokenizer's "
            f"{vocab_size} tokens; give at least that"
        )


def _train_iters(args: argparse.Namespace) -> int:
    """Steps of the run: given as such, or as samples."""
    if args.train_samples is None:
        if args.train_iters is None:
            raise ValueError(
                "--train-iters is missing; give --train-iters and a number, or --train-samples"
            )
        return args.train_iters
    batch_sizes(args)  # raises where the ramp-up cannot be
    fits = bisect.bisect_right(
        range(args.train_samples + 1), args.train_samples, key=partial(samples_in, args)
    )
    if fits == 1:
        raise ValueError(
            f"--train-samples {args.train_samples} is less than one step: its global batch has "
            f"{samples_in(args, 1)} samples; give more, or lower --global-batch-size"
        )
    iterations = fits - 1
    if args.train_iters not in (None, iterations):
        raise ValueError(
            f"--train-iters {args.train_iters} and --train-samples {args.train_samples}, which are "
            f"{iterations} iterations, both say how long to train; give one of them"
        )
    return iterations


def _padded_vocab_size(args: argparse.Namespace, vocab_size: int) -> int:
    """That of the checkpoint where it will do: padded rows are in the softmax, and so in the loss."""
    saved, t = None, args.tensor_model_parallel_size
    if args.load is not None:
        saved = checkpoint_args.saved_padded_vocab_size(args)
    if saved is not None and saved >= vocab_size and saved % t == 0:
        return saved
    return vocab_size_with_padding(vocab_size, args.make_vocab_size_divisible_by, t)


def _vocab_size(args: argparse.Namespace) -> int:
    try:
        return build_tokenizer(args).vocab_size
    except ValueError as error:
        place = "" if args.tokenizer_file is None else f"--tokenizer-file {args.tokenizer_file}: "
        raise ValueError(f"{place}{error}") from None


def _num_chunks(args: argparse.Namespace) -> int | None:
    """Chunks per stage, from whichever of three flags is given, or as the schedule has them.

    None without interleaving.
    """
    p, num_layers = args.pipeline_model_parallel_size, args.num_layers
    chunks, per_chunk, layout = (
        args.num_virtual_stages_per_pipeline_rank,
        args.num_layers_per_virtual_pipeline_stage,
        args.pipeline_model_parallel_layout,
    )
    given = {
        "--num-virtual-stages-per-pipeline-rank": chunks,
        "--num-layers-per-virtual-pipeline-stage": per_chunk,
        "--pipeline-model-parallel-layout": layout,
    }
    given = [f"{flag} {value}" for flag, value in given.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} each say how many chunks there are; keep one")
    if layout is not None:
        chunks = pipeline_parallel_layer_layout.PipelineParallelLayerLayout(
            layout, p
        ).virtual_pipeline_model_parallel_size
    if per_chunk is not None:
        if num_layers % (p * per_chunk):
            raise ValueError(
                f"--num-layers {num_layers} is not divisible by --pipeline-model-parallel-size {p} "
                f"x --num-layers-per-virtual-pipeline-stage {per_chunk} = {p * per_chunk}; "
                f"try --num-layers {max(num_layers // (p * per_chunk), 1) * p * per_chunk}"
            )
        chunks = num_layers // (p * per_chunk)
    if args.pipeline_schedule is not None:
        chunks = _chunks_of_schedule(args.pipeline_schedule, p, chunks)
    # One chunk per stage is plain 1F1B. A flag that asks for chunks without a pipeline is refused.
    return None if chunks == 1 and (p > 1 or layout is not None) else chunks


def _chunks_of_schedule(name: str, p: int, chunks: int | None) -> int | None:
    """`chunks` as given; where nobody says how many, those that the schedule's placement has."""
    try:
        placement = orders.get_schedule(name).placed(p, chunks)
    except ValueError as error:
        raise ValueError(f"--pipeline-schedule {name}: {error}") from None
    if chunks is not None or placement.num_model_chunks == 1:
        return chunks
    if p == 1:
        raise ValueError(
            f"--pipeline-schedule {name} has {placement.num_model_chunks} chunks per stage, which "
            "need a pipeline, but --pipeline-model-parallel-size is 1; use 2 or more"
        )
    return placement.num_model_chunks


def _freeze(args: argparse.Namespace) -> Arguments:
    values, sections = dict(args.__dict__), {}
    for section, config in SECTIONS.items():
        names = [field.name for field in dataclasses.fields(config)]
        sections[section] = config(**{name: values.pop(name) for name in names})
    return Arguments(**sections, extra=values)


_made_configs: dict[type, tuple[dict[str, Any], Any]] = {}
"""Class -> what its latest configuration was made of, and that configuration, as it was made."""


def core_transformer_config_from_args(
    args: Arguments | argparse.Namespace, config_class: type = TransformerConfig
) -> Any:
    """The model's configuration for `core`. Raises ValueError for sizes that do not fit together.

    Spelled out is what follows from several arguments. Each call returns a configuration of its own,
    so that a program may change it. All are copies of one, which is made and checked once, as long as
    the arguments stay as they are.
    """
    dtype = params_dtype(args)
    spelled_out = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "batch_p2p_comm": not args.overlap_p2p_comm,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "activation_func": _activation_func(args),
    }
    values = _values_from_args(args, config_class) | spelled_out
    made = _made_configs.get(config_class)
    if made is None or made[0] != values:
        known = {name: list(x) if isinstance(x, list) else x for name, x in values.items()}
        made = _made_configs[config_class] = (known, config_class(**values))
    config = copy.copy(made[1])
    enter_hooks(
        config, args.log_params_norm, lambda: {"log_funcs": (params_norm.describe_params_norm,)}
    )
    level = args.empty_unused_memory_level
    enter_hooks(config, level >= 1, lambda: {"after_grads_funcs": (give_memory_back,)})
    # After an update is before the next step.
    enter_hooks(config, level >= 2, lambda: {"before_step_funcs": (give_memory_back,)})
    return config


def _values_from_args(args: Arguments | argparse.Namespace, config_class: type) -> dict[str, Any]:
    """The values of all fields of `config_class` that are arguments, under the fields' names.

    A field without a section of its own may be an argument too: of another configuration, as `fp16`
    is, or the user's. Raises AttributeError for a field that has a section but no argument.
    """
    values = {}
    for field in dataclasses.fields(config_class):
        about = field.metadata.get("knob", Knob())
        if about.section or hasattr(args, field.name):
            values[field.name] = getattr(args, about.dest or field.name)
    return values


def _activation_func(args: Arguments | argparse.Namespace) -> Callable:
    if args.openai_gelu:  # with --swiglu too: the gate of T5's later versions
        return activations.fast_gelu
    return F.silu if args.swiglu else F.gelu


def optimizer_config_from_args(args: Arguments | argparse.Namespace) -> OptimizerConfig:
    """The optimizer's configuration for `core`. Raises ValueError for what excludes itself."""
    values = _values_from_args(args, OptimizerConfig)
    return OptimizerConfig(**(values | {"params_dtype": params_dtype(args)}))


def ddp_config_from_args(args: Arguments | argparse.Namespace) -> DistributedDataParallelConfig:
    """The same for gradients over data-parallel ranks."""
    values = _values_from_args(args, DistributedDataParallelConfig)
    return DistributedDataParallelConfig(**values)


def params_dtype(args: Arguments | argparse.Namespace) -> torch.dtype:
    """dtype of the model's weights."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32
