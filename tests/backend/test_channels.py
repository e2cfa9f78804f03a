"""One connection between two ranks: its lanes, steps that fail, and what a full socket does not take.

Most tests have both ends in one process.
"""

import gc
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from minimegatron.backend.channels import IN_PLACE, LENT, Connection, PendingReceive, Sent
from minimegatron.backend.handshake import Met
from minimegatron.backend.incoming import FIRST_LANE_OF_NO_STEP, WireError, next_part
from minimegatron.backend.slots import Arena
from tests.backend.shm_groups import make_group, needs_shared_memory, run_case

LANES = (1, 2, 3, 4)  # what a pipeline tells apart: activation, gradient, and a shape of each
SECONDS = 30.0


def both_ends(timeout: float = SECONDS) -> tuple[Connection, Connection]:
    """The two ends of one connection, in this process."""
    arenas, sockets = (Arena(), Arena()), socket.socketpair()
    return tuple(
        Connection(Met(sockets[i], os.dup(arenas[1 - i].descriptor)), arenas[i], 1 - i, timeout)
        for i in range(2)
    )


def send_value(end: Connection, value: float, lane: int, size: int = 3) -> Sent:
    return end.send(torch.full((size,), float(value)), f"channel {lane}", lane)


def expect_value(end: Connection, lane: int, size: int = 3) -> PendingReceive:
    return end.expect(torch.empty(size), LENT, lane)


def value_of(arrival: PendingReceive) -> float:
    arrival.wait()
    return arrival.tensor.unique().item()


def for_each(ends: tuple[Connection, ...], method: Callable[[Connection], None]) -> None:
    for end in ends:
        method(end)


# -- Lanes --


def test_lanes_are_waited_for_in_any_order():
    """In both directions at once; the n-th of a lane stays the n-th of that lane."""
    ends = both_ends()
    for _ in range(3):
        arrivals = [{lane: [] for lane in LANES} for _ in ends]
        for_each(ends, Connection.begin_step)
        for number in range(5):
            for me, end in enumerate(ends):
                for lane in LANES:
                    send_value(end, 1000 * me + 10 * lane + number, lane)
                    arrivals[me][lane].append(expect_value(end, lane))
        for lane in reversed(LANES):
            for number in (2, 0, 4, 1, 3):
                for me in range(2):
                    wanted = 1000 * (1 - me) + 10 * lane + number
                    assert value_of(arrivals[me][lane][number]) == wanted
        for_each(ends, Connection.end_step)


def talk_over_one_connection(num_steps: int) -> list[float]:
    """Two ranks, each the next one and the previous one of the other, over one connection."""
    group, rank, found = make_group(), dist.get_rank(), []
    (end,) = group.mesh.to.values()
    for step in range(num_steps):
        group.begin_step()
        gradient, activation = expect_value(end, 2), expect_value(end, 1)
        send_value(end, 100 * rank + step, 1)
        send_value(end, -100 * rank - step, 2)
        found += [value_of(gradient), value_of(activation)]
        group.end_step()
    return found


@needs_shared_memory
def test_one_connection_carries_both_directions_of_a_pair():
    first, second = run_case(talk_over_one_connection, 2, 3)
    assert first == [-100.0, 100.0, -101.0, 101.0, -102.0, 102.0]
    assert second == [0.0, 0.0, -1.0, 1.0, -2.0, 2.0]


def test_a_lane_without_messages_times_out_while_others_have_some():
    """What comes in another lane does not begin the time anew."""
    sender, receiver = both_ends(timeout=0.5)
    stop = threading.Event()

    def chatter() -> None:
        while not stop.wait(0.1):
            sender.send(torch.ones(3), None, 2)

    thread = threading.Thread(target=chatter, daemon=True)
    late = threading.Timer(SECONDS, stop.set)  # the wait ends before that, or it has begun anew
    late.daemon = True
    thread.start(), late.start()
    with pytest.raises(WireError) as error:
        expect_value(receiver, 1).wait()
    assert not stop.is_set()
    late.cancel(), stop.set()
    thread.join()
    assert re.search(
        r"rank 0 of the group sent nothing within 0.5 s in the lane that this rank waits for; "
        r"messages in other lanes: [1-9]",
        str(error.value),
    ), str(error.value)


