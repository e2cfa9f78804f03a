"""Predicting several tokens ahead: after the decoder, one more layer for each further token.

Counterpart: `megatron.core.transformer.multi_token_prediction`, under the names of release 0.16.1. What
a configuration and the hooks of a step need is in `mtp_loss`, and `stages_as_told` says which stage has
the layers; Megatron's names of both can be imported from here. Source: DeepSeek-V3, section 2.2
(https://arxiv.org/abs/2412.19437).

    h0 = decoder output, after its final norm                              predicts token i+1 at place i
    hk = layer k of [norm(embedding of token i+k), norm(h(k-1))]           predicts token i+1+k

Embedding and output layer are the model's own. The chunk that holds these layers hands on
[h0, h1, ..., hK] as one tensor, [(1+K) s, b, h]; the chunk with the output layer takes it apart.
"""

from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core.collectives import all_gather, all_reduce
from minimegatron.core.process_groups_config import ProcessGroupCollection, stage_of
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear
from minimegatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from minimegatron.core.tensor_parallel.recompute import checkpoint
from minimegatron.core.transformer import zigzag
from minimegatron.core.transformer.block_recompute import Recompute
from minimegatron.core.transformer.context_parallel_groups import context_parallel_group
from minimegatron.core.transformer.layer_parts import pipeline_rank
from minimegatron.core.transformer.layer_placement import (
    num_layers_before_chunk,
    virtual_stage_of,
)
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.mtp_loss import MTPLossAutoScaler, MTPLossLoggingHelper
from minimegatron.core.transformer.spec_utils import ModuleSpec, build_module
from minimegatron.core.transformer.stages_as_told import get_mtp_ranks, mtp_layers_of_virtual_stages
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm
from minimegatron.core.transformer.transformer_block import dropout_rng
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.utils import or_one

__all__ = ["MTPLossAutoScaler", "MTPLossLoggingHelper", "get_mtp_ranks"]

# -- Which chunk --


def get_mtp_num_layers_to_build(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Layers that chunk `vp_stage` of pipeline rank `pp_rank` builds: all K or none.

    `pp_rank` None means this rank's, by `parallel_state`; with one stage it needs no process groups.
    """
    stage = virtual_stage_of(config, vp_stage, pipeline_rank(config, pp_rank))
    return mtp_layers_of_virtual_stages(config)[stage]


def get_mtp_layer_offset(config: TransformerConfig, vp_stage: int | None = None) -> int:
    """Layers of this kind that chunks before this rank's chunk `vp_stage` build."""
    stage = virtual_stage_of(config, vp_stage, pipeline_rank(config, None))
    return sum(mtp_layers_of_virtual_stages(config)[:stage])


def mtp_on_this_rank(
    config: TransformerConfig, ignore_virtual: bool = True, vp_stage: int | None = None
) -> bool:
    """Whether this rank, or unless `ignore_virtual` its chunk `vp_stage`, has such layers."""
    chunks = [vp_stage]
    if ignore_virtual:
        chunks = list(range(config.virtual_pipeline_model_parallel_size or 1))
    return any(get_mtp_num_layers_to_build(config, chunk) for chunk in chunks)


# -- One token further --


def roll_tensor(
    tensor: torch.Tensor, shifts: int = -1, dims: int = -1, cp_group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's successor: what stood at i + 1 stands at i, and the sequence ends in a 0.

    Args:
        tensor: tokens, positions, labels or mask, [b, s]; [b, s/c] where ranks share a sequence.
        shifts: -1.
        dims: the sequence's dimension.
        cp_group: the ranks that share the sequence, each with two chunks of it (see `zigzag`); then
            the first element of each chunk travels to the rank with the chunk before.

    Returns a new tensor, and the sum of this rank's elements of it.
    Raises ValueError for another shift.
    """
    if shifts != -1:
        raise ValueError(f"roll_tensor shifts by {shifts}; only -1, the next token, is possible")
    chunks, behind = [tensor], [torch.zeros_like(tensor.select(dims, 0))]
    if cp_group is not None and cp_group.size() > 1:
        chunks = list(tensor.chunk(2, dims))
        behind = _first_of_next(chunks, dims, cp_group)
    parts = []
    for chunk, element in zip(chunks, behind, strict=True):
        parts += [chunk.narrow(dims, 1, chunk.size(dims) - 1), element.unsqueeze(dims)]
    rolled = torch.cat(parts, dims)
    return rolled, rolled.sum()


def _first_of_next(chunks: list[torch.Tensor], dims: int, cp_group: Any) -> list[torch.Tensor]:
    """For each of this rank's two chunks, what follows it in the sequence; zeros at its end.

    Rank r has the chunks r and 2c - 1 - r. In Megatron neighbours exchange these elements; here all
    ranks get all of them, which is one message, of a few numbers.
    """
    rank, size = cp_group.rank(), cp_group.size()
    mine = torch.stack([chunk.select(dims, 0) for chunk in chunks])[None]
    all_of_them = mine.new_empty(size, *mine.shape[1:])
    all_gather(all_of_them, mine.contiguous(), cp_group)
    # In the order of the sequence: first chunks of the ranks, then second ones from the last rank.
    in_order = [*all_of_them[:, 0], *all_of_them[:, 1].flip(0), torch.zeros_like(mine[0, 0])]
    return [in_order[rank + 1], in_order[2 * size - rank]]


# -- The layers --


@dataclass
class MultiTokenPredictionLayerSubmodules:
    """The specs of what one such layer is made of."""

    enorm: Any = None
    hnorm: Any = None
    eh_proj: Any = None
    transformer_layer: ModuleSpec | None = None
    layer_norm: Any = None


def get_mtp_layer_spec(
    transformer_layer_spec: ModuleSpec, use_transformer_engine: bool = False
) -> ModuleSpec:
    """The layer around one of the decoder's kind. Raises ValueError for Transformer Engine."""
    if use_transformer_engine:
        raise ValueError(
            "get_mtp_layer_spec: Transformer Engine is not used here; pass use_transformer_engine=False"
        )
    norm = WrappedTorchNorm
    return ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=transformer_layer_spec,
            layer_norm=norm,
        ),
    )


