"""The flags of `train_rl`, and what is refused before any process group exists.

Counterpart: the group "rl" of `megatron.training.arguments`, whose names and defaults these are, unless
the help says otherwise.
"""

import argparse
import math
from typing import Any

from minimegatron.rl.tasks import Task, load_task
from minimegatron.training.checkpoint_args import load_common
from minimegatron.training.checkpoint_folder import find_checkpoint

FLAGS: dict[str, tuple[Any, Any, str]] = {
    "--grpo-prompts-per-step": (int, 32, "prompts of one rollout"),
    "--grpo-group-size": (int, 2, "answers to each prompt, which are compared with each other"),
    "--grpo-iterations": (int, 2, "how often each rollout is learned from"),
    "--grpo-clamp-eps-lower": (float, 0.01, "how far below 1 a token's ratio is still followed"),
    "--grpo-clamp-eps-upper": (float, 0.01, "how far above 1 it is"),
    "--grpo-kl-beta": (float, 0.001, "weight of the distance to the model training began with"),
    "--grpo-entropy-term-weight": (float, 0.0, "weight of the entropy"),
    "--rl-default-temperature": (float, 1.0, "logits are divided by it, drawing and learning"),
    "--rl-importance-sampling-truncation-coef": (
        float,
        None,
        "with --rl-inference-logprobs-is-correction, the largest weight of a token",
    ),
    "--rl-task": (
        str,
        "sort_digits",
        "what is rewarded: a name, or FILE.py:FUNCTION that returns a Task (no Megatron flag)",
    ),
}
SWITCHES = {
    "--grpo-filter-groups-with-same-reward": "do not learn from a group whose answers are equally good",
    "--rl-inference-logprobs-is-correction": "weight tokens by exp(old - sampling log-probability)",
    "--rl-shuffle-rewards": "deal each rollout's rewards out by lot: a control, which must learn "
    "nothing (no Megatron flag)",
}


def add_rl_arguments(parser: argparse.ArgumentParser) -> None:
    """The `extra_args_provider` of `train_rl`; what is wrong with the values, `check_rl_arguments`
    says."""
    group = parser.add_argument_group("Reinforcement learning")
    for flag, (kind, default, words) in FLAGS.items():
        group.add_argument(flag, type=kind, default=default, help=words)
    for flag, words in SWITCHES.items():
        group.add_argument(flag, action="store_true", help=words)
    parser.checks.append(check_rl_arguments)


def check_rl_arguments(args: Any) -> None:
    """Raises ValueError, with the flags, the numbers and the remedy, for what cannot be trained."""
    _check_numbers(args)
    _check_rows(args)
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(args, name) > 0:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} is {getattr(args, name)}, but scores are computed without dropout: ratios "
                f"would not begin at 1; give {flag} 0"
            )
    if args.mtp_num_layers is not None:
        raise ValueError(
            f"--mtp-num-layers is {args.mtp_num_layers}, but a policy's loss has no further tokens; "
            "drop it"
        )
    if args.overlap_moe_expert_parallel_comm:
        raise ValueError(
            "--overlap-moe-expert-parallel-comm needs a forward step that returns a plan, and "
            "train_rl's has none; drop it"
        )
    if args.cuda_graph_impl != "none":
        raise ValueError(
            f"--cuda-graph-impl {args.cuda_graph_impl} captures one kind of forward without a "
            "backward, and a rollout has several, which draw and which score; drop it"
        )
    if args.data_path is not None:
        raise ValueError("--data-path is given, but the model writes its own data here; drop it")
    _check_task(args, load_task(args.rl_task))
    _check_checkpoint(args)


def _check_numbers(args: Any) -> None:
    limits = {
        "grpo_prompts_per_step": (args.grpo_prompts_per_step >= 1, "1 or more"),
        "grpo_iterations": (args.grpo_iterations >= 1, "1 or more"),
        "grpo_clamp_eps_lower": (0 <= args.grpo_clamp_eps_lower < 1, "0 or more, below 1"),
        "grpo_clamp_eps_upper": (args.grpo_clamp_eps_upper >= 0, "0 or more"),
        "grpo_kl_beta": (args.grpo_kl_beta >= 0, "0 or more"),
    }
    for name, (is_allowed, words) in limits.items():
        value = getattr(args, name)
        if not (is_allowed and math.isfinite(value)):
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give {words}")
    if not math.isfinite(args.grpo_entropy_term_weight):
        raise ValueError("--grpo-entropy-term-weight is not finite; give a number")
    if args.grpo_group_size < 2:
        raise ValueError(
            f"--grpo-group-size is {args.grpo_group_size}, but an answer is compared with others to "
            "the same prompt; give 2 or more"
        )
    temperature = args.rl_default_temperature
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"--rl-default-temperature is {temperature}, and logits are divided by it; give a number "
            "above 0, such as 0.01 for answers that hardly vary"
        )
    largest = args.rl_importance_sampling_truncation_coef
    if largest is not None and not largest > 0:
        raise ValueError(
            f"--rl-importance-sampling-truncation-coef is {largest}; give more than 0, or drop it"
        )
    if largest is not None and not args.rl_inference_logprobs_is_correction:
        raise ValueError(
            f"--rl-importance-sampling-truncation-coef {largest} bounds weights that are not asked "
            "for; add --rl-inference-logprobs-is-correction, or drop it"
        )


def _check_rows(args: Any) -> None:
    if args.rampup_batch_size is not None:
        raise ValueError(
            "--rampup-batch-size changes the global batch, but each rollout is cut into batches of "
            "one size; drop it"
        )
    rows = args.grpo_prompts_per_step * args.grpo_group_size
    if rows % args.global_batch_size:
        raise ValueError(
            f"--grpo-prompts-per-step {args.grpo_prompts_per_step} x --grpo-group-size "
            f"{args.grpo_group_size} = {rows} rows do not divide into batches of --global-batch-size "
            f"{args.global_batch_size}; give a global batch size that divides {rows}"
        )


def _check_task(args: Any, task: Task) -> None:
    name = f"--rl-task {args.rl_task}"
    if task.answer_length < 1 or not task.prompts:
        raise ValueError(
            f"{name} has {len(task.prompts)} prompts and answers of {task.answer_length} tokens; there "
            "must be 1 of both at least"
        )
    everything = [*task.prompts, *task.held_out]
    shortest, longest = (f(everything, key=len) for f in (min, max))
    if not shortest:
        raise ValueError(f"{name} has a prompt without a token; begin it with one")
    if len(longest) + task.answer_length > args.seq_length:
        raise ValueError(
            f"{name} has a prompt of {len(longest)} tokens and answers of {task.answer_length}, more "
            f"than --seq-length {args.seq_length}; give {len(longest) + task.answer_length} or more"
        )
    largest = max(task.end, *(token for prompt in everything for token in prompt))
    if max(largest + 1, task.vocab_size) > args.unpadded_vocab_size:
        raise ValueError(
            f"{name} has {max(largest + 1, task.vocab_size)} tokens, but the tokenizer "
            f"{args.unpadded_vocab_size}; with --tokenizer-type NullTokenizer, give --vocab-size "
            f"{max(largest + 1, task.vocab_size) - 1} or more (it adds one)"
        )


SHAPES = ("grpo_prompts_per_step", "grpo_group_size", "global_batch_size", "seq_length", "rl_task")
"""A rollout that a checkpoint holds was made with these."""


def _check_checkpoint(args: Any) -> None:
    """Whoever goes on within a rollout learns from the one that the checkpoint holds."""
    folder = None if args.load is None or args.finetune else find_checkpoint(args.load)
    if folder is None:
        return
    sections = load_common(folder)["args"].values()
    saved = {name: value for section in sections for name, value in section.items()}
    for name in SHAPES:
        if name in saved and saved[name] != getattr(args, name):
            raise ValueError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}, but {saved[name]} in {folder}, "
                f"which holds rows of a rollout; use {saved[name]}, or --finetune to begin at "
                "iteration 0 with its weights"
            )
