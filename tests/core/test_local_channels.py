"""What shared memory between ranks promises: it never blocks, never grows, and serves ranks alone."""

import contextlib
import gc
import os
import re
import resource
import socket
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from minimegatron.backend import connecting
from minimegatron.backend import handshake as local_handshake
from minimegatron.backend.channels import FIRST_LANE_OF_NO_STEP, LENT, Connection
from minimegatron.backend.connecting import connect
from minimegatron.backend.handshake import Met
from minimegatron.backend.shared_memory import Arena
from minimegatron.core import collectives, parallel_state
from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from minimegatron.core.local_host import local_collectives
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.local_transport import LocalTransport
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.send_limits import SendPlan
from minimegatron.core.pipeline_parallel.transport import TorchTransport
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.ranks import run_ranks


def shared_bytes() -> int:
    """Shared memory that this process has mapped for messages it sends or receives."""
    total = 0
    with open("/proc/self/maps") as file:
        for line in file:
            if "memfd:minimegatron" in line:
                start, end = line.split()[0].split("-")
                total += int(end, 16) - int(start, 16)
    return total


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def communicator(group=None, transport=LocalTransport, **options) -> P2PCommunicator:
    config = ModelParallelConfig(
        pipeline_model_parallel_size=dist.get_world_size(), pipeline_dtype=torch.float32, **options
    )
    p2p = P2PCommunicator(group or dist.group.WORLD, config)
    assert isinstance(p2p.transport, transport)
    return p2p


# -- It never blocks --


def start_many(number: int) -> tuple[bool, int]:
    group, rank = dist.group.WORLD, dist.get_rank()
    collectives.all_reduce(torch.ones(1), group)
    before = num_descriptors()
    parts = [torch.full((3,), float(i + rank)) for i in range(number)]
    handles = [collectives.all_reduce(part, group, async_op=True) for part in parts]
    opened = num_descriptors() - before
    for handle in handles:
        handle.wait()
    size = dist.get_world_size()
    wanted = [size * i + size * (size - 1) / 2 for i in range(number)]
    return [part[0].item() for part in parts] == wanted, opened


@pytest.mark.parametrize("size", [2, 3])
def test_a_thousand_collectives_under_way_block_nobody(size):
    for is_right, opened in run_ranks(start_many, size, 1500):
        assert is_right
        assert opened == 0  # one file descriptor per message would exhaust a limit of 1,024


class Many(torch.nn.Module):
    """A model with one bucket per parameter."""

    def __init__(self, number: int):
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(5)) for _ in range(number)
        )

    def forward(self, x):
        return sum((weight * x).sum() for weight in self.weights)


def train_with_buckets(number: int) -> bool:
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    ddp = DistributedDataParallel(config, ddp_config, Many(number))
    assert len(ddp.bucket_groups) == number
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(torch.full((5,), dist.get_rank() + 1.0)).backward()
        ddp.finish_grad_sync()
    return all(bool((weight.main_grad == 1.5).all()) for weight in ddp.module.weights)


def test_150_buckets_with_overlap_block_nobody():
    assert run_ranks(train_with_buckets, 2, 150) == [True, True]


def send_nothing(is_local: bool) -> tuple:
    config = ModelParallelConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    transport = None if is_local else TorchTransport(dist.group.WORLD)
    p2p = P2PCommunicator(dist.group.WORLD, config, transport)
    if dist.get_rank() == 0:
        p2p.send_forward(torch.empty(0, 2, 4), is_last_stage=False)
        p2p.send_forward(torch.ones(1, 2, 4), is_last_stage=False)
        p2p.finish()
        return ()
    empty = p2p.recv_forward((0, 2, 4), is_first_stage=False)
    full = p2p.recv_forward((1, 2, 4), is_first_stage=False)
    return tuple(empty.shape), full.sum().item()


@pytest.mark.parametrize("is_local", [True, False], ids=["shared memory", "gloo"])
def test_a_message_without_elements_arrives(is_local):
    assert run_ranks(send_nothing, 2, is_local)[1] == ((0, 2, 4), 8.0)