class MultiTokenPredictionLayer(MegatronModule):
    """Depth k: norms of the next token's embedding and of h(k-1), a projection, a layer, a norm.

    Args:
        layer_number: k, from 1. The transformer layer in it counts on from the decoder's last.
        vp_stage: the chunk, with virtual stages.
        pg_collection: tp, pp and cp, and those of experts; None for `parallel_state`'s.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        layer_number: int = 1,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.cp_group = context_parallel_group(config, pg_collection)
        size = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm = build_module(submodules.enorm, config=config, **size)
        self.hnorm = build_module(submodules.hnorm, config=config, **size)
        self.eh_proj = build_module(
            submodules.eh_proj,
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            tp_group=self.tp_group,
        )
        before = num_layers_before_chunk(config, vp_stage, stage_of(pg_collection.pp))
        self.transformer_layer = build_module(
            submodules.transformer_layer,
            config=config,
            layer_number=layer_number + config.num_layers - before,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        self.final_layernorm = build_module(submodules.layer_norm, config=config, **size)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        embedding: Any,
        recompute: Recompute | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """h(k-1) [s, b, h] and what depth k-1 embedded, [b, s] -> h(k), and what depth k embeds.

        Rotary angles and mask are those of the decoder: place i looks at places up to i. `recompute` is
        the block's choice for this microbatch; None for the config's.
        """
        if recompute is None:
            recompute = Recompute.of(self.config, self.config.mtp_num_layers, None)
        input_ids, _ = roll_tensor(input_ids, cp_group=self.cp_group)
        if position_ids is not None:
            position_ids, _ = roll_tensor(position_ids, cp_group=self.cp_group)
        inputs = (
            hidden_states,
            embedding(input_ids, position_ids),
            attention_mask,
            rotary_pos_emb,
            recompute.granularity == "selective",
        )
        with dropout_rng(self.config, self.training):
            if self._is_recomputed(recompute):
                hidden_states = checkpoint(self._proj_and_transformer_layer, False, *inputs)
            else:
                hidden_states = self._proj_and_transformer_layer(*inputs)
        return hidden_states, input_ids, position_ids

    def _is_recomputed(self, recompute: Recompute) -> bool:
        """With "uniform" each layer here is a group; with "block" the first `num_layers` are."""
        is_within = recompute.method == "uniform" or self.layer_number <= recompute.num_layers
        return recompute.granularity == "full" and self.training and is_within

    def _proj_and_transformer_layer(
        self,
        hidden_states: torch.Tensor,
        decoder_input: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None,
        checkpoint_core_attention: bool,
    ) -> torch.Tensor:
        hidden_states, _ = self.transformer_layer(
            self._concat_embeddings(hidden_states, decoder_input),
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            checkpoint_core_attention=checkpoint_core_attention,
        )
        return self.final_layernorm(hidden_states)

    def _concat_embeddings(
        self, hidden_states: torch.Tensor, decoder_input: torch.Tensor
    ) -> torch.Tensor:
        """Both [s, b, h], or [s/t, b, h] with sequence parallelism -> the same, projected together."""
        both = torch.cat((self.enorm(decoder_input), self.hnorm(hidden_states)), dim=-1)
        projected, _ = self.eh_proj(both)
        # Every rank goes on with the whole: backward takes its part of the gradient, and sums nothing.
        projected = gather_from_tensor_model_parallel_region(projected, group=self.tp_group)
        if self.config.sequence_parallel:
            projected = scatter_to_sequence_parallel_region(projected, group=self.tp_group)
        return projected

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: the weight gradients of the oldest microbatch that is owed."""
        self.transformer_layer.backward_dw()
        self.eh_proj.backward_dw()


