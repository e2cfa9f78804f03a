"""Planted errors: each is found, with the right kind, place and words. And the crossed tensors."""

import dataclasses
import re
from collections.abc import Callable

import pytest

from minimegatron.core.pipeline_parallel.loops import interleaved_1f1b
from minimegatron.planner.actions import (
    ACTIVATION,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMMUNICATE,
    FORWARD,
    PAIR,
    SEND,
    Action,
    Message,
)
from minimegatron.planner.imagined_transport import match_messages
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_check import Problem, ScheduleError, check, require_valid
from minimegatron.planner.simulator import simulate
from tests.planner.grid import legal_groups
from tests.planner.known_orders import PUBLISHED, registered, zb_h1


def changed(step: Plan, rank: int, change: Callable[[list[Action]], None]) -> Plan:
    """A copy of the plan with one rank's actions changed."""
    ranks = [list(actions) for actions in step.ranks]
    change(ranks[rank])
    return Plan(step.config, ranks)


def place(actions: list[Action], kind_or_call: str, microbatch: int = 0, chunk: int = 0) -> int:
    """Index of a forward or backward, or of the first call that has a message of that work."""
    for index, action in enumerate(actions):
        if action.kind == kind_or_call:
            if (action.microbatch, action.chunk) == (microbatch, chunk):
                return index
        elif action.call == kind_or_call and any(
            (m.microbatch, m.chunk) == (microbatch, chunk) for m in action.messages
        ):
            return index
    raise AssertionError(f"no {kind_or_call} of {microbatch}, {chunk}")


def kinds(problems: list[Problem]) -> set[str]:
    return {problem.kind for problem in problems}


def remove(kind_or_call: str, microbatch: int = 0, chunk: int = 0):
    return lambda actions: actions.pop(place(actions, kind_or_call, microbatch, chunk))


def repeat(kind: str, microbatch: int = 0):
    def change(actions):
        index = place(actions, kind, microbatch)
        actions.insert(index, actions[index])

    return change


def swap(first: tuple, second: tuple):
    def change(actions):
        i, j = place(actions, *first), place(actions, *second)
        actions[i], actions[j] = actions[j], actions[i]

    return change


# -- One planted error each --


@pytest.mark.parametrize(
    ("rank", "change", "kind", "unit", "words"),
    [
        (1, remove(FORWARD, 2), "absent", (2, 0), "forward is never done"),
        (1, remove(BACKWARD, 2), "absent", (2, 0), "backward is never done.*never freed"),
        (1, repeat(FORWARD, 1), "duplicate", (1, 0), "forward is done a second time"),
        (1, repeat(BACKWARD, 1), "duplicate", (1, 0), "backward is done a second time"),
        (
            2,
            swap((FORWARD, 3), (BACKWARD, 3)),
            "order",
            (3, 0),
            "backward comes before its forward",
        ),
        (
            1,
            remove("recv_forward", 0),
            "dependency",
            (0, 0),
            "forward starts before its input was received",
        ),
        (
            1,
            remove("recv_backward", 3),
            "dependency",
            (3, 0),
            "backward starts before its gradient was received",
        ),
        (
            0,
            swap((FORWARD, 0), ("send_forward", 0)),
            "dependency",
            (0, 0),
            "send_forward: sends the activation before its forward made it",
        ),
        (
            2,
            swap((BACKWARD, 3), ("send_backward", 3)),
            "dependency",
            (3, 0),
            "sends the gradient before its backward made it",
        ),
        (0, remove("send_forward", 0), "leak", (0, 0), "expected from rank 0, which never sends"),
        (
            1,
            remove("recv_forward", 0),
            "leak",
            (0, 0),
            "activation is sent to rank 1, which never receives it",
        ),
        (
            0,
            repeat("send_forward", 1),
            "duplicate",
            (1, 0),
            "send_forward: sends the activation a second time",
        ),
        (1, remove(FORWARD, 0), "leak", (0, 0), "activation is received, but no forward uses it"),
    ],
)
def test_planted_error(rank, change, kind, unit, words):
    step = changed(plan("1f1b", pp=3, num_microbatches=4), rank, change)
    found = [p for p in check(step) if p.kind == kind and (p.microbatch, p.chunk) == unit]
    assert any(re.search(words, p.text) for p in found), "\n".join(map(str, check(step)))
    text = str(found[0])
    assert text.startswith(f"rank {found[0].rank}, microbatch {unit[0]}, chunk {unit[1]}: {kind}")


