"""GPT, or the chunk of it that one stage holds.

Counterpart: `megatron.core.models.gpt.gpt_model`.

    tokens [b, s] -> embedding -> [s, b, h] -> layers -> [s, b, h] -> output layer -> [s, b, v/t]
                     first chunk only        every chunk             last chunk only

Between the last two, on one chunk, there may be layers for further tokens: `multi_token_prediction`.
Between chunks the schedule carries the [s, b, h] tensor: it calls `set_input_tensor` before
`forward`. With sequence parallelism it is [s/t, b, h].
"""

from typing import Any

import torch
from torch import Tensor

from minimegatron.core import tracing
from minimegatron.core.models.common.embeddings import LanguageModelEmbedding, RotaryEmbedding
from minimegatron.core.models.common.language_module.labels import check_labels_have_logits
from minimegatron.core.models.common.language_module.language_module import LanguageModule
from minimegatron.core.models.gpt import gpt_model_checks
from minimegatron.core.models.gpt.gpt_second_subjects import PlannedGPT, build_mtp_block_of
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.initial_weights import weights_drawn_later
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear
from minimegatron.core.tensor_parallel.utils import make_viewless_tensor
from minimegatron.core.tracing import traced
from minimegatron.core.transformer import context_parallel_groups, zigzag
from minimegatron.core.transformer import multi_token_prediction as mtp
from minimegatron.core.transformer.transformer_block import TransformerBlock
from minimegatron.core.transformer.transformer_config import TransformerConfig


