"""What the page on experts shows: two ranks' tokens, routed and sent by the package's own code.

Called by: `cases`, where pages find it as `experts`. Calls: `expert_pictures`; reads the record
of `expert_loads`. Groups are pretended: each rank's part of a collective is computed here.
"""

import math
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cases.case_words import table
from minimegatron.core import collectives
from minimegatron.core.distributed.distributed_data_parallel import gradient_scaling_factor
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.rank_generator import all_groups, make_grids
from minimegatron.core.transformer.moe.moe_utils import (
    get_capacity,
    switch_load_balancing_loss_func,
)
from minimegatron.core.transformer.moe.router import TopKRouter
from minimegatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.planner.plan_report import number_words
from pictures import expert_pictures
from source.places import recorded

LOGITS = (
    (
        (2.0, 1.0, 0.0, -1.0),
        (1.5, 0.5, 1.0, -1.0),
        (1.2, -1.0, 0.3, 0.9),
        (0.4, 2.0, -0.5, 1.1),
        (1.8, 0.2, -1.0, 0.6),
        (0.9, 0.3, 1.6, -0.2),
    ),
    (
        (-1.0, 1.0, 2.0, 0.5),
        (0.0, 0.8, -1.0, 1.7),
        (0.2, -0.6, 1.4, 1.2),
        (-0.4, 0.1, 1.3, 0.9),
        (0.7, -1.0, 1.9, 0.0),
        (-0.2, 0.6, -0.9, 1.5),
    ),
)
"""By rank and token, what the router's weight makes of the token for each expert."""
NUM_RANKS, NUM_TOKENS, NUM_EXPERTS = len(LOGITS), len(LOGITS[0]), len(LOGITS[0][0])
TOPK = 2
FACTOR = 1.0


class _Group(SimpleNamespace):
    """Of `members` ranks, as rank `number` sees it."""

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.members


def _groups(rank: int = 0) -> SimpleNamespace:
    alone, both = _Group(number=0, members=1), _Group(number=rank, members=NUM_RANKS)
    names = dict.fromkeys(("tp", "tp_cp", "tp_dp_cp", "expt_tp"), alone)
    return SimpleNamespace(**names, ep=both, tp_ep=both)


def _config(**options: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=NUM_EXPERTS,
        num_attention_heads=1,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=TOPK,
        expert_model_parallel_size=NUM_RANKS,
        moe_token_dispatcher_type="alltoall",
        **options,
    )


# -- Which experts a token goes to --