def test_a_missing_message_is_named_at_the_rank_that_waits_for_it():
    step = changed(plan("1f1b", 3, 4), 0, remove("send_forward", 1))
    leak = next(problem for problem in check(step) if problem.kind == "leak")
    assert (leak.rank, leak.microbatch) == (1, 1)
    assert step.ranks[1][leak.index].call == "recv_forward"


def test_microbatches_and_chunks_that_do_not_exist():
    def add(action):
        return lambda actions: actions.append(action)

    step = plan("interleaved", 2, 2, vpp=2)
    for action in (Action(FORWARD, 0, None, 7, 0), Action(BACKWARD, 0, None, 0, 2)):
        (problem,) = check(changed(step, 0, add(action)))
        assert problem.kind == "range"
        assert "there are 2 microbatches, 2 chunks" in problem.text


@pytest.mark.parametrize("peer", [0, 2, 9])
def test_wrong_peer(peer):
    def redirect(actions):
        index = place(actions, "send_forward", 0)
        (message,) = actions[index].messages
        actions[index] = actions[index]._replace(messages=(message._replace(peer=peer),))

    problems = check(changed(plan("1f1b", 4, 4), 0, redirect))
    wrong = next(problem for problem in problems if problem.kind == "peer")
    assert wrong.text == (
        f"send_forward: sends the activation to rank {peer}, but it belongs to rank 1"
    )


def test_a_backward_in_a_forward_only_step():
    def two_phases(stage):
        yield stage.forward(0)
        yield stage.backward(0)

    (problem,) = check(plan(two_phases, 1, 1, forward_only=True))
    assert problem.kind == "order"
    assert "backward in a forward-only step" in problem.text


def test_crossed_receives():
    # Rank 1 takes the first two inputs in the wrong order.
    def swap_receives(actions):
        i, j = place(actions, "recv_forward", 0), place(actions, "recv_forward", 1)
        actions[i], actions[j] = actions[j], actions[i]

    problems = check(changed(plan("gpipe", 2, 2), 1, swap_receives))
    crossed = next(problem for problem in problems if problem.kind == "crossed")
    assert crossed.rank == 1
    assert "is the activation of microbatch 0, but rank 1 takes it for the activation" in str(
        crossed
    )


# -- Deadlocks --


def test_everybody_receives_first():
    def receive_first(stage):
        for i in range(stage.num_microbatches):
            yield stage.recv_backward(i)
            yield stage.recv_forward(i)
            yield stage.forward(i)
            yield stage.send_forward(i)
            yield stage.backward(i)
            yield stage.send_backward(i)

    step = plan(receive_first, 3, 1)
    (problem,) = check(step)
    # Rank 0 waits for rank 1, but is not part of the cycle.
    assert (problem.kind, problem.rank, problem.microbatch, problem.chunk) == ("deadlock", 1, 0, 0)
    assert problem.text == (
        "rank 1 waits for rank 2 in recv_backward to receive the gradient of microbatch 0, "
        "chunk 0; rank 2 waits for rank 1 in recv_forward to receive the activation of "
        "microbatch 0, chunk 0"
    )
    with pytest.raises(ValueError, match=r"rank 0, 1, 2 waits for ever; see check\(\)"):
        simulate(step)