class GPTModel(PlannedGPT, LanguageModule):
    """A decoder-only language model.

    Args:
        transformer_layer_spec: a layer's spec, or `get_gpt_decoder_block_spec(...)` for the chunk.
        vocab_size: global, padded so that t divides it.
        max_sequence_length: s at most, for learned positions.
        pre_process: this is the first chunk: it holds the embedding.
        post_process: this is the last chunk: it holds the output layer.
        parallel_output: leave logits cut over the vocabulary, [.., v/t]. A loss is computed from cut
            ones in any case.
        share_embeddings_and_output_weights: the output layer uses the word embedding's weight.
        position_embedding_type: "learned_absolute", "rope" or "none".
        rotary_percent, rotary_base: see `RotaryEmbedding`.
        mtp_block_spec: `get_gpt_mtp_block_spec(...)` for the chunk, None if it predicts no further
            tokens.
        pg_collection: tp, pp and cp are used, and dp_cp for the log of further tokens; None for
            `parallel_state`'s.
        vp_stage: which chunk of its stage this is, with virtual stages.

    Raises:
        ValueError: unknown position embedding, indivisible sizes; learned positions where another
            stage than the first predicts further tokens; a `mtp_block_spec` that is missing, or too
            much.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        *,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        mtp_block_spec: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ):
        super().__init__(config, pg_collection)
        gpt_model_checks.check_position_embedding_type(position_embedding_type)
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process, self.post_process = pre_process, post_process
        self.parallel_output = parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        self.vp_stage = vp_stage
        # How many tensor-parallel ranks share the tokens of an activation.
        self.num_parts = self.tp_group.size() if config.sequence_parallel else 1
        self.cp_group = context_parallel_groups.context_parallel_group(config, pg_collection)
        self.mtp_process = mtp_block_spec is not None
        self.rotary_pos_emb = None
        if position_embedding_type == "rope":
            dtype = torch.promote_types(config.params_dtype, torch.float32)
            self.rotary_pos_emb = RotaryEmbedding(
                config.kv_channels, rotary_percent, rotary_base=rotary_base, dtype=dtype
            )
        with weights_drawn_later():
            if pre_process or self.mtp_process:
                self.embedding = LanguageModelEmbedding(
                    config,
                    vocab_size,
                    max_sequence_length,
                    position_embedding_type,
                    tp_group=self.tp_group,
                )
            place = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
            self.decoder = self._build_decoder(
                transformer_layer_spec, pg_collection=self.pg_collection, **place
            )
            self.mtp = build_mtp_block_of(self, mtp_block_spec)
            if post_process:
                self._build_output_layer()
        self.setup_embeddings_and_output_layer()
        self.initialize_weights(self.pg_collection)

    def _build_decoder(self, spec: Any, **options: Any) -> TransformerBlock:
        return TransformerBlock(self.config, spec, **options)

    def _build_output_layer(self) -> None:
        # The two factors of deferred weight gradients, filled by backward, emptied by
        # `drain_embedding_wgrad_compute` at the end of the schedule.
        buffers = ([], []) if self.config.defer_embedding_wgrad_compute else (None, None)
        self.embedding_activation_buffer, self.grad_output_buffer = buffers
        # A tied weight is allocated here only where this chunk has no embedding.
        is_lent = self.pre_process or self.mtp_process
        self.output_layer = ColumnParallelLinear(
            self.config.hidden_size,
            self.vocab_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=not self.parallel_output,
            skip_weight_param_allocation=self.share_embeddings_and_output_weights and is_lent,
            embedding_activation_buffer=self.embedding_activation_buffer,
            grad_output_buffer=self.grad_output_buffer,
            tp_group=self.tp_group,
            # Its dY is V/h times as large as an activation: too much to keep until W.
            delay_wgrad_compute=False,
        )

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """What the previous stage sent: [s, b, h], alone or as a list of one; None on the first."""
        if isinstance(input_tensor, list):
            if len(input_tensor) != 1:
                gpt_model_checks.refuse_inputs(len(input_tensor))
            input_tensor = input_tensor[0]
        self.decoder.set_input_tensor(input_tensor)

    @traced("model-forward", tracing.of_model_forward)
    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        runtime_gather_output: bool | None = None,
        loss_mask: Tensor | None = None,
        checkpoint_activations_microbatch: bool | None = None,
    ) -> Tensor:
        """Runs the chunk.

        Args:
            input_ids, position_ids: int64 [b, s], or this rank's part of them, [b, s/c] (so for s in
                all that follows); read on the first chunk, and on the one that predicts further
                tokens. Positions None count from 0 in each sequence.
            attention_mask: bool, True where attention must not look, [b or 1, a/t or 1, s or 1, s],
                with all columns also where the rows are a rank's part; None for plain causal
                attention.
            decoder_input: [s, b, h], or [s/t, b, h] with sequence parallelism; used instead of
                embedding `input_ids`.
            labels: int64 [b, s]; read on the last chunk.
            runtime_gather_output: whether logits are returned whole; None: unless `parallel_output`.
            loss_mask: [b, s], read on the last chunk for the losses of further tokens; to the main
                loss, the loss function applies it. On a CPU a label that is no token is refused where
                it is not 0.
            checkpoint_activations_microbatch: the schedule's word on recompute for this
                microbatch, None for the config's. A `forward_step_func` that takes it as third
                argument passes it on here (see `block_recompute.Recompute.of`).

        Returns:
            Last chunk, with labels: the loss of each token, [b, s], float32 (float64 for float64
            models). Last chunk without: logits [b, s, v/t], or [b, s, v] if they are gathered.
            Other chunks: [s, b, h], or [s/t, b, h] with sequence parallelism. Never a view.
            Without gradients, nothing is computed for further tokens. Megatron computes it in an
            evaluation too, where nobody reads it.
        """
        decoder_input, rotary_pos_emb = self._preprocess(input_ids, position_ids, decoder_input)
        asked = checkpoint_activations_microbatch
        options = {"rotary_pos_emb": rotary_pos_emb, "checkpoint_activations_microbatch": asked}
        hidden_states = self.decoder(decoder_input, attention_mask, **options)
        if self.mtp is not None and torch.is_grad_enabled():
            given = (input_ids, position_ids, hidden_states, attention_mask)
            hidden_states = self.mtp(*given, embedding=self.embedding, **options)
        if not self.post_process:
            return hidden_states
        return self._postprocess(
            hidden_states, labels, loss_mask=loss_mask, runtime_gather_output=runtime_gather_output
        )

    def _preprocess(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        decoder_input: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the decoder needs: its input, on the first chunk; rotary angles, or None."""
        given = (input_ids, position_ids, decoder_input)
        if self.pre_process:
            if decoder_input is not None or position_ids is None or self.cp_group is not None:
                position_ids = gpt_model_checks.positions_of(self, *given)
            if decoder_input is None:
                decoder_input = self.embedding(input_ids, position_ids)
        return decoder_input, self._rotary_angles(decoder_input)

    def _postprocess(
        self,
        hidden_states: Tensor,
        labels: Tensor | None,
        *,
        loss_mask: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        output_weight: Tensor | None = None,
    ) -> Tensor:
        """On the last chunk, from the decoder's output [s, b, h] to what `forward` returns.

        With further tokens it takes [(1+K) s, b, h]. `output_weight` stands for the tied weight, if the
        output layer has one.
        """
        weight = (
            self.shared_embedding_or_output_weight() if output_weight is None else output_weight
        )
        if self.config.mtp_num_layers is not None and torch.is_grad_enabled():
            hidden_states = mtp.process_mtp_loss(self, hidden_states, labels, loss_mask, weight)
        gather = runtime_gather_output if labels is None else False
        logits, _ = self.output_layer(hidden_states, weight=weight, runtime_gather_output=gather)
        if labels is None:
            return make_viewless_tensor(logits.transpose(0, 1).contiguous())
        if loss_mask is not None:
            check_labels_have_logits(labels, loss_mask, self.vocab_size)
        return self.compute_language_model_loss(labels, logits)

    def _rotary_angles(self, decoder_input: Tensor | None) -> Tensor | None:
        """[s, 1, 1, d'], or [s/c, 1, 1, d']: of this rank's tokens, by their places in the sequence.

        Activations may hold 1/t of them.
        """
        activations = decoder_input if self.pre_process else self.decoder.input_tensor
        if self.rotary_pos_emb is None or activations is None:
            return None
        num_parts = self.num_parts * self.config.context_parallel_size
        angles = self.rotary_pos_emb(activations.size(0) * num_parts, device=activations.device)
        return angles if self.cp_group is None else zigzag.take_part(angles, 0, self.cp_group)