def _route(rank: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and map, both [T, E]: a weight of ones on the diagonal gives these logits."""
    router = TopKRouter(_config(**options), _groups(rank))
    with torch.no_grad():
        router.weight.copy_(torch.eye(NUM_EXPERTS))
        return router(torch.tensor(LOGITS[rank]).unsqueeze(1))


def _routes(capacity: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    options = {"moe_expert_capacity_factor": FACTOR} if capacity else {}
    return [_route(rank, **options) for rank in range(NUM_RANKS)]


def counts(rank: int, capacity: bool = False) -> list[int]:
    """Tokens of a rank by expert."""
    return _routes(capacity)[rank][1].sum(dim=0).tolist()


def capacity() -> int:
    """Tokens of one rank that an expert takes."""
    return get_capacity(NUM_TOKENS * TOPK, NUM_EXPERTS, FACTOR)


def capacity_of(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    return get_capacity(num_tokens * topk, num_experts, factor)


def dropped_words(rank: int = 0) -> str:
    """Which of a rank's tokens which expert drops."""
    before, after = _routes()[rank][1], _routes(True)[rank][1]
    lost = (before & ~after).T.nonzero().tolist()
    by_expert: dict[int, list[int]] = {}
    for expert, token in lost:
        by_expert.setdefault(expert, []).append(token)
    return "; ".join(
        f"expert {expert} drops tokens {' and '.join(map(str, tokens))}"
        for expert, tokens in by_expert.items()
    )


def routing_figure(rank: int = 0) -> str:
    """Tokens × experts with probabilities; counts as bars below, beside the line of capacity."""
    probs, chosen = _route(rank)
    kept = _routes(True)[rank][1]
    cells = [
        [(float(probs[t, e]), bool(chosen[t, e]), bool(kept[t, e])) for e in range(NUM_EXPERTS)]
        for t in range(NUM_TOKENS)
    ]
    return expert_pictures.routing(cells, capacity())


def weights_of(logits: Sequence[float], topk: int, before: bool = False) -> str:
    """The weights of the chosen experts, from the router: "expert 0: 0.73, expert 2: 0.27"."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=len(logits),
        num_attention_heads=1,
        num_moe_experts=len(logits),
        moe_router_topk=topk,
        moe_router_pre_softmax=before,
    )
    router = TopKRouter(config, _groups())
    with torch.no_grad():
        router.weight.copy_(torch.eye(len(logits)))
        probs, chosen = router(torch.tensor(logits, dtype=torch.float32).view(1, 1, -1))
    return ", ".join(f"expert {e}: {float(probs[0, e]):.3g}" for e in chosen[0].nonzero().flatten())


# -- How tokens travel --


def _dispatchers(maps: Sequence[torch.Tensor]) -> list[MoEAlltoAllTokenDispatcher]:
    """Each rank's, after its `dispatch_preprocess` of a map [T, E]."""
    counts_of_all = torch.cat([chosen.sum(dim=0) for chosen in maps])
    share, found = NUM_EXPERTS // NUM_RANKS, []

    def gather(output: torch.Tensor, *_: object, **__: object) -> None:
        output.copy_(counts_of_all)

    for rank, chosen in enumerate(maps):
        local = list(range(rank * share, (rank + 1) * share))
        one = MoEAlltoAllTokenDispatcher(share, local, _config(), _groups(rank))
        with mock.patch.object(collectives, "all_gather", gather):
            one.dispatch_preprocess(
                torch.zeros(len(chosen), 1, NUM_EXPERTS), chosen, chosen.float()
            )
        found.append(one)
    return found


@cache
def _of_the_case() -> list[MoEAlltoAllTokenDispatcher]:
    return _dispatchers([chosen for _, chosen in _routes()])


def splits_of(counts_by_rank: Sequence[Sequence[int]], rank: int) -> str:
    """Of two ranks, whose tokens chose each of four experts so often: what a rank sends and gets."""
    experts_of_copies = [
        torch.arange(NUM_EXPERTS).repeat_interleave(torch.tensor(counts))
        for counts in counts_by_rank
    ]
    maps = [torch.nn.functional.one_hot(x, NUM_EXPERTS).bool() for x in experts_of_copies]
    one = _dispatchers(maps)[rank]
    return f"sends {one.input_splits} and gets {one.output_splits}"


def splits() -> list[list[int]]:
    """Rows from each rank to each, as the senders know it; the receivers must know the same."""
    sent = [one.input_splits for one in _of_the_case()]
    come = [one.output_splits for one in _of_the_case()]
    if sent != [list(column) for column in zip(*come, strict=True)]:
        raise ValueError(f"senders count {sent}, receivers {come}")
    return sent


def split_table() -> str:
    """What each rank hands to the all-to-all, and what it expects of it."""
    splits()
    rows = [
        [f"rank {rank}", f"`{one.input_splits}`", f"`{one.output_splits}`", sum(one.output_splits)]
        for rank, one in enumerate(_of_the_case())
    ]
    return table(["", "`input_splits`", "`output_splits`", "rows that its experts compute"], rows)


def travel_figure() -> str:
    """Tokens, their copies in the order of experts, and where these go: a ribbon for each chunk."""
    chosen = [each.int().tolist() for _, each in _routes()]
    splits()
    share = NUM_EXPERTS // NUM_RANKS
    return expert_pictures.travel(chosen, share)


def sent_elements(
    tokens: int, h: int, topk: int, e: int, dispatcher: str = "alltoall", etp: int = 1
) -> int:
    """Elements that a rank sends per direction, on average, if experts are chosen evenly."""
    if dispatcher == "allgather":
        return (e * etp - 1) * tokens * h
    return tokens * topk * h * (e - 1) // e


# -- Whose gradient it is --


def _factor(num_losses: int) -> Fraction:
    config, ddp_config = _config(), DistributedDataParallelConfig()
    return Fraction(gradient_scaling_factor(config, ddp_config, num_losses)).limit_denominator(999)


LAYOUTS = ((2, 1, 2, 1), (4, 1, 2, 1), (2, 2, 2, 1), (4, 2, 2, 1), (2, 1, 1, 2))
"""World, t, e, etp; p and c are 1."""


def gradient_table() -> str:
    """By layout: over which ranks an expert is summed, and what it is multiplied by."""
    rows = []
    for world, t, e, etp in LAYOUTS:
        dense, expert = make_grids(world, tp=t, ep=e, etp=etp)
        found = all_groups(world, tp=t, ep=e, etp=etp)
        apart = [ranks for ranks in found["expt_dp"] if len(ranks) > 1]
        summed = " ".join(f"`{_members(ranks)}`" for ranks in apart) or "–"
        wrong = Fraction(1, expert.dp) / _factor(dense.dp)
        shown = "right by luck" if wrong == 1 else f"**{wrong} times** too large"
        cells = [world, t, e, etp, dense.dp, expert.dp, summed, _factor(dense.dp), shown]
        rows.append(cells)
    head = [
        "ranks",
        "t",
        "e",
        "etp",
        "d · c",
        "edp",
        "sums over",
        "multiplied by",
        "if divided by edp",
    ]
    return table(head, rows)


def _members(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks))


