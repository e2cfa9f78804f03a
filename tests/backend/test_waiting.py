"""Who reads while several wait: threads of one process, connections whose two ends are both here."""

import gc
import os
import socket
import threading
import time
import types
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from minimegatron.backend import waiting
from minimegatron.backend.calls import CollectiveCall
from minimegatron.backend.channels import Connection
from minimegatron.backend.gloo_works import GlooWork
from minimegatron.backend.handshake import Met
from minimegatron.backend.incoming import WireError
from minimegatron.backend.slots import Arena
from minimegatron.backend.waiting import reader
from minimegatron.backend.works import SharedMemoryWork

SECONDS = 20.0
SOON = 5.0
"""Seconds in which a thread of this process does what it can do at once."""


def both_ends(timeout: float = SECONDS) -> list[Connection]:
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    arenas = [Arena(), Arena()]
    return [
        Connection(Met(sockets[i], os.dup(arenas[1 - i].descriptor)), arenas[i], 1 - i, timeout)
        for i in range(2)
    ]


def value(number: float) -> torch.Tensor:
    return torch.full((3,), float(number))


def in_a_thread(function: Callable[[], object]) -> tuple[threading.Thread, list]:
    """Runs it; what it returns or raises is in the list."""
    found: list = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


@pytest.fixture(autouse=True)
def one_thread_has_waited():
    """As in a new process, whatever ran in this one."""
    reader._is_shared = False
    reader.expecting.clear()


def until_somebody_waits(num_waiting: int = 1) -> None:
    deadline = time.monotonic() + SECONDS
    while (reader._watched is not None) + reader._num_asleep < num_waiting:
        assert time.monotonic() < deadline, "nobody waits"
        time.sleep(1e-3)


def until_somebody_polls() -> None:
    """At first it sleeps in a read, for `BRIEFLY`."""
    deadline = time.monotonic() + SECONDS
    while reader._watched is None or reader.reading is not None:
        assert time.monotonic() < deadline, "nobody is in poll"
        time.sleep(1e-3)


# -- One waits --


def test_who_waits_for_one_message_takes_those_of_other_connections():
    """Was to be feared: two ranks, each waiting until the other takes what it has sent."""
    (here, there), (other_here, other_there) = both_ends(), both_ends()
    early = other_here.expect(torch.empty(3))
    thread, _ = in_a_thread(lambda: here.expect(torch.empty(3)).wait())
    until_somebody_waits()
    sent = other_there.send(value(5))
    deadline = time.monotonic() + SOON
    while not sent.is_taken() and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert sent.is_taken() and early.is_done and early.tensor[0] == 5
    there.send(value(1))
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_one_thread_that_waits_for_one_connection_needs_no_poll(monkeypatch):
    here, there = both_ends()
    monkeypatch.setattr(waiting, "select", None)
    there.send(value(4))
    assert here.expect(received := torch.empty(3)).wait() and received[0] == 4


def test_what_comes_late_is_read_by_poll():
    here, there = both_ends()
    arrival = here.expect(torch.empty(3))
    thread, found = in_a_thread(arrival.wait)
    until_somebody_polls()
    there.send(value(6))
    thread.join(SECONDS)
    assert found == [True] and arrival.tensor[0] == 6


def test_a_peer_that_leaves_ends_a_wait_that_has_just_begun():
    here, there = both_ends()
    thread, found = in_a_thread(here.expect(torch.empty(3)).wait)
    until_somebody_waits()
    there.close()
    thread.join(SOON)
    assert isinstance(found[0], WireError) and "rank 1 of the group has ended" in str(found[0])


def test_a_connection_that_nobody_has_any_more_is_not_read():
    here, there = both_ends()
    here.expect(torch.empty(3))
    number = here.number
    assert number in reader.expecting
    del here
    gc.collect()  # what it expects knows it
    (other_here, other_there) = both_ends()
    other_there.send(value(2))
    other_there.send(value(3))
    first, second = other_here.expect(torch.empty(3)), other_here.expect(torch.empty(3))
    assert second.wait() and first.is_done and second.tensor[0] == 3
    other_here.expect(torch.empty(3))
    reader.read_what_came()
    assert list(reader.expecting) == [other_here.number]
    there.close()


