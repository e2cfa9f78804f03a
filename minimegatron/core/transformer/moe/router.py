"""The router: which experts each token goes to, with which weights, and what keeps them balanced.

Counterpart: `megatron.core.transformer.moe.router`. Letters as in `moe_utils`; t and c are the numbers
of tensor- and context-parallel ranks, d that of data-parallel ones, M that of microbatches.

Every rank has the whole weight, and routes its own part of the sequence. Each loss of balance is a
share: the shares of the t * c ranks of a microbatch sum to its loss. A step adds the mean over M and d:

                                a rank's loss in backward   its gradient is multiplied by
    default                     share                       c / M, and by 1 / (d c) in data parallelism
    calculate_per_token_loss    share * tokens (T t c)      1 / (tokens of the whole step)

Tokens of the whole step are those that the loss function counts. Where it leaves some out, and losses
are per token, those of balance weigh more by as much: a router counts them all.

Gradients of the weight are summed over t. So a step is that of one process, however tokens are cut,
with aux_loss, seq_aux_loss and z-loss. By design it is not with a capacity or sinkhorn, which look at
this rank's tokens alone, or with global_aux_loss and d > 1, where a microbatch also sees the counts of
the other data ranks. Random numbers (jitter) are each rank's own.

megatron-core 0.16.1 differs. Per token its losses are t * c times too weak, seq_aux_loss b times more;
global_aux_loss is d times too weak, and takes it that all microbatches have as many tokens.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch

from minimegatron.core.parameter_marks import note_marks
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.initial_weights import new_weight
from minimegatron.core.tracing import traced
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    get_tokens_per_expert_and_token_count,
    map_of,
    router_gating_linear,
    sinkhorn,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    z_loss_func,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig

Routing = tuple[torch.Tensor, torch.Tensor]
"""Probabilities [T, E], 0 where not chosen, and the map [T, E], bool."""

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class Router(MegatronModule, ABC):
    """Logits of a linear layer, and a choice that subclasses make.

    `weight` is [E, h], whole on every rank, without a bias. Under sequence parallelism its gradient is
    one term of a sum, like a norm's.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection):
        super().__init__(config)
        self.layer_number: int | None = None
        self.tp_cp_group, self.tp_dp_cp_group = pg_collection.tp_cp, pg_collection.tp_dp_cp
        shape = (config.num_moe_experts, config.hidden_size)
        self.weight = new_weight(
            shape, config.params_dtype, config.init_method, -1, pg_collection.tp
        )
        self.weight.sequence_parallel = config.sequence_parallel
        note_marks(self)

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[s/t/c, b, h] -> logits [s/t/c, b, E], in `moe_router_dtype`, or the input's dtype."""
        dtype = ROUTER_DTYPES.get(self.config.moe_router_dtype, input.dtype)
        return router_gating_linear(input, self.weight, None, dtype)

    @abstractmethod
    def routing(self, logits: torch.Tensor) -> Routing:
        """Logits [s/t/c, b, E] -> the choice."""

    @abstractmethod
    def forward(self, input: torch.Tensor) -> Routing:
        """[s/t/c, b, h] -> the choice."""

    def set_layer_number(self, layer_number: int) -> None:
        """Which layer of the whole model this is, from 1."""
        self.layer_number = layer_number


def _describe(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"layer": arguments["self"].layer_number}


def _describe_counts(arguments: dict[str, Any]) -> dict[str, Any]:
    router, counts = arguments["self"], arguments["routing_map"].sum(dim=0).tolist()
    num_chosen = arguments["routing_map"].size(0) * router.topk
    return {
        "layer": router.layer_number,
        "tokens_per_expert": counts,
        "dropped": num_chosen - sum(counts),
    }


