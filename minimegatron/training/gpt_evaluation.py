"""What a GPT's evaluation shows beside its loss: what to hold it against, and some text of the model's.

Megatron has no counterpart.
"""

from typing import Any

import torch

from minimegatron.core.datasets.stdlib_corpus import validation_unigram_entropy
from minimegatron.training import text_generation
from minimegatron.training.global_vars import get_args, get_tokenizer
from minimegatron.training.utils import print_rank_0


def write_sample(model: list[torch.nn.Module]) -> str:
    """During each evaluation, on every rank: some text by the model, with `--sample-tokens`."""
    return text_generation.generate(model, prompt="def ", num_tokens=get_args().sample_tokens)


def after_evaluation(sample: str, iteration: int, writer: Any) -> None:
    """Below the validation loss: what to hold it against, and the sample."""
    args = get_args()
    if args.data_path is None:
        entropy = validation_unigram_entropy(get_tokenizer(), args.split)
        print_rank_0(
            f" for comparison: unigram entropy of the validation text {entropy:.4f} nats/byte, "
            "the best loss without knowing any order"
        )
    if args.sample_tokens > 0:
        print_rank_0(f" a sample of what the model writes:\n\n{sample}\n")
