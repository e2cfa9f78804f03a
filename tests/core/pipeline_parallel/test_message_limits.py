"""What messages between stages cost while nobody takes them: room, time, memory, open files.

And what a step that failed leaves of them to the next one.
"""

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist

from minimegatron.backend.slots import LARGE, MOST_LARGE_LENT
from minimegatron.core import parallel_state
from minimegatron.core.pipeline_parallel.p2p_communication import (
    ACTIVATION,
    GRADIENT,
    P2PCommunicator,
)
from tests.backend.shm_groups import needs_shared_memory
from tests.backend.test_memory import PAGE, shared_bytes
from tests.core.wire_kinds import (
    GLOO,
    GLOO_INSIDE,
    SHARED,
    begin,
    communicator,
    end,
    give_up,
    group_over,
    over_each_kind,
    receive,
    run_over,
    send,
)

# -- A send waits for its turn --


def run_ahead(kind: str, limit: int) -> int:
    """How many messages rank 0 was ahead of rank 1, which is slow, at most."""
    p2p, rank = communicator(group_over(kind)), dist.get_rank()
    begin(p2p, limit)
    most = 0
    store = dist.distributed_c10d._get_default_store()
    for i in range(20):
        if rank == 0:
            p2p.send_forward(torch.full((4, 1, 1), float(i)), False)
            store.add("sent", 1)
        else:
            time.sleep(0.02)
            most = max(most, store.add("sent", 0) - i)
            p2p.recv_forward((4, 1, 1), False)
    end(p2p)
    return most


@pytest.mark.parametrize("limit", [2, 4])
@over_each_kind
def test_a_send_waits_while_its_channel_is_full(kind, limit):
    assert run_over(kind, run_ahead, 2, limit)[1] <= limit


def fill_all_channels(kind: str, limit: int) -> tuple[list[str], str]:
    """Of three stages, stage 0 sends until it must wait; the others receive nothing meanwhile."""
    p2p = communicator(group_over(kind, seconds=1.0))
    begin(p2p, limit)
    dist.barrier()
    sent, said = [], ""
    if dist.get_rank() == 0:
        for _ in range(limit):
            for peer in (1, 2):
                for payload in (ACTIVATION, GRADIENT):
                    p2p.exchange([send(1, peer, payload)])
                    sent.append(f"{payload} to {peer}")
        with pytest.raises(ConnectionError) as error:
            p2p.exchange([send(1, 2, GRADIENT)])
        said = str(error.value)
    dist.barrier()
    return sent, said


@pytest.mark.parametrize("limit", [1, 3])
@over_each_kind
def test_each_peer_has_room_for_each_payload(kind, limit):
    (sent, said), *_ = run_over(kind, fill_all_channels, 3, limit)
    assert len(sent) == 4 * limit
    assert "stage 0 lost stage 2 while sending a gradient of shape (3, 2)" in said


def fill_in_two_steps(kind: str) -> str:
    """Stage 0 ends a step whose messages nobody takes; then another communicator has its turn."""
    group = group_over(kind, seconds=1.0)
    first, second = communicator(group), communicator(group)
    said = ""
    begin(first)
    if dist.get_rank() == 0:
        first.exchange([send(1, 1), send(2, 1)])
    end(first)
    if dist.get_rank() == 0:
        begin(second)
        with pytest.raises(ConnectionError) as error:
            second.exchange([send(3, 1)])
        said = str(error.value)
        second.exchange([send(4, 1, GRADIENT)])
    dist.barrier()  # who begins the next step drops what it has not asked for
    return said


@needs_shared_memory
def test_what_an_earlier_step_has_sent_counts_until_it_is_taken():
    said, _ = run_over(SHARED, fill_in_two_steps, 2)
    assert "has not taken a message within 1 s" in said


def wait_in_vain(kind: str, doing: str) -> str:
    """One stage sends or receives, the other does nothing: what the group was told ends the wait."""
    group = group_over(kind, seconds=3.0)
    if kind != GLOO:
        sizes = {"pipeline_model_parallel_size": 2, "distributed_timeout_minutes": 3 / 60}
        parallel_state.initialize_model_parallel(**sizes)
        group = parallel_state.get_pipeline_model_parallel_group()
    p2p, said = communicator(group), ""
    dist.barrier()
    if dist.get_rank() == (doing == "receiving"):
        with pytest.raises(ConnectionError) as error:
            for _ in range(3):  # one more than may lie unreceived
                if doing == "sending":
                    p2p.send_forward(torch.ones(4, 1, 1), False)
                else:
                    p2p.recv_forward((4, 1, 1), False)
        said = str(error.value)
    dist.barrier()  # the other's process must not end before that
    return said


@pytest.mark.parametrize("doing", ["sending", "receiving"])
@over_each_kind
def test_the_time_out_of_the_groups_reaches_messages(kind, doing):
    """Was, over gloo: they waited for the time-out of `init_process_group`."""
    said = run_over(kind, wait_in_vain, 2, doing)[doing == "receiving"]
    me, other = (0, 1) if doing == "sending" else (1, 0)
    start = f"stage {me} lost stage {other} while {doing} an activation of shape (4, 1, 1): "
    assert said.startswith(start), said
    if kind == SHARED:
        ends = {"sending": "has not taken a message within 3 s", "receiving": "within 3 s"}
        assert ends[doing] in said, said
    else:
        assert "3000ms" in said, said