def test_send_against_send():
    # Both send before either receives: fine where sends are buffered, a deadlock where they meet.
    def send_first(stage):
        yield stage.recv_forward(0)
        yield stage.forward(0)
        yield stage.send_forward(0)
        if stage.pp_rank == 0:
            yield stage.forward(1)
            yield stage.send_forward(1)
            yield stage.recv_backward(0)
            yield stage.backward(0)
            yield stage.recv_backward(1)
            yield stage.backward(1)
        else:
            yield stage.backward(0)
            yield stage.send_backward(0)
            yield stage.recv_forward(1)
            yield stage.forward(1)
            yield stage.backward(1)
            yield stage.send_backward(1)

    step = plan(send_first, 2, 2)
    (problem,) = check(step)
    assert problem.kind == "deadlock"
    assert problem.text == (
        "rank 0 waits for rank 1 in send_forward to send the activation of microbatch 1, chunk 0; "
        "rank 1 waits for rank 0 in send_backward to send the gradient of microbatch 0, chunk 0"
    )
    assert simulate(step, transport="buffered").makespan == 9


def test_a_ring_in_which_everybody_sends_first():
    """Why odd stages receive before they send, where messages start one by one."""
    step = plan("interleaved", 4, 8, 2, batch_p2p_comm=False)
    assert check(step) == []
    send_first = [
        [
            a._replace(messages=tuple(sorted(a.messages, key=lambda m: m.direction != SEND)))
            for a in rank
        ]
        for rank in step.ranks
    ]
    (problem,) = check(Plan(step.config, send_first))
    assert problem.kind == "deadlock"
    assert problem.text.count("to send the activation") == 4
    # In a batch the order within a call does not matter.
    batched = dataclasses.replace(step.config, batch_p2p_comm=True)
    assert check(Plan(batched, send_first)) == []


def test_overlapped_receives_can_deadlock_too():
    def overlapped(stage):
        # Each rank's only forward needs what the other sends after its own.
        yield stage.send_forward_recv_forward(None, (0, 0), overlap=True)
        yield stage.forward(0, 0)
        yield stage.send_forward_recv_forward((0, 0), None, overlap=True)

    step = plan(overlapped, 2, 1, forward_only=True, overlap_p2p_comm=True, vpp=1)
    assert check(step) == []

    def never_sent(stage):
        yield stage.send_forward_recv_forward(None, (0, 0), overlap=True)
        yield stage.forward(0, 0)

    problems = check(plan(never_sent, 2, 1, forward_only=True, overlap_p2p_comm=True, vpp=1))
    assert kinds(problems) == {"leak"}


def half_the_warmup(chunks, p2p, order, tensor_shape, overlap):
    """Interleaving that warms up p - r - 1 + (v - 1)G forwards instead of 2(p - r - 1) + (v - 1)G."""
    num_warmup = order.counts.num_warmup - (order.pp_size - order.pp_rank - 1)
    num_remaining = order.counts.total - num_warmup
    order.counts = order.counts._replace(num_warmup=num_warmup, num_remaining=num_remaining)
    interleaved_1f1b(chunks, p2p, order, tensor_shape, overlap)


@pytest.mark.parametrize(("p", "M", "v"), [(3, 6, 2), (4, 8, 2), (4, 8, 3), (5, 10, 2)])
def test_why_interleaving_warms_up_twice_as_long(p, M, v):
    """One exchange moves both directions at once, so a stage needs one more step per link."""
    (problem,) = check(plan(half_the_warmup, p, M, v))
    assert problem.kind == "deadlock"
    assert "send_forward_backward_recv_forward_backward" in problem.text


# -- The crossed tensors of two stages --


def test_two_stages_with_batched_messages_cross_tensors():
    """Each rank is both neighbours of the other, and a batch lists the previous one's first.

    So an activation meets a receive that is meant for a gradient. Not so one by one, with even and
    odd ranks in opposite orders, nor with overlap, nor with one chunk, nor in a forward-only step.
    """
    crossed, right = [], []
    for M, G in legal_groups(2, 8):
        for v in (2, 3):
            problems = check(plan("interleaved", 2, M, v, G, batch_p2p_comm=True))
            assert kinds(problems) <= {"crossed"}
            (crossed if problems else right).append((M, G, v))
            for problem in problems:
                assert "takes it for the" in problem.text
            for options in (
                {"batch_p2p_comm": False},
                {"overlap_p2p_comm": True},
                {"batch_p2p_comm": True, "forward_only": True},
            ):
                assert check(plan("interleaved", 2, M, v, G, **options)) == []
        assert check(plan("interleaved", 2, M, 1, G, batch_p2p_comm=True)) == []
    # Only where everything is warm-up does no exchange carry both.
    assert len(crossed) > 0
    assert all(M * v <= (v - 1) * G + 2 for M, G, v in right), right


