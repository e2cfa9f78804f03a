"""T5, or the part of it that one stage holds.

Counterpart: `megatron.core.models.T5.t5_model`. That of today runs on one stage; for several, the
source is Megatron-LM until July 2024 (see `stack_split`).

    question [b, s_enc] -> embedding -> encoder -> final norm -> [s_enc, b, h]
                                                                      | every layer's cross attention
    answer   [b, s_dec] -> embedding -> decoder ----------------------+ -> head -> [s_dec, b, v/t]

Both stacks use one embedding, of words and of positions. On several stages the first of each stack
has a copy of it. Every decoder stage needs the encoder's output, and gets it from the stage before:
beside its own output it hands it on, in a second message.
"""

import dataclasses
from typing import Any

import torch

from minimegatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding,
)
from minimegatron.core.models.common.embeddings.relative_pos_embedding import (
    RelativePositionEmbedding,
)
from minimegatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from minimegatron.core.models.common.language_module.language_module import LanguageModule
from minimegatron.core.models.T5.stack_split import StackLine, StackSplit, check_t5
from minimegatron.core.process_groups_config import ProcessGroupCollection, stage_of
from minimegatron.core.tensor_parallel.initial_weights import weights_drawn_later
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear
from minimegatron.core.tensor_parallel.utils import make_viewless_tensor
from minimegatron.core.tracing import traced
from minimegatron.core.transformer.biased_attention import bias_with_mask
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.transformer_block import TransformerBlock
from minimegatron.core.transformer.transformer_config import TransformerConfig

POSITIONS = ("learned_absolute", "rope", "relative", "none")


class T5LMHead(MegatronModule):
    """The decoder's output as scores of the vocabulary; a tied head has a bias of its own.

    Args:
        parallel_output: leave logits cut over the vocabulary, [.., v/t].
        vocab_size: global, divisible by t.
        pre_process: this stage has the embedding, whose weight a tied head then uses.
        share_embeddings_and_output_weights: the head is tied.
        tp_group: None for `parallel_state`'s.
    """

    def __init__(
        self,
        config: TransformerConfig,
        parallel_output: bool,
        vocab_size: int,
        pre_process: bool = True,
        share_embeddings_and_output_weights: bool = False,
        tp_group: Any = None,
    ):
        super().__init__(config)
        self.output_layer = ColumnParallelLinear(
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=share_embeddings_and_output_weights,
            gather_output=not parallel_output,
            skip_weight_param_allocation=pre_process and share_embeddings_and_output_weights,
            tp_group=tp_group,
            delay_wgrad_compute=False,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        word_embeddings_weight: torch.Tensor | None,
        runtime_gather_output: bool | None = None,
    ) -> torch.Tensor:
        """[s, b, h] -> [s, b, v/t]; the weight is the tied one, None for the head's own.

        `runtime_gather_output`: return [s, b, v], or do not; None: unless `parallel_output`.
        """
        logits, _ = self.output_layer(hidden_states, word_embeddings_weight, runtime_gather_output)
        return logits


def t5_position_ids(token_ids: torch.Tensor) -> torch.Tensor:
    """The places 0 to s - 1 of tokens [b, s], int64 [b, s]."""
    return torch.arange(token_ids.size(1), device=token_ids.device).expand_as(token_ids)


def _describe(arguments: dict[str, Any]) -> dict[str, Any]:
    model = arguments["self"]
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return {"chunk": 0, "layers": sum(stack.num_layers_per_pipeline_rank for stack in stacks)}


