"""The tokenizer that the arguments name, and the vocabulary it needs.

Counterpart: `megatron.training.tokenizer.tokenizer`.
"""

from typing import Any

from minimegatron.core.datasets import megatron_tokenizer


def build_tokenizer(args: Any) -> megatron_tokenizer.MegatronTokenizer:
    """The tokenizer of `--tokenizer-type`. Raises ValueError where it cannot be made."""
    return megatron_tokenizer.build_tokenizer(args.tokenizer_type, args.tokenizer_file)


def vocab_size_with_padding(
    vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int
) -> int:
    """Rows of the embedding: rounded up, so that every tensor-parallel rank holds as many.

    >>> vocab_size_with_padding(257, 128, 2)
    512
    """
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple
