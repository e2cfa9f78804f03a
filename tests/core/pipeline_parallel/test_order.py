"""The schedules' order, checked without processes on streams that forgive as little as NCCL.

The fake model checks every tensor that it reads, so each case below proves that every activation and
gradient reached the right microbatch of the right virtual stage, whichever rank was quicker; that no
memory was freed or written too early; and that no message was left over.
"""

from dataclasses import replace
from unittest import mock

import pytest

from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.schedule_table import (
    count_rank_microbatches,
    get_schedule_table,
)
from tests import fake_transport
from tests.core.pipeline_parallel.fake_step import (
    Case,
    computations,
    done_by,
    planned_for,
    run_case,
    run_programs,
)
from tests.fake_streams import PAIRS, TOGETHER, Post
from tests.fake_transport import Deadlock, FakeCommunicator, FakeGroup, FakeTransport, Network, Race


def legal_groups(p: int, M: int) -> list[int]:
    return [G for G in range(p, M + 1) if M % G == 0 or p <= M % G]


PLAIN = [Case(p, M) for p in (1, 2, 3, 4, 8) for M in (1, 2, 3, 4, 8)]
INTERLEAVED = [
    Case(p, M, v, G)
    for p in (2, 3, 4)
    for v in (1, 2, 3)
    for M in ((3, 8) if v == 1 else (2, 3, 5, 8))
    for G in legal_groups(p, M)
]
INTERLEAVED += [Case(8, 8, 2, 8), Case(8, 11, 2, 11)]


def variants(case: Case) -> list[Case]:
    """Both P2P modes, overlap, forward-only, freed outputs, as far as the case allows them."""
    found = []
    # A forward-only step keeps no graph, so it has no outputs to free.
    for forward_only, deallocate in ((False, False), (False, True), (True, False)):
        for batched, overlap in ((True, False), (False, False), (False, True)):
            if overlap and case.v is None:
                continue
            if batched and (case.v or 1) > 1 and case.p == 2:
                continue
            fields = dict(vars(case), forward_only=forward_only, deallocate=deallocate)
            found.append(Case(**dict(fields, batched=batched, overlap=overlap)))
    return found


def expected_order(case: Case, rank: int) -> list[tuple]:
    """Warm-up, pairs, the rest; backward chunks reversed."""
    p, M, v = case.p, case.M, case.v or 1
    if case.v is None:
        table = [(microbatch, 0) for microbatch in range(M)]
        num_warmup = min(p - rank - 1, M)
    else:
        table = get_schedule_table(M, v, case.G)
        num_warmup = min(2 * (p - rank - 1) + (v - 1) * case.G, M * v)
    forwards = [("F", microbatch, chunk * p + rank) for microbatch, chunk in table]
    if case.forward_only:
        return forwards
    backwards = [("B", microbatch, (v - 1 - chunk) * p + rank) for microbatch, chunk in table]
    order = forwards[:num_warmup]
    for i in range(num_warmup, len(table)):
        order += [forwards[i], backwards[i - num_warmup]]
    return order + backwards[len(table) - num_warmup :]


def check(case: Case) -> None:
    reports, network, machine = run_case(case)
    p, M, v = case.p, case.M, case.v or 1
    step = None if case.variable else case.plan()
    for rank in range(p):
        done = computations(network.log[rank])
        assert done == expected_order(case, rank), f"rank {rank} of {case}"
        if step is not None:  # plans know no messages about shapes
            planned = planned_for(rank, step)
            assert done_by(rank, network, machine) == planned, f"rank {rank} of {case}"
        live = peak = 0
        for kind, _, _ in done:
            live += 1 if kind == "F" else -1
            peak = max(peak, live)
        if not case.forward_only:
            formula = min(M, p - rank)
            if case.v is not None:
                formula = min(M * v, 2 * (p - rank - 1) + (v - 1) * case.G + 1)
            assert peak == formula, f"peak in flight on rank {rank} of {case}"
    parts = [part for log in network.log for e in log if isinstance(e, Post) for part in e.parts]
    sent = [part for part in parts if part.is_send]
    activations = [part for part in sent if part.payload == "activation"]
    gradients = [part for part in sent if part.payload == "gradient"]
    assert len(activations) == (p * v - 1) * M
    assert len(gradients) == (0 if case.forward_only else (p * v - 1) * M)
    assert {part.num_bytes for part in activations + gradients} <= {1 * 1 * 2 * 8}  # s b h float64
    assert [report["microbatch"] for report in reports[p - 1]] == list(range(M))
    assert all(not reports[rank] for rank in range(p - 1))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_schedules(case):
    for variant in variants(case):
        check(variant)


