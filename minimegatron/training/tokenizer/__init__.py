"""The run's tokenizer.

Counterpart: `megatron.training.tokenizer`.
"""

from minimegatron.training.tokenizer.tokenizer import build_tokenizer

__all__ = ["build_tokenizer"]