class TopKRouter(Router):
    """Each token goes to the k experts of the highest score.

    Buffers, none of which `.half()` or `.bfloat16()` changes:
        local_tokens_per_expert: [E], int64; tokens of this rank and step, without those dropped.
        global_tokens_per_expert: [E], int64; of all ranks of the stage, with global_aux_loss.
        expert_bias: [E], float32, saved; with `moe_router_enable_expert_bias`.

    `losses` has sums over the step's `num_counted` microbatches of each loss's share, without its
    coefficient, by Megatron's name in logs. What is counted and added up is for training alone;
    recompute's first pass, which has no gradients, does not do it either.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection):
        super().__init__(config, pg_collection)
        self.topk, self.kinds = config.moe_router_topk, tuple(config.balancing)
        self.losses: dict[str, torch.Tensor] = {}
        self.num_counted, self.step_is_over = 0, False
        counts = torch.zeros(config.num_moe_experts, dtype=torch.int64)
        is_global = "global_aux_loss" in self.kinds
        for name, is_there in (("local", True), ("global", is_global)):
            buffer = counts.clone() if is_there else None
            self.register_buffer(f"{name}_tokens_per_expert", buffer, persistent=False)
        has_bias = config.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", counts.float() if has_bias else None)

    def _apply(self, fn: Any, recurse: bool = True) -> "TopKRouter":
        """What `.half()`, `.bfloat16()` and `.to(...)` do. The bias changes its device, not its dtype.

        In bfloat16 a bias of 1 would take no step of 0.001 any more.
        """
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            moved = self.expert_bias
            self.expert_bias = moved.float() if bias.is_meta else bias.to(moved.device)
        return self

    # -- Forward --

    @traced("moe-route", _describe)
    def forward(self, input: torch.Tensor) -> Routing:
        """[s/t/c, b, h] -> probabilities and map, both [T, E]."""
        return self.routing(self.gating(self.apply_input_jitter(input)))

    def apply_input_jitter(self, input: torch.Tensor) -> torch.Tensor:
        """In training, times uniform noise from 1 - eps to 1 + eps."""
        eps = self.config.moe_input_jitter_eps
        if not eps or not self.training:
            return input
        return input * torch.empty_like(input).uniform_(1.0 - eps, 1.0 + eps)

    def routing(self, logits: torch.Tensor) -> Routing:
        """Logits [s/t/c, b, E] -> probabilities and map, both [T, E]."""
        config = self.config
        seq_length, bsz, num_experts = logits.shape
        if self.step_is_over and self._counts():
            self.forget_step()
        logits = self.apply_z_loss(logits.reshape(-1, num_experts))
        if "sinkhorn" in self.kinds:
            probs, chosen = self.sinkhorn_load_balancing(logits)
        else:
            probs, chosen = topk_routing_with_score_function(
                logits,
                self.topk,
                use_pre_softmax=config.moe_router_pre_softmax,
                num_groups=config.moe_router_num_groups,
                group_topk=config.moe_router_group_topk,
                scaling_factor=config.moe_router_topk_scaling_factor,
                score_function=config.moe_router_score_function,
                expert_bias=self.expert_bias,
            )
        routing_map = chosen
        if config.moe_expert_capacity_factor is not None:
            probs, routing_map = apply_router_token_dropping(
                probs,
                chosen,
                self.topk,
                config.moe_expert_capacity_factor,
                config.moe_token_drop_policy,
                config.moe_pad_expert_input_to_capacity,
            )
        if self._counts() and any(self.config.balancing.values()):
            probs = self._balance(probs, logits, seq_length, bsz)
        # With padding, the map also has tokens that fill places of experts they did not choose.
        self._apply_expert_bias(routing_map & chosen)
        return probs, routing_map

    def sinkhorn_load_balancing(self, logits: torch.Tensor) -> Routing:
        """In training the choice is by a matrix that gives each expert as much; it has no gradient."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = torch.sigmoid(wide) if self.topk == 1 else torch.softmax(wide, dim=-1)
        preferred = sinkhorn(wide.detach()) if self.training else scores
        routing_map = map_of(preferred.topk(self.topk, dim=-1).indices, logits)
        return scores.to(logits.dtype) * routing_map, routing_map

    # -- Losses --

    def _counts(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Its coefficient, which may be set anew; 0 for a loss that is not in the configuration."""
        return self.config.balancing.get(aux_loss_type, 0.0)

    def apply_z_loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [T, E] with the z-loss on them."""
        coeff = self.config.moe_z_loss_coeff
        if not coeff or not self._counts():
            return logits
        share = z_loss_func(logits, coeff / self.tp_cp_group.size())
        return self.attach_and_log_load_balancing_loss(logits, coeff, share, "z_loss")

    def _balance(
        self, probs: torch.Tensor, logits: torch.Tensor, seq_length: int, bsz: int
    ) -> torch.Tensor:
        score_function = self.config.moe_router_score_function
        chosen, scores = compute_routing_scores_for_aux_loss(logits, self.topk, score_function)
        probs = self._apply_aux_loss(probs, scores, chosen)
        probs = self._apply_seq_aux_loss(probs, scores, chosen, seq_length, bsz)
        return self._apply_global_aux_loss(probs, scores, chosen)

    def _apply_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor
    ) -> torch.Tensor:
        """Over the tokens of a microbatch."""
        coeff = self.get_aux_loss_coeff("aux_loss")
        if not coeff:
            return probs
        counts, _, num_tokens = get_tokens_per_expert_and_token_count(routing_map, self.tp_cp_group)
        share = self._switch_loss(scores_for_aux_loss, counts, num_tokens, coeff)
        return self.attach_and_log_load_balancing_loss(probs, coeff, share, "load_balancing_loss")

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
    ) -> torch.Tensor:
        """Over the tokens of each sequence; the mean over the b sequences.

        As if each sequence had E experts of its own. Tokens are ordered [s/t/c, b], so a row of all
        sequences' experts is a place in the sequence.
        """
        coeff = self.get_aux_loss_coeff("seq_aux_loss")
        if not coeff:
            return probs
        scores, chosen = (
            tensor.reshape(seq_length, -1) for tensor in (scores_for_aux_loss, routing_map)
        )
        counts, _, num_tokens = get_tokens_per_expert_and_token_count(chosen, self.tp_cp_group)
        share = self._switch_loss(scores, counts, num_tokens, coeff) / bsz
        return self.attach_and_log_load_balancing_loss(
            probs, coeff, share, "seq_load_balancing_loss"
        )

    def _apply_global_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor
    ) -> torch.Tensor:
        """Over the tokens of the step so far, on all ranks of the stage.

        Counts become those of a microbatch that has its tokens divided like them. So neither the number
        of microbatches and data ranks nor their sizes change how much a token's scores weigh.
        """
        coeff = self.get_aux_loss_coeff("global_aux_loss")
        if not coeff:
            return probs
        counts, num_tokens, _ = get_tokens_per_expert_and_token_count(
            routing_map, self.tp_dp_cp_group
        )
        self.global_tokens_per_expert += counts
        so_far = self.global_tokens_per_expert
        num_tokens *= self.tp_cp_group.size()
        counts = so_far.to(scores_for_aux_loss.dtype) * (num_tokens * self.topk) / so_far.sum()
        share = self._switch_loss(scores_for_aux_loss, counts, num_tokens, coeff)
        return self.attach_and_log_load_balancing_loss(
            probs, coeff, share, "global_load_balancing_loss"
        )

    def _switch_loss(
        self, scores: torch.Tensor, counts: torch.Tensor, num_tokens: int, coeff: float
    ) -> torch.Tensor:
        num_experts = self.config.num_moe_experts
        return switch_load_balancing_loss_func(
            scores, counts, num_tokens, self.topk, num_experts, coeff
        )

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
    ) -> torch.Tensor:
        """`activation` [T, E] with this rank's share of a loss on it; the sum for the log goes on."""
        so_far = self.losses.get(aux_loss_name, 0.0)
        self.losses[aux_loss_name] = so_far + aux_loss.detach() / aux_loss_coeff
        if self.config.calculate_per_token_loss:
            aux_loss = aux_loss * (activation.size(0) * self.tp_cp_group.size())
        return MoEAuxLossAutoScaler.apply(activation, aux_loss)

    # -- Counts --

    @traced("moe-counts", _describe_counts)
    def _apply_expert_bias(self, routing_map: torch.Tensor) -> None:
        """Counts tokens for the bias: those that chose an expert and were not dropped."""
        if self._counts():
            self.local_tokens_per_expert += routing_map.sum(dim=0)
            self.num_counted += 1

    def sums_of_step(self) -> dict[str, Any]:
        """What is counted and added up, beside buffers: values of attributes by their names."""
        return {name: vars(self)[name] for name in ("losses", "num_counted", "step_is_over")}

    def forget_step(self) -> None:
        """Everything counted and added up is zero again."""
        self.local_tokens_per_expert.zero_()
        if self.global_tokens_per_expert is not None:
            self.global_tokens_per_expert.zero_()
        self.losses, self.num_counted, self.step_is_over = {}, 0, False
