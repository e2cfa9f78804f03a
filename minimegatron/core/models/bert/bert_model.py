"""BERT, or the chunk of it that one stage holds.

Counterpart: `megatron.core.models.bert.bert_model`. Source: Devlin et al. 2018
(https://arxiv.org/abs/1810.04805).

    tokens, types [b, s] -> embedding -> [s, b, h] -> layers -> [s, b, h] -> lm head -> output layer
                         first chunk only          every chunk               last chunk only
                                                                    \\-> pooler -> binary head

A token sees all tokens, before and after it, but no padding. So every chunk needs the padding mask,
and what else differs from GPT is at the two ends.
"""

from typing import Any

import torch

from minimegatron.core.models.bert.bert_lm_head import BertLMHead
from minimegatron.core.models.bert.pooler import Pooler
from minimegatron.core.models.common.embeddings.embedding_checks import check_of_tokens
from minimegatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding,
)
from minimegatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from minimegatron.core.models.common.language_module.language_module import LanguageModule
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.initial_weights import weights_drawn_later
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear
from minimegatron.core.tensor_parallel.utils import make_viewless_tensor
from minimegatron.core.tracing import traced
from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.transformer_block import TransformerBlock
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.utils import get_linear_layer

Outputs = tuple[torch.Tensor, torch.Tensor | None]
"""Of the last chunk: for tokens, and for the pair of texts."""


def _describe(arguments: dict[str, Any]) -> dict[str, Any]:
    model = arguments["self"]
    return {"chunk": model.vp_stage or 0, "layers": model.encoder.num_layers_per_pipeline_rank}