def expert_data_size(world: int, p: int = 1, e: int = 1, etp: int = 1) -> int:
    return make_grids(world, pp=p, ep=e, etp=etp)[1].dp


def times_over_edp(world: int, **sizes: int) -> Fraction:
    """How many times too large an expert's gradient is, if edp divides it."""
    dense, expert = make_grids(world, **sizes)
    return Fraction(1, expert.dp) / _factor(dense.dp * dense.cp)


def groups_figure(world: int = 4, **sizes: int) -> str:
    """The ranks as dense layers see them, and as experts do."""
    found = all_groups(world, **sizes)
    rows = [
        ("data", found["dp"], "sum dense gradients"),
        ("expert", found["ep"], "exchange tokens"),
        ("expert data", found["expt_dp"], "sum gradients of experts"),
    ]
    return expert_pictures.groups(rows)


def factor_of(world: int, **sizes: int) -> Fraction:
    """What an expert's gradient is multiplied by."""
    dense, _ = make_grids(world, **sizes)
    return _factor(dense.dp * dense.cp)


def expert_grad(grads: Sequence[float], e: int) -> str:
    """Of an expert's parameter: what each of its copies has after backward, and the end of it.

    `grads` are what the tokens of each rank, all with a loss of their own, give the expert.
    """
    world = len(grads)
    copies = [sum(grads[rank : rank + e]) for rank in range(0, world, e)]
    total = sum(copies) * float(_factor(world))
    return f"{' and '.join(f'{one:g}' for one in copies)}; {total:g}"


# -- Balance --


def balance_loss(tokens: Sequence[int], scores: Sequence[float], topk: int, coeff: float) -> str:
    """The auxiliary loss: tokens by expert, and the mean score of each expert."""
    num_tokens = sum(tokens) // topk
    probs = torch.tensor([list(scores)], dtype=torch.float64) * num_tokens
    loss = switch_load_balancing_loss_func(
        probs, torch.tensor(tokens), num_tokens, topk, len(tokens), coeff
    )
    return f"{float(loss):.4g}"


@cache
def recording() -> dict[str, Any]:
    return recorded("expert_loads")


def balance_figure() -> str:
    """The load imbalance of three runs, a mean over five steps each."""
    runs = recording()["runs"]
    curves = [(name, _means(run["imbalance"])) for name, run in runs.items()]
    return expert_pictures.curves(curves, worst=worst_imbalance(8, 2))


WINDOW = 5


def _means(values: Sequence[float]) -> list[float]:
    return [
        sum(values[max(0, i + 1 - WINDOW) : i + 1]) / min(i + 1, WINDOW) for i in range(len(values))
    ]


def last_imbalance(run: str) -> str:
    """The mean over the last steps."""
    return f"{_means(recording()['runs'][run]['imbalance'])[-1]:.2f}"


def last_loss(run: str) -> str:
    return f"{_means(recording()['runs'][run]['loss'])[-1]:.2f}"


def worst_imbalance(num_experts: int, topk: int) -> str:
    """If one expert is among every token's choices: its tokens over the mean."""
    return number_words(Fraction(num_experts, topk))


def imbalance(tokens: Sequence[int]) -> str:
    return number_words(Fraction(max(tokens) * len(tokens), sum(tokens)))


def num_steps() -> int:
    return len(recording()["runs"]["bias"]["imbalance"])


def balance_command() -> str:
    """The command of the runs, in lines that fit."""
    lines = textwrap.wrap(
        recording()["command"], 84, break_on_hyphens=False, break_long_words=False
    )
    return "\n".join(["```console", "$ " + " \\\n    ".join(lines), "```"])


def experts_of(rank: int, num_experts: int, e: int) -> str:
    share = num_experts // e
    return f"{rank * share} to {(rank + 1) * share - 1}"


def even_share(num_tokens: int, topk: int, num_experts: int) -> int:
    return math.ceil(num_tokens * topk / num_experts)
