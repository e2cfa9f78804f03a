"""A layer's second half with experts: choose, send, compute, send back, add.

Counterpart: `megatron.core.transformer.moe.moe_layer`.

    [s, b, h] -> router: which experts, how much of each
              -> dispatch: tokens go to the ranks of their experts
              -> experts: each computes its tokens
              -> combine: tokens come back, and each adds up what its experts made of it
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.moe.router import TopKRouter
from minimegatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from minimegatron.core.transformer.spec_utils import ModuleSpec, build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig

DISPATCHERS = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
}
"""By `moe_token_dispatcher_type`."""


@dataclass
class MoESubmodules:
    """The specs of a mixture-of-experts layer's parts."""

    experts: ModuleSpec | type | None = None
    shared_experts: ModuleSpec | type | None = None
    router: Any = TopKRouter


class BaseMoELayer(MegatronModule, ABC):
    """What every such layer knows: which experts are here.

    Args:
        layer_number: from 1, within the whole model; None until `set_layer_number`.
        pg_collection: of this rank.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int | None,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        self.ep_group = pg_collection.ep
        if config.num_moe_experts is None:
            raise ValueError("a layer of experts needs the configuration's num_moe_experts; set it")
        if config.expert_model_parallel_size != self.ep_group.size():
            raise ValueError(
                "the configuration says expert_model_parallel_size="
                f"{config.expert_model_parallel_size}, but the expert group has "
                f"{self.ep_group.size()} ranks; make them equal"
            )
        self.num_local_experts = config.num_moe_experts // self.ep_group.size()
        first = self.ep_group.rank() * self.num_local_experts
        self.local_expert_indices = list(range(first, first + self.num_local_experts))

    @abstractmethod
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[s, b, h] -> ([s, b, h], no bias)."""


class MoELayer(BaseMoELayer):
    """Router, dispatcher, this rank's experts, and perhaps a shared expert.

    Args:
        submodules: the specs of its parts.
        pg_collection: tp, tp_cp, ep, expt_tp, tp_ep, and tp_dp_cp for the balance; None for
            `parallel_state`'s.

    Raises ValueError for a configuration without experts, or for another number of expert-parallel
    ranks than the group has.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(config, layer_number, pg_collection)
        self.router = submodules.router(config=config, pg_collection=pg_collection)
        dispatcher = DISPATCHERS[config.moe_token_dispatcher_type]
        self.token_dispatcher: MoETokenDispatcher = dispatcher(
            self.num_local_experts,
            self.local_expert_indices,
            config=config,
            pg_collection=pg_collection,
        )
        self.experts = build_module(
            submodules.experts, self.num_local_experts, config, pg_collection=pg_collection
        )
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size is not None:
            self.shared_experts = build_module(
                submodules.shared_experts,
                config=config,
                gate=config.moe_shared_expert_gate,
                pg_collection=pg_collection,
            )
        if layer_number is not None:
            self.set_layer_number(layer_number)

    def set_layer_number(self, layer_number: int) -> None:
        """From 1, within the whole model; the layer that holds this one calls it."""
        self.layer_number = self.experts.layer_number = layer_number
        self.router.set_layer_number(layer_number)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[s, b, h] -> ([s, b, h], no bias); [s/t, b, h] each with sequence parallelism."""
        shared_expert_output = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.route(hidden_states)
        tokens, probs = self.preprocess(hidden_states, probs, routing_map)
        tokens, probs = self.dispatch(tokens, probs)
        output, _ = self.routed_experts_compute(tokens, probs)
        output = self.combine(output)
        return self.postprocess(output, shared_expert_output), None

    # -- The parts of forward, in order; combined 1F1B calls them one by one --

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """What the shared expert makes of every token, [s, b, h]; None without one."""
        return None if self.shared_experts is None else self.shared_experts(hidden_states)

    def route(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How much of which expert each token gets: probabilities and a bool map, both [T, E]."""
        return self.router(hidden_states)

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and probabilities, ready to be sent."""
        return self.token_dispatcher.dispatch_preprocess(hidden_states, routing_map, probs)

    def dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends both to the ranks that have the experts, and returns what has come."""
        return self.token_dispatcher.token_dispatch(hidden_states, probs)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """This rank's experts on the tokens that have come: (ready to be sent back, no bias)."""
        tokens = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        output, _ = self.experts(*tokens)
        return self.token_dispatcher.combine_preprocess(output), None

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        """Sends the outputs back to where their tokens came from."""
        return self.token_dispatcher.token_combine(output)

    def postprocess(
        self, output: torch.Tensor, shared_expert_output: torch.Tensor | None
    ) -> torch.Tensor:
        """Adds up each token's outputs: [s, b, h]."""
        output = self.token_dispatcher.combine_postprocess(output)
        return output if shared_expert_output is None else output + shared_expert_output

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = True) -> None:
        """With `delay_wgrad_compute`: weight gradients of the oldest microbatch that is owed."""
        if routed_experts:
            self.experts.backward_dw()
        if shared_experts and self.shared_experts is not None:
            self.shared_experts.backward_dw()
