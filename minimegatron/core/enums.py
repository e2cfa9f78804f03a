"""What kind of model is trained.

Read by: `training.pretrain` and `get_model`, to know what chunks to ask the model provider for.
Calls nothing; torch-free. Counterpart: `megatron.core.enums`.
"""

import enum


class ModelType(enum.Enum):
    """Which stacks a model has. A decoder-only GPT and an encoder-only BERT are the same to a
    schedule: one stack, cut into stages."""

    encoder_or_decoder = 1