def test_more_stages_never_cross():
    for p in (3, 4, 5):
        for M, G in legal_groups(p, 9):
            assert check(plan("interleaved", p, M, 2, G, batch_p2p_comm=True)) == []


# -- As an error --


def test_require_valid():
    step = plan("1f1b", 2, 2)
    assert require_valid(step) is step
    with pytest.raises(ScheduleError, match=r"rank 1, microbatch 0.*\(and \d+ more\)") as error:
        require_valid(changed(step, 1, remove(FORWARD, 0)))
    assert len(error.value.problems) > 1
    assert isinstance(error.value, ValueError)


def test_check_of_an_empty_plan_names_everything_absent():
    problems = check(plan(lambda stage: (), 2, 2))
    assert len(problems) == 8
    assert kinds(problems) == {"absent"}


# -- Split backwards, pairs, placements --


def split(p: int = 3, M: int = 4, wire: str = "tagged") -> Plan:
    with registered(zb_h1) as name:
        return plan(name, p, M, wire=wire)


def on(name: str, wire: str = "tagged") -> Plan:
    order, placement, p, M = PUBLISHED[name]
    with registered(order, placement) as registered_name:
        return plan(registered_name, p, M, wire=wire)


def replace(of_kind: str, of_microbatch: int, **values):
    def change(actions):
        index = place(actions, of_kind, of_microbatch)
        actions[index] = actions[index]._replace(**values)

    return change


def joined(first: tuple, second: tuple):
    """Makes two pieces of work a pair, where the first of them stands."""

    def change(actions):
        parts = tuple(actions[place(actions, *one)] for one in (first, second))
        actions[place(actions, *first)] = parts[0]._replace(kind=PAIR, parts=parts)
        actions.pop(place(actions, *second))

    return change


@pytest.mark.parametrize(
    ("rank", "change", "kind", "unit", "words"),
    [
        (
            1,
            swap((BACKWARD_INPUT, 2), (BACKWARD_WEIGHT, 2)),
            "order",
            (2, 0),
            "weight gradient comes before its input gradient",
        ),
        (
            1,
            remove(BACKWARD_WEIGHT, 2),
            "absent",
            (2, 0),
            "its weight gradient is never computed, so the activation of its forward is never",
        ),
        (1, remove(BACKWARD_INPUT, 2), "absent", (2, 0), "its input gradient is never computed"),
        (1, repeat(BACKWARD_WEIGHT, 1), "duplicate", (1, 0), "weight gradient is done a second"),
        (1, repeat(BACKWARD_INPUT, 1), "duplicate", (1, 0), "input gradient is done a second time"),
        (
            1,
            replace(BACKWARD_INPUT, 1, kind=BACKWARD),
            "duplicate",
            (1, 0),
            "its weight gradient is computed a second time, by weight gradient",
        ),
        (
            1,
            replace(BACKWARD_WEIGHT, 1, kind=BACKWARD),
            "duplicate",
            (1, 0),
            "its input gradient is computed a second time, by backward",
        ),
        (
            2,
            joined((FORWARD, 1), (BACKWARD_INPUT, 1)),
            "order",
            (1, 0),
            "input gradient comes before its forward",
        ),
        (
            1,
            remove("exchange", 0),
            "dependency",
            (0, 0),
            "before its input was received .an exchange that receives it must precede it",
        ),
        (1, replace(FORWARD, 0, kind="forwards"), "range", (0, 0), "forwards is no single kind"),
    ],
)
def test_planted_error_in_a_split_backward(rank, change, kind, unit, words):
    assert check(split()) == []
    found = check(changed(split(), rank, change))
    assert any(
        re.search(words, p.text) for p in found if (p.kind, p.microbatch, p.chunk) == (kind, *unit)
    ), "\n".join(map(str, found))


