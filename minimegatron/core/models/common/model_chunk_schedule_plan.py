"""One microbatch's forward and backward through a chunk, in nodes, and two of them side by side.

Counterpart: `megatron.core.models.common.model_chunk_schedule_plan`.

A layer of the one and a layer of the other run together. What either sends to experts is under way
while the other computes: b is the backward of one microbatch, f the forward of another,

    all-to-alls   b combine | f dispatch  | b dispatch | f combine
    computation     f attn  |    b mlp    |    f mlp   |  b attn

Each all-to-all is started as soon as its input exists, and waited for where its output is used. So its
way is as long as the computation between. All ranks of an expert group start theirs in this order,
whatever the tokens are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core.models.gpt.fine_grained_callables import (
    PostProcessNode,
    PreProcessNode,
    TransformerLayerExchange,
    TransformerLayerNode,
    TransformerLayerState,
    build_transformer_layer_callables,
    has_experts,
    should_free_input,
)
from minimegatron.core.pipeline_parallel.schedule_node import (
    AbstractSchedulePlan,
    NoopScheduleNode,
)
from minimegatron.core.transformer.transformer_layer import TransformerLayer


@dataclass
class ModelChunkState:
    """What the nodes of one forward share: the arguments of the model's forward, and what came of them.

    `model` is None once the backward is done.
    """

    model: torch.nn.Module | None
    input_ids: torch.Tensor | None
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    decoder_input: torch.Tensor | None
    labels: torch.Tensor | None
    runtime_gather_output: bool | None
    loss_mask: torch.Tensor | None
    microbatch: int | None
    chunk: int
    rotary_pos_emb: torch.Tensor | None = None
    output_weight: torch.Tensor | None = None


class TransformerLayerSchedulePlan:
    """The nodes of one layer; see `fine_grained_callables`. Without `layer`, five that do nothing."""

    def __init__(
        self, layer: TransformerLayer | None = None, chunk_state: ModelChunkState | None = None
    ):
        self.attn: Any = NoopScheduleNode()
        self.moe_dispatch: Any = NoopScheduleNode()
        self.mlp: Any = NoopScheduleNode()
        self.moe_combine: Any = NoopScheduleNode()
        self.add: Any = NoopScheduleNode()
        if layer is not None:
            self._build_callable_nodes(layer, chunk_state)

    def _build_callable_nodes(self, layer: TransformerLayer, chunk_state: ModelChunkState) -> None:
        is_moe, layer_state = has_experts(layer), TransformerLayerState()
        num_local_experts = layer.mlp.num_local_experts if is_moe else None
        names = ("attn", "moe_dispatch", "mlp", "moe_combine", "add")
        forward_funcs, weight_gradients = build_transformer_layer_callables(layer)
        for name, function in zip(names, forward_funcs, strict=True):
            frees = should_free_input(name, is_moe, layer.config, num_local_experts)
            if function is None:
                continue
            if name in ("moe_dispatch", "moe_combine"):
                node = TransformerLayerExchange(layer, chunk_state, function, name, frees)
            else:
                dw = weight_gradients.get(name, ())
                node = TransformerLayerNode(
                    layer, layer_state, chunk_state, function, name, dw, frees
                )
            setattr(self, name, node)

    def release_state(self) -> None:
        """Lets go of all nodes."""
        self.attn = self.moe_dispatch = self.mlp = self.moe_combine = self.add = None

    @staticmethod
    def run(
        f_layer: "TransformerLayerSchedulePlan | None",
        b_layer: "TransformerLayerSchedulePlan | None",
        f_input: torch.Tensor | None = None,
        b_grad: torch.Tensor | None = None,
        is_last_layer_in_bwd: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The forward of one layer beside the backward of another; either may be None.

        Args:
            f_input, b_grad: [s, b, h].
            is_last_layer_in_bwd: leaves the attention's weight gradients to the caller, who has
                messages to send first.

        Returns the forward's output and the gradient of the backward's input; of an absent one, what
        was given.
        """
        f, b = f_layer or TransformerLayerSchedulePlan(), b_layer or TransformerLayerSchedulePlan()
        combine_b = b.moe_combine.start_backward(b.add.backward(b_grad))
        f_input = f.attn.forward(f_input)
        dispatch_f = f.moe_dispatch.start_forward(f_input)
        b_grad = b.mlp.backward(combine_b.wait())
        dispatch_b = b.moe_dispatch.start_backward(b_grad)
        b.mlp.backward_dw()
        f_input = f.mlp.forward(dispatch_f.wait())
        combine_f = f.moe_combine.start_forward(f_input)
        b_grad = b.attn.backward(dispatch_b.wait())
        if not is_last_layer_in_bwd:
            b.attn.backward_dw()
        return f.add.forward(combine_f.wait()), b_grad


