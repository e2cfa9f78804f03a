"""The order of combined 1F1B: its pairs, its messages, and that what is planned can be run."""

from itertools import product

import pytest

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders.orders import (
    COMBINED,
    PlanConfig,
    get_schedule,
    order_of_ranks,
)
from minimegatron.core.orders.placement import LOOP
from minimegatron.core.orders.planned_schedule import get_named_forward_backward_func
from minimegatron.core.orders.work import COMMUNICATE, PAIR, Work, parts_of
from minimegatron.core.pipeline_parallel.schedule_table import count_rank_microbatches
from minimegatron.planner.formulas import peak_in_flight_formula
from minimegatron.planner.memory import activation_timeline, peak_activation_bytes
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_check import check
from minimegatron.planner.simulator import simulate
from tests.core.pipeline_parallel.fake_step import Case, done_by, planned_for, run_case
from tests.planner.grid import legal_groups

SIZES = [(1, None, M, None) for M in (1, 2, 3, 8)] + [
    (p, v, M, G) for p, v in product((2, 3, 4), (1, 2, 3)) for M, G in legal_groups(p, 8)
]
"""p, v, M, G"""


def word(work: Work) -> str:
    """`F1.0`: the forward of microbatch 1 in chunk 0. `[F1.1 B0.1]`: a pair."""
    words = " ".join(f"{p.kind[0].upper()}{p.microbatch}.{p.chunk}" for p in parts_of(work))
    return f"[{words}]" if work.kind == PAIR else words


def words(step: Plan, rank: int) -> str:
    """The rank's work, with a bar between its phases."""
    found, phase = [], None
    for action in step.work(rank):
        if phase not in (None, action.phase):
            found.append("|")
        phase = action.phase
        found.append(word(action))
    return " ".join(found)


def test_one_stage():
    assert words(plan(COMBINED, 1, 4), 0) == "F0.0 | [F1.0 B0.0] [F2.0 B1.0] [F3.0 B2.0] | B3.0"
    assert words(plan(COMBINED, 1, 1), 0) == "F0.0 | B0.0"


def test_two_stages_as_megatron_runs_them():
    step = plan(COMBINED, 2, 4, 2, overlap_p2p_comm=True)
    assert [words(step, rank) for rank in range(2)] == [
        "F0.0 F1.0 F0.1 F1.1 F2.0 | [F3.0 B0.1] [F2.1 B1.1] [F3.1 B0.0] | B1.0 B2.1 B3.1 B2.0 B3.0",
        "F0.0 F1.0 F0.1 | [F1.1 B0.1] [F2.0 B1.1] [F3.0 B0.0] [F2.1 B1.0] [F3.1 B2.1] "
        "| B3.1 B2.0 B3.0",
    ]


@pytest.mark.parametrize("overlap", [True, False])
def test_messages_follow_a_whole_pair(overlap):
    """Both messages of a step at its end, the forward's first."""
    names = {
        "send_forward_recv_forward": "f",
        "send_backward_recv_backward": "b",
        "send_forward_backward_recv_forward_backward": "x",
        "recv_forward": "r",
    }
    step = plan(COMBINED, 2, 4, 2, overlap_p2p_comm=overlap)
    for rank in range(2):
        calls = [names[a.call] if a.kind == COMMUNICATE else word(a)[0] for a in step.ranks[rank]]
        num_warmup, num_pairs = (5, 3) if rank == 0 else (3, 5)
        if overlap:
            expected = "r" + "Ff" * num_warmup + "b" + "[fb" * num_pairs + "Bb" * num_warmup
        else:
            expected = "r" + "Ff" * (num_warmup - 1) + "Fx" + "[x" * num_pairs + "Bb" * num_warmup
        assert "".join(calls) == expected
        assert all(a.overlap == overlap for a in step.ranks[rank] if a.call in list(names)[:1])


@pytest.mark.parametrize(("p", "v", "M", "G"), SIZES)
def test_every_rank_and_wire(p, v, M, G):
    """No pair shares (microbatch, chunk); the plans are the order's; nothing waits for ever."""
    config = PlanConfig(COMBINED, p, M, v or 1, G)
    orders = order_of_ranks(config)
    for rank, order in enumerate(orders):
        pairs = [work.parts for work in order if work.parts]
        for forward, backward in pairs:
            assert (forward.kind, backward.kind) == ("forward", "backward")
            assert forward[1:3] != backward[1:3]
        total = M * (v or 1)
        num_warmup = 1
        if p > 1:
            overlap = {"overlap_moe_expert_parallel_comm": True}
            num_warmup = count_rank_microbatches(p, rank, M, v, G, **overlap).num_warmup
        assert len(order) == total + num_warmup
        assert len(pairs) == total - num_warmup
    written = [{}] if p == 1 else [{"batch_p2p_comm": False}, {"overlap_p2p_comm": True}]
    for options in [*written, {"wire": "tagged"}, {"wire": "untagged"}]:
        step = plan(COMBINED, p, M, v, G, **options)
        assert check(step) == []
        assert [[word(a) for a in step.work(r)] for r in range(p)] == [
            [word(work) for work in order] for order in orders
        ]
        assert [a.phase for a in step.work(0)] == [work.phase for work in orders[0]]
    assert step.message_counts() == {"activation": (p * (v or 1) - 1) * M} | {
        "gradient": (p * (v or 1) - 1) * M
    }


