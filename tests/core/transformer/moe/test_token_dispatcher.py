"""Both dispatchers against one process that applies every expert to every token, on real ranks."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel import mappings
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.tracing import observed_by
from minimegatron.core.transformer.mlp import MLPSubmodules
from minimegatron.core.transformer.moe.experts import SequentialMLP
from minimegatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    TokenExchange,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.groups import PretendGroup
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


def all_checks() -> list[tuple[Case, float]]:
    found, layout = [], None
    for case in cases(dist.get_world_size()):
        if (case.ep, case.etp) != layout:
            layout = (case.ep, case.etp)
            parallel_state.destroy_model_parallel()
            groups = groups_of(case)
        found.append((case, difference(case, groups)))
        check_identity(case, groups)
        check_collectives(case, groups)
    check_exchanges()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_real_ranks_equal_one_process(size):
    for of_rank in run_ranks(all_checks, size):
        assert [(case, off) for case, off in of_rank if not off < 1e-12] == []


def check_identity(case: Case, groups: ProcessGroupCollection) -> None:
    """Experts that change nothing, weights of 1: each token comes back once per expert that it has."""
    dispatcher, _ = make_dispatcher(case, groups)
    hidden, routing_map, _ = route(case, dist.get_rank())
    output = six_steps(
        dispatcher,
        hidden,
        routing_map,
        routing_map.to(hidden.dtype),
        lambda tokens, counts, probs: tokens * probs.unsqueeze(-1) / case.etp,
    )
    times = routing_map.sum(dim=1).view(SEQUENCE, BATCH, 1)
    assert (output - times * hidden).abs().max() < 1e-14
    # Nothing with a graph, and no token, stays behind in the dispatcher.
    kept = [value for value in vars(dispatcher).values() if isinstance(value, torch.Tensor)]
    assert all(not tensor.is_floating_point() for tensor in kept)


class Seen:
    """Collectives in order: (name, ranks, bytes that leave this rank)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def start(self, call) -> None:
        about = call.attributes
        if about.get("group_size", 1) > 1:
            size = about["group_size"]
            factor = {"all-gather": size - 1, "reduce-scatter": (size - 1) / size}.get(call.name)
            moved = about["bytes_sent"] if factor is None else int(factor * about["bytes"])
            self.seen.append((call.name, size, moved))

    def stop(self, call) -> None:
        pass


def check_collectives(case: Case, groups: ProcessGroupCollection) -> None:
    """What each step sends: how often, over which ranks, and as many bytes as it must."""
    dispatcher, _ = make_dispatcher(case, groups)
    hidden, routing_map, probs = route(case, dist.get_rank())
    hidden.requires_grad_(), probs.requires_grad_()
    by_step = {}

    def step(name: str, *args):
        seen = Seen()
        with observed_by(seen):
            result = getattr(dispatcher, name)(*args)
        by_step[name] = [name for name, _, _ in seen.seen]
        sent.extend(seen.seen)
        return result

    sent: list[tuple[str, int, int]] = []
    tokens = step("dispatch_preprocess", hidden, routing_map, probs)
    tokens, _, weighed = step("dispatch_postprocess", *step("token_dispatch", *tokens))
    output = step("combine_preprocess", tokens * weighed.unsqueeze(-1))
    output = step("combine_postprocess", step("token_combine", output))
    seen = Seen()
    with observed_by(seen):
        output.sum().backward()
    all_to_all = case.dispatcher == "alltoall"
    over_etp = all_to_all and case.etp > 1
    over_ep = all_to_all and case.ep > 1
    counted = all_to_all and case.routing != "padded"
    assert by_step == {
        "dispatch_preprocess": ["all-gather"] * counted,
        "token_dispatch": ["all-to-all"] * 2 * over_ep + ["all-gather"] * 3 * (not all_to_all),
        "dispatch_postprocess": ["all-gather"] * 2 * over_etp,
        "combine_preprocess": ["reduce-scatter"] * over_etp,
        "token_combine": ["all-to-all"] * over_ep + ["reduce-scatter"] * (not all_to_all),
        "combine_postprocess": [],
    }
    row = HIDDEN * hidden.element_size()
    if over_ep:
        local = case.num_experts // case.ep
        first = groups.ep.rank() * local
        leaving = int(routing_map.sum() - routing_map[:, first : first + local].sum())
        arriving = sum(dispatcher.output_splits) - dispatcher.output_splits[groups.ep.rank()]
        of_forward = [moved for name, _, moved in sent if name == "all-to-all"]
        assert of_forward == [leaving * row, leaving * hidden.element_size(), arriving * row]
        of_backward = [moved for name, _, moved in seen.seen if name == "all-to-all"]
        wanted = [leaving * row, arriving * row, arriving * hidden.element_size()]
        assert sorted(of_backward) == sorted(wanted)
    if not all_to_all:
        num_others = case.ep * case.etp - 1
        moved = [moved for _, _, moved in sent]
        assert moved[2:] == [num_others * TOKENS * row] * 2