@dataclass
class MultiTokenPredictionBlockSubmodules:
    """The specs of a chunk's layers of this kind."""

    layer_specs: list[ModuleSpec] | None = None


def check_mtp_spec(
    config: TransformerConfig,
    spec: Any,
    vp_stage: int | None,
    pg_collection: ProcessGroupCollection,
) -> None:
    """Raises ValueError for a chunk that has such layers without a spec, or a spec without them."""
    rank = stage_of(pg_collection.pp)
    num_layers = get_mtp_num_layers_to_build(config, vp_stage, rank)
    if (spec is not None) != (num_layers > 0):
        raise ValueError(
            f"mtp_num_layers is {config.mtp_num_layers}, and chunk {vp_stage or 0} of pipeline rank "
            f"{rank} builds {num_layers} of these layers, but mtp_block_spec is "
            f"{'missing' if spec is None else 'given'}; pass what get_gpt_mtp_block_spec returns"
        )


class MultiTokenPredictionBlock(MegatronModule):
    """All K layers: they are in one chunk. Arguments as for `MultiTokenPredictionLayer`.

    `spec` is what `get_gpt_mtp_block_spec` returns, or a `ModuleSpec` of this class with that inside.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: MultiTokenPredictionBlockSubmodules | ModuleSpec,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        self.cp_group = context_parallel_group(config, pg_collection)
        submodules = spec.submodules if isinstance(spec, ModuleSpec) else spec
        options = {"config": config, "vp_stage": vp_stage, "pg_collection": pg_collection}
        self.layers = torch.nn.ModuleList(
            build_module(layer_spec, layer_number=number, **options)
            for number, layer_spec in enumerate(submodules.layer_specs, start=1)
        )
        if len(self.layers) != config.mtp_num_layers:
            raise ValueError(
                f"the spec has {len(self.layers)} layers for further tokens, but mtp_num_layers is "
                f"{config.mtp_num_layers}; one chunk builds all of them"
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        embedding: Any,
        checkpoint_activations_microbatch: bool | None = None,
    ) -> torch.Tensor:
        """h0 [s, b, h] -> [(1+K) s, b, h]; s/t each with sequence parallelism.

        Args:
            input_ids, position_ids: int64 [b, s], those of the embedding; positions may be None.
            embedding: the chunk's `LanguageModelEmbedding`.
            attention_mask, rotary_pos_emb, checkpoint_activations_microbatch: as for
                `TransformerBlock`.

        Raises ValueError without `input_ids`: this chunk needs tokens, also if it is not the first.
        """
        if input_ids is None:
            raise ValueError(
                "this chunk predicts further tokens, so it embeds tokens, but its input_ids are None; "
                "give it the batch's tokens and positions too, as pretrain_gpt.keys_of_chunks does"
            )
        if position_ids is None and embedding.add_position_embedding:
            position_ids = zigzag.places_of(input_ids, self.cp_group)
        recompute = Recompute.of(self.config, len(self.layers), checkpoint_activations_microbatch)
        found = [hidden_states]
        for layer in self.layers:
            hidden_states, input_ids, position_ids = layer(
                input_ids,
                position_ids,
                found[-1],
                attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                embedding=embedding,
                recompute=recompute,
            )
            found.append(hidden_states)
        return torch.cat(found, dim=0)

    def backward_dw(self) -> None:
        """As `TransformerBlock.backward_dw`."""
        for layer in reversed(self.layers):
            layer.backward_dw()


def build_mtp_block(model: torch.nn.Module, spec: Any) -> MultiTokenPredictionBlock | None:
    """The layers for further tokens of the chunk `model`, a `GPTModel`; None without a `spec`.

    Raises ValueError for learned positions where the chunk has no embedding of its own, and as
    `check_mtp_spec`.
    """
    if model.config.mtp_num_layers is not None:
        check_mtp_spec(model.config, spec, model.vp_stage, model.pg_collection)
    if spec is None:
        return None
    if model.position_embedding_type == "learned_absolute" and not model.pre_process:
        raise ValueError(
            "further tokens are embedded on another stage than the first, which would need a copy "
            "of the learned positions; use position_embedding_type 'rope' or 'none', or "
            "pipeline_model_parallel_size 1"
        )
    return MultiTokenPredictionBlock(
        model.config, spec, vp_stage=model.vp_stage, pg_collection=model.pg_collection
    )


# -- The losses --


def process_mtp_loss(
    model: Any,
    hidden_states: torch.Tensor,
    labels: torch.Tensor | None,
    loss_mask: torch.Tensor | None,
    output_weight: torch.Tensor | None,
) -> torch.Tensor:
    """On the chunk with the output layer: hangs each further token's loss on h0.

    Args:
        model: the `GPTModel`; its output layer, loss and groups are used.
        hidden_states: [(1+K) s, b, h], h0 first.
        labels: int64 [b, s], of the next token; None: nothing is scored.
        loss_mask: [b, s], 0 for tokens that do not count; None if all count.
        output_weight: the tied weight, or None.

    Raises ValueError for a mask of another shape than the labels'.
    Returns h0, [s, b, h]. With f = `mtp_loss_scaling_factor`, and n_k tokens that count at depth k, the
    loss l of a token that counts at depth k enters with

        f/K * l / n_k          and MTPLossAutoScaler's scale, which has c/M
        f/K * l * n_0 / n_k    with `calculate_per_token_loss`: the step divides by all n_0

    Release 0.16.1 has no n_0 / n_k in the second row, so that depths with fewer tokens weigh less;
    later ones have it. And n_k are the tokens of all ranks that share the sequence, where Megatron
    counts each rank's own: so the result does not depend on their number.
    """
    config = model.config
    hidden_states, *further = hidden_states.chunk(1 + config.mtp_num_layers, dim=0)
    if labels is None:
        return hidden_states
    if loss_mask is not None and loss_mask.shape != labels.shape:
        raise ValueError(
            f"loss_mask is {list(loss_mask.shape)} for labels {list(labels.shape)}; "
            "give one number for each token"
        )
    targets = [(labels, torch.ones_like(labels) if loss_mask is None else loss_mask)]
    for _ in further:
        targets.append(tuple(roll_tensor(each, cp_group=model.cp_group)[0] for each in targets[-1]))
    counts = torch.stack([mask.sum(dtype=torch.float64) for _, mask in targets])
    if model.cp_group is not None:
        all_reduce(counts, model.cp_group)
    weight = config.mtp_loss_scaling_factor / config.mtp_num_layers
    for depth, states in enumerate(further):
        labels, mask = targets[depth + 1]
        logits, _ = model.output_layer(states, weight=output_weight, runtime_gather_output=False)
        losses = mask * model.compute_language_model_loss(labels, logits)
        losses = losses / or_one(counts[depth + 1]).to(losses.dtype)
        if model.training:
            MTPLossLoggingHelper.save_loss_to_tracker(
                losses.sum() * config.context_parallel_size,
                depth,
                config.mtp_num_layers,
                avg_group=getattr(model.pg_collection, "dp_cp", None),
            )
        if config.calculate_per_token_loss:
            losses = losses * counts[0].to(losses.dtype)
        hidden_states = MTPLossAutoScaler.apply(hidden_states, weight * losses)
    return hidden_states
