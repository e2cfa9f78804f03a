"""A GPT's step by rewards, for `gpt_step`: rows that were answered and scored, and GRPO's loss.

Megatron has no counterpart.
"""

from collections.abc import Iterator
from functools import partial

import torch

from minimegatron.core.utils import get_attr_wrapped_model
from minimegatron.exercises.bench.family_steps import Batch, sum_of_losses
from minimegatron.exercises.bench.step_case import MICRO_BATCH, SEQ, VOCAB
from minimegatron.rl import rl_utils

EPSILON, BETA, CAP = 0.2, 0.1, 1.2


def policy_batches(seed: int, num: int) -> list[Batch]:
    """Rows whose probabilities have moved to either side of both bounds, with good and bad answers."""
    generator = torch.Generator().manual_seed(seed + 17)
    found = []
    for i in range(num):
        tokens = torch.randint(VOCAB, (MICRO_BATCH, SEQ), generator=generator)
        # A model that knows nothing gives each token 1 / VOCAB.
        about = torch.full((3, MICRO_BATCH, SEQ - 1), 1.0 / VOCAB, dtype=torch.float64).log()
        old, ref, drawn = about + 0.4 * torch.randn(about.shape, generator=generator).double()
        mask = torch.ones(MICRO_BATCH, SEQ - 1, dtype=torch.float64)
        mask[:, : i % 2] = 0.0
        advantages = torch.tensor([1.0, -1.0], dtype=torch.float64) * (1.0 + i % 3)
        found.append(
            {
                "tokens": tokens,
                "advantages": advantages,
                "old": old,
                "ref": ref,
                "drawn": drawn,
                "mask": mask,
            }
        )
    return found


def policy_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple:
    """As `train_rl.forward_step`: on the last chunk the output is the loss of each token."""
    batch = next(data_iterator)
    tokens = batch["tokens"]
    positions = torch.arange(SEQ).expand_as(tokens)
    output = model(tokens, positions, None, runtime_gather_output=True)
    if not get_attr_wrapped_model(model, "post_process"):
        return output, partial(sum_of_losses, batch["mask"])
    current = rl_utils.selective_log_softmax(output[:, :-1], tokens[:, 1:])
    losses = rl_utils.calculate_grpo_loss(
        current,
        batch["old"],
        batch["ref"],
        batch["advantages"],
        *(EPSILON, EPSILON, BETA, 0.0),
        *(batch["drawn"], CAP),
    )[0]
    return losses, partial(sum_of_losses, batch["mask"])