def check_exchanges() -> None:
    """What a schedule starts and waits for by hand is what the steps do with autograd."""
    case = Case("alltoall", dist.get_world_size(), 1, 4, 2)
    parallel_state.destroy_model_parallel()
    dispatcher, _ = make_dispatcher(case, groups_of(case))
    hidden, routing_map, probs = route(case, dist.get_rank())
    ready = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    ready = [tensor.requires_grad_() for tensor in ready]
    sent = dispatcher.token_dispatch(*ready)
    exchange = dispatcher.dispatch_exchange
    started = [exchange.start(tensor) for tensor in ready]
    grads = [torch.rand_like(tensor) for tensor in sent]
    returned = [exchange.reversed().start(grad) for grad in grads]
    for _, handle in [*started, *returned]:
        handle.wait()
    assert all(torch.equal(a, b) for (a, _), b in zip(started, sent, strict=True))
    wanted = torch.autograd.grad(sent, ready, grads)
    assert all(torch.equal(a, b) for (a, _), b in zip(returned, wanted, strict=True))
    assert not any(output.requires_grad for output, _ in started)
    back, handle = dispatcher.combine_exchange.start(sent[0])
    handle.wait()
    assert torch.equal(back, ready[0])


# -- Alone --


def groups_of_one() -> ProcessGroupCollection:
    return ProcessGroupCollection(**dict.fromkeys(("ep", "expt_tp", "tp_ep"), PretendGroup()))


@pytest.mark.parametrize("name", DISPATCHERS)
def test_one_rank_sorts_and_adds(name):
    case = Case(name, 1, 1, 4, 2, "dropped")
    dispatcher, _ = make_dispatcher(case, groups_of_one())
    hidden, routing_map, probs = route(case, 0)
    hidden.requires_grad_(), probs.requires_grad_()
    ready = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    tokens, counts, weighed = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*ready))
    experts, places = routing_map.T.nonzero(as_tuple=True)
    assert torch.equal(counts, routing_map.sum(dim=0))
    assert torch.equal(tokens, hidden.flatten(0, 1)[places])
    assert torch.equal(weighed, probs[places, experts])
    (weighed.sum() + tokens.sum()).backward()
    assert torch.equal(probs.grad, routing_map.double()), "gradient of the probabilities"
    wanted = routing_map.sum(dim=1).view(SEQUENCE, BATCH, 1).expand_as(hidden)
    assert torch.equal(hidden.grad, wanted.double())


def test_what_arrives_is_sorted_by_local_expert():
    """Rank 1 of two, experts 2 and 3. Each source gives each expert three places."""
    groups = groups_of_one()
    groups.ep = PretendGroup(1, 2)
    case = Case("alltoall", 2, 1, 4, 2, "padded")
    dispatcher, _ = make_dispatcher(case, groups)
    dispatcher.dispatch_preprocess(*route(case, 1))
    assert dispatcher.input_splits == dispatcher.output_splits == [6, 6]
    of_source = torch.tensor([0.0, 10.0]).repeat_interleave(6)
    of_expert = torch.tensor([2.0, 3.0]).repeat_interleave(3).repeat(2)
    arrived = of_source + of_expert
    tokens, counts, weights = dispatcher.dispatch_postprocess(arrived.unsqueeze(-1), arrived)
    wanted = [2.0] * 3 + [12.0] * 3 + [3.0] * 3 + [13.0] * 3
    assert weights.tolist() == wanted, "order of the local experts"
    assert counts.tolist() == [6, 6] and torch.equal(tokens[:, 0], weights)
    assert torch.equal(dispatcher.combine_preprocess(tokens)[:, 0], arrived)


