"""Against megatron-core: tokens reach their experts in the same rows, and come back the same."""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.moe import permutation
from tests.conformance.megatron import cuda_calls_on_cpu, megatron_module
from tests.core.transformer.moe import test_token_dispatcher as ours
from tests.core.transformer.moe.test_token_dispatcher import HIDDEN, Case
from tests.figures import figure
from tests.ranks import run_ranks

THEIRS = {
    name: megatron_module(module)
    for name, module in {
        "utils": "transformer.moe.moe_utils",
        "dispatcher": "transformer.moe.token_dispatcher",
        "config": "transformer.transformer_config",
        "state": "parallel_state",
    }.items()
}
pytestmark = pytest.mark.filterwarnings("ignore")


# -- Permutation, without ranks --


def permuted(package: Any, seed: int, padded: bool, weighed_after: bool) -> list[torch.Tensor]:
    """Values and gradients of a permutation and its inverse."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, num_experts = 1 + seed % 9, 2 + seed % 4
    tokens = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64)
    routing_map = torch.rand(num_tokens, num_experts, generator=generator) < 0.5
    probs = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    tokens.requires_grad_(), probs.requires_grad_()
    options = {"drop_and_pad": True} if padded else {}
    number = num_experts * (1 + num_tokens // 2) if padded else None
    rows, weights, indices = package.permute(
        tokens, routing_map, probs=probs, num_out_tokens=number, **options
    )
    if weighed_after:
        options |= {"probs": probs, "routing_map": routing_map}
    moved = rows.tanh() if weighed_after else rows.tanh() * weights.unsqueeze(-1)
    total = package.unpermute(moved, indices, tokens.shape, **options)
    grads = torch.autograd.grad(total.sin().sum(), (tokens, probs))
    return [rows, weights, indices, total, *grads]


@pytest.mark.parametrize("weighed_after", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_permutation_and_its_inverse(padded, weighed_after):
    for seed in range(20):
        pairs = zip(
            permuted(permutation, seed, padded, weighed_after),
            permuted(THEIRS["utils"], seed, padded, weighed_after),
            strict=True,
        )
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_chunks_in_another_order():
    rows = torch.randn(7, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(7, dtype=torch.float64, requires_grad=True)
    arguments = (rows, torch.tensor([2, 0, 4, 1]), torch.tensor([3, 1, 0, 2]))
    results = []
    for package in (permutation, THEIRS["utils"]):
        moved, probs = package.sort_chunks_by_idxs(*arguments, probs=weights)
        total = (moved.sin() * probs.unsqueeze(-1) * torch.arange(7).unsqueeze(-1)).sum()
        results.append([moved, probs, *torch.autograd.grad(total, (rows, weights))])
        assert package.sort_chunks_by_idxs(*arguments)[1] is None
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))


# -- Dispatchers, over two ranks --


class AlltoAllOnCpu(THEIRS["dispatcher"].MoEAlltoAllTokenDispatcher):
    """What theirs copies from a GPU is there already."""

    def _maybe_dtoh_and_synchronize(self, point, tokens_per_expert=None):
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if torch.is_tensor(getattr(self, name)):
                setattr(self, name, getattr(self, name).numpy())
        return tokens_per_expert


DISPATCHERS = {
    "alltoall": AlltoAllOnCpu,
    "allgather": THEIRS["dispatcher"].MoEAllGatherTokenDispatcher,
}
CASES = [
    case
    for case in ours.cases(2)
    # Over gloo, theirs cannot gather unequal numbers of rows from the ranks that share an expert.
    if case.dispatcher == "allgather" or case.etp == 1 or case.routing == "padded"
]


def their_dispatcher(case: Case, groups: ProcessGroupCollection, indices: list[int]) -> Any:
    padded = case.routing == "padded"
    config = THEIRS["config"].TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        add_bias_linear=False,
        num_moe_experts=case.num_experts,
        moe_router_topk=case.topk,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=case.dispatcher,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        moe_expert_capacity_factor=1.0 if padded else None,
        moe_pad_expert_input_to_capacity=padded,
    )
    return DISPATCHERS[case.dispatcher](len(indices), indices, config, groups)


def dispatched(dispatcher: Any, case: Case, groups: ProcessGroupCollection) -> list[torch.Tensor]:
    """What arrives, in its order; what comes back; gradients."""
    rank = dist.get_rank()
    hidden, routing_map, probs = ours.route(case, rank)
    hidden.requires_grad_(), probs.requires_grad_()
    kept = []

    def run_experts(tokens, counts, weights):
        kept.extend([tokens.detach().clone(), torch.tensor(counts), weights.detach().clone()])
        # Each expert another function, and each of its ranks another term of it.
        places = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).unsqueeze(-1)
        number = 1 + groups.expt_tp.rank() + places + 10 * groups.ep.rank()
        return (tokens * number).tanh() * weights.unsqueeze(-1)

    output = ours.six_steps(dispatcher, hidden, routing_map, probs, run_experts)
    (output.sin() * (rank + 1)).sum().backward()
    return [*kept, output.detach(), hidden.grad, probs.grad]


def differences() -> list[tuple[Case, float]]:
    found = []
    warnings.simplefilter("ignore")  # of old names in torch, a line for each call
    THEIRS["state"]._set_global_memory_buffer()
    owner = THEIRS["dispatcher"].MoEAlltoAllTokenDispatcher
    stream = mock.patch.object(owner, "cuda_dtoh_stream", "made already")
    for case in CASES:
        parallel_state.destroy_model_parallel()
        groups = ours.groups_of(case)
        mine, indices = ours.make_dispatcher(case, groups)
        with cuda_calls_on_cpu(), stream:
            theirs = dispatched(their_dispatcher(case, groups, indices), case, groups)
        pairs = zip(dispatched(mine, case, groups), theirs, strict=True)
        off = 0.0
        for one, other in pairs:
            assert (one.shape, one.dtype) == (other.shape, other.dtype), case
            off = max([off, *(one - other).abs().flatten().tolist()])
        found.append((case, off))
    return found


def test_dispatchers_over_two_ranks():
    results = run_ranks(differences, 2)
    assert len(results[0]) == len(CASES) >= 15
    worst = max(off for of_rank in results for _, off in of_rank)
    figure(f"{len(CASES)} cases, worst difference {worst:.1e}")
    assert worst < 1e-14, results