# -- Steps that fail --


@pytest.mark.parametrize("who_fails", ["receiver", "both"])
def test_a_step_that_fails_in_one_lane_leaves_nothing_in_any(who_fails):
    ends = sender, receiver = both_ends()
    for step in range(10):
        for_each(ends, Connection.begin_step)
        left = {lane: [expect_value(receiver, lane) for _ in range(2)] for lane in LANES}
        for lane in LANES:
            send_value(sender, 100 * step + lane, lane)
        assert value_of(left[2][0]) == 100 * step + 2
        receiver.abandon("planted")
        sender.abandon("planted") if who_fails == "both" else sender.end_step()
        for lane in LANES:
            with pytest.raises(WireError, match="belongs to a step that has failed"):
                left[lane][1].wait()
        for_each(ends, Connection.begin_step)
        for lane in LANES:
            send_value(sender, 100 * step + 50 + lane, lane)
        for lane in reversed(LANES):
            assert value_of(expect_value(receiver, lane)) == 100 * step + 50 + lane
        for_each(ends, Connection.end_step)
    # Of the failed step one message per lane, of the good one after it one more.
    assert max(len(of.slots) for of in sender._slots.values()) <= 2
    assert not any(receiver._expected.values()) and not any(receiver._incoming.messages.values())


def test_what_nobody_expected_of_a_failed_step_is_dropped():
    ends = sender, receiver = both_ends()
    for step in range(3):
        for_each(ends, Connection.begin_step)
        for _ in range(2):
            send_value(sender, -1, 1)
        send_value(sender, step, 2)
        assert value_of(expect_value(receiver, 2)) == step
        receiver.abandon("planted")
        sender.end_step()
        for_each(ends, Connection.begin_step)
        send_value(sender, 50 + step, 1)
        assert value_of(expect_value(receiver, 1)) == 50 + step
        for_each(ends, Connection.end_step)
    assert len(sender._slots["channel 1"].slots) <= 3


def test_a_wait_that_fails_in_one_lane_fails_the_step_in_all():
    ends = sender, receiver = both_ends()
    for_each(ends, Connection.begin_step)
    send_value(sender, 1, 1, size=4)
    send_value(sender, 2, 2)
    wrong, right = expect_value(receiver, 1), expect_value(receiver, 2)
    with pytest.raises(WireError, match="16 bytes came where 12 bytes were expected"):
        wrong.wait()
    for arrival in (right, expect_value(receiver, 2)):
        with pytest.raises(WireError, match="belongs to a step that has failed"):
            arrival.wait()
    receiver.abandon("planted")
    with pytest.raises(WireError, match="given up this step: planted"):
        expect_value(sender, 3).wait()
    sender.abandon("told")
    for_each(ends, Connection.begin_step)
    for lane in LANES:
        send_value(sender, lane, lane)
    assert [value_of(expect_value(receiver, lane)) for lane in LANES] == list(LANES)


def test_who_waits_for_one_that_gives_up_is_told_why():
    ends = sender, receiver = both_ends(timeout=2.0)
    for_each(ends, Connection.begin_step)
    sender.abandon("planted")
    with pytest.raises(WireError, match="given up this step: planted"):
        expect_value(receiver, 1).wait()


def test_a_message_of_a_later_step_in_another_lane_ends_a_wait():
    ends = sender, receiver = both_ends(timeout=60)
    for_each(ends, Connection.begin_step)
    sender.end_step()
    sender.begin_step()
    send_value(sender, 1, 2)
    with pytest.raises(
        WireError,
        match="is in step 2, and this rank waits for a message of step 1; every rank must begin",
    ):
        expect_value(receiver, 1).wait()