# -- It never grows --


def lengths_that_vary(num_steps: int, elements: int) -> list[float]:
    p2p, rank = communicator(), dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    most, largest = 0, 0
    for _ in range(num_steps):
        p2p.begin_step()
        lengths = torch.randint(1, elements, (6,), generator=generator).tolist()
        largest = max(largest, 4 * max(lengths))
        for length in lengths:
            if rank == 0:
                p2p.send_forward(torch.full((length, 1, 1), float(length)), False)
            else:
                received = p2p.recv_forward((length, 1, 1), False)
                assert received.shape == (length, 1, 1) and received[-1] == length
        p2p.finish()
        p2p.end_step()
        most = max(most, shared_bytes())
    return [most, largest]


def test_shared_memory_stays_small_while_lengths_vary():
    """A channel's limit is 2: two messages may wait, and one more may be on its way."""
    for most, largest in run_ranks(lengths_that_vary, 2, 200, 200_000):
        pages = 4096 * (3 + 1)  # slots end on whole pages, and there is one page of marks
        assert most <= 3 * largest + pages


def hold_what_arrived(number: int) -> int:
    p2p, rank = communicator(), dist.get_rank()
    held = []
    for i in range(number):
        if rank == 0:
            p2p.send_forward(torch.full((25_600, 1, 1), float(i)), False)
        else:
            held.append(p2p.recv_forward((25_600, 1, 1), False))
    assert [tensor[0].item() for tensor in held] == [float(i) for i in range(len(held))]
    return shared_bytes()


def test_what_a_stage_keeps_for_its_backward_is_no_shared_memory():
    for found in run_ranks(hold_what_arrived, 2, 12):
        assert found <= 3 * 102_400 + 4096  # two that wait, one in use, a page of marks


def wait_for_a_rank_that_failed() -> list:
    """Rank 0 ends its step well, and waits, as in an optimizer, for rank 1, whose step has failed."""
    group, rank = dist.group.WORLD, dist.get_rank()
    collectives.begin_step([group])
    found, tensor = [], torch.ones(1)
    if rank == 1:
        collectives.abandon([group], "planted")
    else:
        collectives.end_step([group])
        try:
            collectives.all_reduce(tensor, group)
        except ConnectionError as error:
            found.append(str(error))
    for number in range(3):
        collectives.begin_step([group])
        tensor = torch.full((1,), float(rank + number))
        collectives.all_reduce(tensor, group)
        found.append(tensor.item())
        collectives.end_step([group])
    return found


def test_who_waits_outside_of_a_step_for_a_rank_that_failed_is_told():
    """Was: both stood until the time-out, and every later collective failed."""
    (words, *first), second = run_ranks(wait_for_a_rank_that_failed, 2)
    assert "has gone on after a step that it had given up: planted" in words
    assert first == second == [1.0, 3.0, 5.0]


def send_in_inference_mode() -> list[float]:
    p2p, found = communicator(), []
    for number in range(3):
        with torch.inference_mode(number == 0):
            if p2p.pp_group.rank() == 0:
                p2p.send_forward(torch.full((4, 2), float(number)), False)
            else:
                found.append(p2p.recv_forward((4, 2), False).sum().item())
    return found


def test_a_step_in_inference_mode_leaves_slots_that_may_be_written():
    """Was: every later message of the channel was refused."""
    assert run_ranks(send_in_inference_mode, 2)[1] == [0.0, 8.0, 16.0]


def broadcast_many(number: int) -> int:
    values = [torch.full((25_600,), float(i + dist.get_rank())) for i in range(number)]
    for value in values:
        if dist.get_rank() == 1:
            time.sleep(0.01)
        collectives.broadcast(value, 0, dist.group.WORLD)
    assert [value[-1].item() for value in values] == list(range(number))
    return shared_bytes()


def test_the_source_of_broadcasts_runs_ahead_by_a_few():
    limit = local_collectives.MAX_BROADCASTS_AHEAD
    for found in run_ranks(broadcast_many, 2, 40):
        assert found <= (limit + 1) * 102_400 + 4096


