"""What language models share: the loss, and the weight that several stages may share.

Counterpart: `megatron.core.models.common.language_module.language_module`.
"""

import torch
from torch import Tensor

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from minimegatron.core.tensor_parallel.utils import make_viewless_tensor
from minimegatron.core.transformer import layer_checks
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.transformer_config import TransformerConfig


class LanguageModule(MegatronModule):
    """A model chunk with an embedding on the first stage and an output layer on the last.

    Args:
        pg_collection: tp and pp; None for `parallel_state`'s.
    """

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ):
        super().__init__(config)
        layer_checks.check_hidden_size(config)
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.pre_process = self.post_process = True
        # The first: whether this chunk predicts further tokens.
        self.mtp_process = self.share_embeddings_and_output_weights = False
        self.vocab_size: int | None = None  # global; models set it
        self.whole_length: int | None = None  # of a step's sequences; a schedule tells it

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """The loss of each token: labels [b, s], logits [s, b, v/t] -> [b, s].

        float32; float64 for float64 logits. The same on every tensor-parallel rank. Raises ValueError
        for logits of another part of the vocabulary, such as gathered ones, and for labels of other
        tokens.
        """
        ranks = self.tp_group.size()
        if self.vocab_size is not None and logits.size(-1) * ranks != self.vocab_size:
            layer_checks.refuse_logits(logits, self.vocab_size, ranks)
        labels = labels.transpose(0, 1).contiguous()
        loss = vocab_parallel_cross_entropy(logits, labels, tp_group=self.tp_group)
        return make_viewless_tensor(loss.transpose(0, 1).contiguous())

    def global_name(self, name: str) -> str:
        """The last stage's copy of a tied embedding has the embedding's name."""
        is_copy = name == "output_layer.weight" and self.share_embeddings_and_output_weights
        return "embedding.word_embeddings.weight" if is_copy else name

    def setup_embeddings_and_output_layer(self) -> None:
        """Marks the vocabulary's weights for modules that treat them specially.

        With a pipeline, the word embedding's weight lives in several places: on the first stage; if it
        is tied, on the last as the output layer's; where further tokens are predicted, to embed them.
        These may be chunks of one rank. `shared_embedding` on all: they are one parameter, their
        gradients to be summed. `shared` on all but the first: the gradient norm counts that only.
        """
        if self.post_process and self.output_layer.weight is not None:
            self.output_layer.weight.is_embedding_or_output_parameter = True
        is_embedded_twice = self.config.mtp_num_layers is not None
        is_in_several = self.share_embeddings_and_output_weights or is_embedded_twice
        weight = self.word_embedding_weight()
        if weight is not None and is_in_several and not (self.pre_process and self.post_process):
            weight.shared_embedding = True
            weight.shared = not self.pre_process

    def word_embedding_weight(self) -> torch.nn.Parameter | None:
        """This chunk's copy of the word embedding, as such or as a tied output layer's; or None."""
        if self.pre_process or self.mtp_process:
            return self.embedding.word_embeddings.weight
        is_tied = self.share_embeddings_and_output_weights
        return self.output_layer.weight if self.post_process and is_tied else None

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter | None:
        """This chunk's copy of the tied weight; None for a middle chunk or if none is tied."""
        return self.word_embedding_weight() if self.share_embeddings_and_output_weights else None
