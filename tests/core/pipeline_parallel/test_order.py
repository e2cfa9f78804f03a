"""The schedules' order, checked without processes on a transport that forgives nothing.

Every message's content is checked by its receiver (`Identified`), so each case below proves that
every activation and gradient reached the right microbatch of the right virtual stage.
"""

import pytest
import torch

from minimegatron.core.pipeline_parallel import p2p_communication
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.schedule_table import (
    count_rank_microbatches,
    get_schedule_table,
)
from tests.core.pipeline_parallel.fake_step import Case, computations, run_case
from tests.fake_transport import Deadlock, FakeGroup, FakeTransport, Network

PLAIN = [Case(p, M) for p in (1, 2, 3, 4, 5) for M in (1, 2, 3, 4, 8)]


def legal_groups(p: int, M: int) -> list[int]:
    return [G for G in range(p, M + 1) if M % G == 0 or p <= M % G]


INTERLEAVED = [
    Case(p, M, v, G)
    for p in (2, 3, 4)
    for v in (1, 2, 3)
    for M in (2, 3, 4, 5, 8)
    for G in legal_groups(p, M)
]


def variants(case: Case) -> list[Case]:
    """Both P2P modes, overlap, forward-only, freed outputs, as far as the case allows them."""
    found = []
    for forward_only in (False, True):
        for deallocate in (False, True):
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
    reports, network = run_case(case)
    p, M, v = case.p, case.M, case.v or 1
    assert network.leftovers() == []
    for rank in range(p):
        done = computations(network.log[rank])
        assert done == expected_order(case, rank), f"rank {rank} of {case}"
        live = peak = 0
        for kind, _, _ in done:
            live += 1 if kind == "F" else -1
            peak = max(peak, live)
        if not case.forward_only:
            formula = min(M, p - rank)
            if case.v is not None:
                formula = min(M * v, 2 * (p - rank - 1) + (v - 1) * case.G + 1)
            assert peak == formula, f"peak in flight on rank {rank} of {case}"
    sent = [entry for log in network.log for entry in log if entry[0] == "send"]
    activations = [entry for entry in sent if entry[2] == "activation"]
    gradients = [entry for entry in sent if entry[2] == "gradient"]
    assert len(activations) == (p * v - 1) * M
    assert len(gradients) == (0 if case.forward_only else (p * v - 1) * M)
    assert all(size == 1 * 1 * 2 * 8 for _, _, _, size in sent)  # s * b * h * float64
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


def test_interleaving_refuses_short_groups():
    for p, M, G in ((4, 2, 4), (4, 6, 4), (2, 3, 2), (3, 8, 9)):
        with pytest.raises(ValueError, match=rf"\b{M}\b.*\b{p}\b|\b{p}\b.*\b{M}\b"):
            run_case(Case(p, M, 2, G, batched=False))
    with pytest.raises(ValueError, match="less than pipeline_model_parallel_size=4"):
        Case(4, 8, 2, 3).config()


def test_two_stages_interleaved_and_batched_is_refused_with_the_reason():
    case = Case(2, 4, 2, 2)
    with pytest.raises(ValueError, match=r"swap activations and gradients.*batch_p2p_comm=False"):
        P2PCommunicator(FakeGroup(0, 2), case.config(), FakeTransport(Network(2), 0))


def test_two_stages_interleaved_and_batched_would_cross_tensors(monkeypatch):
    """The guard is there for a reason: without it, a gradient arrives as an activation."""
    create = P2PCommunicator.__init__

    def without_guard(self, pp_group, config, transport=None):
        config.batch_p2p_comm = False
        create(self, pp_group, config, transport)
        config.batch_p2p_comm = True

    # The order in which a batch lists its messages: to and from the previous rank first.
    def previous_first(self, messages):
        messages = sorted(messages, key=lambda m: m.is_send != (m.payload == "gradient"))
        return [self.network.post(message, self.rank) for message in messages]

    monkeypatch.setattr(P2PCommunicator, "__init__", without_guard)
    monkeypatch.setattr(FakeTransport, "start_batch", previous_first)
    with pytest.raises(AssertionError, match=r"expected (activation|gradient)"):
        run_case(Case(2, 4, 2, 2))


def test_unbatched_order_that_ignores_even_and_odd_deadlocks(monkeypatch):
    """All stages sending first wait for each other: the reason for the even/odd order."""
    monkeypatch.setattr(
        P2PCommunicator,
        "_start",
        lambda self, parts: {name: self.transport.start(m) for name, m in parts.items()},
    )
    with pytest.raises(Deadlock, match=r"rank 0 waits.*rank 1 waits"):
        run_case(Case(4, 8, 2, 4, batched=False))


def test_a_missing_receive_is_reported_as_a_deadlock(monkeypatch):
    def forgets(self, *arguments, **keywords):
        return None

    monkeypatch.setattr(P2PCommunicator, "send_backward", forgets)
    with pytest.raises(Deadlock, match="rank 0 waits: receive from rank 1"):
        run_case(Case(2, 4))


def test_freeing_before_the_send_is_done_is_noticed(monkeypatch):
    """Without the communicator's own view, the fake network copies a freed output."""
    message = p2p_communication.Message
    monkeypatch.setattr(
        P2PCommunicator,
        "_message",
        lambda self, is_send, tensor, payload: message(
            is_send,
            tensor,
            self.next_rank if is_send == payload.startswith("activation") else self.prev_rank,
            payload,
        ),
    )
    with pytest.raises(AssertionError, match="sent shape"):
        run_case(Case(4, 8, 2, 4, overlap=True, deallocate=True))


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
    reports, _ = run_case(Case(4, 3, forward_only=True))
    assert all(not report["output"].requires_grad for report in reports[3])
    assert torch.equal(reports[3][2]["output"], torch.tensor([[[2.0, 3.0]]], dtype=torch.float64))
