"""Runs notebooks from top to bottom, each in a kernel of its own, and remembers what came out.

Called by: `notebook_pages`, tests/notebooks; `python docs/tools/record.py notebooks --pairs`
(`make notebooks` does so) writes the .ipynb beside each .py. Calls: jupytext, nbclient.

What came out is kept in build/notebooks under a name with a hash of all that it depends on: the
notebook, and the package's source. Tests always run; pages take what a run of the same left there.
"""

import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from source.places import ROOT, python_path

NOTEBOOKS = ROOT / "notebooks"
CACHE = ROOT / "build" / "notebooks"
NUM_AT_ONCE = 2
CELL_SECONDS = 400
"""After which a cell counts as stuck. Live ranks may take 300 s to start."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")
"""The colours in what a cell printed."""


@dataclass(frozen=True)
class Executed:
    """A notebook with its outputs."""

    name: str
    notebook: nbformat.NotebookNode
    seconds: float
    error: str = ""
    """What the first failing cell said; empty if all went well."""


def sources(folder: Path = NOTEBOOKS) -> list[Path]:
    """The notebooks in order, as the .py files in which they are written."""
    return sorted(folder.glob("[0-9][0-9]_*.py"))


def write_pairs(paths: Iterable[Path]) -> list[Path]:
    """Makes, or brings up to date, the .ipynb beside each .py; outputs in it stay. Returns which."""
    written = []
    for path in paths:
        fresh, pair = jupytext.read(path), path.with_suffix(".ipynb")
        if pair.exists():
            old = nbformat.read(pair, as_version=4)
            if same_cells(fresh, old):
                continue
            fresh = jupytext.combine.combine_inputs_with_outputs(fresh, old)
        else:
            _give_ids(fresh)
        jupytext.write(fresh, pair)
        written.append(pair)
    return written


def same_cells(one: nbformat.NotebookNode, other: nbformat.NotebookNode) -> bool:
    """Whether two notebooks say the same, apart from outputs."""
    return [(c.cell_type, c.source) for c in one.cells] == [
        (c.cell_type, c.source) for c in other.cells
    ]


def _give_ids(notebook: nbformat.NotebookNode) -> None:
    # Random ones would make every new pair differ.
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"


# -- Running --


def execute(path: Path, cell_seconds: float = CELL_SECONDS) -> Executed:
    """Runs one notebook in a temporary folder that has only the notebooks in it."""
    begun = time.monotonic()
    notebook, error = jupytext.read(path), ""
    with tempfile.TemporaryDirectory(prefix="minimegatron-notebook-") as folder:
        copy = Path(folder) / "notebooks"
        shutil.copytree(path.parent, copy, ignore=shutil.ignore_patterns("*.ipynb", ".*"))
        client = NotebookClient(
            notebook,
            timeout=cell_seconds,
            kernel_name="python3",
            coalesce_streams=True,
            # Else each prints that other users of this machine could read what it is sent.
            extra_arguments=["--IPKernelApp.log_level=40"],
            shutdown_kernel="immediate",  # asked to end, a kernel takes seconds, and does nothing
            resources={"metadata": {"path": str(copy)}},
        )
        # This checkout comes first.
        environment = os.environ | {"IPYTHONDIR": folder, "PYTHONPATH": python_path(ROOT)}
        try:
            _execute(client, environment)
        except CellExecutionError as failure:
            error = str(failure)
    executed = Executed(path.stem, notebook, time.monotonic() - begun, error)
    if not error:
        _remember(path, executed)
    return executed


def _execute(client: NotebookClient, environment: dict[str, str]) -> None:
    """Once more if the kernel did not come up: two that start together can pick one port."""
    try:
        client.execute(env=environment)
    except RuntimeError as error:
        if "Kernel died before replying" not in str(error):
            raise
        client.km = None
        client.execute(env=environment)


@contextmanager
def executing(paths: Iterable[Path], at_once: int = NUM_AT_ONCE) -> Iterator[dict[str, Future]]:
    """Runs notebooks, a few at a time; yields their futures at once, by name, first come first."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = {path.stem: pool.submit(execute, path) for path in paths}
        try:
            yield futures
        finally:
            for future in futures.values():
                future.cancel()


# -- Remembering --


def key(path: Path) -> str:
    """A hash of everything that the outputs of this notebook depend on."""
    digest = hashlib.sha256(path.read_bytes())
    for source in sorted((ROOT / "minimegatron").rglob("*.py")):
        digest.update(source.relative_to(ROOT).as_posix().encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def remembered(path: Path) -> nbformat.NotebookNode | None:
    """What an earlier run of this very notebook left, with its outputs."""
    kept = CACHE / f"{path.stem}-{key(path)}.ipynb"
    return nbformat.read(kept, as_version=4) if kept.exists() else None


def _remember(path: Path, executed: Executed) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.glob(f"{path.stem}-*.ipynb"):
        old.unlink(missing_ok=True)
    kept = CACHE / f"{path.stem}-{key(path)}.ipynb"
    unfinished = kept.with_suffix(".new")
    nbformat.write(executed.notebook, unfinished)
    unfinished.rename(kept)


def table(times: dict[str, float]) -> str:
    """Name and seconds of each notebook, and the sum."""
    width = max(map(len, times), default=0)
    rows = [f"{name:{width}}  {seconds:6.1f} s" for name, seconds in sorted(times.items())]
    return "\n".join([*rows, f"{'sum':{width}}  {sum(times.values()):6.1f} s"])


def main() -> None:
    """Runs all notebooks and says how long each took; with --pairs writes the .ipynb alone."""
    chosen = sources()
    if sys.argv[1:] == ["--pairs"]:
        for pair in write_pairs(chosen):
            print(f"wrote {pair.relative_to(ROOT)}")
    elif sys.argv[1:]:
        raise SystemExit("usage: record.py notebooks [--pairs]")
    else:
        with executing(chosen) as runs:
            results = [future.result() for future in runs.values()]
        print(table({result.name: result.seconds for result in results}))
        if failed := [result for result in results if result.error]:
            raise SystemExit("\n\n".join(f"{r.name}: {r.error}" for r in failed))