@pytest.mark.parametrize("case", INTERLEAVED, ids=str)
def test_interleaved_schedules(case):
    for variant in variants(case):
        check(variant)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_planned_runner_does_what_the_schedules_do(p):
    cases = [Case(p, M) for M in (1, p + 3)]
    cases += [Case(p, p + 3, 2, p + 3)] if p > 1 else []
    cases += [Case(p, 2 * p, 3, p)] if 1 < p < 8 else []
    for case in cases:
        for variant in variants(case)[:: 2 if p == 8 else 1]:
            name = "interleaved" if case.v else "no-pipelining" if p == 1 else "1f1b"
            check(replace(variant, planned=name))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_the_planned_runner_does_what_a_plan_says(p):
    for variant in variants(Case(p, p + 1)):
        case = replace(variant, planned="gpipe")
        _, network, machine = run_case(case)
        for rank in range(p):
            assert done_by(rank, network, machine) == planned_for(rank, case.plan())


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 8, variable=True),
        Case(3, 5, batched=False, variable=True, deallocate=True),
        Case(2, 4, 2, 2, batched=False, variable=True),
        Case(3, 6, 2, 3, variable=True),
        Case(4, 8, 2, 4, batched=False, overlap=True, variable=True, deallocate=True),
    ],
    ids=str,
)
def test_messages_about_shapes_stop_the_program_and_nobody_waits_for_ever(case):
    check(case)


def test_an_exchange_with_nothing_in_it_starts_no_batch():
    """Interleaving in batches over more than two stages has such exchanges; NCCL refuses them."""
    for p, M in ((3, 3), (4, 8), (8, 8)):
        check(Case(p, M, 2, p))
        check(Case(p, M, 2, p, forward_only=True))


def test_a_batch_lists_messages_as_the_plan_does():
    """To and from the previous stage, then the next, in raw order."""
    _, network, machine = run_case(Case(4, 8, 2, 4))
    batches = [entry[1:] for entry in done_by(1, network, machine) if entry[0] == "batch"]
    assert batches[-9] == (
        (True, "gradient", 0, 3, 1),
        (True, "activation", 2, 7, 5),
        (False, "gradient", 2, 4, 6),
    )
    all_four = [(True, 0), (False, 0), (True, 2), (False, 2)]
    assert [(is_send, peer) for is_send, _, peer, *_ in batches[-10]] == all_four


def test_interleaving_refuses_short_groups():
    for p, M, G in ((4, 2, 4), (4, 6, 4), (2, 3, 2), (3, 8, 9)):
        with pytest.raises(ValueError, match=rf"\b{M}\b.*\b{p}\b|\b{p}\b.*\b{M}\b"):
            run_case(Case(p, M, 2, G, batched=False))
    with pytest.raises(ValueError, match="less than pipeline_model_parallel_size=4"):
        Case(4, 8, 2, 3).config()


def test_two_stages_interleaved_and_batched_is_refused_with_the_reason():
    case = Case(2, 4, 2, 2)
    with pytest.raises(ValueError, match=r"swap activations and gradients.*batch_p2p_comm=False"):
        FakeCommunicator(FakeGroup(0, 2), case.config(), FakeTransport(Network(2), 0))


# -- Each protection is there for a reason: without it, the streams go wrong --


def test_two_stages_interleaved_and_batched_would_cross_tensors(monkeypatch):
    """Without the refusal, a gradient arrives as an activation."""
    monkeypatch.setattr(P2PCommunicator, "refuse_a_ring_of_two", lambda self: None)
    with pytest.raises(AssertionError, match=r"expected (activation|gradient)"):
        run_case(Case(2, 4, 2, 2))


