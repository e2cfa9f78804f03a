"""BERT.

Counterpart: `megatron.core.models.bert`.
"""

from minimegatron.exports import lazily

__getattr__, __dir__ = lazily(
    __name__, {"BertModel": "minimegatron.core.models.bert.bert_model:BertModel"}
)
