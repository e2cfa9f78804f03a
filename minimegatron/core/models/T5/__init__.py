"""T5: a text is read by one stack and answered by another.

Counterpart: `megatron.core.models.T5`.
"""

from minimegatron.exports import lazily

__getattr__, __dir__ = lazily(__name__, {"T5Model": "minimegatron.core.models.T5.t5_model:T5Model"})
