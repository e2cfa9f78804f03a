"""Ranks that return, raise, die and hang, and what is left of them: nothing."""

import ctypes
import importlib.machinery
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minimegatron.launching import packing
from minimegatron.launching.launcher import RankError, RankProcesses, RankTimeout, launch
from tests.ranks import run_ranks


def report(factor: torch.Tensor) -> dict:
    total = factor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return {
        "rank": dist.get_rank(),
        "total": total,
        "threads": torch.get_num_threads(),
        "environment": os.environ["RANK"] + "/" + os.environ["WORLD_SIZE"],
        "passed on": os.environ.get("MINIMEGATRON_TEST"),
        "cuda": torch.cuda.is_initialized(),
        "pid": os.getpid(),
        "parent": os.getppid(),
    }


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"trouble on {rank}")
    dist.barrier()


def end_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(7)
        if how == "bad access":
            ctypes.string_at(8)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int, folder: str) -> None:
    # A process of its own per rank, to see that it goes as well.
    child = subprocess.Popen(["sleep", "600"])
    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    if dist.get_rank() == rank:
        dist.recv(torch.empty(1), src=0)


def leave_early_with_message_under_way() -> float | None:
    if dist.get_rank() == 0:
        dist.send(torch.full((1000,), 3.0), dst=1)
        return None
    time.sleep(0.3)
    received = torch.empty(1000)
    dist.recv(received, src=0)
    return received.mean().item()


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> list[int]:
    """Those of the processes that are still there after a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(map(is_running, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if is_running(pid)]


def test_values_come_back_in_rank_order(monkeypatch):
    monkeypatch.setenv("MINIMEGATRON_TEST", "late")
    values = run_ranks(report, 3, torch.tensor([1.0, 10.0]))
    assert [value["rank"] for value in values] == [0, 1, 2]
    for value in values:
        assert value["total"].tolist() == [6.0, 60.0]
        assert value["threads"] == 1
        assert value["environment"] == f"{value['rank']}/3"
        assert value["passed on"] == "late"
        assert not value["cuda"]
    assert not wait_until_gone([value["pid"] for value in values])


def test_a_second_launch_starts_no_interpreter():
    first = run_ranks(report, 2, torch.ones(1))
    second = run_ranks(report, 4, torch.ones(1))
    (parent,) = {value["parent"] for value in first + second}
    assert parent != os.getpid(), "they are forked from a process that has loaded torch"


def test_a_rank_that_raises_is_named_with_its_traceback():
    with pytest.raises(RankError) as caught:
        run_ranks(raise_on, 3, 1)
    message = str(caught.value)
    assert message.startswith("rank 1 of 3 raised KeyError: 'trouble on 1'")
    assert 'raise KeyError(f"trouble on {rank}")' in message
    assert "stopped while running: ranks 0, 2" in message
    assert caught.value.ranks == [1]


@pytest.mark.parametrize(("how", "fate"), [("exit", "exit code 7"), ("kill", "killed by SIGKILL")])
def test_a_rank_that_dies_is_named_with_its_end(how, fate):
    with pytest.raises(RankError) as caught:
        run_ranks(end_on, 3, 2, how)
    assert str(caught.value).startswith("rank 2 of 3 ")
    assert fate in str(caught.value)
    assert caught.value.ranks[0] == 2


def test_a_rank_that_a_bad_access_ends_tells_where_it_was():
    with pytest.raises(RankError) as caught:
        run_ranks(end_on, 3, 2, "bad access")
    first, *rest = str(caught.value).splitlines()
    assert first == "rank 2 of 3 was killed by SIGSEGV"
    where = "\n".join(rest)
    assert where.startswith("Fatal Python error: Segmentation fault")
    assert "in string_at" in where and "in end_on" in where and "Extension modules" not in where
    assert "_die_with_parent" not in where


def test_a_hang_names_the_ranks_shows_their_stacks_and_leaves_nothing(tmp_path):
    run_ranks(report, 1, torch.ones(1))
    with pytest.raises(RankTimeout) as caught:
        run_ranks(hang_on, 3, 1, str(tmp_path), timeout=4)
    message = str(caught.value)
    assert message.startswith("rank 1 of 3 did not return within 4 s")
    assert "in hang_on" in message
    assert "_die_with_parent" not in message
    assert caught.value.ranks == [1]
    assert isinstance(caught.value, TimeoutError)
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 6
    assert not wait_until_gone(pids)


def test_success_leaves_nothing_either(tmp_path):
    run_ranks(hang_on, 2, -1, str(tmp_path))
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 4
    assert not wait_until_gone(pids)


def test_ranks_leave_together():
    assert run_ranks(leave_early_with_message_under_way, 2) == [None, 3.0]


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def test_stacks_can_be_read_while_ranks_go_on(tmp_path):
    go = tmp_path / "go"
    with RankProcesses(wait_for_file, 2, str(go), backend="gloo", device="cpu") as ranks:
        # The first look may come before the processes exist; it must not harm them.
        stacks = ranks.python_stacks([0, 1])
        deadline = time.monotonic() + 60
        while not all("in wait_for_file" in stack for stack in stacks.values()):
            assert time.monotonic() < deadline, stacks
            stacks = ranks.python_stacks([0, 1])
        assert ranks.unfinished() == [0, 1]
        go.touch()
        assert ranks.wait(timeout=30) == [None, None]


def test_killing_the_caller_ends_its_ranks(tmp_path):
    # Short, since sockets are made in it: their paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="mm-", dir="/tmp") as temporary:
        _kill_the_caller(tmp_path, Path(temporary))


def _kill_the_caller(tmp_path, temporary):
    code = (
        "from tests.test_launcher import hang_on; from tests.ranks import run_ranks\n"
        f"if __name__ == '__main__': run_ranks(hang_on, 2, 1, {str(tmp_path)!r})"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": ".", "TMPDIR": str(temporary)}
    caller = subprocess.Popen([sys.executable, str(script)], env=environment)
    try:
        pids = []
        deadline = time.monotonic() + 240  # under load, 60 s were once not enough
        while len(pids) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
            texts = [file.read_text() for file in tmp_path.iterdir() if file.name in "01"]
            pids = [int(pid) for text in texts for pid in text.split()]
        assert len(pids) == 4
    finally:
        caller.kill()
        caller.wait()
    assert not wait_until_gone(pids)
    assert not list(temporary.glob("minimegatron-ranks-*"))


def test_a_rank_that_nobody_waits_for_ends_itself(tmp_path):
    """As after Ctrl-C within its start: its number is not known, but its channel is closed."""
    with RankProcesses(hang_on, 1, -1, str(tmp_path), backend="gloo", device="cpu") as ranks:
        assert ranks.wait(timeout=60) == [None], "a channel that is used does no harm"
    go = tmp_path / "never"
    with RankProcesses(wait_for_file, 2, str(go), backend="gloo", device="cpu") as ranks:
        pids = [process.pid for process in ranks.processes]
        for channel in ranks._channels:
            channel.close()
        assert not wait_until_gone(pids)


def test_a_rank_that_has_reported_takes_its_processes_along(tmp_path):
    """As when the caller is killed after a rank's report and before its word to leave."""
    with RankProcesses(hang_on, 1, -1, str(tmp_path), backend="gloo", device="cpu") as ranks:
        while ranks.unfinished():
            ranks.check()
            time.sleep(0.05)
        ranks._channels[0].close()
        assert not wait_until_gone([int(pid) for pid in (tmp_path / "0").read_text().split()])


