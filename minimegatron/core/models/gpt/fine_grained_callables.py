"""A GPT layer in nodes, and the model's two ends: what combined 1F1B puts side by side.

Counterpart: `megatron.core.models.gpt.fine_grained_callables`. The first node of a layer has the name
that it has in release 0.16.1.

| node           | a layer of experts                                         | a dense layer        |
|----------------|------------------------------------------------------------|----------------------|
| `attn`         | norm, attention, add; norm, shared expert, router, permute | norm, attention, add |
| `moe_dispatch` | all-to-all of the tokens, then of their probabilities      |                      |
| `mlp`          | sort, experts, sort back                                   | norm, MLP, add       |
| `moe_combine`  | all-to-all of the experts' outputs                         |                      |
| `add`          | unpermute, add                                             |                      |

In Megatron `moe_combine` does the work of the last row too. Here the all-to-alls of tokens are nodes of
their own; other messages, such as the counts of tokens, stay in the nodes that compute.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from minimegatron.core.orders.work import BACKWARD, BACKWARD_WEIGHT, COMPUTE, FORWARD
from minimegatron.core.pipeline_parallel.schedule_node import (
    CommunicationNode,
    ScheduleNode,
    TensorsInFlight,
)
from minimegatron.core.tracing import traced
from minimegatron.core.transformer.module import float16_to_fp32
from minimegatron.core.transformer.transformer_block import dropout_rng
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.transformer_layer import TransformerLayer, bias_dropout_add

# -- The model's two ends --


class PreProcessNode(ScheduleNode):
    """The embedding, on the first chunk; elsewhere its output is the tensor that another stage sent.

    Args:
        gpt_model: the chunk, without wrappers.
        chunk_state: `ModelChunkState`.
    """

    def __init__(self, gpt_model: torch.nn.Module, chunk_state: Any):
        super().__init__(name="pre_process")
        self.gpt_model, self.chunk_state = gpt_model, chunk_state

    def forward_impl(self) -> torch.Tensor:
        """[s, b, h]; what later nodes need goes into `chunk_state`."""
        model, state = self.gpt_model, self.chunk_state
        hidden_states, state.rotary_pos_emb = model._preprocess(
            state.input_ids, state.position_ids, state.decoder_input
        )
        # The output layer's gradient joins the embedding's, so that the tied weight gets one gradient.
        # One that is deferred comes by itself, at the end of the step.
        is_deferred = model.config.defer_embedding_wgrad_compute
        is_tied = model.share_embeddings_and_output_weights and not is_deferred
        if is_tied and model.pre_process and model.post_process:
            state.output_weight = self.detach(model.shared_embedding_or_output_weight())
        return model.decoder.first_input(hidden_states)


class PostProcessNode(ScheduleNode):
    """On the last chunk: final norm, output layer, losses. Arguments as for `PreProcessNode`."""

    def __init__(self, gpt_model: torch.nn.Module, chunk_state: Any):
        super().__init__(name="post_process")
        self.gpt_model, self.chunk_state = gpt_model, chunk_state

    def forward_impl(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> what the model's forward returns; in float32, as from `Float16Module`."""
        model, state = self.gpt_model, self.chunk_state
        if model.decoder.final_layernorm is not None:
            hidden_states = model.decoder.final_layernorm(hidden_states)
        output = model._postprocess(
            hidden_states,
            state.labels,
            loss_mask=state.loss_mask,
            runtime_gather_output=state.runtime_gather_output,
            output_weight=state.output_weight,
        )
        is_half = model.config.fp16 or model.config.bf16
        return float16_to_fp32(output) if is_half else output


# -- A layer --


def should_free_input(
    name: str, is_moe: bool, config: TransformerConfig, num_local_experts: int | None = None
) -> bool:
    """Whether nobody needs a node's input after its forward, so that its memory can be given back.

    The backward of an all-to-all needs nothing. Experts save what they get, and that is another tensor
    than the node's input if tokens of several ranks were sorted by several experts.
    """
    if not is_moe:
        return False
    num_sources = config.expert_model_parallel_size * config.expert_tensor_parallel_size
    is_sorted = num_sources > 1 and (num_local_experts or 1) > 1
    return {"moe_dispatch": True, "mlp": is_sorted, "moe_combine": True}.get(name, False)


class TransformerLayerState:
    """What skips nodes of a layer, in one forward: from `attn` to `add`, both [s, b, h]."""

    residual: torch.Tensor | None = None
    shared_expert_output: torch.Tensor | None = None


