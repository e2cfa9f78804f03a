"""Every notebook in JupyterLab, in a browser, as `make notebooks` starts it.

Each is run from top to bottom, then with one cell broken on purpose. Then its kernel is restarted, and
nothing is left behind.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from pages.notebook_runs import ROOT, sources
from tests.figures import figure, slowness
from tests.notebooks.test_notebooks import SECONDS
from tests.test_launcher import wait_until_gone

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

PATIENCE_MS = 120_000
BROKEN = "raise KeyError('broken on purpose')"
BROKEN_AT = {
    "01_ranks_and_groups": "members = {kind:",
    "02_tensor_parallel_by_hand": "hidden = F.gelu(x @ a)",
    "03_point_to_point": "    rank, received = dist.get_rank(), []",
    "04_one_pipeline_step_by_hand": "data, reports = gpt.microbatches(1), []",
    "05_gpipe_to_1f1b": "    gpt.step(1)  # what is made on first use is made now",
    "06_trace_1f1b": "    is_slow = gpt.groups.pp.rank() == slow_stage",
    "07_interleaving": "    chunks = vp or 1",
    "08_gradient_buffers": "    (buffer,) = chunk.buffers",
    "09_the_whole_step": "    _, _, model, *_ = everything",
    "10_memory": "    return measure_states(), measure_layers()",
    "11_to_a_thousand_gpus": "deepest = plan(",
    "12_your_own_forward_step": '    ratio = torch.exp(-output - batch["old"])',
    "18_run_again_and_captured": "again, built = run(runs=[1, 2])",
}
"""Notebook -> the line before which an exception is raised; in ranks, where the notebook has any."""
HAS_LIVE_RANKS = ("01", "02", "04", "18")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JupyterLab's root: a copy of the notebooks, into which it may write."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(ROOT / "notebooks", root / "notebooks")
    for name in ("home", "temporary"):
        (root.parent / name).mkdir(exist_ok=True)
    return root


@pytest.fixture(scope="module")
def lab(folder: Path) -> Iterator[tuple[str, int]]:
    """JupyterLab as `make notebooks` starts it for a user without settings: address, process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [f"PORT={port}", f"VENV={sys.prefix}"]
    dry_run = ["make", "--dry-run", "notebooks", *settings]
    done = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True)
    (command,) = (line for line in done.stdout.splitlines() if "jupyter lab " in line)
    command = command.replace("root_dir=.", f"root_dir={folder}") + " --expose-app-in-browser"
    environment = os.environ | {
        "HOME": str(folder.parent / "home"),
        "TMPDIR": str(folder.parent / "temporary"),
        "PYTHONPATH": str(ROOT),
        "BROWSER": "true",
    }
    # With this set, a kernel does not show what its processes write.
    environment.pop("PYTEST_CURRENT_TEST", None)
    log = folder.parent / "log"
    with open(log, "w") as opened:
        options = {"stdout": opened, "stderr": opened, "start_new_session": True}
        command = f"exec env {command}"
        server = subprocess.Popen(command, shell=True, cwd=ROOT, env=environment, **options)
    try:
        found = wait_for(lambda: re.search(r"http://127\S+token=\w+", log.read_text()), 120)
        assert found, log.read_text()
        yield found[0], server.pid
    finally:
        all_of_it = [server.pid, *descendants(server.pid)]
        server.send_signal(signal.SIGINT)
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            raise
    assert not wait_until_gone(all_of_it)


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    give_up = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < give_up:
        time.sleep(0.1)
    return found