# -- A send waits for its turn, but not for ever --


def run_ahead(limit: int) -> int:
    p2p, rank = communicator(), dist.get_rank()
    p2p.begin_step(SendPlan(limit))
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
    p2p.finish()
    return most


@pytest.mark.parametrize("limit", [2, 4])
def test_a_send_waits_while_its_channel_is_full(limit):
    assert run_ranks(run_ahead, 2, limit)[1] <= limit


def wait_in_vain(seconds: float, transport: type) -> tuple[float, str]:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, distributed_timeout_minutes=seconds / 60
    )
    group = parallel_state.get_pipeline_model_parallel_group()
    p2p = communicator(group, transport)
    dist.barrier()
    began, said = time.monotonic(), ""
    try:
        if dist.get_rank() == 0:
            for _ in range(3):  # one more than the channel holds
                p2p.send_forward(torch.ones(4, 1, 1), False)
        else:
            p2p.recv_backward((4, 1, 1), False)
    except ConnectionError as error:
        said = str(error)
    took = time.monotonic() - began
    if dist.get_rank() == 1:
        time.sleep(3)  # the peer must not see the end of this process instead
    return took, said


def test_the_time_out_of_the_groups_reaches_shared_memory():
    (send_took, sending), (receive_took, receiving) = run_ranks(
        wait_in_vain, 2, 1.5, LocalTransport
    )
    assert 1.4 < send_took < 20 and 1.4 < receive_took < 20
    assert "stage 0 lost stage 1 while sending an activation of shape (4, 1, 1)" in sending
    assert "has not taken a message within 1.5 s" in sending
    assert "stage 1 lost stage 0" in receiving or "sent nothing within 1.5 s" in receiving


def test_the_time_out_of_the_groups_reaches_messages_over_gloo():
    """Was: they waited for the time-out of `init_process_group`."""
    told = run_ranks(wait_in_vain, 2, 1.5, TorchTransport, shared_memory=False)
    assert all(1.4 < took < 20 for took, _ in told)
    assert "stage 0 lost stage 1 while sending" in told[0][1]
    assert "stage 1 lost stage 0 while receiving" in told[1][1]


def groups_made_again(transport: type) -> list[int]:
    """Open files after each of several initialisations, each with a message."""
    counts = []
    for _ in range(5):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        group = parallel_state.get_pipeline_model_parallel_group()
        p2p, tensor = communicator(group, transport), torch.ones(4, 1, 1)
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


@pytest.mark.parametrize("transport", [LocalTransport, TorchTransport])
def test_groups_made_again_leave_no_open_files(transport):
    """Was: without shared memory, five more each time."""
    is_shared = transport is LocalTransport
    for counts in run_ranks(groups_made_again, 2, transport, shared_memory=is_shared):
        assert counts[-1] <= counts[1], counts


def fail_often() -> tuple[int, list[float]]:
    """Steps that fail with messages unread, a good one after each: the most slots, and what came."""
    p2p, rank, found = communicator(), dist.get_rank(), []
    for step in range(20):
        for is_good in (False, True):
            p2p.begin_step()
            if rank == 0:
                for number in range(2):
                    p2p.send_forward(torch.full((64, 1, 1), 2.0 * step + number), False)
            elif is_good:
                for _ in range(2):
                    found.append(p2p.recv_forward((64, 1, 1), False).unique().item())
            dist.barrier()
            if is_good:
                p2p.finish()
                p2p.end_step()
            else:
                p2p.abandon("planted")
    slots = [len(of.slots) for of in p2p.transport.connections[p2p.next_rank]._slots.values()]
    return max(slots, default=0), found


def test_what_failed_steps_leave_unread_gives_its_memory_back():
    """Was: two slots more for each failed step."""
    (num_slots, _), (_, found) = run_ranks(fail_often, 2)
    assert found == [float(number) for number in range(40)]
    assert num_slots <= 4  # of a good step, K; of the failed one before it, K more