class T5Model(LanguageModule):
    """An encoder-decoder language model.

    Args:
        config: the decoder's, with the model's number of stages.
        encoder_config: the encoder's. Its `pipeline_model_parallel_size` is the number of stages that
            have the encoder, where the model has several: the split rank q.
        transformer_encoder_layer_spec, transformer_decoder_layer_spec: a layer's spec of each stack, or
            this stage's layers.
        vocab_size: global, padded so that t divides it.
        max_sequence_length: tokens of either sequence at most, for learned positions.
        pre_process: this stage is the first of its stack: it embeds.
        post_process: this stage is the last of its stack: it ends in the norm, and the decoder's in the
            head.
        parallel_output: leave logits cut over the vocabulary, [.., v/t]. A loss is computed from cut
            ones in any case.
        share_embeddings_and_output_weights: the head uses the word embedding's weight.
        position_embedding_type: "learned_absolute", "rope", "relative" (then the specs are with a bias,
            and the model is on one stage) or "none".
        rotary_percent, rotary_base: see `RotaryEmbedding`.
        relative_attention_num_buckets, relative_attention_max_distance: see
            `RelativePositionEmbedding`.
        add_encoder, add_decoder: this stage has layers of that stack.
        pg_collection: tp, pp and cp are used; None for `parallel_state`'s.

    Raises:
        ValueError: unknown position embedding; a configuration that T5 does not run with; a stage that
            has other parts than the split rank says.
    """

    def __init__(
        self,
        config: TransformerConfig,
        encoder_config: TransformerConfig,
        transformer_encoder_layer_spec: Any,
        transformer_decoder_layer_spec: Any,
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
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        add_encoder: bool = True,
        add_decoder: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config, pg_collection)
        if position_embedding_type not in POSITIONS:
            raise ValueError(
                f"position_embedding_type {position_embedding_type!r} is unknown to T5; "
                f"use one of {', '.join(POSITIONS)}"
            )
        self.encoder_config = encoder_config
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process = pre_process
        # The encoder's last stage ends a stack, not the model: there is no loss, and no head.
        self.post_process = post_process and add_decoder
        self.add_encoder, self.add_decoder = add_encoder, add_decoder
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        self.encoder_hidden_state: torch.Tensor | None = None
        self.vp_stage = None
        p, rank = config.pipeline_model_parallel_size, stage_of(self.pg_collection.pp)
        self.split = StackSplit(p, encoder_config.pipeline_model_parallel_size if p > 1 else None)
        check_t5(config)
        self.split.check_stage(rank, pre_process, post_process, add_encoder, add_decoder)
        self.rotary_pos_emb = None
        if position_embedding_type == "rope":
            dtype = torch.promote_types(config.params_dtype, torch.float32)
            self.rotary_pos_emb = RotaryEmbedding(
                config.kv_channels, rotary_percent, rotary_base=rotary_base, dtype=dtype
            )
        with weights_drawn_later():
            self._build(transformer_encoder_layer_spec, transformer_decoder_layer_spec, rank)
            if position_embedding_type == "relative":
                self._build_distances(
                    relative_attention_num_buckets, relative_attention_max_distance
                )
            if self.post_process:
                self.lm_head = T5LMHead(
                    config,
                    parallel_output,
                    vocab_size,
                    pre_process,
                    share_embeddings_and_output_weights,
                    self.tp_group,
                )
        self.setup_embeddings_and_output_layer()
        self.initialize_weights(self.pg_collection)

    def _build(self, encoder_spec: Any, decoder_spec: Any, rank: int) -> None:
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                self.config,
                self.vocab_size,
                self.max_sequence_length,
                self.position_embedding_type,
                tp_group=self.tp_group,
            )
        self.encoder = self.decoder = None
        if self.add_encoder:
            line = self.split.encoder_line(rank)
            self.encoder = self._stack(self.encoder_config, encoder_spec, line)
        if self.add_decoder:
            line = self.split.decoder_line(rank)
            config = dataclasses.replace(self.config, pipeline_model_parallel_size=line.size())
            self.decoder = self._stack(config, decoder_spec, line)

    def _build_distances(self, num_buckets: int, max_distance: int) -> None:
        """A table for each stack, which all its layers use."""
        if self.config.pipeline_model_parallel_size > 1:
            raise ValueError(
                "position_embedding_type 'relative' needs one table in all layers of a stack, but "
                f"pipeline_model_parallel_size is {self.config.pipeline_model_parallel_size}; use 1, "
                "or other positions"
            )
        sizes = (
            self.config.init_method,
            self.config.num_attention_heads,
            num_buckets,
            max_distance,
        )
        options = {"dtype": self.config.params_dtype, "tp_group": self.tp_group}
        self.encoder_relative_pos_emb = RelativePositionEmbedding(True, *sizes, **options)
        self.decoder_relative_pos_emb = RelativePositionEmbedding(False, *sizes, **options)

    def _stack(self, config: TransformerConfig, spec: Any, line: StackLine) -> TransformerBlock:
        """This stage's layers of one stack, which is cut over its own line of stages only."""
        return TransformerBlock(
            config,
            spec,
            pre_process=line.rank() == 0,
            post_process=line.rank() == line.size() - 1,
            pg_collection=ProcessGroupCollection(**{**vars(self.pg_collection), "pp": line}),
        )

    @property
    def output_layer(self) -> ColumnParallelLinear:
        """The head's linear layer."""
        return self.lm_head.output_layer

    # -- Weights that several stages have --

    def global_name(self, name: str) -> str:
        """A tied head's own copy of the embedding has the embedding's name."""
        is_copy = name == "lm_head.output_layer.weight" and self.share_embeddings_and_output_weights
        return "embedding.word_embeddings.weight" if is_copy else name

    def setup_embeddings_and_output_layer(self) -> None:
        """Marks the vocabulary's weights, and those that several stages have.

        On several stages the encoder's first has the embedding, and the decoder's first a copy of it,
        with positions; a tied head on another stage has a third of the words. Gradients are summed over
        the copies, and the gradient norm counts one.
        """
        super().setup_embeddings_and_output_layer()
        if self.config.pipeline_model_parallel_size == 1:
            return
        words = self.word_embedding_weight()
        if words is not None:
            words.shared_embedding = True
            words.shared = not self.add_encoder
        if self.pre_process and self.embedding.add_position_embedding:
            self.embedding.position_embeddings.weight.shared = not self.add_encoder

    # -- What travels between stages --

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the previous stage sent, a tensor or a list; None on the first.

        The encoder gets [s_enc, b, h]; the decoder's first stage the same, the encoder's output; those
        after it two tensors, their input [s_dec, b, h] and the encoder's output.
        """
        inputs = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        number = 2 if not self.add_encoder and not self.pre_process else 1
        if len(inputs) != number:
            raise ValueError(f"this stage of T5 takes {number} input tensors, not {len(inputs)}")
        if self.add_encoder:
            self.encoder.set_input_tensor(inputs[0])
        else:
            self.decoder.set_input_tensor(inputs[0] if number == 2 else None)
            self.encoder_hidden_state = inputs[-1]

    def extra_outputs(self, inputs: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What this stage hands on as it came: the encoder's output, through the decoder's stages."""
        return [] if self.add_encoder or self.post_process else inputs[-1:]

    def message_shapes(self, encoder_shapes: list, decoder_shapes: list) -> tuple[list, list]:
        """Shapes of what this stage receives and of what it sends, forwards."""
        rank = stage_of(self.pg_collection.pp)
        behind = self.shapes_behind(encoder_shapes, decoder_shapes)
        return behind[max(rank - 1, 0)], behind[rank]

    def shapes_behind(self, encoder_shapes: list, decoder_shapes: list) -> list[list]:
        """Shapes of what each stage sends on; for those who watch all stages."""
        return self.split.shapes_behind(encoder_shapes, decoder_shapes)

    # -- Forward --

    @traced("model-forward", _describe)
    def forward(
        self,
        encoder_input_ids: torch.Tensor | None,
        decoder_input_ids: torch.Tensor | None,
        encoder_attn_mask: torch.Tensor | None,
        decoder_attn_mask: torch.Tensor | None,
        encoder_decoder_attn_mask: torch.Tensor | None,
        lm_labels: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        output_encoder_hidden_only: bool = False,
        *,
        checkpoint_activations_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """Runs this stage's part.

        Args:
            encoder_input_ids: int64 [b, s_enc]; read where the encoder begins.
            decoder_input_ids: int64 [b, s_dec]; read where the decoder begins.
            encoder_attn_mask, decoder_attn_mask, encoder_decoder_attn_mask: bool, True where attention
                must not look, [b, a/t, s_enc, s_enc], [b, a/t, s_dec, s_dec] and
                [b, a/t, s_dec, s_enc], each of the first three sizes also 1; None for no mask beside
                the decoder's causal one.
            lm_labels: int64 [b, s_dec]; read where the decoder ends.
            encoder_hidden_states: used in place of the encoder's output.
            output_encoder_hidden_only: return the encoder's output, and leave the decoder out.
            checkpoint_activations_microbatch: see `block_recompute.Recompute.of`.

        Returns:
            Where the decoder ends, with labels: the loss of each token, [b, s_dec], float32 (float64
            for float64 models). Without: logits [b, s_dec, v/t], or [b, s_dec, v] unless
            `parallel_output`. Elsewhere: [s, b, h] of this stage's stack, or [s/t, b, h] with
            sequence parallelism. Never a view.
        """
        options = {"checkpoint_activations_microbatch": checkpoint_activations_microbatch}
        if encoder_hidden_states is None and self.encoder is None:
            encoder_hidden_states = self.encoder_hidden_state
        elif encoder_hidden_states is None:
            encoder_hidden_states = self._run(
                self.encoder, encoder_input_ids, encoder_attn_mask, **options
            )
        if self.decoder is None or output_encoder_hidden_only:
            return encoder_hidden_states
        hidden_states = self._run(
            self.decoder,
            decoder_input_ids,
            decoder_attn_mask,
            context=encoder_hidden_states,
            context_mask=encoder_decoder_attn_mask,
            **options,
        )
        return self._postprocess(hidden_states, lm_labels) if self.post_process else hidden_states

    def _run(
        self,
        stack: TransformerBlock,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        """One stack's layers, from tokens where the stack begins; positions count from 0 in each."""
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids, t5_position_ids(input_ids))
        if self.position_embedding_type == "relative":
            is_encoder = stack is self.encoder
            table = self.encoder_relative_pos_emb if is_encoder else self.decoder_relative_pos_emb
            bias = table(input_ids.size(1), input_ids.size(1))
            attention_mask = bias_with_mask(bias, attention_mask)
        angles = None
        activations = embedded if self.pre_process else stack.input_tensor
        if self.rotary_pos_emb is not None and activations is not None:
            ranks = self.tp_group.size() if self.config.sequence_parallel else 1
            angles = self.rotary_pos_emb(activations.size(0) * ranks, device=activations.device)
        return stack(embedded, attention_mask, rotary_pos_emb=angles, **options)

    def _postprocess(
        self, hidden_states: torch.Tensor, labels: torch.Tensor | None
    ) -> torch.Tensor:
        gather = None if labels is None else False
        logits = self.lm_head(hidden_states, self.shared_embedding_or_output_weight(), gather)
        if labels is None:
            return make_viewless_tensor(logits.transpose(0, 1).contiguous())
        return self.compute_language_model_loss(labels, logits)

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: the layers' weight gradients of the oldest microbatch owed."""
        for stack in (self.decoder, self.encoder):
            if stack is not None:
                stack.backward_dw()
