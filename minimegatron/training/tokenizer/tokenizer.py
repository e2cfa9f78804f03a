"""The tokenizer that the arguments name, and the vocabulary it needs.

Counterpart: `megatron.training.tokenizer.tokenizer`.
"""

from typing import Any

from minimegatron.core.datasets import megatron_tokenizer, wordpiece_tokenizer
from minimegatron.core.datasets.megatron_tokenizer import NullTokenizer as _NullTokenizer


def build_tokenizer(args: Any) -> megatron_tokenizer.MegatronTokenizer:
    """The tokenizer of `--tokenizer-type`. Raises ValueError where it cannot be made."""
    is_null = args.tokenizer_type == "NullTokenizer"
    if is_null == (args.vocab_size is None):
        raise ValueError(
            f"--tokenizer-type is {args.tokenizer_type} and --vocab-size {args.vocab_size}; give both "
            "NullTokenizer and a size, or neither: other tokenizers know theirs"
        )
    if is_null:
        return _NullTokenizer(args.vocab_size)
    # The word first: a run with another tokenizer does not load the module.
    is_wordpiece = "WordPiece" in args.tokenizer_type
    if is_wordpiece and args.tokenizer_type in wordpiece_tokenizer.LOWER_CASE:
        return wordpiece_tokenizer.build_wordpiece(
            args.tokenizer_type, args.vocab_file, args.vocab_extra_ids
        )
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


def _vocab_size_with_padding(orig_vocab_size: int, args: Any) -> int:
    """`vocab_size_with_padding` by the arguments of a run, as programs for Megatron call it."""
    return vocab_size_with_padding(
        orig_vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )
