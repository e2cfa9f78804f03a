"""Train a GPT by rewards: GRPO, the file a learner copies and edits.

It calls `pretrain` as `pretrain_gpt` does, with another forward step, and with a hook that makes the
data: answers of the model itself. Counterpart: `train_rl.py` at the top of Megatron-LM.

The functions come in this order: the model, the loss, one microbatch, the run.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from minimegatron import pretrain_gpt
from minimegatron.core.enums import ModelType
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.straggler_detector import StragglerDetector
from minimegatron.core.utils import get_attr_wrapped_model, or_one
from minimegatron.rl.grpo_data import GrpoData
from minimegatron.rl.rl_arguments import add_rl_arguments
from minimegatron.rl.rl_utils import calculate_grpo_loss, get_logprobs
from minimegatron.training.global_vars import get_args, get_timers
from minimegatron.training.result_checks import check_loss
from minimegatron.training.training import pretrain
from minimegatron.training.utils import print_rank_0

stimer = StragglerDetector()

DEFAULTS = {
    "model_family": "gpt",
    # Tokens are numbers: few of them, for the model begins by drawing from all alike. Whoever wants
    # another tokenizer takes both lines out of a copy of this file.
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 7,
    "make_vocab_size_divisible_by": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "eval_iters": 0,
    # Each token of a step weighs the same, in however many microbatches and copies it lies.
    "calculate_per_token_loss": True,
}


def model_provider(
    rollouts: GrpoData,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> GPTModel:
    """One chunk of a GPT; it tells `rollouts` to log lines and checkpoints."""
    chunk = pretrain_gpt.model_provider(pre_process, post_process, vp_stage)
    rollouts.attach(chunk)
    return chunk


def train_valid_test_datasets_provider(train_val_test_num_samples: Sequence[int]) -> tuple:
    """No data sets: the model writes what it learns from."""
    return None, None, None


def loss_func(
    loss_mask: torch.Tensor,
    logged: dict[str, torch.Tensor],
    output_tensor: torch.Tensor,
    model: torch.nn.Module | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one microbatch, on the last stage.

    Args:
        loss_mask: [b, s - 1], 1 for tokens of an answer, 0 for others and for padding.
        logged: by name, [b, s - 1] each; their means over tokens are shown.
        output_tensor: the loss of each token, [b, s - 1].
        model: the chunk that computed them; a bad loss is reported with its microbatch.

    Returns the summed loss, the number of tokens, and pairs [sum, number of tokens] to be logged. A
    microbatch without a token counts 0 tokens. (Megatron counts 1, and with it the step's mean is too
    small.) Source: Megatron's `train_rl.loss_func`.
    """
    num_tokens = loss_mask.sum().detach()
    loss = (output_tensor * loss_mask).sum()
    check_loss(loss.detach() / or_one(num_tokens), model)
    report = {
        name: torch.stack([(values.detach() * loss_mask).sum(), num_tokens])
        for name, values in {"lm loss": output_tensor, **logged}.items()
    }
    return loss, num_tokens, report


def forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    """One microbatch through one chunk. On the last one its output is the loss of each token."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        tokens, advantages, old, loss_mask, position_ids, ref, inference = next(data_iterator)
    timers("batch-generator").stop()

    with stimer:
        output_tensor, logged = get_logprobs(model, tokens, position_ids), {}
    if get_attr_wrapped_model(model, "post_process"):
        args = get_args()
        output_tensor, *found = calculate_grpo_loss(
            current_logprobs=output_tensor,
            old_logprobs=old,
            ref_logprobs=ref,
            advantages=advantages,
            clamp_eps_lower=args.grpo_clamp_eps_lower,
            clamp_eps_upper=args.grpo_clamp_eps_upper,
            kl_beta=args.grpo_kl_beta,
            entropy_weight=args.grpo_entropy_term_weight,
            inference_logprobs=inference if args.rl_inference_logprobs_is_correction else None,
            is_truncation_coef=args.rl_importance_sampling_truncation_coef,
        )
        logged = dict(zip(LOGGED, found, strict=True))
    # The first token of a row was not predicted.
    return output_tensor, partial(loss_func, loss_mask[:, 1:], logged, model=model)


LOGGED = (
    "rl/kl_term",
    "rl/pi_over_pi_old",
    "rl/entropy_term",
    "rl/truncated_from_above",
    "rl/truncated_from_below",
)
"""What `calculate_grpo_loss` returns after the loss, under Megatron's names."""


def main() -> None:
    """The whole run."""
    rollouts = GrpoData()
    pretrain(
        train_valid_test_datasets_provider,
        partial(model_provider, rollouts),
        ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=add_rl_arguments,
        args_defaults=DEFAULTS,
        get_embedding_ranks=pretrain_gpt.get_embedding_ranks,
        data_iterator_func=rollouts,
    )
    print_rank_0(rollouts.summary())


if __name__ == "__main__":
    main()
