"""The site, built once, served once, looked at by one browser: for all tests of the documentation."""

import argparse
import ast
import fcntl
import functools
import http.server
import importlib
import inspect
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from minimegatron.planner.plan import without_garbage_collection
from tests.figures import figure

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

PATIENCE_MS = 30_000
"""Of every wait for the page: long, since the machine may be busy with other tests."""
MAX_BUILD_PARSES = 900
"""What a build of the site may take of processor time, in times of `parse_some`. Not in seconds:
machines differ by more than twice, and one and the same does from hour to hour."""
SAMPLE_SECONDS = 10
"""How often a piece of work is timed beside the build, since a machine's speed changes meanwhile."""
expect.set_options(timeout=PATIENCE_MS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The first of them builds the site, or waits for the worker that does: minutes on a busy machine.
    for item in items:
        if "site" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def package():
    """Every module of the package, annotated."""
    with without_garbage_collection():  # a third of the time
        return importlib.import_module("source.package").Package.read()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site, built once for all workers. A warning of MkDocs fails the build.

    While working on a test, MINIMEGATRON_SITE=site takes what `make docs` left, which is faster.
    """
    if os.environ.get("MINIMEGATRON_SITE"):
        return (ROOT / os.environ["MINIMEGATRON_SITE"]).resolve()
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):  # each worker has a folder of its own inside it
        folder = folder.parent
    folder = folder / "site-of-all-tests"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "is-built").exists():
            build_site(folder)
            (folder / "is-built").touch()
    return folder / "site"


def build_site(folder: Path) -> None:
    environment = os.environ | {
        "NO_MKDOCS_2_WARNING": "1",
        "DISABLE_MKDOCS_2_WARNING": "true",
        "MINIMEGATRON_DOCS": str(folder / "docs"),
    }
    seconds, parse_seconds = build_once(folder, environment)
    parses = seconds / parse_seconds
    (folder / "parses").write_text(str(parses))
    figure(
        f"the site was built in {seconds:.0f} s of processor time, {parses:.0f} times what it takes "
        f"to parse four modules (bound: {MAX_BUILD_PARSES})"
    )


def build_once(folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Processor seconds of the build, and of `parse_some`, the mean of those beside it."""
    begun, samples = processor_seconds(), [parse_some()]
    for command in (
        ["docs/tools/build_docs.py", "--out", str(folder / "docs")],
        ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder / "site")],
    ):
        run_build([sys.executable, *command], environment, samples)
    return processor_seconds() - begun, statistics.mean(samples)


def run_build(command: list[str], environment: dict[str, str], samples: list[float]) -> None:
    """Runs it to its end; meanwhile `samples` gets a time of `parse_some` every ten seconds."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as build:
        try:
            while True:
                try:
                    stdout, stderr = build.communicate(timeout=SAMPLE_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    samples.append(parse_some())
        finally:  # a test that is given up leaves no build behind
            build.kill()
    assert build.returncode == 0, f"{command}\n{stdout[-4000:]}\n{stderr[-4000:]}"


def processor_seconds() -> float:
    """Of the processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def parse_some() -> float:
    """Processor seconds for a piece of work of the build's kind, which makes many small objects."""
    begun = time.process_time()
    trees = [
        ast.parse(inspect.getsource(module)) for module in (argparse, inspect, typing, subprocess)
    ]
    assert sum(1 for tree in trees for _ in ast.walk(tree)) > 10_000
    return time.process_time() - begun


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """Where a plain static server has the site."""
    handler = functools.partial(_Handler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


class Watched:
    """A page, and what went wrong in it: leaving the `with` block checks that nothing did."""

    def __init__(self, browser: Browser, own: tuple[str, ...], **options: Any):
        options = {"viewport": {"width": 1200, "height": 900}, **options}
        self.context: BrowserContext = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.own = (*own, "data:", "blob:")
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _heard(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} {message.location['url']}")

    def check(self, name: str = "") -> None:
        """No error so far, and no request to another host."""
        elsewhere = [url for url in self.requests if not url.startswith(self.own)]
        assert not self.errors, f"{name}: {self.errors}"
        assert not elsewhere, f"{name} asks other hosts: {elsewhere}"

    def sees(self, selector: str, words: Any) -> None:
        """Waits until the element shows the words."""
        expect(self.page.locator(selector)).to_contain_text(words, use_inner_text=True)

    def keys(self, *names: str) -> None:
        for name in names:
            self.page.keyboard.press(name)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.context.close()
        if kind is None:
            self.check()
