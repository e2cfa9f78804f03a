"""Both dispatchers against one process that applies every expert to every token, on real ranks."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.ranks import run_ranks

HIDDEN, WIDE, SEQUENCE, BATCH = 3, 4, 3, 2
TOKENS = SEQUENCE * BATCH
DISPATCHERS = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
}


@dataclass(frozen=True)
class Case:
    """A layout, and how the router chooses."""

    dispatcher: str
    ep: int
    etp: int
    num_experts: int
    topk: int
    routing: str = "random"
    """random; one: all tokens to the first experts; dropped: some pairs are left out; padded."""

    @property
    def config(self) -> TransformerConfig:
        padded = self.routing == "padded"
        return TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=1,
            add_bias_linear=False,
            num_moe_experts=self.num_experts,
            moe_router_topk=self.topk,
            moe_router_pre_softmax=True,
            moe_token_dispatcher_type=self.dispatcher,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            moe_expert_capacity_factor=1.0 if padded else None,
            moe_pad_expert_input_to_capacity=padded,
        )


def cases(size: int) -> list[Case]:
    found = []
    for etp in (1, 2, 4)[: size.bit_length()]:
        ep = size // etp
        for name in DISPATCHERS:
            found += [
                Case(name, ep, etp, 2 * ep, 2),
                Case(name, ep, etp, ep, 1, "one"),
                Case(name, ep, etp, 2 * ep, 2, "one"),
                Case(name, ep, etp, 4, 2, "dropped"),
                Case(name, ep, etp, 4, 2, "padded"),
            ]
    return found


def route(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden states [s, b, h], map [T, E], probabilities [T, E]) of one rank."""
    generator = torch.Generator().manual_seed(rank)
    draw = {"generator": generator, "dtype": torch.float64}
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, **draw)
    scores = torch.rand(TOKENS, case.num_experts, **draw)
    if case.routing == "one":
        chosen = torch.arange(case.topk).expand(TOKENS, -1)
    else:
        chosen = scores.topk(case.topk).indices
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
    if case.routing == "dropped":
        routing_map &= torch.rand(TOKENS, case.num_experts, generator=generator) < 0.6
    probs = scores * routing_map
    if case.routing == "padded":
        capacity = math.ceil(TOKENS * case.topk / case.num_experts)
        kept = probs.topk(capacity, dim=0).indices
        routing_map = torch.zeros_like(routing_map).scatter(0, kept, True)
        probs = probs * routing_map
    return hidden, routing_map, probs


def weights(case: Case) -> list[torch.Tensor]:
    draw = {"generator": torch.Generator().manual_seed(99), "dtype": torch.float64}
    wide = torch.randn(case.num_experts, HIDDEN, WIDE, **draw)
    narrow = torch.randn(case.num_experts, WIDE, HIDDEN, **draw)
    return [wide.requires_grad_(), narrow.requires_grad_()]


def expert(x: torch.Tensor, probs: torch.Tensor, wide, narrow) -> torch.Tensor:
    return (torch.tanh(x @ wide) * probs.unsqueeze(-1)) @ narrow


def one_process(case: Case, ranks: int) -> list[list[torch.Tensor]]:
    """Per rank: output, gradients of hidden states, of probabilities, and of the weights (summed)."""
    wide, narrow = weights(case)
    results = []
    for rank in range(ranks):
        hidden, routing_map, probs = route(case, rank)
        hidden.requires_grad_(), probs.requires_grad_()
        x = hidden.flatten(0, 1)
        each = [expert(x, probs[:, e], wide[e], narrow[e]) for e in range(case.num_experts)]
        output = (torch.stack(each, dim=1) * routing_map.unsqueeze(-1)).sum(dim=1).view_as(hidden)
        (output.sin() * (rank + 1)).sum().backward()
        results.append([output.detach(), hidden.grad, probs.grad])
    return [[*result, wide.grad, narrow.grad] for result in results]


def groups_of(case: Case) -> ProcessGroupCollection:
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=case.ep, expert_tensor_parallel_size=case.etp
    )
    return ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "tp_ep"])


def make_dispatcher(case: Case, groups: ProcessGroupCollection):
    number = case.num_experts // case.ep
    indices = list(range(groups.ep.rank() * number, (groups.ep.rank() + 1) * number))
    return DISPATCHERS[case.dispatcher](number, indices, case.config, groups), indices


def six_steps(dispatcher, hidden, routing_map, probs, run_experts):
    hidden, probs = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    hidden, probs = dispatcher.token_dispatch(hidden, probs)
    tokens, counts, probs = dispatcher.dispatch_postprocess(hidden, probs)
    assert counts.device.type == "cpu" and counts.sum() == tokens.size(0) == probs.size(0)
    output = dispatcher.combine_preprocess(run_experts(tokens, counts.tolist(), probs))
    return dispatcher.combine_postprocess(dispatcher.token_combine(output))


def difference(case: Case, groups: ProcessGroupCollection) -> float:
    """From one process: the largest, of output and gradients."""
    rank, etp = dist.get_rank(), groups.expt_tp
    dispatcher, indices = make_dispatcher(case, groups)
    wide, narrow = weights(case)
    hidden, routing_map, probs = route(case, rank)
    hidden.requires_grad_(), probs.requires_grad_()

    def run_experts(tokens, counts, weighed):
        mine = slice(etp.rank() * WIDE // case.etp, (etp.rank() + 1) * WIDE // case.etp)
        pieces = zip(indices, tokens.split(counts), weighed.split(counts), strict=True)
        return torch.cat([expert(x, p, wide[e][:, mine], narrow[e][mine]) for e, x, p in pieces])

    output = six_steps(dispatcher, hidden, routing_map, probs, run_experts)
    (output.sin() * (rank + 1)).sum().backward()
    for param in (wide, narrow):
        dist.all_reduce(param.grad)
    found = [output.detach(), hidden.grad, probs.grad, wide.grad, narrow.grad]
    wanted = one_process(case, dist.get_world_size())[rank]
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def all_differences() -> list[tuple[Case, float]]:
    found, layout = [], None
    for case in cases(dist.get_world_size()):
        if (case.ep, case.etp) != layout:
            layout = (case.ep, case.etp)
            parallel_state.destroy_model_parallel()
            groups = groups_of(case)
        found.append((case, difference(case, groups)))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_outputs_and_gradients_equal_one_process(size):
    for of_rank in run_ranks(all_differences, size):
        assert [(case, off) for case, off in of_rank if not off < 1e-12] == []