def wait_for_a_collective(seconds: float) -> tuple[float, str]:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, distributed_timeout_minutes=seconds / 60
    )
    groups = ProcessGroupCollection(tp=parallel_state.get_tensor_model_parallel_group())
    collectives.begin_step([groups.tp])
    began = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(seconds + 3)
        return 0.0, ""
    with pytest.raises(ConnectionError) as error:
        collectives.all_reduce(torch.ones(3), groups.tp)
    return time.monotonic() - began, str(error.value)


def test_the_time_out_of_the_groups_reaches_collectives():
    took, said = run_ranks(wait_for_a_collective, 2, 1.0)[0]
    assert 0.9 < took < 3.9
    assert "rank 1 of the group sent nothing within 1 s" in said


# -- Lanes --

LANES = (1, 2, 3, 4)  # what a pipeline tells apart: activation, gradient, and a shape of each


def both_ends(timeout: float = 5.0) -> tuple[Connection, Connection]:
    """The two ends of one connection, in this process."""
    arenas, sockets = (Arena(), Arena()), socket.socketpair()
    return tuple(
        Connection(Met(sockets[i], os.dup(arenas[1 - i].descriptor)), arenas[i], 1 - i, timeout)
        for i in range(2)
    )


def send_value(end: Connection, value: float, lane: int, size: int = 3):
    return end.send(torch.full((size,), float(value)), f"channel {lane}", lane)


def expect_value(end: Connection, lane: int, size: int = 3):
    return end.expect(torch.empty(size), LENT, lane)


def value_of(arrival) -> float:
    arrival.wait()
    return arrival.tensor.unique().item()


def test_lanes_are_waited_for_in_any_order():
    """In both directions at once; the n-th of a lane stays the n-th of that lane."""
    ends = both_ends()
    for _ in range(3):
        arrivals = [{lane: [] for lane in LANES} for _ in ends]
        for end in ends:
            end.begin_step()
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
        for end in ends:
            end.end_step()


class Named(Connection):
    """A connection that its maker can tell from others."""


def talk_over_one_connection(num_steps: int) -> tuple[str, list[float]]:
    """Two ranks, each the next one and the previous one of the other, over one connection."""
    rank, found = dist.get_rank(), []
    called, came = connect(dist.group.WORLD, [0][:rank], [1][: 1 - rank], kind=Named)
    (end,) = (called | came).values()
    for step in range(num_steps):
        end.begin_step()
        gradient, activation = expect_value(end, 2), expect_value(end, 1)
        send_value(end, 100 * rank + step, 1)
        send_value(end, -100 * rank - step, 2)
        found += [value_of(gradient), value_of(activation)]
        end.end_step()
    return type(end).__name__, found


def test_one_connection_carries_both_directions_of_a_pair():
    first, second = run_ranks(talk_over_one_connection, 2, 3)
    assert first == ("Named", [-100.0, 100.0, -101.0, 101.0, -102.0, 102.0])
    assert second == ("Named", [0.0, 0.0, -1.0, 1.0, -2.0, 2.0])


@pytest.mark.parametrize("who_fails", ["receiver", "both"])
def test_a_step_that_fails_in_one_lane_leaves_nothing_in_any(who_fails):
    sender, receiver = both_ends()
    for step in range(10):
        for end in (sender, receiver):
            end.begin_step()
        left = {lane: [expect_value(receiver, lane) for _ in range(2)] for lane in LANES}
        for lane in LANES:
            send_value(sender, 100 * step + lane, lane)
        assert value_of(left[2][0]) == 100 * step + 2
        receiver.abandon("planted")
        sender.abandon("planted") if who_fails == "both" else sender.end_step()
        for lane in LANES:
            with pytest.raises(ConnectionError, match="belongs to a step that has failed"):
                left[lane][1].wait()
        for end in (sender, receiver):
            end.begin_step()
        for lane in LANES:
            send_value(sender, 100 * step + 50 + lane, lane)
        for lane in reversed(LANES):
            assert value_of(expect_value(receiver, lane)) == 100 * step + 50 + lane
        for end in (sender, receiver):
            end.end_step()
    # Of the failed step one message per lane, of the good one after it one more.
    assert max(len(of.slots) for of in sender._slots.values()) <= 2
    assert not any(receiver._expected.values()) and not any(receiver._incoming.messages.values())


