"""Messages lowered from orders, over a transport as strict as NCCL, and over one that matches by tag.

What ends well has brought every tensor to its place: the fake's kernels check what they read.
"""

import random

import pytest
import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders import lowering
from minimegatron.core.orders.lowering import lowered_step
from minimegatron.core.orders.orders import (
    BREADTH_FIRST,
    GPIPE,
    INTERLEAVED,
    NO_PIPELINING,
    ONE_F_ONE_B,
    PlanConfig,
    order_of_ranks,
    register_order,
    unregister,
)
from minimegatron.core.orders.placement import LINE, LOOP, Placement, V
from minimegatron.core.orders.work import BACKWARD, COMMUNICATE, FORWARD, Work
from minimegatron.core.pipeline_parallel.p2p_communication import (
    ACTIVATION,
    GRADIENT,
    TensorMessage,
)
from minimegatron.planner.plan import plan
from minimegatron.planner.plan_check import check
from tests.core.pipeline_parallel.fake_step import (
    SHAPE,
    Case,
    done_by,
    planned_for,
    run_case,
    run_programs,
)
from tests.core.pipeline_parallel.test_order import legal_groups
from tests.fake_streams import PAIRS, TAGS, TOGETHER, Deadlock
from tests.fake_transport import FakeCommunicator, FakeGroup, FakeTransport, Network

SIZES = (2, 3, 4, 8)
WIRES = {
    "batched": {},
    "lone": {"batched": False},
    "tagged": {"tagged": True, "batched": False},
    "lone, sizes vary": {"batched": False, "variable": True},
    "freed": {"deallocate": True},
    "tagged, freed, forward-only": {"tagged": True, "deallocate": True, "forward_only": True},
}


def draw_orders(placement: Placement, num_microbatches: int, seed: int) -> list[list[Work]]:
    """Orders that can be done together, any of them: work is drawn from what is possible."""
    draw, last = random.Random(seed), placement.num_stages - 1
    orders: list[list[Work]] = [[] for _ in range(placement.pp_size)]
    ready = [(FORWARD, microbatch, 0) for microbatch in range(num_microbatches)]
    while ready:
        kind, microbatch, stage = ready.pop(draw.randrange(len(ready)))
        rank, chunk = placement.place_of(stage)
        orders[rank].append(Work(kind, microbatch, chunk))
        after = stage + (1 if kind == FORWARD else -1)
        if after > last:
            ready.append((BACKWARD, microbatch, last))
        elif after >= 0:
            ready.append((kind, microbatch, after))
    return orders


@pytest.fixture
def drawn():
    """Registers orders that are drawn for a placement, as "drawn"."""

    def register(rule, num_microbatches: int, seed: int) -> None:
        @register_order("drawn", placement=rule)
        def drawn(rank):
            yield from draw_orders(rank.placement, num_microbatches, seed)[rank.pp_rank]

    yield register
    unregister("drawn")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("rule", [LINE, LOOP, V], ids=lambda rule: rule.name)
@pytest.mark.parametrize("p", SIZES)
def test_any_order_brings_every_tensor_to_its_place(drawn, p, rule, wire):
    """In raw order: what was started is the plan, message for message."""
    draw = random.Random(f"{p} {rule.name} {wire}")
    for seed in range(4 if p < 8 else 2):
        M = draw.randint(1, 6 if p < 8 else 4)
        drawn(rule, M, seed)
        case = Case(p, M, None if rule is LINE else 2, order="drawn", **WIRES[wire])
        reports, network, machine = run_case(case)
        step = case.plan()
        assert check(step) == []
        last = step.config.placement.last_rank
        for rank, of_rank in enumerate(reports):
            reported = [report["microbatch"] for report in of_rank]
            assert reported == (list(range(M)) if rank == last else [])
        for rank in range(p):
            if not case.variable:
                assert done_by(rank, network, machine) == planned_for(rank, step), (case, seed)


@pytest.mark.parametrize(("rule", "p"), [(V, 2), (V, 3), (LOOP, 2)])
def test_receiving_as_early_as_possible_takes_gradients_for_activations(
    drawn, monkeypatch, rule, p
):
    """Without tags: why a receive stands where its send stands."""
    monkeypatch.setattr(
        lowering, "_at_their_sends", lambda found, _: lowering._before_their_use(found)
    )
    failed = 0
    for seed in range(6):
        drawn(rule, 4, seed)
        try:
            run_case(Case(p, 4, 2, order="drawn", batched=False))
        except (AssertionError, Deadlock):
            failed += 1
    assert failed >= 3


def test_a_receive_of_sizes_that_vary_stands_where_they_are_sent():
    """Asked for early, it would wait for what its sender can make only after this rank has gone on."""
    step = Case(2, 4, 2, order=BREADTH_FIRST, tagged=True, batched=False, variable=True)
    _, network, machine = run_case(step)
    assert step.plan().config.wire == "untagged"
    for rank in range(2):
        done = [entry for entry in done_by(rank, network, machine) if "shape" not in str(entry)]
        assert done == planned_for(rank, step.plan())


# -- The orders of the written schedules --


