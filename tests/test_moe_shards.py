"""What experts do differently from one process by design, against one that routes the same parts.

A capacity and sinkhorn look at the tokens of one rank alone; the global loss of balance, at those of
all copies of the model so far. So here one process has the whole model, and its routers are replaced by
one written by hand: for each microbatch, for each copy, for each tensor-parallel rank's part of the
sequence. Losses, every gradient and the norm are compared.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.transformer.moe.router import TopKRouter
from minimegatron.core.utils import unwrap_model
from tests import parity
from tests.fake_transport import FakeGroup
from tests.figures import figure
from tests.parity import MICRO_BATCH, SEQ, Case, batches, build
from tests.parity import compare as compare_with
from tests.ranks import run_ranks

FEW, COEFF = 0.6, 0.5
KINDS: dict[str, dict[str, Any]] = {
    f"{'padded' if padded else 'few'}, {policy}": {
        "moe_aux_loss_coeff": 0.0,
        "moe_expert_capacity_factor": FEW,
        "moe_token_drop_policy": policy,
        "moe_pad_expert_input_to_capacity": padded,
    }
    for policy in ("probs", "position")
    for padded in (False, True)
} | {
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "global": {
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": COEFF,
    },
}
TWO, FOUR = {"experts": 4, "num_layers": 2, "M": 2}, {"experts": 8, "num_layers": 2, "M": 3}
LAYOUTS = [
    Case(tp=2, sp=True, ep=2, **TWO),
    Case(dp=2, ep=2, dispatcher="allgather", **TWO),
    Case(tp=2, dp=2, sp=True, ep=2, **FOUR),
    Case(pp=2, dp=2, ep=2, **FOUR),
]
MORE = [
    Case(
        tp=2,
        dp=2,
        sp=True,
        ep=4,
        dispatcher="allgather",
        recompute="full",
        balance="few, probs",
        **FOUR,
    ),
    Case(dp=4, ep=4, dispatcher="allgather", balance="padded, position", **FOUR),
    Case(tp=4, sp=True, etp=4, llama=True, balance="padded, probs", **FOUR),
    Case(tp=2, dp=2, sp=True, ep=2, etp=2, llama=True, balance="few, position", **FOUR),
    Case(tp=2, pp=2, sp=True, ep=2, topk=1, balance="sinkhorn", **FOUR),
    Case(tp=2, dp=2, sp=True, ep=2, per_token=True, balance="global", **FOUR),
    Case(dp=4, ep=2, dist_opt=True, overlap_grad_reduce=True, balance="global", **FOUR),
]


def cases(world: int) -> list[Case]:
    found = [replace(case, balance=kind) for case in LAYOUTS for kind in KINDS]
    return [case for case in [*found, *MORE] if case.world == world]


# -- One process, its router by hand --


@dataclass
class ByHand:
    """Routes as all ranks do together. One for each layer.

    Tokens of a microbatch are [s, d b]: those of all copies beside each other.
    """

    case: Case
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    losses: list[torch.Tensor] = field(default_factory=list)
    num_dropped: int = 0

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(copy, the numbers of one rank's tokens, in its order)."""
        numbers = torch.arange(SEQ * self.case.dp * MICRO_BATCH).view(SEQ, -1)
        for copy, of_copy in enumerate(numbers.split(MICRO_BATCH, dim=1)):
            for of_rank in of_copy.chunk(self.case.tp):
                yield copy, of_rank.flatten()

    def routing(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.flatten(0, 1)
        probs, chosen = torch.zeros_like(logits), torch.zeros_like(logits, dtype=torch.bool)
        for _, part in self.parts():
            choose = self.by_sinkhorn if self.case.balance == "sinkhorn" else self.by_score
            probs[part], chosen[part] = choose(logits[part])
        if self.case.balance == "global":
            self.losses.append(self.global_loss(logits))
        return probs, chosen

    def by_score(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, (num_tokens, num_experts) = self.case.topk, logits.shape
        best = logits.topk(k).indices
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, best, True)
        probs = logits.masked_fill(~chosen, -math.inf).softmax(dim=-1)
        if self.case.balance == "global":
            return probs, chosen
        room = math.ceil(num_tokens * k / num_experts * FEW)
        for expert in range(num_experts):
            mine = chosen[:, expert].nonzero().flatten().tolist()
            if "probs" in self.case.balance:
                mine.sort(key=lambda token: -probs[token, expert].item())
            chosen[mine[room:], expert] = False
            self.num_dropped += len(mine[room:])
        return probs * chosen, chosen

    def by_sinkhorn(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        balanced = logits.detach().exp()
        for _ in range(300):
            balanced = balanced / balanced.sum(dim=1, keepdim=True)
            balanced = balanced / balanced.sum(dim=0, keepdim=True)
        best = balanced.topk(self.case.topk).indices
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, best, True)
        scores = logits.sigmoid() if self.case.topk == 1 else logits.softmax(dim=-1)
        return scores * chosen, chosen

    def global_loss(self, logits: torch.Tensor) -> torch.Tensor:
        """The mean over the copies: each has its own scores, and the shares of all so far."""
        k, num_experts = self.case.topk, logits.size(1)
        best = logits.topk(k).indices.flatten()
        now = torch.bincount(best, minlength=num_experts).double()
        self.counts = now if not self.losses else self.counts + now
        shares = self.counts / self.counts.sum()
        total = torch.zeros(())
        for _, part in self.parts():
            num_of_copy = len(part) * self.case.tp
            scores = logits[part].softmax(dim=-1).sum(dim=0)
            total = total + COEFF * num_experts / num_of_copy * (shares * scores).sum()
        return total / self.case.dp


def reference(case: Case) -> dict[str, torch.Tensor]:
    """What `parity.compare` wants to know of the first step."""
    serial = case.serial()
    names = [entry.name for entry in fields(ProcessGroupCollection)]
    groups = ProcessGroupCollection(**{name: FakeGroup() for name in names})
    chunks, _ = build(serial, groups)
    (model,) = unwrap_model(chunks)
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    hands = [ByHand(case) for _ in routers]
    for router, hand in zip(routers, hands, strict=True):
        router.routing = hand.routing
    for mlp in [layer.mlp for layer in model.decoder.layers]:
        mlp.token_dispatcher.drop_and_pad = False  # empty places have no effect
    data, losses, objective = batches(case.M * case.dp), [], torch.zeros((), dtype=torch.float64)
    num_tokens = sum(batch["mask"].sum() for batch in data)
    for number in range(case.M):
        beside = data[number * case.dp :][: case.dp]
        tokens, labels = (
            torch.cat([batch[key] for batch in beside]) for key in ("tokens", "labels")
        )
        output = model(tokens, torch.arange(SEQ).expand_as(tokens), None, labels=labels)
        for batch, mine in zip(beside, output.split(MICRO_BATCH), strict=True):
            total = (mine * batch["mask"]).sum()
            losses.append(total.item())
            share = num_tokens if case.per_token else batch["mask"].sum() * case.M * case.dp
            objective = objective + total / share
    balance = sum(sum(hand.losses, torch.zeros(())) for hand in hands) / case.M
    # A router knows all of its tokens, but not which of them the loss function counts.
    weight = len(data) * SEQ * MICRO_BATCH / num_tokens if case.per_token else 1.0
    objective = objective + balance * weight
    objective.backward()
    assert "few" not in case.balance or all(hand.num_dropped for hand in hands)
    found = {"losses of step 0": torch.tensor(losses, dtype=torch.float64)}
    grads = {name: param.main_grad for name, param in named_global_parameters(model)}
    norm = sum(grad.square().sum() for grad in grads.values()).sqrt()
    named = {f"step 0 gradient of {name}": grad.clone() for name, grad in grads.items()}
    return found | {"norm of step 0": norm} | named


# -- Real ranks --


def compare(
    work: list[tuple[Case, dict[str, torch.Tensor]]],
) -> list[tuple[str, int, float, list[str]]]:
    with (
        mock.patch.dict(parity.BALANCE, KINDS),
        mock.patch.object(parity, "load_reference", lambda expected: expected),
        mock.patch.object(parity, "compare", partial(compare_with, num_steps=1)),
        mock.patch.object(parity, "lines_of_log", lambda *unused: {}),  # nothing is logged by hand
    ):
        return parity.run_cases(work)


@pytest.mark.parametrize("world", [2, 4])
def test_the_same_parts_in_one_process(world: int):
    with mock.patch.dict(parity.BALANCE, KINDS):
        work = [(case, reference(case)) for case in cases(world)]
    results = run_ranks(compare, world, work)
    problems = [problem for rank in results for *_, found in rank for problem in found]
    assert problems == []
    compared = sum(number for rank in results for _, number, _, _ in rank)
    worst = max(worst for rank in results for _, _, worst, _ in rank)
    figure(f"{world} ranks: {len(work)} cases, {compared} tensors, worst difference {worst:.1e}")