def test_what_nobody_expected_of_a_failed_step_is_dropped():
    sender, receiver = both_ends()
    for step in range(3):
        for end in (sender, receiver):
            end.begin_step()
        for _ in range(2):
            send_value(sender, -1, 1)
        send_value(sender, step, 2)
        assert value_of(expect_value(receiver, 2)) == step
        receiver.abandon("planted")
        sender.end_step()
        for end in (sender, receiver):
            end.begin_step()
        send_value(sender, 50 + step, 1)
        assert value_of(expect_value(receiver, 1)) == 50 + step
        for end in (sender, receiver):
            end.end_step()
    assert len(sender._slots["channel 1"].slots) <= 3


def test_a_wait_that_fails_in_one_lane_fails_the_step_in_all():
    sender, receiver = both_ends()
    for end in (sender, receiver):
        end.begin_step()
    send_value(sender, 1, 1, size=4)
    send_value(sender, 2, 2)
    wrong, right = expect_value(receiver, 1), expect_value(receiver, 2)
    with pytest.raises(ConnectionError, match="16 bytes came where 12 bytes were expected"):
        wrong.wait()
    for arrival in (right, expect_value(receiver, 2)):
        with pytest.raises(ConnectionError, match="belongs to a step that has failed"):
            arrival.wait()
    receiver.abandon("planted")
    with pytest.raises(ConnectionError, match="given up this step: planted"):
        expect_value(sender, 3).wait()
    sender.abandon("told")
    for end in (sender, receiver):
        end.begin_step()
    for lane in LANES:
        send_value(sender, lane, lane)
    assert [value_of(expect_value(receiver, lane)) for lane in LANES] == list(LANES)


def test_who_waits_for_one_that_gives_up_is_told_why():
    sender, receiver = both_ends(timeout=2.0)
    for end in (sender, receiver):
        end.begin_step()
    sender.abandon("planted")
    with pytest.raises(ConnectionError, match="given up this step: planted"):
        expect_value(receiver, 1).wait()


def test_a_lane_without_messages_times_out_while_others_have_some():
    """What comes in another lane does not begin the time anew."""
    sender, receiver = both_ends(timeout=0.5)
    stop = threading.Event()

    def chatter():
        while not stop.wait(0.1):
            sender.send(torch.ones(3), None, 2)

    thread = threading.Thread(target=chatter)
    thread.start()
    began = time.monotonic()
    with pytest.raises(ConnectionError) as error:
        expect_value(receiver, 1).wait()
    took = time.monotonic() - began
    stop.set()
    thread.join()
    assert 0.4 < took < 5
    assert re.search(
        r"rank 0 of the group sent nothing within 0.5 s in the lane that this rank waits for; "
        r"messages in other lanes: [1-9]",
        str(error.value),
    ), str(error.value)


def test_a_message_of_a_later_step_in_another_lane_ends_a_wait():
    sender, receiver = both_ends(timeout=60)
    for end in (sender, receiver):
        end.begin_step()
    sender.end_step()
    sender.begin_step()
    send_value(sender, 1, 2)
    with pytest.raises(
        ConnectionError,
        match="is in step 2, and this rank waits for a message of step 1; every rank must begin",
    ):
        expect_value(receiver, 1).wait()


def test_a_lane_of_no_step_outlives_a_failed_one():
    sender, receiver = both_ends()
    for end in (sender, receiver):
        end.begin_step()
    kept, lost = expect_value(receiver, FIRST_LANE_OF_NO_STEP), expect_value(receiver, 1)
    send_value(sender, 7, FIRST_LANE_OF_NO_STEP)
    send_value(sender, 8, 1)
    for end in (sender, receiver):
        end.abandon("planted")
        end.begin_step()
    assert value_of(kept) == 7
    with pytest.raises(ConnectionError, match="belongs to a step that has failed"):
        lost.wait()


