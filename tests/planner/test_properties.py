"""What holds for every plan, whatever its sizes: found by hypothesis, not by example."""

from collections import Counter, defaultdict
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.core.pipeline_parallel.schedule_table import (
    convert_schedule_table_to_order,
    get_schedule_table,
)
from minimegatron.planner.actions import BACKWARD, FORWARD
from minimegatron.planner.imagined_transport import BUFFERED, RENDEZVOUS, match_messages
from minimegatron.planner.memory import activation_timeline, peak_activation_bytes
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_check import check
from minimegatron.planner.simulator import Costs, simulate


@st.composite
def plans(draw) -> Plan:
    """Any legal plan of a built-in schedule, and any way a run could send its messages."""
    p = draw(st.integers(1, 8))
    forward_only = draw(st.booleans())
    if p == 1 or draw(st.booleans()):
        name = draw(st.sampled_from(["gpipe", "1f1b"]))
        batched = draw(st.booleans())
        M = draw(st.integers(1, 14))
        return plan(name, p, M, forward_only=forward_only, batch_p2p_comm=batched)
    G = draw(st.integers(p, 12))
    # Whole groups, and perhaps a shorter one of at least p.
    M = G * draw(st.integers(1, 3)) + draw(st.sampled_from([0, *range(p, G)]))
    v = draw(st.integers(1, 4))
    overlap = draw(st.booleans())
    batched = None if overlap or p == 2 else draw(st.booleans())
    return plan("interleaved", p, M, v, G, forward_only, overlap, batched)


@st.composite
def costs(draw, step: Plan) -> Costs:
    """Any costs: whole numbers and fractions, equal or not, also of nothing."""
    time = st.one_of(st.integers(0, 5), st.fractions(0, 3, max_denominator=7))
    n = step.config.num_virtual_stages
    times = st.one_of(time, st.lists(time, min_size=n, max_size=n))
    return Costs(draw(times), draw(times), latency=draw(time))


@given(plans())
@settings(deadline=None, max_examples=150)
def test_every_forward_precedes_its_backward_and_chunks_are_first_in_first_out(step):
    config = step.config
    everything = {
        (microbatch, chunk)
        for microbatch in range(config.num_microbatches)
        for chunk in range(config.num_model_chunks)
    }
    for rank in range(config.pp_size):
        order = defaultdict(list)
        for action in step.work(rank):
            if action.kind == BACKWARD:
                assert (action.microbatch, action.chunk) in order["seen"]
            order["seen"].append((action.microbatch, action.chunk))
            order[action.kind, action.chunk].append(action.microbatch)
        kinds = (FORWARD,) if config.forward_only else (FORWARD, BACKWARD)
        assert set(order["seen"]) == everything
        assert len(order["seen"]) == len(everything) * len(kinds)
        for kind in kinds:
            for chunk in range(config.num_model_chunks):
                assert order[kind, chunk] == list(range(config.num_microbatches))


@given(plans())
@settings(deadline=None, max_examples=150)
def test_no_deadlock_no_leftovers_nothing_crossed(step):
    assert check(step) == []
    for sends, receives in match_messages(step).values():
        assert len(sends) == len(receives)
    if not step.config.forward_only:
        assert all(step.in_flight(rank)[-1] == 0 for rank in range(step.config.pp_size))


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_times_respect_every_dependency(data):
    step = data.draw(plans())
    transport = data.draw(st.sampled_from([RENDEZVOUS, BUFFERED]))
    cost = data.draw(costs(step))
    simulation = simulate(step, cost, transport)
    latency = cost.message_time(0)
    # One after the other on each rank.
    for starts, ends in zip(simulation.starts, simulation.ends, strict=True):
        assert all(start <= end for start, end in zip(starts, ends, strict=True))
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    # A message comes after what made it, and before what needs it.
    work = {
        (rank, a.kind, a.microbatch, a.chunk): (rank, index)
        for rank, actions in enumerate(step.ranks)
        for index, a in enumerate(actions)
    }
    for sends, receives in match_messages(step).values():
        for send, receive in zip(sends, receives, strict=True):
            kind = FORWARD if send.message.payload == "activation" else BACKWARD
            made, needed = (
                work[side.place[0], kind, side.message.microbatch, side.message.chunk]
                for side in (send, receive)
            )
            end = simulation.ends[made[0]][made[1]]
            assert simulation.starts[needed[0]][needed[1]] >= end + latency


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_figures_add_up(data):
    step = data.draw(plans())
    simulation = simulate(step, data.draw(costs(step)))
    for rank in range(step.config.pp_size):
        gaps = simulation.gaps(rank)
        assert sum(gap.length for gap in gaps) == simulation.idle(rank)
        assert all(gap.length > 0 for gap in gaps)
        for gap in gaps:
            if gap.waits_for is not None:
                place = gap.waits_for
                assert simulation.ends[place[0]][place[1]] <= gap.end
    # The critical path is a chain of work without overlaps that ends when the step ends.
    path = simulation.critical_path()
    if path:
        assert simulation.ends[path[-1][0]][path[-1][1]] <= simulation.makespan
        for a, b in zip(path, path[1:], strict=False):
            assert simulation.ends[a[0]][a[1]] <= simulation.starts[b[0]][b[1]]
    over_ideal, over_total = simulation.bubble_over_ideal, simulation.bubble_over_total
    if simulation.busy(0):
        assert over_total == over_ideal / (1 + over_ideal)


@given(plans())
@settings(deadline=None, max_examples=60)
def test_free_messages_make_the_critical_path_all_there_is(step):
    simulation = simulate(step, Costs(Fraction(1, 3), 2))
    path = simulation.critical_path()
    length = sum(simulation.ends[r][i] - simulation.starts[r][i] for r, i in path)
    assert length == simulation.makespan


@given(plans())
@settings(deadline=None, max_examples=60)
def test_memory_follows_what_is_in_flight(step):
    simulation = simulate(step)
    for rank in range(step.config.pp_size):
        timeline = activation_timeline(simulation, rank, 100)
        assert [held // 100 for _, held in timeline] == (
            [0] if step.config.forward_only else step.in_flight(rank)
        )
        peak = max(held for _, held in timeline)
        assert peak == peak_activation_bytes(step, rank, 100) == 100 * step.peak_in_flight(rank)


@given(st.integers(2, 6), st.integers(1, 4), st.data())
@settings(deadline=None, max_examples=60)
def test_the_plan_follows_the_schedule_table(p, v, data):
    G = data.draw(st.integers(p, 9))
    M = G * data.draw(st.integers(1, 3))
    step = plan("interleaved", p, M, v, G)
    table = get_schedule_table(M, v, G)
    for rank in range(p):
        warmup = Counter(a.phase for a in step.work(rank))["warmup"]
        signed = convert_schedule_table_to_order(warmup, v, table)
        mine = [(a.chunk + 1) * (1 if a.kind == FORWARD else -1) for a in step.work(rank)]
        assert mine == signed
        assert [(a.microbatch, a.chunk) for a in step.work(rank) if a.kind == FORWARD] == table
