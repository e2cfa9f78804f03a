"""What turns token ids and positions into the first layer's input.

Counterpart: `megatron.core.models.common.embeddings`.
"""

from minimegatron.exports import lazily

_WORDS = "minimegatron.core.models.common.embeddings.language_model_embedding"
_ROTARY = "minimegatron.core.models.common.embeddings.rotary_pos_embedding"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "LanguageModelEmbedding": f"{_WORDS}:LanguageModelEmbedding",
        "RotaryEmbedding": f"{_ROTARY}:RotaryEmbedding",
        "apply_rotary_pos_emb": "minimegatron.core.transformer.rope_utils:apply_rotary_pos_emb",
    },
)