def test_lanes_of_no_step_come_after_those_of_the_steps():
    def lanes() -> list[int]:
        return [local_collectives.new_lane(dist.group.WORLD) for _ in range(2)]

    assert run_ranks(lanes, 1) == [[FIRST_LANE_OF_NO_STEP, FIRST_LANE_OF_NO_STEP + 1]]


# -- It serves ranks alone --


def call_as_a_stranger(name: str, hello: bytes) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect("\0" + name)
    stranger.sendall(hello)
    return stranger


def meet_among_strangers() -> tuple[bool, list[str], float]:
    """Strangers call while the ranks meet: one says nothing, one guesses the secret."""
    strangers, answers = [], []
    gather = dist.all_gather_object

    def gather_slowly(everyone, *arguments, **options):
        gather(everyone, *arguments, **options)
        for _, name, _ in everyone:
            for hello in (b"", b"\0" * 20, b"GET / HTTP/1.0\r\n\r\n"):
                strangers.append(call_as_a_stranger(name.removeprefix("\0"), hello))
        dist.barrier()

    dist.all_gather_object = gather_slowly
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        called, came = connect(
            dist.group.WORLD,
            callees=list(range(dist.get_rank())),
            callers=list(range(dist.get_rank() + 1, dist.get_world_size())),
        )
    took = time.monotonic() - began
    dist.all_gather_object = gather
    for stranger in strangers:
        stranger.settimeout(20)
        try:
            answers.append(stranger.recv(1))
        except ConnectionError:
            answers.append(b"")
    connections = called | came
    for connection in connections.values():
        connection.send(torch.full((2,), float(dist.get_rank())))
    found = []
    for peer, connection in connections.items():
        arrival = connection.expect(torch.empty(2))
        arrival.wait()
        found.append(arrival.tensor.tolist() == [float(peer)] * 2)
    dist.barrier()
    is_right = all(found) and not any(answers)
    return is_right, [str(warning.message) for warning in warned], took


def test_strangers_are_turned_away_and_named():
    results = run_ranks(meet_among_strangers, 3)
    assert all(is_right for is_right, _, _ in results)
    assert all(took < 30 for _, _, took in results)
    # The last rank is called by nobody, so it looks at no caller.
    for _, warned, _ in results[:2]:
        assert any(
            re.search(r"process \d+ \(.+\) of user \d+ called this rank .* was turned away", text)
            for text in warned
        )


def test_a_caller_of_another_user_is_turned_away(monkeypatch):
    secret = b"s" * 16
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    socket.send_fds(theirs, [local_handshake._HELLO.pack(1, secret)], [0])
    other = os.geteuid() + 1
    monkeypatch.setattr(local_handshake, "_peer", lambda connection: (os.getpid(), other, 0))
    with pytest.warns(UserWarning, match=f"of user {other} called this rank"):
        _, met = local_handshake._check_caller(ours, secret, {1})
    assert met is None


def test_an_address_of_another_user_is_not_called(monkeypatch):
    name = f"\0minimegatron-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen()
        address = local_handshake._Address((), name, b"s" * 16)
        monkeypatch.setattr(local_handshake, "_peer", lambda connection: (1, os.geteuid() + 1, 0))
        with pytest.raises(ConnectionError, match="belongs to user"):
            local_handshake._call(address, 1, 0, 0, time.monotonic() + 5)


def meet_among_many() -> tuple[int, int]:
    """More silent callers than a rank keeps, more than its socket lets wait, and a limit of files."""
    strangers, gather = [], dist.all_gather_object

    def gather_slowly(everyone, mine, **options):
        gather(everyone, mine, **options)
        for _ in range(dist.get_rank() * (local_handshake._MAX_CALLS + 20)):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stranger.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                stranger.connect(everyone[0][1])
            strangers.append(stranger)
        dist.barrier()

    dist.all_gather_object = gather_slowly
    num_files = len(os.listdir("/proc/self/fd"))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if dist.get_rank() == 0:
        limit = num_files + local_handshake._MAX_SILENT + 20
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        rank = dist.get_rank()
        called, came = connect(dist.group.WORLD, callees=[0][:rank], callers=[1][: 1 - rank])
    dist.all_gather_object = gather
    dist.barrier()
    return len(called | came), sum("turned away" in str(warning.message) for warning in warned)