def test_a_step_without_backwards_has_no_weight_gradients():
    def one(stage):
        yield stage.forward(0)
        yield Action(BACKWARD_WEIGHT, 0, None, 0, 0)

    (problem,) = check(plan(one, 1, 1, forward_only=True))
    assert problem.text == "weight gradient in a forward-only step"


def test_a_pair_needs_the_inputs_of_both_its_parts():
    step = on("dualpipe-v")
    # On rank 3 of a V, chunk 1 needs what chunk 0 makes.
    problems = check(changed(step, 3, joined((FORWARD, 0), (FORWARD, 0, 1))))
    assert [(p.kind, p.chunk, p.text) for p in problems] == [
        ("dependency", 1, "forward starts before chunk 0 of this rank has made its input")
    ]


def test_neighbours_on_one_rank():
    step = on("zb-v")
    problems = check(changed(step, 3, swap((FORWARD, 0), (FORWARD, 0, 1))))
    assert ("dependency", "forward starts before chunk 0 of this rank has made its input") in [
        (p.kind, p.text) for p in problems
    ]
    problems = check(changed(step, 3, swap((BACKWARD_INPUT, 0), (BACKWARD_INPUT, 0, 1))))
    assert (
        "dependency",
        "input gradient starts before chunk 1 of this rank has made its gradient",
    ) in [(p.kind, p.text) for p in problems]

    def send_to_itself(actions):
        index = place(actions, FORWARD, 0) + 1
        message = Message(SEND, ACTIVATION, 3, 0, 0)
        actions.insert(index, Action(COMMUNICATE, 3, call="exchange", messages=(message,)))

    problem = check(changed(step, 3, send_to_itself))[0]
    assert (problem.kind, problem.text) == (
        "peer",
        "exchange: sends the activation to rank 3, but it belongs to chunk 1 of this rank and "
        "needs no message",
    )


def test_each_copy_of_the_model_has_its_own_microbatches():
    step = on("dualpipe")
    problems = check(changed(step, 0, replace(FORWARD, 2, microbatch=6)))
    assert ("range", 6, 0) in [(p.kind, p.microbatch, p.chunk) for p in problems]
    assert "of the copy that runs other microbatches" in problems[0].text
    assert ("absent", 2, 0) in [(p.kind, p.microbatch, p.chunk) for p in problems]


def reordered_receives(step: Plan, rank: int, payloads: tuple[str, str]) -> Plan:
    """The rank takes two messages of one peer in the other order."""

    def change(actions):
        first, second = (
            next(
                (i, m)
                for i, action in enumerate(actions)
                for m in action.messages
                if m.direction != SEND and m.payload == payload and m.microbatch == microbatch
            )
            for microbatch, payload in enumerate(payloads)
        )
        for (index, mine), (_, other) in ((first, second), (second, first)):
            messages = [other if m == mine else m for m in actions[index].messages]
            actions[index] = actions[index]._replace(messages=tuple(messages))

    return changed(step, rank, change)


@pytest.mark.parametrize("wire", ["tagged", "untagged"])
def test_on_a_tagged_wire_only_messages_of_one_payload_cross(wire):
    # Of two ranks, both send activations and gradients to each other.
    step = plan("interleaved", 2, 4, 2, wire=wire)
    assert check(step) == []
    two_activations = check(reordered_receives(step, 1, (ACTIVATION, ACTIVATION)))
    assert "crossed" in kinds(two_activations)
    name = "activation" if wire == "tagged" else "message"
    pattern = rf"{name} \d from rank 0 to rank 1 is the activation"
    assert any(re.match(pattern, p.text) for p in two_activations)


def test_matching_by_payload():
    """Where each payload keeps its order, a gradient may overtake an activation: with tags."""
    step = on("zb-v")
    assert check(step) == []
    # Three pairs of neighbours, two directions; in each a payload of either kind.
    assert len(match_messages(step)) == 12
    untagged = Plan(dataclasses.replace(step.config, wire="untagged"), step.ranks)
    assert len(match_messages(untagged)) == 6
    problems = check(untagged)
    assert kinds(problems) == {"crossed"}
    assert all("takes it for the" in problem.text for problem in problems)