# -- Memory and files --


def lengths_that_vary(kind: str, num_steps: int, elements: int) -> tuple[int, int]:
    p2p, rank = communicator(group_over(kind)), dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    most, largest = 0, 0
    for _ in range(num_steps):
        begin(p2p)
        lengths = torch.randint(1, elements, (6,), generator=generator).tolist()
        largest = max(largest, 4 * max(lengths))
        for length in lengths:
            if rank == 0:
                p2p.send_forward(torch.full((length, 1, 1), float(length)), False)
            else:
                received = p2p.recv_forward((length, 1, 1), False)
                assert received.shape == (length, 1, 1) and received[-1] == length
        end(p2p)
        most = max(most, shared_bytes())
    return most, largest


@needs_shared_memory
def test_shared_memory_stays_small_while_lengths_vary():
    """The limit is 2: two messages may wait, and one more may be on its way."""
    for most, largest in run_over(SHARED, lengths_that_vary, 2, 200, 200_000):
        # Slots end on whole pages, each channel has a page of marks; and what made the group.
        assert largest < most <= 3 * largest + 16 * PAGE


def hold_what_arrived(kind: str, number: int, length: int) -> int:
    p2p, rank = communicator(group_over(kind)), dist.get_rank()
    held = []
    for i in range(number):
        if rank == 0:
            p2p.send_forward(torch.full((length, 1, 1), float(i)), False)
        else:
            held.append(p2p.recv_forward((length, 1, 1), False))
    assert [tensor[0].item() for tensor in held] == [float(i) for i in range(len(held))]
    return shared_bytes()


@needs_shared_memory
def test_what_a_stage_keeps_for_its_backward_is_no_shared_memory():
    for found in run_over(SHARED, hold_what_arrived, 2, 12, 25_600):
        assert found <= 3 * 102_400 + 16 * PAGE  # two that wait, one in use


@needs_shared_memory
def test_of_large_messages_a_few_are_used_where_they_lie():
    for found in run_over(SHARED, hold_what_arrived, 2, 12, LARGE // 4):
        assert found <= (2 + MOST_LARGE_LENT) * LARGE + 16 * PAGE


def num_slots_to(p2p: P2PCommunicator, peer: int) -> int:
    """Of the channel to `peer` that has most."""
    channels = p2p.pp_group.mesh.to[peer]._slots.values()
    return max((len(slots.slots) for slots in channels), default=0)


def use_in_autograd(kind: str) -> int:
    """Both ranks send and receive; autograd holds what came, then lets go."""
    p2p = communicator(group_over(kind))
    other = p2p.next_rank
    for i in range(50):
        _, received = p2p.exchange([send(i, other), receive(other)])
        tensor = received.wait()
        assert tensor[0, 0] == i
        tensor.square().sum().backward()
        assert tensor.grad[0, 0] == 2 * i
        del tensor, received, _
        dist.barrier()
    return num_slots_to(p2p, other)


@needs_shared_memory
def test_memory_is_used_again_once_nobody_holds_it():
    assert max(run_over(SHARED, use_in_autograd, 2)) <= 3


def groups_made_again(kind: str) -> list[int]:
    """Open files after each of several initialisations, each with a message."""
    counts = []
    for _ in range(5):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        group = parallel_state.get_pipeline_model_parallel_group()
        assert (group.mesh is not None) == (kind == SHARED)
        p2p, tensor = communicator(group), torch.ones(4, 1, 1)
        if dist.get_rank() == 0:
            p2p.send_forward(tensor, False)
        else:
            p2p.recv_forward((4, 1, 1), False)
        p2p.finish()
        dist.barrier()
        parallel_state.destroy_model_parallel()
        del p2p, group
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


@pytest.mark.parametrize("kind", [pytest.param(SHARED, marks=needs_shared_memory), GLOO_INSIDE])
def test_groups_made_again_leave_no_open_files(kind):
    """Was: without shared memory, five more each time."""
    for counts in run_over(kind, groups_made_again, 2):
        assert counts[-1] <= counts[1], counts


# -- What a failed step leaves --


def fail_often(kind: str, num_steps: int) -> tuple[int, list[float]]:
    """Steps that fail with messages unread, a good one after each: the most slots, and what came."""
    p2p, rank, found = communicator(group_over(kind)), dist.get_rank(), []
    for step in range(num_steps):
        for is_good in (False, True):
            begin(p2p)
            if rank == 0:
                for number in range(2):
                    value = 2.0 * step + number if is_good else -1.0
                    p2p.send_forward(torch.full((64, 1, 1), value), False)
            elif is_good:
                for _ in range(2):
                    found.append(p2p.recv_forward((64, 1, 1), False).unique().item())
            dist.barrier()
            (end if is_good else give_up)(p2p)
    return num_slots_to(p2p, p2p.next_rank) if kind == SHARED else 0, found


@over_each_kind
def test_messages_of_failed_steps_are_not_taken_and_give_their_memory_back(kind):
    """Was, in shared memory: two slots more for each failed step."""
    (num_slots, _), (_, found) = run_over(kind, fail_often, 2, 20)
    assert found == [float(number) for number in range(40)]
    assert num_slots <= 4  # of a good step, K; of the failed one before it, K more
