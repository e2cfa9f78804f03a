"""What kind of model is trained.

Torch-free. Counterpart: `megatron.core.enums`.
"""

import enum


class ModelType(enum.Enum):
    """Which stacks a model has. A decoder-only GPT and an encoder-only BERT are the same to a
    schedule: one stack, cut into stages."""

    encoder_or_decoder = 1