# -- Several wait --


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_two_threads_wait_in_two_lanes_of_one_connection(order):
    here, there = both_ends()
    arrivals = {lane: here.expect(torch.empty(3), lane=lane) for lane in (1, 2)}
    threads = [in_a_thread(arrivals[lane].wait) for lane in (1, 2)]
    until_somebody_waits(2)
    for lane in order:
        there.send(value(lane), lane=lane)
    for (thread, found), lane in zip(threads, (1, 2), strict=True):
        thread.join(SECONDS)
        assert found == [True] and arrivals[lane].tensor[0] == lane


@pytest.mark.parametrize("until_the_first_sleeps", [until_somebody_waits, until_somebody_polls])
def test_who_comes_later_is_read_for_too(until_the_first_sleeps):
    """The thread that reads does not know the connection of the one that comes after it."""
    (here, there), (other_here, other_there) = both_ends(), both_ends()
    first, _ = in_a_thread(lambda: here.expect(torch.empty(3)).wait())
    until_the_first_sleeps()
    arrival = other_here.expect(torch.empty(3))
    second, found = in_a_thread(arrival.wait)
    until_somebody_waits(2)
    other_there.send(value(7))
    second.join(SOON)
    assert found == [True] and arrival.tensor[0] == 7
    there.send(value(1))
    first.join(SECONDS)
    assert not first.is_alive()


def test_who_comes_later_and_names_no_connection_is_read_for_too():
    """A `wait` with a time-out, and a message from any rank, wait for several connections."""
    (here, there), (other_here, other_there) = both_ends(), both_ends()
    first, _ = in_a_thread(here.expect(torch.empty(3)).wait)
    until_somebody_polls()
    work = SharedMemoryWork([received := torch.empty(3)], [other_here.expect(received)])
    second, found = in_a_thread(lambda: work.wait(timedelta(seconds=SECONDS)))
    until_somebody_waits(2)
    other_there.send(value(8))
    second.join(SOON)
    assert found == [True] and received[0] == 8
    there.send(value(1))
    first.join(SECONDS)
    assert not first.is_alive()


def test_who_looks_takes_nothing_before_what_who_waits_has_read():
    """What is read first must be taken first, though the lock is free in between."""
    here, there = both_ends()
    has_read, may_go_on, receive = threading.Event(), threading.Event(), here.receive

    def receive_and_stay(flags: int = 0) -> bytes | None:
        part = receive(flags)
        if not flags and part is not None:
            has_read.set()
            assert may_go_on.wait(SECONDS)
        return part

    here.receive = receive_and_stay
    arrivals = [here.expect(torch.empty(3)) for _ in range(2)]
    thread, found = in_a_thread(arrivals[0].wait)
    until_somebody_waits()
    there.send(value(1))
    assert has_read.wait(SECONDS)
    there.send(value(2))
    reader.read_what_came(here)
    may_go_on.set()
    thread.join(SECONDS)
    assert found == [True] and arrivals[1].wait()
    assert [arrival.tensor[0].item() for arrival in arrivals] == [1, 2]


def test_who_looks_without_waiting_wakes_who_waits():
    here, there = both_ends()
    waited = SharedMemoryWork([torch.empty(3)], [here.expect(torch.empty(3))])
    thread, found = in_a_thread(waited.wait)
    until_somebody_waits()
    there.send(value(1))
    while not waited.is_completed():
        pass
    thread.join(SECONDS)
    assert found == [True]


def test_a_connection_that_this_rank_closes_ends_its_waits():
    here, _there = both_ends()
    thread, found = in_a_thread(here.expect(torch.empty(3)).wait)
    until_somebody_waits()
    here.close()
    thread.join(SECONDS)
    assert isinstance(found[0], WireError) and "has left the group" in str(found[0])


# -- Nobody waits --


def threads_for_futures() -> int:
    return sum(thread.name == "local futures" for thread in threading.enumerate())


