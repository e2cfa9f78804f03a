"""Arguments that texts about Megatron name and that this package does not have: what to do instead.

Megatron has no counterpart. Who types a flag of an older text, or reads such an argument, learns what
it did and what does that today; the nearest flag by spelling would be a wrong guess. Torch-free.

Three flags are taken and change nothing here, because what they ask for is always so:

    --local-rank N          added by `python -m torch.distributed.launch`; the environment says the same
    --data-impl mmap        indexed datasets were once read in several ways; this one is left
    --exit-signal-handler   SIGTERM saves and ends a run, with or without it
"""

import argparse
from typing import Any

OLDER_ARGUMENTS = {
    # -- Recompute, as it was called before 2022 --
    "activations_checkpoint_method": (
        "it chose the layers whose activations are computed again; today --recompute-granularity full "
        "with --recompute-method and --recompute-num-layers"
    ),
    "activations_checkpoint_num_layers": (
        "it was the number of layers that are computed again as one; today --recompute-num-layers"
    ),
    "checkpoint_activations": "it computed activations again; today --recompute-granularity full",
    "distribute_checkpointed_activations": (
        "it divided kept activations over tensor ranks; today --sequence-parallel does, for all of them"
    ),
    # -- Gradients --
    "use_contiguous_buffers_in_local_ddp": (
        "gradients lie in contiguous buffers always, so drop it"
    ),
    "no_contiguous_buffers_in_local_ddp": (
        "gradients lie in contiguous buffers always, so drop it"
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": "it is for weights in FP8, which are not here; drop it",
    # -- Precision and kernels --
    "fp16_lm_cross_entropy": "the loss is computed in float32 always, so drop it",
    "fp32_residual_connection": "the residual sum has the type of the activations; drop it",
    "no_persist_layer_norm": (
        "it chose a kernel of the layer norm; here torch chooses, so drop it"
    ),
    "layernorm_epsilon": "today --norm-epsilon",
    # -- Starting --
    "use_cpu_initialization": (
        "initial weights are the same numbers on every device and for every cut, so drop it"
    ),
    "lazy_mpu_init": (
        "it left the process groups to the caller; today initialize torch.distributed before "
        "initialize_megatron, which then uses it"
    ),
    "adlr_autoresume": (
        "it asked NVIDIA's scheduler when to end; today --exit-duration-in-mins, or SIGTERM: both save"
    ),
    "adlr_autoresume_interval": (
        "it asked NVIDIA's scheduler when to end; today --exit-duration-in-mins, or SIGTERM: both save"
    ),
    "straggler_ctrlr_port": (
        "it let anybody who can reach the machine turn --log-straggler on and off; no port is opened "
        "here, so drop it, and call stimer.configure in the program"
    ),
    "use_legacy_models": "the models before core are not here; drop it",
    "model_type": "give it to pretrain, as its third argument",
    # -- Data --
    "mmap_warmup": "it read data files once, to have them in memory; the system does that, so drop it",
    # -- Other programs --
    "vision_pretraining": "models of pictures are not here; drop it",
    "vision_pretraining_type": "models of pictures are not here; drop it",
}
"""Name -> what it did, and what to do. Flags have dashes in place of the underscores."""

VALUES = {
    "adlr_autoresume": False,
    "activations_checkpoint_method": None,
    "activations_checkpoint_num_layers": None,
    "data_impl": "mmap",
    "distribute_checkpointed_activations": False,
    "exit_signal_handler": True,
    "fp16_lm_cross_entropy": False,
    "fp32_residual_connection": False,
    "lazy_mpu_init": False,
    "mmap_warmup": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "straggler_ctrlr_port": 65535,
    "use_contiguous_buffers_in_local_ddp": True,
    "use_cpu_initialization": False,
    "use_legacy_models": False,
    "vision_pretraining": False,
}
"""What `get_args()` says of some that programs ask, where no flag was given: how it is here."""

RENAMED = {
    "--virtual-pipeline-model-parallel-size": "today --num-virtual-stages-per-pipeline-rank",
}
"""Flags that are the names of other flags' arguments."""


def advice_for(flag: str) -> str | None:
    """What `OLDER_ARGUMENTS` says of a flag.

    >>> advice_for("--layernorm-epsilon"), advice_for("--no-such-flag")
    ('today --norm-epsilon', None)
    """
    flag = flag.split("=")[0]
    return RENAMED.get(flag) or OLDER_ARGUMENTS.get(flag.removeprefix("--").replace("-", "_"))


# -- Flags that change nothing --


def add_old_flags(parser: argparse.ArgumentParser) -> None:
    """All three. The arguments hold them where a script gives them, and only there."""
    group = parser.add_argument_group("Flags that change nothing here")
    group.add_argument(
        "--local-rank",
        "--local_rank",
        dest="given_local_rank",
        type=int,
        default=argparse.SUPPRESS,
        help="This process, of those on this machine; LOCAL_RANK in the environment says it too.",
    )
    group.add_argument(
        "--data-impl", default=argparse.SUPPRESS, help="How to read indexed datasets: mmap."
    )
    group.add_argument(
        "--exit-signal-handler",
        action="store_true",
        default=argparse.SUPPRESS,
        help="Save and end on SIGTERM, which is always done.",
    )


def check_old_flags(args: argparse.Namespace) -> None:
    """Raises ValueError, with the remedy, for a value that would change something."""
    given = vars(args)
    if given.get("given_local_rank", args.local_rank) != args.local_rank:
        raise ValueError(
            f"--local-rank is {args.given_local_rank}, but LOCAL_RANK is {args.local_rank} in the "
            "environment; drop it, the launcher says both"
        )
    if given.get("data_impl", "mmap") != "mmap":
        raise ValueError(
            f"--data-impl {args.data_impl} is not there any more; drop it, or give mmap: indexed "
            "datasets are mapped into memory"
        )


def print_old_flags(args: Any) -> None:
    """A line for each flag that was given."""
    if "given_local_rank" in args.extra:
        print("--local-rank: taken from LOCAL_RANK in the environment, which says the same")
    if "data_impl" in args.extra:
        print("--data-impl mmap: the only way to read indexed datasets, with or without this flag")
    if "exit_signal_handler" in args.extra:
        print("--exit-signal-handler: SIGTERM saves and ends a run, with or without this flag")