def test_silent_strangers_are_named_and_take_no_more_files_than_there_are():
    """Was: closed without a word; a thousand of them ended in "Too many open files"."""
    (connections, num_named), (others, _) = run_ranks(meet_among_many, 2)
    assert (connections, others) == (1, 1)
    assert num_named >= local_handshake._MAX_CALLS


def secrets_of_a_job() -> bool:
    """The secret is in no argument and no variable of the environment."""
    told = []
    gather = dist.all_gather_object

    def overhear(everyone, mine, **options):
        gather(everyone, mine, **options)
        told.extend(everyone)

    dist.all_gather_object = overhear
    connect(dist.group.WORLD, callees=[1 - dist.get_rank()], callers=[1 - dist.get_rank()])
    dist.all_gather_object = gather
    with open("/proc/self/cmdline", "rb") as line, open("/proc/self/environ", "rb") as environment:
        public = line.read() + environment.read() + repr(dict(os.environ)).encode()
    secrets = [bytes.fromhex(secret) for _, _, secret in told]
    return len(set(secrets)) == 2 and not any(
        s in public or s.hex().encode() in public for s in secrets
    )


def test_the_secret_travels_among_the_ranks_alone():
    assert run_ranks(secrets_of_a_job, 2) == [True, True]


# -- What a full socket does not take --


def fill_a_socket() -> int:
    """The peer sleeps while this rank sends more headers than a socket holds; all of them arrive."""
    p2p, rank = communicator(), dist.get_rank()
    connection = p2p.transport.connections[1 - rank]
    other = connection
    number = 3000
    if rank == 0:
        for i in range(number):
            connection.send(torch.tensor([float(i)]))
        dist.barrier()  # over gloo: the thread must write what is left while this rank waits here
        return threading.active_count()
    time.sleep(0.5)
    for i in range(number):
        arrival = other.expect(torch.empty(1))
        arrival.wait()
        assert arrival.tensor.item() == i
    dist.barrier()
    return number


def test_more_headers_than_a_socket_holds_arrive_in_order():
    assert run_ranks(fill_a_socket, 2)[1] == 3000


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
        deadline = time.monotonic() + 10
        while sender._writer.later and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not sender._writer.later
    assert 1000 < waited < number


# -- In containers --


def test_b1_a_host_that_hides_its_identity_is_like_no_other(monkeypatch):
    def hidden(path: str, *_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", path)

    here = local_handshake._host()
    assert here == local_handshake._host()
    monkeypatch.setattr(local_handshake, "open", hidden, raising=False)
    one, other = local_handshake._host(), local_handshake._host()
    assert one != other, "ranks that cannot know it do not share memory"
    assert here not in (one, other)


@pytest.mark.parametrize("without_memory", ["this rank", "the other", "both"])
def test_b1_without_memory_to_share_all_ranks_use_gloo(without_memory):
    def gather(mine: list) -> list[list]:
        host = [] if without_memory != "this rank" else list(local_handshake._host())
        return [mine, [host, *mine[1:]]]

    descriptor = 0 if without_memory == "the other" else None
    assert local_handshake.meet(0, gather, [1], [], descriptor, 5.0) is None


@pytest.mark.parametrize("limit", ["system call", "size of files"])
def test_b1_a_container_may_forbid_memory_without_a_name(monkeypatch, limit):
    def forbidden() -> None:
        raise PermissionError(1, "Operation not permitted")

    assert isinstance(connecting._new_arena(), Arena)
    if limit == "system call":
        monkeypatch.setattr(connecting, "Arena", forbidden)
    else:
        monkeypatch.setattr(connecting.resource, "getrlimit", lambda which: (4096, 4096))
    assert connecting._new_arena() is None