def test_sources_may_change_while_they_are_collected(monkeypatch):
    """As when one thread launches while another prints a traceback."""
    monkeypatch.setattr(packing.linecache, "cache", {"<one>": (2, None, ["x\n"], "<one>")})

    def exists(name: str) -> bool:
        packing.linecache.cache[f"{name} and more"] = (2, None, ["y\n"], name)
        return False

    monkeypatch.setattr(packing.os.path, "exists", exists)
    assert list(packing._unsaved_sources()) == ["<one>"]


def test_closures_and_lambdas_go_by_value():
    factor = torch.tensor([2.0])

    class Local:
        def __init__(self, value):
            self.value = value

    def scale(x):
        return Local(factor * x * (dist.get_rank() + 1))

    results = run_ranks(scale, 2, torch.ones(1))
    assert [type(result) is Local for result in results] == [True, True]
    assert [result.value.item() for result in results] == [2.0, 4.0]
    assert run_ranks(lambda: dist.get_world_size(), 2) == [2, 2]


def test_check_reports_a_failure_at_once_and_nothing_else(tmp_path):
    options = {"backend": "gloo", "device": "cpu", "folder": tmp_path / "own"}
    (tmp_path / "own").mkdir()
    with RankProcesses(raise_on, 2, 1, **options) as ranks:
        with pytest.raises(RankError, match="rank 1 of 2 raised KeyError"):
            for _ in range(600):
                ranks.check()
                time.sleep(0.1)
        assert ranks.unfinished() == [0]
    assert not (tmp_path / "own").exists()


def test_what_cannot_be_launched_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="nprocs is 0; give 1 rank or more"):
        launch(report, 0)
    with pytest.raises(ValueError, match="make what cannot be sent inside the function"):
        launch(report, 1, threading.Lock())
    monkeypatch.setattr(packing, "cloudpickle", None)
    with pytest.raises(ValueError, match="minimegatron.notebooks.*at the top level of a module"):
        launch(lambda: None, 1)


def test_b6_another_machines_interface_does_no_harm(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert [value["rank"] for value in run_ranks(report, 2, torch.ones(1))] == [0, 1]


def a_main(path: str | None, module: str | None) -> types.ModuleType:
    """A program as Python runs it: `__main__`, with a function of its own."""
    main = types.ModuleType("__main__")
    exec("def work():\n    return 7", vars(main))
    main.__spec__ = None if module is None else importlib.machinery.ModuleSpec(module, None)
    if path is not None:
        main.__file__ = path
    return main


@pytest.mark.parametrize(
    ("path", "module"),
    [("<stdin>", None), (None, None), ("/nowhere/x.py", None), ("app.pyz/__main__.py", "__main__")]
    + [("pkg/__main__.py", "pkg.__main__")],
)
def test_b5_a_program_that_ranks_cannot_import_is_sent_to_them(monkeypatch, path, module):
    main = a_main(path, module)
    monkeypatch.setitem(sys.modules, "__main__", main)
    packed = packing.pack(main.work, ())
    with packing.main_left_out():
        told = multiprocessing.spawn.get_preparation_data("rank 0")
    assert "init_main_from_path" not in told
    assert getattr(main, "__file__", None) == path
    monkeypatch.undo()
    function, _ = packed.unpack()
    assert function() == 7


def test_b5_without_cloudpickle_one_sentence_says_where_the_function_is(monkeypatch):
    main = a_main("<stdin>", None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(packing, "cloudpickle", None)
    with pytest.raises(ValueError, match=r"defined in <stdin>, where ranks cannot import it; pip"):
        packing.pack(main.work, ())


def test_b5_a_programs_own_file_is_run_again_as_ever(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", a_main(__file__, None))
    with packing.main_left_out():
        told = multiprocessing.spawn.get_preparation_data("rank 0")
    assert told["init_main_from_path"] == __file__