@pytest.mark.parametrize("p", [1, 2, 4])
def test_an_evaluation_takes_the_ordinary_path(p):
    v = None if p == 1 else 2
    for overlap in (False, p > 1):
        mine, others = (
            plan(name, p, 4, v, forward_only=True, overlap_p2p_comm=overlap)
            for name in (COMBINED, "interleaved" if v else "no-pipelining")
        )
        assert [[a._replace(phase=None) for a in rank] for rank in mine.ranks] == [
            [a._replace(phase=None) for a in rank] for rank in others.ranks
        ]


@pytest.mark.parametrize("options", [{"overlap": True}, {"batched": False}], ids=str)
@pytest.mark.parametrize(("p", "M", "v"), [(2, 4, 2), (2, 6, 3), (3, 6, 2), (4, 8, 2), (4, 4, 3)])
def test_what_is_planned_arrives_over_a_wire_that_blocks(p, M, v, options):
    """In raw order: a fake NCCL, where each message waits for its other end."""
    case = Case(p, M, v, planned=COMBINED, **options)
    reports, network, machine = run_case(case)
    assert [report["microbatch"] for report in reports[p - 1]] == list(range(M))
    step = case.plan()
    single = Plan(step.config, [[x for a in of for x in parts_of(a)] for of in step.ranks])
    for rank in range(p):
        assert done_by(rank, network, machine) == planned_for(rank, single)


def test_without_the_extra_warm_up_a_pair_would_need_itself():
    """The last stage of plain interleaving: its first pair would be [F0.1 B0.1]."""
    order = order_of_ranks(PlanConfig("interleaved", 2, 4, 2, 2))[1]
    assert " ".join(map(word, order[2:4])) == "F0.1 B0.1"


# -- What a rank holds --


@pytest.mark.parametrize(("p", "v", "M", "G"), [(1, None, 8, None), (2, 2, 4, 2), (4, 3, 8, 4)])
def test_the_extra_warm_up_costs_one_layer(p, v, M, G):
    """In a pair the backward frees a layer for each that the forward adds: w + 1 chunks and a layer."""
    L = 5
    ordinary = plan("no-pipelining" if p == 1 else "interleaved", p, M, v, G)
    step = plan(COMBINED, p, M, v, G)
    for rank in range(p):
        w = 0 if p == 1 else count_rank_microbatches(p, rank, M, v, G).num_warmup
        held = min(w + 1, M * (v or 1))
        assert step.peak_in_flight(rank) == ordinary.peak_in_flight(rank) == held
        assert peak_in_flight_formula(step.config, rank).value == held
        has_pairs = any(action.parts for action in step.ranks[rank])
        assert peak_activation_bytes(step, rank, L, bytes_per_layer=1) == held * L + has_pairs
        timeline = activation_timeline(simulate(step), rank, L, bytes_per_layer=1)
        assert max(now for _, now in timeline) == held * L + has_pairs
        assert timeline[-1][1] == 0
    # Chunks of unequal size: what is larger, the layer beside or what the forward leaves.
    if p == 2:
        assert peak_activation_bytes(step, 0, [1, 1, 5, 1], bytes_per_layer=1) == 3 * 1 + 2 * 5 + 1


# -- What is refused --


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="over 4 stages needs the number of chunks per stage; set"):
        plan(COMBINED, 4, 8)
    with pytest.raises(ValueError, match="vpp=2 needs a pipeline, but pp is 1"):
        plan(COMBINED, 1, 8, 2)
    with pytest.raises(ValueError, match="last group of 1"):
        plan(COMBINED, 4, 9, 2)
    with pytest.raises(ValueError, match="overlap_p2p_comm is on, but schedule combined"):
        plan(COMBINED, 1, 8, overlap_p2p_comm=True)


def test_a_flag_chooses_it_and_not_its_name():
    says = "set overlap_moe_expert_parallel_comm, which runs it"
    with pytest.raises(ValueError, match=says):
        ModelParallelConfig(pipeline_schedule=COMBINED)
    with pytest.raises(ValueError, match=says):
        get_named_forward_backward_func(COMBINED)
    assert get_schedule(COMBINED).placement is LOOP