def test_what_comes_between_steps_outlives_the_receivers_forward_only_steps():
    """Its sender evaluates less often. Was: dropped when the receiver began the next one."""
    ends = sender, receiver = both_ends()
    for_each(ends, Connection.begin_step)
    for_each(ends, Connection.end_step)
    send_value(sender, 3, 1)
    for _ in range(3):
        receiver.begin_step(next_part(receiver.epoch))
        receiver.end_step()
    assert value_of(expect_value(receiver, 1)) == 3
    # The next training step brings both together, and drops what is left.
    send_value(sender, 4, 1)
    for_each(ends, Connection.begin_step)
    send_value(sender, 5, 1)
    assert value_of(expect_value(receiver, 1)) == 5


def test_what_a_failed_forward_only_step_has_left_between_steps_is_dropped():
    """One that both take part in: its messages are asked for."""
    ends = sender, receiver = both_ends()
    for_each(ends, Connection.begin_step)
    for_each(ends, Connection.end_step)
    send_value(sender, 3, 1)
    for end in ends:
        end.begin_step(next_part(end.epoch))
    send_value(sender, 4, 1)
    assert value_of(expect_value(receiver, 1)) == 4


def test_a_lane_of_no_step_outlives_a_failed_one():
    ends = sender, receiver = both_ends()
    for_each(ends, Connection.begin_step)
    kept, lost = expect_value(receiver, FIRST_LANE_OF_NO_STEP), expect_value(receiver, 1)
    send_value(sender, 7, FIRST_LANE_OF_NO_STEP)
    send_value(sender, 8, 1)
    for end in ends:
        end.abandon("planted")
        end.begin_step()
    assert value_of(kept) == 7
    with pytest.raises(WireError, match="belongs to a step that has failed"):
        lost.wait()


# -- What a full socket does not take --


def fill_a_socket(number: int) -> int:
    """Rank 0 sends more headers than a socket holds before the other rank reads any of them."""
    group, rank = make_group(), dist.get_rank()
    (end,) = group.mesh.to.values()
    if rank == 0:
        for i in range(number):
            end.send(torch.tensor([float(i)]), "values", 1)
        num_waiting = len(end._writer.later)
        dist.barrier()  # over another group
        dist.barrier()  # the thread must write what is left while this rank waits here
        return num_waiting
    dist.barrier()
    for i in range(number):
        arrival = end.expect(torch.empty(1), lane=1)
        arrival.wait()
        assert arrival.tensor.item() == i
    dist.barrier()
    return number


@needs_shared_memory
def test_more_headers_than_a_socket_holds_arrive_in_order():
    num_waiting, num_received = run_case(fill_a_socket, 2, 3000)
    assert num_waiting > 0 and num_received == 3000


def test_what_waits_for_a_full_socket_is_not_overtaken():
    """The sender writes to the socket itself, but not while something older waits."""
    sender, receiver = both_ends()
    number, waited = 0, 0
    for size in (3000, 1, 2000, 10):
        for _ in range(size):
            send_value(sender, number, 1 + number % 2, size=1)
            waited += bool(sender._writer.later)
            number += 1
        for i in range(number - size, number):
            assert value_of(expect_value(receiver, 1 + i % 2, size=1)) == i
        # All of it was read, so all was written; the thread takes the last piece off a little later.
        deadline = time.monotonic() + SECONDS
        while sender._writer.later and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not sender._writer.later
    assert 1000 < waited < number


# -- What is left over when nobody has a connection any more --


def leave_what_is_held_to_the_collector() -> bool:
    """A receive that uses its slot, and all the memory of its connection, become garbage together."""
    sender, receiver = both_ends()
    send_value(sender, 5.0, 1)
    held = receiver.expect(torch.empty(3), IN_PLACE, 1)
    seen = held.wait() and held.tensor.tolist() == [5.0] * 3
    marks = weakref.ref(next(iter(receiver._incoming.slots._pages.values()))[0])
    held.tensor.cycle = [held, receiver._incoming]
    receiver.close()
    held = receiver = None
    assert marks() is not None
    gc.collect()
    assert marks() is None
    return seen


@needs_shared_memory
def test_a_slot_is_freed_before_its_memory_goes():
    """In a process of its own, since one that writes to memory that has gone is ended."""
    assert run_case(leave_what_is_held_to_the_collector, 1) == [True]