def test_gradients_of_what_was_gathered_are_summed(monkeypatch):
    """Two ranks with the same tokens, of which this one plays both."""
    sent = []

    def all_gather(output, input, group):
        sent.append("all-gather")
        output.copy_(torch.cat([input, input]))

    def reduce_scatter(output, input, group):
        sent.append("reduce-scatter")
        output.copy_(2 * input.chunk(2)[0])

    monkeypatch.setattr(mappings.collectives, "all_gather", all_gather)
    monkeypatch.setattr(mappings.collectives, "reduce_scatter", reduce_scatter)
    groups = ProcessGroupCollection(ep=PretendGroup(0, 2), expt_tp=PretendGroup())
    groups.tp_ep = groups.ep
    case = Case("allgather", 2, 1, 4, 2)
    dispatcher, _ = make_dispatcher(case, groups)
    hidden, routing_map, probs = route(case, 0)
    hidden.requires_grad_(), probs.requires_grad_()
    tokens = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    tokens = dispatcher.token_dispatch(*tokens)
    assert sent == ["all-gather"] * 3
    (tokens[0].sum() + tokens[1].sum()).backward()
    assert sent == ["all-gather"] * 3 + ["reduce-scatter"] * 2, "gradients must be summed"
    assert hidden.grad.eq(2).all() and probs.grad.eq(2).all()


def test_an_expert_without_tokens_runs_too():
    """Else its parameters have no gradient, and its hooks do not run: other ranks wait for them."""
    case = Case("alltoall", 1, 1, 3, 1)
    linears = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    experts = SequentialMLP(3, case.config, linears, groups_of_one())
    tokens = torch.ones(2, HIDDEN, requires_grad=True)
    output, _ = experts(tokens, torch.tensor([0, 2, 0]), torch.ones(2))
    output.sum().backward()
    norms = [
        [param.grad.norm() for param in expert.parameters()] for expert in experts.local_experts
    ]
    assert [all(norm > 0 for norm in of_expert) for of_expert in norms] == [False, True, False]
    assert output.shape == tokens.shape


def test_an_exchange_of_one_rank_gives_a_tensor_of_its_own():
    """Whoever frees what was sent would else free what has arrived."""
    exchange = TokenExchange(PretendGroup(), [3], [3])
    mine = torch.ones(3, 2)
    output, handle = exchange.start(mine)
    handle.wait()
    assert torch.equal(output, mine)
    assert output.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()


def test_tokens_may_have_less_precision_than_their_probabilities():
    case = Case("alltoall", 1, 1, 4, 2)
    dispatcher, _ = make_dispatcher(case, groups_of_one())
    hidden, routing_map, probs = route(case, 0)
    hidden = hidden.to(torch.bfloat16)
    output = six_steps(dispatcher, hidden, routing_map, probs.float(), lambda x, counts, p: x)
    assert output.dtype == torch.bfloat16 and torch.equal(output, 2 * hidden)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_what_does_not_fit_is_refused(name):
    case = Case(name, 2, 1, 4, 2)
    groups = groups_of_one()
    groups.ep = PretendGroup(1, 2)
    for number, indices in ((2, [0, 1]), (1, [2, 3]), (2, [2, 2])):
        with pytest.raises(ValueError, match=r"rank 1 of 2 .* its share of 4 is \[2, 3\]"):
            DISPATCHERS[name](number, indices, case.config, groups)
    dispatcher, _ = make_dispatcher(case, groups)
    hidden, routing_map, probs = route(case, 0)
    for wrong in (routing_map[1:], routing_map[:, 1:], routing_map.long()):
        with pytest.raises(
            ValueError, match=r"there are 6 tokens and 4 experts; give a bool \[6, 4\]"
        ):
            dispatcher.dispatch_preprocess(hidden, wrong, probs)
