"""GPT.

Counterpart: `megatron.core.models.gpt`.
"""

from minimegatron.exports import lazily

__getattr__, __dir__ = lazily(
    __name__, {"GPTModel": "minimegatron.core.models.gpt.gpt_model:GPTModel"}
)
