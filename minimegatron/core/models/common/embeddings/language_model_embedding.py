"""Token and position embeddings: what the first stage makes of token ids.

Counterpart: `megatron.core.models.common.embeddings.language_model_embedding`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minimegatron.core.models.common.embeddings import embedding_checks, token_types
from minimegatron.core.tensor_parallel import standalone_regions as regions
from minimegatron.core.tensor_parallel.initial_weights import new_weight
from minimegatron.core.tensor_parallel.layers import VocabParallelEmbedding
from minimegatron.core.tensor_parallel.utils import get_tensor_model_parallel_group_if_none
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.transformer_block import dropout_rng
from minimegatron.core.transformer.transformer_config import TransformerConfig


class LanguageModelEmbedding(MegatronModule):
    """dropout(word(ids) + position(positions) + type(token types)).

    Args:
        vocab_size: global, divisible by t.
        max_sequence_length: positions of a learned embedding.
        position_embedding_type: "learned_absolute" adds one here; "rope" and "none" do not.
        num_tokentypes: of BERT, which is told which of two texts a token is in; 0 for no types.
        tp_group: None for `parallel_state`'s.
    """

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        num_tokentypes: int = 0,
        *,
        tp_group: Any = None,
    ):
        super().__init__(config)
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.add_position_embedding = position_embedding_type == "learned_absolute"
        self.num_parts = self.tp_group.size() if config.sequence_parallel else 1
        # Positions and types are added to whole sequences; without them, the sum over vocabulary
        # shards may scatter the sequence at once.
        adds_nothing = not self.add_position_embedding and num_tokentypes == 0
        self.reduce_scatter_embeddings = config.sequence_parallel and adds_nothing
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=config.init_method,
            reduce_scatter_embeddings=self.reduce_scatter_embeddings,
            config=config,
            tp_group=self.tp_group,
        )
        if self.add_position_embedding:
            self.position_embeddings = self._whole_table(max_sequence_length)
        self.tokentype_embeddings = self._whole_table(num_tokentypes) if num_tokentypes else None

    def _whole_table(self, num_rows: int) -> torch.nn.Embedding:
        """[num_rows, h], the same on all tensor-parallel ranks."""
        shape, config = (num_rows, self.config.hidden_size), self.config
        table = torch.nn.Embedding(*shape, device="meta")
        table.weight = new_weight(shape, config.params_dtype, config.init_method, -1, self.tp_group)
        return table

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None, tokentype_ids: Tensor | None = None
    ) -> Tensor:
        """Ids, positions, types [b, s] -> [s, b, h], or [s/t, b, h] with sequence parallelism.

        `position_ids` is read for learned positions only; [1, s] are those of each sequence. Raises
        ValueError for a sequence longer than those, or not divisible over the ranks, for token types
        that are missing or too much, for positions or types of another shape and, on the CPU, for
        numbers without a row in their table.
        """
        length, numbers = input_ids.size(1), (input_ids, position_ids, tokentype_ids)
        shapes = (input_ids.shape, (1, length), (length,))
        fits = position_ids is not None and position_ids.shape in shapes
        is_placed = not self.add_position_embedding or fits and length <= self.max_sequence_length
        if length % self.num_parts or not is_placed:
            embedding_checks.check_numbers(self, *numbers)
        try:
            embeddings = self.word_embeddings(input_ids)
            if self.add_position_embedding:
                embeddings = embeddings + self.position_embeddings(position_ids)
            if tokentype_ids is not None or self.tokentype_embeddings is not None:
                embeddings = embeddings + token_types.embedded(self, tokentype_ids, input_ids)
        except IndexError as error:
            raise embedding_checks.without_row(self, error, *numbers) from None
        if not self.reduce_scatter_embeddings:
            # [b, s, h] -> [s, b, h]
            embeddings = embeddings.transpose(0, 1).contiguous()
        least = torch.float32 if self.config.fp32_residual_connection else embeddings.dtype
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, least))
        if self.config.sequence_parallel and not self.reduce_scatter_embeddings:
            embeddings = regions.scatter_to_sequence_parallel_region(
                embeddings, group=self.tp_group
            )
        # Ranks that hold other tokens drop by their own streams, ranks that hold the same alike.
        with dropout_rng(self.config, self.training):
            return F.dropout(embeddings, self.config.hidden_dropout, self.training)
