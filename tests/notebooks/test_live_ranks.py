"""Live ranks in a real kernel: what is shown, and that no process outlives its cell, or the kernel."""

import errno
import functools
import html
import importlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import ipyparallel.controller.app
import ipyparallel.util
import pytest
import zmq
import zmq.devices
from ipyparallel import DirectView
from ipyparallel.engine.app import IPEngine
from jupyter_client.manager import start_new_kernel

from minimegatron.launching import launcher
from minimegatron.notebook import LiveRanks, engines
from minimegatron.notebook.live_ranks import ControllerError
from minimegatron.notebook.magics import CellError
from tests.test_launcher import wait_until_gone

START = "from minimegatron.notebook import live_ranks; ranks = live_ranks({})"


class Notebook:
    """A kernel, and what cells show in it."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel()

    def run(self, code: str) -> str:
        """Everything that a cell shows, an error's traceback included, without colours.

        Where there is HTML, as in JupyterLab, it is that.
        """
        shown: list[str] = []

        def note(message: dict) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append(content["text"])
            elif message["msg_type"] == "error":
                shown.append("\n".join(content["traceback"]) + "\n")
            elif message["msg_type"] in ("execute_result", "display_data"):
                shown.append(content["data"].get("text/html", content["data"]["text/plain"]) + "\n")

        self.client.execute_interactive(code, timeout=280, output_hook=note)
        return html.unescape(re.sub(r"\x1b\[[0-9;]*m", "", "".join(shown)))

    def interrupted(self, code: str, begun: Path) -> str:
        """The same, interrupted as soon as the cell has made the file `begun`."""

        def interrupt() -> None:
            while not begun.exists():
                time.sleep(0.02)
            time.sleep(0.2)
            self.manager.interrupt_kernel()

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        shown = self.run(code)
        thread.join()
        return shown

    def start(self, num_ranks: int) -> str:
        """Live ranks, unless there are that many already."""
        there = self.run("ranks")
        if re.fullmatch(rf"<{num_ranks} live ranks, \w+>\n", there):
            return there
        return self.run(START.format(num_ranks))

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def descendants(self) -> list[int]:
        """All processes that the kernel has started, and theirs."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
            except FileNotFoundError:
                continue
        found = [self.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found[1:]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    # Temporary folders of its own: what is left there is the kernel's.
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        notebook = Notebook()
    notebook.folder = folder
    yield notebook
    notebook.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(kernel: Notebook) -> Notebook:
    """With four live ranks."""
    shown = kernel.start(4)
    assert "4" in shown, shown
    return kernel


def four(text: str) -> str:
    return "".join(f"rank {rank} | {text}\n" for rank in range(4))


@pytest.mark.full
def test_the_first_output_is_no_warning(monkeypatch):
    """Was: in red, that frozen modules may let a debugger miss breakpoints."""
    # With this set, a kernel does not show what its processes write.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    notebook = Notebook()
    try:
        shown = notebook.run(START.format(1)) + notebook.run("%px rank")
    finally:
        notebook.manager.shutdown_kernel(now=True)
    assert re.fullmatch(r"1 live rank, .*\nrank 0 \| 0\n", shown), shown


def test_it_says_what_it_runs_on(notebook):
    shown = notebook.run("ranks.stop(); ranks = live_ranks(4)")
    assert re.fullmatch(r"4 live ranks, (gloo|nccl), on .*GPUs.*; started in [\d.]+ s\n", shown)


def test_output_is_labelled_and_in_the_order_of_ranks(notebook):
    late_first = "import time\ntime.sleep(0.3 * (rank == 0))\nprint('one')\nprint('two')\nrank * 10"
    shown = notebook.run(f"%%px\n{late_first}")
    assert shown == "".join(
        f"rank {rank} | one\nrank {rank} | two\nrank {rank} | {10 * rank}\n" for rank in range(4)
    )


def test_ranks_communicate_and_keep_their_variables(notebook):
    notebook.run("%%px\nx = torch.full((2,), float(rank), device=device)")
    notebook.run("%px dist.all_reduce(x)")
    assert notebook.run("%px x.tolist()") == four("[6.0, 6.0]")
    assert notebook.run("[x.tolist() for x in ranks['x / 2']]") == f"{[[3.0, 3.0]] * 4}\n"
    assert (
        notebook.run("ranks['dist.all_reduce(x) or float(x[0])']") == "[24.0, 24.0, 24.0, 24.0]\n"
    )
    shown = notebook.run("ranks['nonsense']")
    assert "Traceback of ranks 0, 1, 2, 3" in shown and "NameError" in shown
    assert "apply" not in shown
    notebook.run("import torch; ranks.push(y={'a': torch.ones(1)})")
    assert notebook.run("%px y['a'].device == device") == four("True")


def test_a_cell_may_run_on_some_ranks(notebook):
    assert notebook.run("%%px 2, 0\nrank") == "rank 0 | 0\nrank 2 | 2\n"
    assert "there is no rank 7; ranks are 0 to 3" in notebook.run("%%px 7\nrank")
    assert "%%px rank 2: give the numbers of ranks" in notebook.run("%%px rank 2\nrank")


def test_rich_output_stays_rich(notebook):
    shown = notebook.run("%%px 1\nfrom IPython.display import HTML\nHTML('<b>x</b>')")
    assert shown == "rank 1 |\n<b>x</b>\n"


def test_a_failing_rank_shows_its_traceback_and_all_stay_usable(notebook):
    notebook.run("%px kept = 5")
    before = notebook.descendants()
    shown = notebook.run("%%px\nprint('before')\nif rank == 2:\n    raise KeyError('trouble')")
    assert shown.startswith(four("before"))
    assert "Traceback of rank 2" in shown and "raise KeyError('trouble')" in shown
    assert shown.count("Traceback (most recent") == 1 and "live_ranks.py" not in shown
    assert notebook.run("%px kept") == four("5")
    assert notebook.descendants() == before


def test_the_same_error_on_all_ranks_is_shown_once(notebook):
    shown = notebook.run("%px nonsense")
    folded, in_a_line = shown.split("</details>\n")
    assert "Traceback of ranks 0, 1, 2, 3" in folded
    assert folded.count("name 'nonsense'") == in_a_line.count("name 'nonsense'") == 1


def test_an_error_is_folded_and_has_the_number_of_the_notebooks_cell(notebook):
    defined = int(notebook.run("%px def fail(): raise KeyError('trouble')\nIn.__len__() - 1"))
    shown = notebook.run("%%px 1,3\nx = 1\nfail()")
    folded, in_a_line = shown.split("</details>\n")
    assert folded.startswith("<details><summary>Traceback of ranks 1, 3</summary><pre")
    assert f"Cell In[{defined + 1}], line 2" in folded  # who called it
    assert in_a_line == f"ranks 1, 3, In [{defined}], line 1: KeyError: 'trouble'\n"


def test_ranks_that_wait_for_a_failed_one_are_named_and_replaced(notebook):
    before = notebook.descendants()
    shown = notebook.run("%%px\n\n\nif rank == 1:\n    raise KeyError('trouble')\ndist.barrier()")
    assert "Traceback of rank 1" in shown and "KeyError: 'trouble'" in shown
    assert "Rank 1 has raised an exception" in shown
    assert "rank 3 stands in line 3: dist.barrier()" in shown
    assert "Fresh ranks have taken their place" in shown
    assert notebook.run("%px dist.barrier()\n") == ""
    # The server, the tracker, and the keeper of the server's folder.
    assert len(set(notebook.descendants()) & set(before)) <= 3


def test_a_deadlock_is_explained(notebook):
    notebook.run("ranks.hang_timeout = 1")
    shown = notebook.run("%%px 0,1\ndist.recv(torch.empty(1), src=1 - rank)")
    assert "Ranks 0 and 1 wait for each other in a circle" in shown
    assert notebook.run("%px rank") == "".join(f"rank {r} | {r}\n" for r in range(4))


def test_a_slow_cell_is_left_alone(notebook):
    notebook.run("ranks.hang_timeout = 0.3")
    shown = notebook.run("%%px\nimport time\nif rank == 0: time.sleep(1.5)\ndist.barrier()\nrank")
    notebook.run("ranks.hang_timeout = 5")
    assert shown == "".join(f"rank {rank} | {rank}\n" for rank in range(4))


def test_a_rank_that_dies_is_named_and_replaced(notebook):
    shown = notebook.run("%%px 2\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert "rank 2 of 4 was killed by SIGKILL" in shown
    assert notebook.run("%px 1") == four("1")


def test_interrupting_a_cell_interrupts_its_ranks(notebook, tmp_path):
    notebook.run("%px kept = 6")
    before = notebook.descendants()
    begun = tmp_path / "begun"
    cell = f"%%px\nimport time, pathlib\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)"
    shown = notebook.interrupted(cell, begun)
    assert "KeyboardInterrupt" in shown and "time.sleep(60)" in shown
    assert notebook.descendants() == before
    assert notebook.run("%px kept") == four("6")


@pytest.mark.full
def test_a_second_interrupt_does_not_cut_the_first_ones_traceback(notebook, tmp_path):
    """Was: on a busy machine, ranks showed the lines that format tracebacks instead of their own."""
    notebook.run(
        "%%px\nimport time\ntracebacks = get_ipython().InteractiveTB\n"
        "usual = tracebacks.structured_traceback\n"
        "def slow(*arguments, **options):\n"
        "    time.sleep(5)\n    return usual(*arguments, **options)\n"
        "tracebacks.structured_traceback = slow"
    )
    begun = tmp_path / "begun"
    cell = f"%%px\nimport pathlib\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)"
    shown = notebook.interrupted(cell, begun)
    notebook.run("%px tracebacks.structured_traceback = usual")
    assert "KeyboardInterrupt" in shown and "time.sleep(60)" in shown
    assert "time.sleep(5)" not in shown


def test_a_rank_that_missed_the_interrupt_is_interrupted_again(notebook, tmp_path):
    """Was: one that had not begun the cell yet went on, and all ranks lost their variables."""
    notebook.run("%px kept = 7")
    before = notebook.descendants()
    begun = tmp_path / "begun"
    cell = (
        "%%px\nimport time, pathlib, signal\nusual = signal.getsignal(signal.SIGINT)\n"
        "if rank == 1: signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "time.sleep(2)\nsignal.signal(signal.SIGINT, usual)\ntime.sleep(60)"
    )
    assert "KeyboardInterrupt" in notebook.interrupted(cell, begun)
    assert notebook.descendants() == before
    assert notebook.run("%px kept") == four("7")


def test_interrupting_a_stuck_cell_leaves_no_process_behind(notebook, tmp_path):
    ranks_before = notebook.run("%px import os; os.getpid()")
    begun = tmp_path / "begun"
    cell = (
        # A wait over shared memory would end: gloo's does not.
        f"%%px\nimport pathlib\nover_gloo = dist.new_group(backend='gloo')\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "if rank == 0: dist.recv(torch.empty(1), src=1, group=over_gloo)"
    )
    shown = notebook.interrupted(cell, begun)
    assert "Rank 0 waits for it" in shown and "Fresh ranks" in shown
    pids = [int(pid) for pid in re.findall(r"\| (\d+)", ranks_before)]
    assert len(pids) == 4
    assert not wait_until_gone(pids)
    assert notebook.run("%px rank * 0") == four("0")


def serve_hasty_controller(folder: str) -> None:
    """Left alone, it would forget after 1 s (instead of 30) an engine that does not beat yet."""
    ipyparallel.controller.app.max = lambda *_: 1
    engines.serve_controller(folder)


def serve_slow_rank(folder: str) -> None:
    """Begins to beat 3 s after it was told its number, as on a machine that has much else to do."""
    usual = IPEngine.start_heartbeat

    def start_heartbeat(*arguments, **options):
        time.sleep(3)
        return usual(*arguments, **options)

    IPEngine.start_heartbeat = start_heartbeat
    engines.serve_rank(folder)


def test_a_rank_that_is_slow_to_start_is_there_in_the_end(monkeypatch):
    module = importlib.import_module("minimegatron.notebook.live_ranks")
    monkeypatch.setattr(module, "serve_controller", serve_hasty_controller)
    monkeypatch.setattr(module, "serve_rank", serve_slow_rank)
    monkeypatch.setattr(module, "START_SECONDS", 200)
    ranks = LiveRanks(1)
    try:
        assert ranks["rank + 7"] == [7]
    finally:
        ranks.stop()


def refuse(*arguments: object, **options: object) -> None:
    raise zmq.ZMQError(errno.EADDRINUSE)


def serve_unlucky_controller(marker: Path, part: str, folder: str) -> None:
    """At the first time, `part` of it cannot listen."""
    if not marker.exists():
        marker.touch()
        if part == "process":
            ipyparallel.controller.app.start_heartmonitor = refuse
        else:
            zmq.devices.ThreadMonitoredQueue.run_device = refuse
    engines.serve_controller(folder)


@pytest.mark.parametrize("part", ["process", pytest.param("thread", marks=pytest.mark.full)])
def test_where_a_part_of_the_controller_ends_all_is_started_again(part, monkeypatch, tmp_path):
    """So it happened under load: the controller chose ports, and another program was quicker."""
    module = importlib.import_module("minimegatron.notebook.live_ranks")
    serve = functools.partial(serve_unlucky_controller, tmp_path / "marker", part)
    monkeypatch.setattr(module, "serve_controller", serve)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 2)
    ranks = LiveRanks(1)
    try:
        assert (tmp_path / "marker").exists() and ranks["rank + 7"] == [7]
    finally:
        ranks.stop()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[LiveRanks]:
    """A live rank of this process, and not of a kernel."""
    ranks = LiveRanks(1)
    yield ranks
    ranks.stop()


def test_live_ranks_take_no_port(one_rank):
    assert len(list(one_rank._folder.glob("socket:*"))) > 10


def test_ranks_whose_controller_ends_are_replaced(one_rank):
    one_rank._controller.processes[0].kill()
    with pytest.raises(CellError, match="The controller of the ranks has ended"):
        one_rank.run("import time; time.sleep(60)")
    assert one_rank["rank + 7"] == [7]


def test_the_length_of_a_folders_name_counts_in_bytes():
    """A folder of temporary files may have the user's name in it."""
    assert engines._where("/tmp/" + "n" * 35) and not engines._where("/tmp/" + "学" * 35)


def serve_at_ports(folder: str) -> None:
    """As where the folder's name is too long for a socket."""
    engines.LONGEST_SOCKET = len(folder)
    engines.serve_controller(folder)


def test_in_a_folder_with_a_long_name_they_take_ports(monkeypatch):
    module = importlib.import_module("minimegatron.notebook.live_ranks")
    monkeypatch.setattr(module, "serve_controller", serve_at_ports)
    ranks = LiveRanks(1)
    try:
        assert not list(ranks._folder.glob("socket:*")) and ranks["rank + 7"] == [7]
    finally:
        ranks.stop()


def test_a_controller_that_cannot_start_is_told(monkeypatch):
    module = importlib.import_module("minimegatron.notebook.live_ranks")
    monkeypatch.setattr(module, "serve_controller", refuse)
    with pytest.raises(ControllerError, match="in 3 attempts.*Address already in use"):
        LiveRanks(1)


class Lost(Future):
    """What comes of a request that nobody has received."""

    def ready(self) -> bool:
        return False


def test_a_first_question_that_is_lost_is_asked_again(monkeypatch):
    """So it happened under load: an engine is registered before its connection is complete."""

    def apply_async(view, function, *arguments):
        asked.append(function)
        return Lost() if len(asked) <= 2 else usual(view, function, *arguments)

    asked, usual = [], DirectView.apply_async
    monkeypatch.setattr(DirectView, "apply_async", apply_async)
    ranks = LiveRanks(2)
    try:
        assert len(asked) >= 4 and ranks["rank"] == [0, 1]
    finally:
        ranks.stop()


def test_a_rank_whose_news_is_missed_is_there_in_the_end(monkeypatch):
    """So it happened under load: registered after the answer, before the client listened."""

    def connect(socket, url, *arguments, **options):
        if socket.type == zmq.SUB and not late:
            late.append(url)
            while not knows_a_rank():
                time.sleep(0.1)
        return usual(socket, url, *arguments, **options)

    def knows_a_rank():
        client = ipyparallel.Client(paths[0], timeout=60)
        try:
            return bool(client.ids)
        finally:
            client.close()

    def note(client, path, **options):
        paths.append(path)
        make(client, path, **options)

    module = importlib.import_module("minimegatron.notebook.live_ranks")
    monkeypatch.setattr(module, "NEWS_SECONDS", 1)
    paths, late = [], []
    usual, make = ipyparallel.util.connect, ipyparallel.Client.__init__
    monkeypatch.setattr(ipyparallel.util, "connect", connect)
    monkeypatch.setattr(ipyparallel.Client, "__init__", note)
    ranks = LiveRanks(1)
    try:
        assert late and ranks["rank + 7"] == [7]
    finally:
        ranks.stop()


def test_outside_of_a_notebook_an_errors_traceback_is_text(one_rank, capsys):
    with pytest.raises(CellError, match=r"^rank 0, In \[\d+\], line 2: KeyError: 'trouble'$"):
        one_rank.run("x = 1\nraise KeyError('trouble')")
    shown = capsys.readouterr().out
    assert "--- Traceback of rank 0 ---\n" in shown and "raise KeyError('trouble')" in shown


def test_functions_of_a_cell_can_be_launched(notebook):
    shown = notebook.run(
        "from minimegatron import launch\n"
        "class Pair:\n    def __init__(self, x): self.x = x\n"
        "def double(x): return 2 * x\n"
        "def fn(pair):\n"
        "    import torch.distributed as dist\n"
        "    return Pair(double(pair.x) + dist.get_rank())\n"
        "found = launch(fn, 2, Pair(10))\n"
        "[(pair.x, type(pair) is Pair) for pair in found], launch(lambda: 5, 1)"
    )
    assert shown == "([(20, True), (21, True)], [5])\n"
    shown = notebook.run("def fails():\n    raise KeyError('here')\nlaunch(fails, 1)")
    assert "rank 0 of 1 raised KeyError: 'here'" in shown
    assert shown.count("    raise KeyError('here')") >= 1


# -- `launch` in a notebook --

CIRCLE = (
    "import torch, torch.distributed as dist, time\n"
    "from minimegatron import launch, launcher\n"
    "options = {'backend': 'gloo', 'device': 'cpu'}\n"
    "def circle(): dist.recv(torch.empty(1), src=1 - dist.get_rank())\n"
)


def test_a_launch_that_hangs_is_ended_after_a_while(kernel):
    assert (
        launcher.NOTEBOOK_HANG_SECONDS == 10
    )  # what waits less than that for a reader does not hang
    shown = kernel.run(
        f"{CIRCLE}launcher.NOTEBOOK_HANG_SECONDS = 2\nbegan = time.monotonic()\n"
        "try: launch(circle, 2, timeout=100, **options)\n"
        "except launcher.HangError as hang: found = hang\n"
        "print(found.diagnosis.kind, time.monotonic() - began)"
    )
    kind, seconds = shown.split()
    assert kind == "cycle" and float(seconds) >= 2


def test_a_launch_in_which_a_rank_computes_is_left_alone(kernel):
    shown = kernel.run(
        f"{CIRCLE}launcher.NOTEBOOK_HANG_SECONDS = 0.5\n"
        "def slow():\n"
        "    until = time.monotonic() + 2\n"
        "    while dist.get_rank() == 0 and time.monotonic() < until: sum(range(1000))\n"
        "    dist.barrier()\n    return dist.get_rank()\n"
        "launch(slow, 3, **options)"
    )
    assert shown == "[0, 1, 2]\n"


DEBUGGERS = {
    "traced": ("sys.settrace(lambda *_: None)", "sys.settrace(None)"),
    # JupyterLab's debugger is connected to debugpy; here nobody is.
    "debugpy": ("debugpy.is_client_connected = lambda: True", "importlib.reload(debugpy)"),
}


@pytest.mark.parametrize(
    "begin, end",
    [pytest.param(*DEBUGGERS["traced"], marks=pytest.mark.full), DEBUGGERS["debugpy"]],
    ids=list(DEBUGGERS),
)
def test_under_a_debugger_no_launch_counts_as_hung(kernel, begin, end):
    attempt = (
        "try: launch(circle, 2, timeout=seconds, **options)\n"
        "except Exception as error: kind = type(error).__name__\n"
    )
    kernel.run(f"{CIRCLE}import debugpy, importlib, sys\nlauncher.NOTEBOOK_HANG_SECONDS = 0.5")
    assert kernel.run(f"{begin}\nseconds = 2\n{attempt}{end}\nkind") == "'RankTimeout'\n"
    assert kernel.run(f"seconds = 200\n{attempt}\nkind") == "'HangError'\n"


def test_stopping_leaves_nothing(notebook):
    assert notebook.run("ranks.stop()") == ""
    # What is left belongs to the kernel: the server that ranks are forked from, the tracker of
    # shared memory that Python gives it, and the keeper of the folder with the server's socket.
    assert len(notebook.descendants()) <= 3
    left = [path.name for path in notebook.folder.glob("minimegatron-*")]
    assert all(name.startswith("minimegatron-fork-") for name in left) and len(left) <= 1
    assert notebook.run("ranks.stop()") == ""  # may be repeated
    assert "these ranks were stopped; run live_ranks(4)" in notebook.run("%px rank")


def test_restarting_the_kernel_cleans_up(notebook):
    left = notebook.descendants()
    assert len(left) > 6
    notebook.manager.restart_kernel()
    notebook.client.wait_for_ready(timeout=60)
    assert not wait_until_gone(left)
    assert not list(notebook.folder.glob("minimegatron-*"))


def test_killing_the_kernel_cleans_up(kernel):
    kernel.start(2)
    left = kernel.descendants()
    assert len(left) > 4
    os.kill(kernel.pid, signal.SIGKILL)
    assert not wait_until_gone(left)
    assert not list(kernel.folder.glob("minimegatron-*"))


def test_what_cannot_be_started_is_refused():
    with pytest.raises(ValueError, match="num_ranks is 0; give 1 rank or more"):
        LiveRanks(0)