def work_of(step) -> list[list[tuple]]:
    return [
        [(a.kind, a.microbatch, a.chunk, a.phase) for a in actions if a.kind != COMMUNICATE]
        for actions in step.ranks
    ]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_the_written_schedules_follow_their_orders(p):
    """The plans are those of the written code: traces of real runs are equal to them."""
    for M in (1, 2, 3, 5, 8):
        names = [(NO_PIPELINING, None, None)] if p == 1 else [(ONE_F_ONE_B, None, None)]
        names += [(GPIPE, None, None)]
        if p > 1:
            names += [(INTERLEAVED, v, G) for v in (1, 2, 3) for G in legal_groups(p, M)]
        for name, v, G in names:
            written = plan(name, p, M, v, G)
            config = PlanConfig(name, p, M, v or 1, G)
            assert work_of(written) == [
                [(w.kind, w.microbatch, w.chunk, w.phase) for w in order]
                for order in order_of_ranks(config)
            ]
            lowered = plan(name, p, M, v, G, wire="untagged")
            assert work_of(lowered) == work_of(written)
            assert lowered.message_counts() == written.message_counts()
            assert check(lowered) == []


def test_breadth_first_is_chunk_after_chunk():
    config = PlanConfig(BREADTH_FIRST, 2, 2, 2)
    assert [" ".join(map(str, order)) for order in order_of_ranks(config)] == [
        "F0 F1 F0 of chunk 1 F1 of chunk 1 B0 of chunk 1 B1 of chunk 1 B0 B1"
    ] * 2
    # All of chunk 0's messages may lie unreceived while the others still fill.
    assert lowered_step(PlanConfig(BREADTH_FIRST, 4, 16, 2)).limits == [13, 1, 1, 13]


# -- The exchange alone --


def random_messages(draw: random.Random, p: int, number: int) -> list[tuple[int, int, str]]:
    """(sender, receiver, payload), in one order for all ranks. Each rank sends at least one."""
    # All ranks must come to the first use of a communicator that they share.
    senders = [*range(p), *draw.choices(range(p), k=number - p)]
    draw.shuffle(senders)
    return [
        (
            sender,
            draw.choice([rank for rank in range(p) if rank != sender]),
            draw.choice((ACTIVATION, GRADIENT)),
        )
        for sender in senders
    ]


def exchange_all(rank: int, p: int, messages: list, network: Network, batched: bool, tagged: bool):
    """One rank's part of `messages`, in exchanges of random length, waited for at random times."""
    config = ModelParallelConfig(
        pipeline_model_parallel_size=p, batch_p2p_comm=batched, pipeline_dtype=torch.float64
    )
    transport = FakeTransport(network, rank, tagged)
    communicator = FakeCommunicator(FakeGroup(rank, p), config, transport)
    communicator.begin_step(len(messages))
    draw = random.Random(rank)
    mine = [(number, *m) for number, m in enumerate(messages) if rank in m[:2]]
    pending: list[tuple[int, object]] = []
    while mine or pending:
        size = draw.randint(0, 3)
        now, mine = mine[:size], mine[size:]
        batch = []
        for number, sender, receiver, payload in now:
            if sender == rank:
                tensor = torch.empty(SHAPE, dtype=torch.float64)
                transport.compute(f"makes {number}", writes={tensor: number})
                batch.append(TensorMessage(True, tensor, receiver, payload))
            else:
                batch.append(TensorMessage(False, None, sender, payload, SHAPE))
        handles = communicator.exchange(batch, overlap=True)
        assert len(handles) == len(batch)
        pending += [
            (number, handle)
            for (number, sender, *_), handle in zip(now, handles, strict=True)
            if sender != rank
        ]
        # What has come is used in any order, but only what this rank's own sends do not hold up.
        if pending and not mine:
            number, handle = pending.pop(draw.randrange(len(pending)))
            transport.compute(f"uses {number}", reads={handle.wait(): number})
    communicator.finish()


@pytest.mark.parametrize("wire", ["batched", "lone", "tagged"])
@pytest.mark.parametrize("p", SIZES)
def test_exchanges_of_any_peers_and_payloads_deliver_everything(p, wire):
    for seed in range(5):
        messages = random_messages(random.Random(seed), p, 12)
        network = Network(p, sizes=SHAPE)
        for rank in range(p):
            exchange_all(rank, p, messages, network, wire == "batched", wire == "tagged")
        for lone in {"batched": [PAIRS], "lone": [PAIRS, TOGETHER], "tagged": [TAGS]}[wire]:
            network.run(lone)


def test_an_exchange_of_nothing_starts_nothing():
    network = Network(2)
    config = ModelParallelConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.float64)
    communicator = FakeCommunicator(FakeGroup(0, 2), config, FakeTransport(network, 0))
    assert communicator.exchange([]) == []
    assert network.log[0] == []


def test_both_ends_of_an_order_agree_on_the_order_of_all_messages(drawn):
    """Between two ranks of a V, one list: the sends of one are the receives of the other."""
    drawn(V, 5, seed=1)
    _, network = run_programs(Case(3, 5, 2, order="drawn"))
    ends: dict[tuple[int, int], list] = {}
    for rank, log in enumerate(network.log):
        for post in (
            entry for entry in log if not isinstance(entry, tuple) or hasattr(entry, "parts")
        ):
            for part in getattr(post, "parts", ()):
                key = (
                    (part.is_send, part.payload)
                    if rank < part.peer
                    else (not part.is_send, part.payload)
                )
                ends.setdefault((rank, part.peer), []).append(key)
    for (a, b), found in ends.items():
        assert found == ends[b, a]
