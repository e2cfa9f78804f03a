"""Token and position embeddings: what the first stage makes of token ids.

Counterpart: `megatron.core.models.common.embeddings.language_model_embedding`.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core.tensor_parallel.initial_weights import new_weight
from minimegatron.core.tensor_parallel.layers import VocabParallelEmbedding
from minimegatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from minimegatron.core.tensor_parallel.random import get_cuda_rng_tracker
from minimegatron.core.tensor_parallel.utils import get_tensor_model_parallel_group_if_none
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.transformer_config import TransformerConfig


def check_of_tokens(
    name: str, tensor: torch.Tensor | None, tokens: torch.Tensor, may_be_shared: bool = False
) -> None:
    """Raises ValueError unless `tensor` has the shape of `tokens`, [b, s].

    `may_be_shared`: [1, s] will do, or [s]. Any other shape would broadcast by accident, or not at all.
    """
    shape, wanted = None if tensor is None else tuple(tensor.shape), tuple(tokens.shape)
    shared = ((1, *wanted[1:]), wanted[1:]) if may_be_shared else ()
    if shape not in (wanted, *shared):
        raise ValueError(
            f"{name} is {None if shape is None else list(shape)}, but the tokens are {list(wanted)}; "
            "give one number for each token"
        )


def look_up(table: torch.nn.Module, numbers: torch.Tensor, name: str) -> torch.Tensor:
    """The rows of `numbers`. Raises ValueError, on the CPU, for a number that has none."""
    try:
        return table(numbers)
    except IndexError:
        raise ValueError(
            f"{name} go from {numbers.min()} to {numbers.max()}, but the embedding has rows 0 to "
            f"{table.num_embeddings - 1}"
        ) from None


def check_embedded(states: torch.Tensor, tokens: torch.Tensor, ranks: int) -> None:
    """Raises ValueError unless `states` are [s/ranks, b, h] for tokens [b, s]."""
    b, s = tokens.shape
    if s % ranks or states.shape[:2] != (s // ranks, b):
        raise ValueError(
            f"decoder_input is {list(states.shape)}, but the tokens are {[b, s]}, and their states are "
            f"over {ranks} ranks; give [{s // ranks}, {b}, h]"
        )


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
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.add_position_embedding = position_embedding_type == "learned_absolute"
        # Positions and types are added to whole sequences; without them, the sum over vocabulary
        # shards may scatter the sequence at once.
        self.reduce_scatter_embeddings = (
            config.sequence_parallel and not self.add_position_embedding and num_tokentypes == 0
        )
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
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        tokentype_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids, positions, types [b, s] -> [s, b, h], or [s/t, b, h] with sequence parallelism.

        `position_ids` is read for learned positions only; [1, s] are those of each sequence. Raises
        ValueError for a sequence longer than those, or not divisible over the ranks, for token types
        that are missing or too much, for positions or types of another shape and, on the CPU, for
        numbers without a row in their table.
        """
        self._check_length(input_ids.size(1))
        if self.add_position_embedding:
            check_of_tokens("position_ids", position_ids, input_ids, may_be_shared=True)
        embeddings = look_up(self.word_embeddings, input_ids, "token ids")
        if self.add_position_embedding:
            embeddings = embeddings + look_up(self.position_embeddings, position_ids, "positions")
        if (tokentype_ids is None) != (self.tokentype_embeddings is None):
            raise ValueError(
                "token types are given to an embedding without them, or missing; pass tokentype_ids "
                "exactly if num_tokentypes is more than 0"
            )
        if tokentype_ids is not None:
            check_of_tokens("tokentype_ids", tokentype_ids, input_ids)
            embeddings = embeddings + look_up(
                self.tokentype_embeddings, tokentype_ids, "token types"
            )
        if not self.reduce_scatter_embeddings:
            # [b, s, h] -> [s, b, h]
            embeddings = embeddings.transpose(0, 1).contiguous()
        if self.config.fp32_residual_connection:
            embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        if self.config.sequence_parallel and not self.reduce_scatter_embeddings:
            embeddings = scatter_to_sequence_parallel_region(embeddings, group=self.tp_group)
        dropout = self.config.hidden_dropout
        if not self.training or dropout == 0.0:
            return embeddings
        # Ranks that hold other tokens drop by their own streams, ranks that hold the same alike.
        own_stream = get_cuda_rng_tracker().fork() if self.config.sequence_parallel else None
        with own_stream or contextlib.nullcontext():
            return F.dropout(embeddings, p=dropout, training=True)

    def _check_length(self, sequence_length: int) -> None:
        if self.add_position_embedding and sequence_length > self.max_sequence_length:
            raise ValueError(
                f"the batch has sequences of {sequence_length} tokens but the model has "
                f"{self.max_sequence_length} learned positions; raise max_sequence_length"
            )
        if self.config.sequence_parallel and sequence_length % self.tp_group.size():
            raise ValueError(
                f"sequence_parallel cuts the sequence over {self.tp_group.size()} ranks, which does "
                f"not divide its length {sequence_length}; pad it or turn sequence_parallel off"
            )