@pytest.mark.parametrize(("p", "lone"), [(2, PAIRS), (4, TOGETHER)])
def test_unbatched_order_that_ignores_even_and_odd_deadlocks(monkeypatch, p, lone):
    """All stages sending first wait for each other: the reason for the even/odd order."""
    in_order = P2PCommunicator._in_order

    def as_even(self, **parts):
        with mock.patch.object(self, "curr_rank_in_pg", 2 * self.curr_rank_in_pg):
            messages = list(in_order(self, **parts))  # while it looks like an even one
        return messages

    monkeypatch.setattr(P2PCommunicator, "_in_order", as_even)
    _, network = run_programs(Case(p, 8, 2, 4, batched=False))
    with pytest.raises(Deadlock, match=r"rank 0 waits.*rank 1 waits"):
        network.run(lone)


def test_a_missing_receive_is_reported_as_a_deadlock(monkeypatch):
    def forgets(self, *arguments, **keywords):
        return None

    monkeypatch.setattr(P2PCommunicator, "send_backward", forgets)
    with pytest.raises(Deadlock, match="rank 0 waits: receive from rank 1"):
        run_case(Case(2, 4))


@pytest.mark.parametrize("batched", [True, False])
def test_computing_without_waiting_for_the_message_is_noticed(monkeypatch, batched):
    wait = fake_transport.Handle.wait
    monkeypatch.setattr(
        fake_transport.Handle, "wait", lambda self: self.message.is_send and wait(self)
    )
    with pytest.raises(
        AssertionError, match=r"forward of microbatch 0 on virtual stage \d expected"
    ):
        run_case(Case(3, 4, batched=batched))


def test_freeing_before_the_send_is_done_is_noticed(monkeypatch):
    """Without the communicator's own view, nobody holds the memory of a freed output."""
    make_handle = P2PCommunicator._handle

    def without_view(self, message, *arguments):
        handle = make_handle(self, message, *arguments)
        if message.is_send:
            handle.message = handle.message._replace(tensor=None)
        return handle

    monkeypatch.setattr(P2PCommunicator, "_handle", without_view)
    with pytest.raises(Race, match=r"rank 0: nothing says which comes first: .*memory is freed"):
        run_case(Case(4, 8, 2, 4, batched=False, overlap=True, deallocate=True))


def test_a_step_that_does_not_wait_for_its_last_sends_is_noticed(monkeypatch):
    """The communicator goes after the step, and the tensors that it held."""
    monkeypatch.setattr(P2PCommunicator, "finish", lambda self: None)
    with pytest.raises(Race, match="comes first: .*memory is freed"):
        run_case(Case(4, 8, 2, 4, batched=False, overlap=True))


def test_a_program_that_reads_a_number_is_noticed(monkeypatch):
    receive = P2PCommunicator.recv_forward

    def looks(self, tensor_shapes, is_first_stage):
        received = receive(self, tensor_shapes, is_first_stage)
        return received if is_first_stage else [received[0] * received[0].max().item()]

    monkeypatch.setattr(P2PCommunicator, "recv_forward", looks)
    with pytest.raises(AssertionError, match="reads a tensor's number"):
        run_case(Case(2, 2))


def test_counts_are_those_of_the_formulas():
    for p in range(1, 9):
        for rank in range(p):
            for v in (1, 2, 3, 4):
                for M in range(1, 33):
                    for G in legal_groups(p, M):
                        counts = count_rank_microbatches(p, rank, M, v, G)
                        warmup = 0 if p == 1 else 2 * (p - rank - 1) + (v - 1) * G
                        assert counts.num_warmup == min(warmup, M * v)
                        assert counts.total == counts.num_warmup + counts.num_remaining == M * v
                        assert counts.are_all_in_warmup == (warmup >= M * v)


def test_forward_only_keeps_no_graph():
    reports, _, _ = run_case(Case(4, 3, forward_only=True))
    assert all(not report["output"].requires_grad for report in reports[3])