class TransformerModelChunkSchedulePlan(AbstractSchedulePlan):
    """One microbatch in one chunk: `pre_process`, the layers, and on the last chunk `post_process`.

    Args:
        model: the chunk, without wrappers.
        others: as for its forward.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        decoder_input: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        runtime_gather_output: bool | None = None,
        loss_mask: torch.Tensor | None = None,
    ):
        self.vp_stage = model.vp_stage
        self.microbatch: int | None = getattr(model, "current_microbatch", None)
        self.state = ModelChunkState(
            model,
            input_ids,
            position_ids,
            attention_mask,
            decoder_input,
            labels,
            runtime_gather_output,
            loss_mask,
            microbatch=self.microbatch,
            chunk=model.vp_stage or 0,
        )
        self.pre_process: Any = PreProcessNode(model, self.state)
        self._layers = [TransformerLayerSchedulePlan(x, self.state) for x in model.decoder.layers]
        self.post_process: Any = NoopScheduleNode()
        if model.post_process:
            self.post_process = PostProcessNode(model, self.state)

    def num_layers(self) -> int:
        """How many layers are left: each backward takes one."""
        return len(self._layers)

    def get_layer(self, i: int) -> TransformerLayerSchedulePlan:
        """The i-th layer."""
        return self._layers[i]

    def pop_layer(self) -> TransformerLayerSchedulePlan:
        """Removes the last layer that is left."""
        return self._layers.pop()

    def release_state(self) -> None:
        """Lets go of the model and of the nodes at its ends."""
        self.state.model = self.pre_process = self.post_process = None

    @staticmethod
    def run(
        f_schedule_plan: "TransformerModelChunkSchedulePlan | None",
        b_schedule_plan: "TransformerModelChunkSchedulePlan | None",
        b_grad: torch.Tensor | None = None,
        pre_forward: Callable | None = None,
        pre_backward: Callable | None = None,
        post_forward: Callable | None = None,
        post_backward: Callable | None = None,
    ) -> torch.Tensor | None:
        """See `AbstractSchedulePlan.run`.

        The i-th layer forward runs beside the i-th from the end backward. If one chunk has more, the
        rest run alone. The messages of both follow the last layers, and what is left,
        the model's two ends and one layer's weight gradients, is computed while they travel.
        """
        f, b = f_schedule_plan, b_schedule_plan
        f_input = None
        if f is not None:
            _call(pre_forward, f.vp_stage)
            f_input = f.pre_process.forward()
        if b is not None:
            _call(pre_backward, b.vp_stage)
            b_grad = b.post_process.backward(b_grad)

        num_f, num_b = (0 if plan is None else plan.num_layers() for plan in (f, b))
        b_layer = None
        for i in range(num_b):
            f_layer, b_layer = f.get_layer(i) if i < num_f else None, b.pop_layer()
            is_last = i == num_b - 1
            f_input, b_grad = TransformerLayerSchedulePlan.run(
                f_layer, b_layer, f_input, b_grad, is_last
            )
            if not is_last:
                b_layer.release_state()
        for i in range(num_b, num_f):
            f_input, _ = TransformerLayerSchedulePlan.run(f.get_layer(i), None, f_input)

        if f is not None:
            _call(post_forward, f_input, f.vp_stage)
        if b is not None:
            _call(post_backward, b_grad, b.vp_stage)
        if b_layer is not None:
            b_layer.attn.backward_dw()
            b_layer.release_state()
        if f is not None:
            f_input = f.post_process.forward(f_input)
        if b is not None:
            b.pre_process.backward(b_grad)
            b.release_state()
        return f_input


def _call(hook: Callable | None, *arguments: Any) -> None:
    if hook is not None:
        hook(*arguments)