def descendants(pid: int) -> list[int]:
    """All processes that the process `pid` has started, and theirs."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


@pytest.fixture(scope="module")
def page(browser: Browser, lab: tuple[str, int]) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(PATIENCE_MS)
    page.goto(re.sub(r"/lab/tree/[^?]*", "/lab", lab[0]))
    page.wait_for_function("() => window.jupyterapp")
    page.evaluate("() => jupyterapp.restored.then(() => 0)")
    yield page
    page.close()


@dataclass
class Open:
    """A notebook that is open in the browser."""

    page: Page
    name: str

    def command(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        """One of JupyterLab's commands, to its end."""
        program = (
            "([name, arguments]) => jupyterapp.commands.execute(name, arguments).then(() => 0)"
        )
        self.page.evaluate(program, [name, arguments or {}])

    def open(self) -> None:
        self.command("docmanager:open", {"path": f"notebooks/{self.name}.ipynb"})
        self.page.wait_for_function(
            "() => jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
        )

    def cells(self) -> list[dict[str, Any]]:
        """The cells of code, as they would be saved."""
        model = self.page.evaluate("() => jupyterapp.shell.currentWidget.model.toJSON()")
        return [cell for cell in model["cells"] if cell["cell_type"] == "code"]

    def change(self, old: str, new: str) -> int:
        """Changes the text of the one cell with `old` in it; its number among those of code."""
        numbers = [i for i, cell in enumerate(self.cells()) if old in "".join(cell["source"])]
        assert len(numbers) == 1, (old, numbers)
        program = """([old, text]) => {
            for (const cell of jupyterapp.shell.currentWidget.model.cells)
                if (cell.type === "code" && cell.sharedModel.getSource().includes(old))
                    cell.sharedModel.setSource(cell.sharedModel.getSource().replace(old, text));
        }"""
        self.page.evaluate(program, [old, new])
        return numbers[0]

    def run_all(self) -> float:
        """As from the menu; returns the seconds."""
        begun = time.monotonic()
        self.command("notebook:run-all-cells")
        return time.monotonic() - begun

    def restart(self) -> None:
        """As from the menu, with its question answered."""
        self.page.evaluate("() => { jupyterapp.commands.execute('notebook:restart-kernel'); }")
        self.page.click(".jp-Dialog .jp-mod-accept")
        self.page.wait_for_selector(".jp-Dialog", state="detached")
        self.page.wait_for_function(
            "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'"
        )

    def scroll_to(self, cell: dict[str, Any]) -> None:
        """What is far from the window is not in the page."""
        self.page.evaluate(
            """(id) => {
                const content = jupyterapp.shell.currentWidget.content;
                return content.scrollToItem(content.widgets.findIndex(c => c.model.id === id));
            }""",
            cell["id"],
        )

    def close(self) -> None:
        self.command("docmanager:save")
        self.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.command("application:close")


def outputs(cell: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [output for output in cell["outputs"] if output["output_type"] == kind]


def text_of(cell: dict[str, Any]) -> str:
    """All that a cell put out, without colours."""
    parts = []
    for output in cell["outputs"]:
        parts += output.get("text", []), output.get("traceback", []), output.get("evalue", "")
        parts += list(output.get("data", {}).values())
    text = "\n".join("".join(part) if isinstance(part, list) else str(part) for part in parts)
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_list_has_one_file_per_notebook_and_no_question_is_asked(page):
    page.evaluate(
        "() => jupyterapp.commands.execute('filebrowser:go-to-path', {path: 'notebooks'})"
    )
    page.wait_for_selector(f".jp-DirListing-item >> text={sources()[-1].stem}.ipynb")
    listed = page.locator(".jp-DirListing-item .jp-DirListing-itemName").all_text_contents()
    assert sorted(listed) == [f"{path.stem}.ipynb" for path in sources()]
    assert page.get_by_text("official Jupyter news").count() == 0


@pytest.fixture
def notebook(name: str, page: Page) -> Iterator[Open]:
    opened = Open(page, name)
    opened.open()
    yield opened
    opened.close()


@pytest.mark.parametrize("name", [path.stem for path in sources()])
def test_a_notebook_runs_breaks_and_leaves_nothing(name, notebook, lab, page, folder):
    seconds = notebook.run_all()
    figure(f"{name}: {seconds:.1f} s in JupyterLab")
    cells = notebook.cells()
    assert all(cell["execution_count"] for cell in cells)
    assert not any(outputs(cell, "error") for cell in cells)
    # The first output, and every other, is no warning in red.
    red = [o["text"] for cell in cells for o in outputs(cell, "stream") if o["name"] == "stderr"]
    assert not red
    assert any("no prediction was made" in text_of(cell) for cell in cells)
    assert seconds < SECONDS * slowness()
    for cell in cells:
        if "show_wide(" in "".join(cell["source"]):
            notebook.scroll_to(cell)
            wide = page.locator(".jp-OutputArea-output pre", has_text="length ms").first
            assert wide.evaluate("element => getComputedStyle(element).whiteSpace") == "pre"

    line = BROKEN_AT[name]
    indent = line[: len(line) - len(line.lstrip())]
    broken = notebook.change(line, f"{indent}{BROKEN}\n{line}")
    notebook.run_all()
    cells = notebook.cells()
    (failed,) = (number for number, cell in enumerate(cells) if outputs(cell, "error"))
    assert failed >= broken
    told = text_of(cells[failed])
    assert "KeyError" in told and "broken on purpose" in told
    if name.startswith(HAS_LIVE_RANKS):
        (error,) = outputs(cells[failed], "error")
        assert f"In [{cells[failed]['execution_count']}], line" in error["evalue"]
        assert len("".join(error["traceback"]).splitlines()) == 1
        notebook.scroll_to(cells[failed])
        folded = page.locator("details", has_text="Traceback of ranks 0, 1").first
        assert folded.evaluate("element => element.open") is False
        folded.locator("summary").click()
        assert folded.get_by_text("Traceback (most recent call last)").is_visible()

    begun = descendants(lab[1])
    assert len(begun) > 1
    notebook.restart()
    assert not wait_until_gone(begun)
    assert not list((folder.parent / "temporary").glob("minimegatron-*"))