class BertModel(LanguageModule):
    """An encoder with a head for masked tokens, and one for the order of two texts.

    Args:
        num_tokentypes: rows of the embedding of token types; 0 for none.
        transformer_layer_spec: a layer's; see `bert_layer_local_spec`.
        vocab_size: global, padded so that t divides it.
        max_sequence_length: s at most, for learned positions.
        pre_process: this is the first chunk: it holds the embedding.
        post_process: this is the last chunk: it holds the heads.
        parallel_output: leave logits cut over the vocabulary, [.., v/t]. A loss is computed from cut
            ones in any case.
        share_embeddings_and_output_weights: the output layer uses the word embedding's weight. It has
            a bias of its own in any case.
        position_embedding_type: "learned_absolute" or "rope".
        rotary_percent: see `RotaryEmbedding`.
        add_binary_head: the last chunk has a pooler and a binary head.
        vp_stage: which chunk of its stage this is, with virtual stages.
        pg_collection: tp and pp are used; None for `parallel_state`'s.

    Raises:
        ValueError: another position embedding; context parallelism: a rank would need the keys of
            tokens that other ranks have, and their padding.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_tokentypes: int,
        transformer_layer_spec: ModuleSpec,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        *,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        add_binary_head: bool = True,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config, pg_collection)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"context_parallel_size is {config.context_parallel_size}, but BERT's ranks do not "
                "share sequences; use 1"
            )
        if position_embedding_type not in ("learned_absolute", "rope"):
            raise ValueError(
                f"position_embedding_type {position_embedding_type!r} is unknown to BERT; "
                "use learned_absolute or rope"
            )
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.vocab_size, self.num_tokentypes, self.vp_stage = vocab_size, num_tokentypes, vp_stage
        self.rotary_pos_emb = None
        if position_embedding_type == "rope":
            dtype = torch.promote_types(config.params_dtype, torch.float32)
            self.rotary_pos_emb = RotaryEmbedding(config.kv_channels, rotary_percent, dtype=dtype)
        with weights_drawn_later():
            if pre_process:
                self.embedding = LanguageModelEmbedding(
                    config,
                    vocab_size,
                    max_sequence_length,
                    position_embedding_type,
                    num_tokentypes,
                    tp_group=self.tp_group,
                )
            self.encoder = TransformerBlock(
                config,
                transformer_layer_spec,
                pre_process=pre_process,
                post_process=post_process,
                pg_collection=self.pg_collection,
                vp_stage=vp_stage,
            )
            if post_process:
                self._build_heads(vocab_size, parallel_output, add_binary_head)
        self.setup_embeddings_and_output_layer()
        self.initialize_weights(self.pg_collection)

    def _build_heads(self, vocab_size: int, parallel_output: bool, add_binary_head: bool) -> None:
        config, hidden_size, tp_group = self.config, self.config.hidden_size, self.tp_group
        self.lm_head = BertLMHead(hidden_size, config, tp_group=tp_group)
        # A tied weight is allocated here only where this chunk has no embedding.
        self.output_layer = ColumnParallelLinear(
            hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=True,
            gather_output=not parallel_output,
            skip_weight_param_allocation=(
                self.share_embeddings_and_output_weights and self.pre_process
            ),
            tp_group=tp_group,
            delay_wgrad_compute=False,
        )
        # The bias too is as long as the vocabulary, which is padded according to t: a checkpoint
        # must know.
        for param in self.output_layer.parameters():
            param.is_embedding_or_output_parameter = True
        self.binary_head = self.pooler = None
        if add_binary_head:
            options = {"dtype": config.params_dtype, "tp_group": tp_group}
            self.binary_head = get_linear_layer(hidden_size, 2, config.init_method, **options)
            self.pooler = Pooler(
                hidden_size,
                config.init_method,
                config,
                config.sequence_parallel,
                tp_group=tp_group,
            )

    def set_input_tensor(
        self, input_tensor: torch.Tensor | list[torch.Tensor | None] | None
    ) -> None:
        """What the previous stage sent: [s, b, h], alone or as a list of one; None on the first."""
        if isinstance(input_tensor, list):
            (input_tensor,) = input_tensor
        self.encoder.set_input_tensor(input_tensor)

    def bert_extended_attention_mask(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """[b, s], 1 at tokens and 0 at padding -> bool [b, 1, s, s], True where not to look.

        No token looks at padding, and padding looks at nothing. Where a row looks at nothing, torch's
        attention returns 0, with finite gradients; Megatron's returns the mean of all values. So
        hidden states at padding differ. Losses and gradients do not: no loss is of padding, and no
        token looks there. Raises ValueError for another number of dimensions.
        """
        if attention_mask.dim() != 2:
            raise ValueError(
                f"BERT's attention_mask is {list(attention_mask.shape)}; give [b, s], 1 at tokens and "
                "0 at padding"
            )
        both_are_tokens = attention_mask.unsqueeze(1) * attention_mask.unsqueeze(2)
        return both_are_tokens.unsqueeze(1) < 0.5

    def bert_position_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """0 to s-1 for each sequence of [b, s]."""
        return torch.arange(token_ids.size(1), device=token_ids.device).expand_as(token_ids)

    @traced("model-forward", _describe)
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        tokentype_ids: torch.Tensor | None = None,
        lm_labels: torch.Tensor | None = None,
    ) -> torch.Tensor | Outputs:
        """Runs the chunk.

        Args:
            input_ids: int64 [b, s]; read on the first chunk.
            attention_mask: [b, s], 1 at tokens and 0 at padding; read on every chunk.
            tokentype_ids: int64 [b, s], below `num_tokentypes`; read on the first chunk.
            lm_labels: int64 [b, s]; read on the last chunk. One that is no token's id, as -1, gives a
                loss that is no use; the loss function leaves it out.

        Returns:
            Last chunk, with labels: (the loss of each token [b, s], logits of the binary head [b, 2]).
            Last chunk without: (logits [b, s, v/t], or [b, s, v] unless `parallel_output`; the same).
            The second is None without a binary head. Losses are float32 (float64 for float64 models).
            Other chunks: [s, b, h], or [s/t, b, h] with sequence parallelism. Never a view.
        """
        encoder_input = None
        if self.pre_process:
            check_of_tokens("attention_mask", attention_mask, input_ids)
            positions = self.bert_position_ids(input_ids)
            encoder_input = self.embedding(input_ids, positions, tokentype_ids)
        extended_mask, rotary_pos_emb = self.bert_extended_attention_mask(attention_mask), None
        if self.rotary_pos_emb is not None:
            length, device = attention_mask.size(1), attention_mask.device
            rotary_pos_emb = self.rotary_pos_emb(length, device=device)
        hidden_states = self.encoder(encoder_input, extended_mask, rotary_pos_emb=rotary_pos_emb)
        return self._heads(hidden_states, lm_labels) if self.post_process else hidden_states

    def _heads(self, hidden_states: torch.Tensor, lm_labels: torch.Tensor | None) -> Outputs:
        binary_logits = None
        if self.binary_head is not None:
            binary_logits = self.binary_head(self.pooler(hidden_states))
        weight = self.shared_embedding_or_output_weight()
        logits, _ = self.output_layer(
            self.lm_head(hidden_states),
            weight=weight,
            runtime_gather_output=None if lm_labels is None else False,
        )
        if lm_labels is None:
            return make_viewless_tensor(logits.transpose(0, 1).contiguous()), binary_logits
        return self.compute_language_model_loss(lm_labels, logits), binary_logits

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: the layers' weight gradients of the oldest microbatch owed.

        Heads, norms, biases and the embedding have theirs from backward.
        """
        self.encoder.backward_dw()
