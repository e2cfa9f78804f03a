"""Ranks that die, stop or differ; systems that refuse; strangers; and what is left afterwards."""

import contextlib
import gc
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minimegatron.backend import NAME, handshake, mesh
from tests.backend.lone_processes import Job, run_mortal
from tests.backend.shm_groups import make_group, needs_shared_memory, refusal, run_case

pytestmark = pytest.mark.processes

MIB = 1 << 20


def ones(num_bytes: int = 400) -> torch.Tensor:
    return torch.ones(num_bytes // 4)


# -- A rank that is killed --

CALLS = {
    "all_reduce": lambda group, peer: dist.all_reduce(ones(), group=group),
    "all_reduce, large": lambda group, peer: dist.all_reduce(ones(4 * MIB), group=group),
    "reduce": lambda group, peer: dist.reduce(ones(), dist.get_rank(), group=group),
    "broadcast": lambda group, peer: dist.broadcast(ones(), peer, group),
    "all_gather": lambda group, peer: dist.all_gather([ones() for _ in range(2)], ones(), group),
    "gather": lambda group, peer: dist.gather(
        ones(), [ones() for _ in range(2)], dist.get_rank(), group
    ),
    "scatter": lambda group, peer: dist.scatter(ones(), None, peer, group),
    "reduce_scatter": lambda group, peer: dist.reduce_scatter(ones(), [ones()] * 2, group=group),
    "all_to_all": lambda group, peer: dist.all_to_all_single(
        torch.empty(4), ones(12), [2, 2], [2, 1], group
    ),
    "recv": lambda group, peer: dist.recv(ones(), peer, group),
    "recv from any": lambda group, peer: dist.recv(ones(), None, group),
    "barrier": lambda group, peer: dist.barrier(group),
    "objects": lambda group, peer: dist.all_gather_object([None, None], "words", group),
    "future": lambda group, peer: (
        dist.all_reduce(ones(), group=group, async_op=True).get_future().wait()
    ),
}
"""Calls of one of two ranks that cannot return before the other one has called too."""


def lose_a_neighbour(names: list[str]) -> str:
    """Pairs of ranks, a call for each pair: the second rank of each is killed instead of calling."""
    groups = [make_group([2 * i, 2 * i + 1]) for i in range(len(names))]
    rank = dist.get_rank()
    group, name = groups[rank // 2], names[rank // 2]
    dist.barrier(group)
    dist.all_reduce(ones(), group=group)
    if rank % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    first = refusal(CALLS[name], group, rank + 1)
    again = refusal(CALLS[name], group, rank + 1)
    assert first and again, f"{name} returned: {first!r}, and then {again!r}"
    return first


@needs_shared_memory
@pytest.mark.parametrize("first", range(0, len(CALLS), 4))
def test_who_waits_for_a_killed_rank_is_told(first):
    names = list(CALLS)[first : first + 4]
    results = run_mortal(lose_a_neighbour, 2 * len(names), names)
    for name, (value, error, _), killed in zip(names, results[::2], results[1::2], strict=True):
        assert killed.exit_code == -signal.SIGKILL
        assert not error, error
        assert re.search(r"rank 1\b|ranks \[1\]", value), f"{name}: {value}"


def lose_one_of_three(num_bytes: int) -> tuple[str, int]:
    """Rank 2 is killed after it has begun a collective, which may yet end well for the others."""
    group, rank, num_good = make_group(), dist.get_rank(), 0
    dist.barrier(group)
    if rank == 2:
        for _ in range(3):
            dist.all_reduce(ones(num_bytes), group=group, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    while not (said := refusal(lambda: dist.all_reduce(ones(num_bytes), group=group))):
        num_good += 1
        assert num_good <= 3, "a collective without its last rank"
    return said, num_good


@needs_shared_memory
@pytest.mark.parametrize("num_bytes", [400, 4 * MIB])
def test_a_rank_killed_in_the_midst_of_a_collective_fails_all_others(num_bytes):
    *others, killed = run_mortal(lose_one_of_three, 3, num_bytes)
    assert killed.exit_code == -signal.SIGKILL
    for other in others:
        assert other.value and other.value[0], other


def wait_for_one_that_has_stopped(is_async: bool) -> str:
    """Rank 2 begins a large collective and is killed; rank 1 never makes that call."""
    group, rank = make_group(), dist.get_rank()
    dist.barrier(group)
    if rank == 2:
        work = dist.all_reduce(ones(4 * MIB), group=group, async_op=True)
        dist.monitored_barrier()  # the others have come so far
        os.kill(os.getpid(), signal.SIGKILL)
        assert work
    dist.monitored_barrier()
    if rank == 1:
        return ""
    call = partial(dist.all_reduce, ones(4 * MIB), group=group, async_op=is_async)
    return refusal(lambda: call().wait() if is_async else call())


@needs_shared_memory
@pytest.mark.parametrize("is_async", [False, True])
def test_who_waits_for_a_rank_that_has_stopped_is_told_of_one_that_has_gone(is_async):
    """Was: a rank waited for the time-out, here ten minutes, and then named the wrong rank.

    It sees the end where it waits, or where it sends: either names rank 2.
    """
    told = run_mortal(wait_for_one_that_has_stopped, 3, is_async)[0]
    named = r"ranks \[2\] of the group have ended|rank 2 of the group has gone"
    assert re.search(named, told.value or ""), told


def note_and_die(folder: str) -> None:
    """Tells its parent what it holds, through a file, and is killed."""
    group, peer = make_group(), 1 - dist.get_rank()
    for num_bytes in (400, 4 * MIB):
        dist.all_reduce(ones(num_bytes), group=group)
    works = [dist.isend(ones(), peer, group), dist.irecv(ones(), peer, group)]
    for work in works:
        work.wait()
    dist.isend(ones(MIB), peer, group)  # nobody takes it
    with open(f"{folder}/rank{dist.get_rank()}", "w") as file:
        file.write("\n".join([*files_held(), *shared_files()]))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def files_held() -> list[str]:
    """What the descriptors of this process stand for: sockets, memory, files."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return found


def shared_files() -> list[str]:
    """Files of /dev/shm that this process has mapped."""
    with open("/proc/self/maps") as file:
        return [line.split()[-1] for line in file if "/dev/shm/" in line]


def test_nothing_is_left_of_killed_ranks(tmp_path):
    results = run_mortal(note_and_die, 2, str(tmp_path))
    assert [result.exit_code for result in results] == [-signal.SIGKILL] * 2
    for rank in range(2):
        held = (tmp_path / f"rank{rank}").read_text().splitlines()
        assert not [name for name in held if name.startswith("/dev/shm/")]
        inodes = {name[8:-1] for name in held if name.startswith("socket:")}
        with open("/proc/net/unix") as file:
            left = [line for line in file if set(line.split()) & inodes]
        assert inodes and not left


FAILING = """
import os, sys
import torch, torch.distributed as dist
import minimegatron.backend
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group(sys.argv[2], store=store, rank=int(sys.argv[3]), world_size=2)
total = torch.ones(3)
dist.all_reduce(total)
work = dist.all_reduce(torch.ones(5), async_op=True)
message = dist.isend(torch.ones(5), 1 - dist.get_rank())
if dist.get_rank() == 1:
    raise KeyError("planted between two calls")
dist.all_reduce(total)
dist.all_reduce(total)
"""


def test_an_exception_between_two_calls_ends_both_programs(tmp_path):
    command = [sys.executable, "-c", FAILING, str(tmp_path / "store"), f"cpu:{NAME}"]
    programs = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        told = [program.communicate(timeout=120)[1] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [1, 1], told
    assert "planted between two calls" in told[1]
    assert "Error" in told[0]


# -- A rank that is stopped --


def wait_for_a_stopped_rank(num_bytes: int) -> tuple[str, float]:
    group = make_group(timeout=timedelta(seconds=3))
    others = dist.new_group([0, 1], backend="gloo")
    rank, pids = dist.get_rank(), [0] * 3
    dist.all_gather_object(pids, os.getpid())
    dist.all_reduce(ones(num_bytes), group=group)
    dist.barrier()
    began = time.monotonic()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "", 0.0
    said = refusal(lambda: dist.all_reduce(ones(num_bytes), group=group))
    took = time.monotonic() - began
    dist.barrier(others)
    if rank == 0:
        os.kill(pids[2], signal.SIGCONT)
    return said, took


@needs_shared_memory
@pytest.mark.parametrize("num_bytes", [400, 4 * MIB])
def test_a_stopped_rank_fails_the_others_after_the_time_out(num_bytes):
    *others, _ = run_case(wait_for_a_stopped_rank, 3, num_bytes)
    for said, took in others:
        assert took > 2.5, took
        assert re.search(r"rank 2\b", said), said


# -- Systems that refuse --


def use_group(group: dist.ProcessGroup) -> None:
    """Several calls over a group; raises AssertionError if a result is wrong."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for num_bytes in (400, 4 * MIB):
        total = ones(num_bytes) * (rank + 1)
        dist.all_reduce(total, group=group)
        assert total.eq(size * (size + 1) / 2).all()
    to, source = ((rank + step) % size for step in (1, -1))
    tensor = torch.empty(5)
    work = dist.isend(torch.full((5,), float(rank)), to, group, tag=3)
    dist.recv(tensor, source, group, tag=3)
    work.wait()
    assert tensor.eq(source).all()
    objects: list = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group)
    assert objects == [{"rank": number} for number in range(size)]
    out = torch.empty(size)
    dist.all_to_all_single(out, torch.full((size,), float(rank)), group=group)
    assert out.tolist() == list(range(size))


def refuse(how: str):
    """A context in which this process has no memory to share, or is like no other."""
    if how == "other system":
        return mock.patch.object(mesh, "is_supported", lambda: False)
    if how == "memory refused":
        return mock.patch.object(mesh, "Arena", mock.Mock(side_effect=PermissionError(1, "no")))
    if how == "other boot id":
        return mock.patch.object(handshake, "_host", lambda *_: ("other", os.getpid()))
    raise ValueError(how)


def use_gloo_inside(hows: list[str]) -> bool:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for how in hows:
        for refused in ([last], range(last + 1)):
            if rank in refused:
                with refuse(how):
                    group = make_group()
                    use_group(group)
            else:
                group = make_group()
                use_group(group)
            dist.destroy_process_group(group)
    return True


def test_where_one_rank_or_all_have_no_shared_memory_gloo_carries_all():
    hows = ["other system", "memory refused", "other boot id"]
    assert all(run_case(use_gloo_inside, 3, hows))


def limit_files(is_limited_everywhere: bool) -> bool:
    if is_limited_everywhere or dist.get_rank() == 1:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    group = make_group()
    use_group(group)
    return True


@pytest.mark.parametrize("is_limited_everywhere", [True, False])
def test_a_limit_on_the_size_of_files_kills_no_rank(is_limited_everywhere):
    assert all(run_case(limit_files, 2, is_limited_everywhere))


def use_long_folder(folder: str) -> list[str]:
    os.environ["TMPDIR"] = folder
    group = make_group()
    use_group(group)
    return shared_files()


def test_neither_the_temporary_folder_nor_dev_shm_is_used(tmp_path):
    """So it does not matter how long the name of the one is, or how full the other."""
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    assert run_case(use_long_folder, 2, str(folder)) == [[], []]
    assert not list(folder.iterdir())


# -- Strangers --


def call_as_stranger(name: str, hello: bytes | None) -> socket.socket:
    """Calls a rank's socket. With `hello` None: says nothing, and does not wait to be heard."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if hello is None:
        stranger.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            stranger.connect(name)
        return stranger
    stranger.settimeout(20)
    stranger.connect(name)
    stranger.sendall(hello)
    return stranger


def make_group_among(hellos: list[bytes | None], has_few_files: bool) -> tuple[list[str], bool]:
    """A group that is made while the last rank calls all others as a stranger.

    Returns the warnings of this rank, and whether any stranger was answered.
    """
    rank, last, read = dist.get_rank(), dist.get_world_size() - 1, mesh._read
    strangers: list[socket.socket] = []

    def read_slowly(store: dist.Store, other: int, timeout: timedelta) -> bytes:
        told = read(store, other, timeout)
        if rank == last and other != last:
            name = json.loads(told)[1]
            strangers.extend(call_as_stranger(name, hello) for hello in hellos)
        if other == last:
            dist.barrier()
        return told

    if has_few_files and rank != last:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        num_files = len(os.listdir("/proc/self/fd")) + handshake._MAX_SILENT + 40
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, most))
    with (
        mock.patch.object(mesh, "_read", read_slowly),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        group = make_group()
    use_group(group)
    answers = [] if has_few_files else [answer_to(stranger) for stranger in strangers]
    return [str(warning.message) for warning in warned], any(answers)


def answer_to(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(1)
    except ConnectionError:
        return b""


@needs_shared_memory
def test_strangers_are_turned_away_by_name_and_the_group_forms():
    hellos = [b"\0" * 20, b"GET / HTTP/1.0\r\n\r\n", None]
    *called, _ = run_case(make_group_among, 3, hellos, False)
    for warned, was_answered in called:
        assert not was_answered
        told = [text for text in warned if "was turned away" in text]
        assert len(told) >= 2 and all(re.match(r"process \d+ \(.+\) of user \d+", t) for t in told)


@needs_shared_memory
def test_many_silent_strangers_take_no_more_files_than_there_are():
    hellos = [None] * (handshake._MAX_CALLS + 20)
    (warned, _), _ = run_case(make_group_among, 2, hellos, True)
    assert sum("was turned away" in text for text in warned) >= handshake._MAX_CALLS


# -- Many groups, and two jobs --


def things_held() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/maps") as file:
        num_maps = sum("memfd:" in line or "/dev/shm" in line for line in file)
    held = files_held()
    return {
        "files": len(held),
        "sockets": sum(name.startswith("socket:") for name in held),
        "threads": len(os.listdir("/proc/self/task")),
        "shared memory": num_maps,
    }


def make_many(num: int) -> tuple[dict, dict]:
    """What this process holds after the first eleven groups, and after all."""
    first: dict[str, int] = {}
    peer = 1 - dist.get_rank()
    for number in range(num):
        group = make_group()
        total = ones(4 * MIB if number % 10 == 5 else 400)
        dist.all_reduce(total, group=group)
        assert total.eq(2).all()
        if number % 10 == 0:
            work = dist.isend(ones(), peer, group)
            dist.recv(ones(), peer, group)
            work.wait()
        dist.barrier()
        dist.destroy_process_group(group)
        if number == 10:
            first = things_held()
    del group
    return first, settle(first)


MAY_LINGER = 10
"""So many things more may be held: those of the last group, and what torch makes once."""


def settle(first: dict[str, int]) -> dict[str, int]:
    """What is held at last: a thread of gloo ends a little after its group."""
    deadline = time.monotonic() + 20
    while not has_settled(first, found := things_held()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def has_settled(first: dict[str, int], found: dict[str, int]) -> bool:
    return all(found[kind] <= number + MAY_LINGER for kind, number in first.items())


@pytest.mark.parametrize("num", [100, pytest.param(2000, marks=pytest.mark.full)])
def test_groups_made_and_destroyed_leave_nothing(num):
    for first, last in run_case(make_many, 2, num, timeout=280):
        assert has_settled(first, last), (first, last)


def use_often(num: int) -> int:
    group = make_group()
    for _ in range(num):
        use_group(group)
    return num


def test_two_jobs_of_one_user_run_at_the_same_time():
    with Job(use_often, 2, 20) as first, Job(use_often, 3, 20) as second:
        for job in (first, second):
            results = job.results(120)
            assert all(result.value == 20 and result.exit_code == 0 for result in results), results


LATE = """
import datetime, sys, time
import torch, torch.distributed as dist
import minimegatron.backend
store, rank, way = dist.FileStore(sys.argv[1], 2), int(sys.argv[3]), sys.argv[4]
limit = datetime.timedelta(seconds=120)
dist.init_process_group(sys.argv[2], store=store, rank=rank, world_size=2, timeout=limit)
large = torch.ones(1 << 20)
dist.all_reduce(large)
if rank == 1:
    sys.stdin.read()
    sys.exit(0)
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), dist.group.WORLD)
work = dist.all_reduce(large, async_op=True)
if way != "dropped":
    work.get_future().wait() if way == "future" else work.wait()