def until_none_waits_for_futures() -> None:
    deadline = time.monotonic() + SECONDS
    while threads_for_futures():
        assert time.monotonic() < deadline, "the thread for futures stays"
        time.sleep(1e-3)


def test_a_future_is_completed_while_nobody_waits():
    here, there = both_ends()
    target = torch.empty(3)
    future = SharedMemoryWork([target], [here.expect(target)]).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert not future.done() and threads_for_futures() == 1
    there.send(value(4))
    assert doubled.wait()[0] == 8 and future.value()[0] is target
    until_none_waits_for_futures()


def test_a_later_future_may_be_completed_first():
    here, there = both_ends()
    works = [
        SharedMemoryWork([torch.empty(3)], [here.expect(torch.empty(3), lane=lane)])
        for lane in (1, 2)
    ]
    first, second = (work.get_future() for work in works)
    there.send(value(4), lane=2)
    second.wait()
    assert not first.done()
    there.send(value(4), lane=1)
    first.wait()
    until_none_waits_for_futures()


def test_a_callback_may_wait_for_another_future():
    here, there = both_ends()
    works = [SharedMemoryWork([value(0)], [here.expect(value(0), lane=lane)]) for lane in (1, 2)]

    def wait_for_the_other(_: torch.futures.Future) -> int:
        there.send(value(2), lane=2)
        works[1].get_future().wait()
        return 2

    answer = works[0].get_future().then(wait_for_the_other)
    there.send(value(1), lane=1)
    thread, found = in_a_thread(answer.wait)
    thread.join(SECONDS)
    assert found == [2]
    until_none_waits_for_futures()


@pytest.mark.parametrize("why", ["time", "gone"])
def test_a_future_that_fails_says_who_is_in_the_way(why):
    here, there = both_ends(timeout=0.2 if why == "time" else SECONDS)
    future = SharedMemoryWork([torch.empty(3)], [here.expect(torch.empty(3))]).get_future()
    if why == "gone":
        there.close()
    words = "rank 1 of the group " + ("sent nothing within 0.2 s" if why == "time" else "has ended")
    with pytest.raises(RuntimeError, match=words):
        future.wait()
    until_none_waits_for_futures()


def test_a_result_is_there_though_nobody_has_the_handle():
    """As over gloo; and the slots of such a message are free again."""
    here, there = both_ends()
    found = []
    SharedMemoryWork([], [here.expect(torch.empty(3), "in place")], lambda: found.append(1))
    sent = there.send(value(1))
    there.send(value(2), lane=1)
    here.expect(torch.empty(3), lane=1).wait()
    assert found == [1] and not sent._slot.marks[sent._slot.mark_at]


# -- What was called --


def test_ranks_that_have_called_different_things_are_told_both():
    here, there = both_ends()
    sum_of_twelve = CollectiveCall("all_reduce", 12, torch.float32, "SUM")
    maximum = CollectiveCall("all_reduce", 12, torch.float32, "MAX")
    there.send(value(1), call=maximum.number())
    with pytest.raises(WireError) as caught:
        here.expect(torch.empty(3), call=sum_of_twelve.number()).wait()
    assert str(caught.value) == (
        "rank 1 of the group has called all_reduce of 12 bytes of float32, op MAX, and this rank "
        "all_reduce of 12 bytes of float32, op SUM; all ranks of a group must make the same calls in "
        "one order"
    )
    there.send(value(2))
    assert here.expect(torch.empty(3)).wait(), "what comes after is in order"


def test_what_gloo_says_later_hides_no_rank():
    """Was: its own words, without a rank, in place of what the thread that waited had found."""
    theirs = torch.futures.Future()
    handle = types.SimpleNamespace(get_future=lambda: theirs)
    work = GlooWork([torch.ones(1)], [], handle, None, lambda: None, lambda: 0.01, None)
    with pytest.raises(WireError, match="still waits"):
        work.wait()
    theirs.set_exception(RuntimeError("Timed out waiting 1000ms for recv operation"))
    assert "still waits" in str(work.exception())