def _node(direction: str, lane: str = COMPUTE) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What observers are told of a node."""

    def describe(arguments: dict[str, Any]) -> dict[str, Any]:
        node = arguments["self"]
        name = node.name.removeprefix("moe_").replace("attn", "attention")
        state = node.chunk_state
        return {
            "node": name,
            "direction": direction,
            "layer": node.layer.layer_number,
            "lane": lane,
            "microbatch": state.microbatch,
            "chunk": state.chunk,
        }

    return describe


class TransformerLayerNode(ScheduleNode):
    """A piece of a layer that computes.

    Args:
        layer: whose piece it is.
        layer_state: `TransformerLayerState`.
        chunk_state: `ModelChunkState`.
        submodule: `(node, *inputs) -> outputs`, of `build_transformer_layer_callables`.
        name: which of the nodes.
        bwd_dw_callables: with `delay_wgrad_compute`, what computes its weight gradients.
        free_input: see `should_free_input`.
    """

    def __init__(
        self,
        layer: TransformerLayer,
        layer_state: TransformerLayerState,
        chunk_state: Any,
        submodule: Callable,
        name: str = "default",
        bwd_dw_callables: tuple[Callable[[], None], ...] = (),
        free_input: bool = False,
    ):
        super().__init__(free_input=free_input, name=name)
        self.layer, self.layer_state, self.chunk_state = layer, layer_state, chunk_state
        self.submodule, self.bwd_dw_callables = submodule, bwd_dw_callables

    @traced("layer-node", _node(FORWARD))
    def forward(self, inputs: Any = ()) -> Any:
        # As around the layers of a whole forward; a piece goes on where the one before it ended.
        with dropout_rng(self.layer.config, self.layer.training):
            return super().forward(inputs)

    def forward_impl(self, *inputs: torch.Tensor) -> Any:
        return self.submodule(self, *inputs)

    @traced("layer-node", _node(BACKWARD))
    def backward(self, output_grad: Any) -> Any:
        return super().backward(output_grad)

    def backward_dw(self) -> None:
        """The weight gradients that the backward has left; none without `delay_wgrad_compute`."""
        if self.layer.config.delay_wgrad_compute and self.bwd_dw_callables:
            self._compute_weight_gradients()

    @traced("layer-node", _node(BACKWARD_WEIGHT))
    def _compute_weight_gradients(self) -> None:
        for compute in self.bwd_dw_callables:
            compute()


class TransformerLayerExchange(CommunicationNode):
    """A piece of a layer that communicates; arguments as for `TransformerLayerNode`."""

    def __init__(
        self,
        layer: TransformerLayer,
        chunk_state: Any,
        get_exchange: Callable[[], Any],
        name: str,
        free_input: bool,
    ):
        super().__init__(get_exchange, free_input, name)
        self.layer, self.chunk_state = layer, chunk_state

    @traced("layer-node", _node(FORWARD, "all-to-all"))
    def start_forward(self, inputs: Any) -> TensorsInFlight:
        return super().start_forward(inputs)

    @traced("layer-node", _node(BACKWARD, "all-to-all"))
    def start_backward(self, output_grad: Any) -> TensorsInFlight:
        return super().start_backward(output_grad)


def has_experts(layer: TransformerLayer) -> bool:
    """Whether the layer sends tokens to experts."""
    return hasattr(layer.mlp, "token_dispatcher")


def build_transformer_layer_callables(
    layer: TransformerLayer,
) -> tuple[list[Callable | None], dict[str, tuple[Callable[[], None], ...]]]:
    """What the nodes of a layer do.

    Returns:
        `[attn, moe_dispatch, mlp, moe_combine, add]`, where an exchange is a function that returns it;
        three are None for a dense layer. And for `attn` and `mlp`, what computes the weight gradients.
    """
    attention, mlp = layer.self_attention.backward_dw, layer.mlp.backward_dw
    if not has_experts(layer):
        forward_funcs = [partial(_attention, layer), None, partial(_mlp, layer), None, None]
        return forward_funcs, {"attn": (attention,), "mlp": (mlp,)}
    dispatcher = layer.mlp.token_dispatcher
    forward_funcs = [
        partial(_attention_and_routing, layer),
        lambda: dispatcher.dispatch_exchange,
        partial(_experts, layer),
        lambda: dispatcher.combine_exchange,
        partial(_add, layer),
    ]
    shared_experts = partial(mlp, routed_experts=False, shared_experts=True)
    routed_experts = partial(mlp, routed_experts=True, shared_experts=False)
    return forward_funcs, {"attn": (shared_experts, attention), "mlp": (routed_experts,)}


def _attention(
    layer: TransformerLayer, node: TransformerLayerNode, hidden_states: torch.Tensor
) -> torch.Tensor:
    state = node.chunk_state
    return layer._forward_attention(
        hidden_states,
        state.attention_mask,
        state.rotary_pos_emb,
        layer.config.recompute_granularity == "selective",
    )


def _mlp(
    layer: TransformerLayer, node: TransformerLayerNode, hidden_states: torch.Tensor
) -> torch.Tensor:
    return layer._forward_mlp(hidden_states)


def _attention_and_routing(
    layer: TransformerLayer, node: TransformerLayerNode, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[s, b, h] -> tokens [n, h] and probabilities [n], ready to be sent."""
    hidden_states = _attention(layer, node, hidden_states)
    normed = layer.pre_mlp_layernorm(hidden_states)
    # In the order of the layer's own forward: so gradients are added up in the same order too.
    shared_expert_output = layer.mlp.shared_experts_compute(normed)
    probs, routing_map = layer.mlp.route(normed)
    tokens, probs = layer.mlp.preprocess(normed, probs, routing_map)
    node.layer_state.residual = node.detach(hidden_states)
    if shared_expert_output is not None:
        node.layer_state.shared_expert_output = node.detach(shared_expert_output)
    return tokens, probs


def _experts(
    layer: TransformerLayer, node: TransformerLayerNode, tokens: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    output, _ = layer.mlp.routed_experts_compute(tokens, probs)
    return output


def _add(layer: TransformerLayer, node: TransformerLayerNode, output: torch.Tensor) -> torch.Tensor:
    """The experts' outputs that have come back -> [s, b, h]."""
    state = node.layer_state
    output = layer.mlp.postprocess(output, state.shared_expert_output)
    residual, state.residual, state.shared_expert_output = state.residual, None, None
    return bias_dropout_add((output, None), residual, layer.hidden_dropout, layer.training)