"""


@pytest.mark.parametrize("way", ["wait", "future", "dropped"])
def test_a_process_ends_while_gloo_is_busy(tmp_path, way):
    """Was: what ends gloo waited for gloo's thread, which waited for Python."""
    command = [sys.executable, "-c", LATE, str(tmp_path / "store"), f"cpu:{NAME}"]
    options = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    programs = [subprocess.Popen([*command, str(rank), way], **options) for rank in range(2)]
    try:
        told = programs[0].communicate(timeout=120)[1]
        programs[1].communicate(timeout=120)
    finally:
        for program in programs:
            program.kill()
    if way == "dropped":
        assert (programs[0].returncode, programs[1].returncode) == (0, 0), told
    else:
        assert programs[0].returncode == 1, told
        assert "rank 1" in told


CALLBACK = """
import sys, threading, time
import torch, torch.distributed as dist
import minimegatron.backend
store, rank, num = dist.FileStore(sys.argv[1], 2), int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group(sys.argv[2], store=store, rank=rank, world_size=2)
if rank == 1:
    time.sleep(0.5)  # so that the other rank's future is not done at once
    dist.all_reduce(torch.ones(num))
    sys.stdin.read()
    sys.exit(0)
called = threading.Event()

def be_slow(done):
    called.set()
    time.sleep(1)
    print("called", flush=True)

dist.all_reduce(torch.ones(num), async_op=True).get_future().add_done_callback(be_slow)
assert called.wait(60)
"""


@pytest.mark.parametrize("num", [3, 1 << 20], ids=["shared memory", "gloo"])
def test_a_process_ends_while_a_callback_of_a_future_runs(tmp_path, num):
    """Was: the callback's thread was ended inside torch, and so the process was aborted."""
    command = [sys.executable, "-c", CALLBACK, str(tmp_path / "store"), f"cpu:{NAME}"]
    pipe = subprocess.PIPE
    options = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True}
    programs = [subprocess.Popen([*command, str(rank), str(num)], **options) for rank in range(2)]
    try:
        printed, told = programs[0].communicate(timeout=120)
        programs[1].communicate(timeout=120)
    finally:
        for program in programs:
            program.kill()
    assert (programs[0].returncode, programs[1].returncode) == (0, 0), told
    assert printed == "called\n"
