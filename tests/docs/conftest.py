"""The site, built once, served once, looked at by one browser: for all tests of the documentation."""

import fcntl
import functools
import http.server
import importlib
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from minimegatron.planner.plan import without_garbage_collection
from tests.figures import QuietTime, figure

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

PATIENCE_MS = 30_000
"""Of every wait for the page: long, since the machine may be busy with other tests."""
MAX_BUILD_SECONDS = 60
"""Of a quiet machine's processor. How long it takes is a figure of every run, printed at its end; a
machine that others use gives less for a second, so a test fails only at twice as much."""
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
    seconds = build_once(folder, environment)
    (folder / "seconds").write_text(str(seconds))
    figure(
        f"the site was built in {seconds:.1f} s of a quiet machine's processor time "
        f"(bound: {MAX_BUILD_SECONDS})"
    )


def build_once(folder: Path, environment: dict[str, str]) -> float:
    """Of one processor, as a clock would say were it not shared with other tests."""
    clock = QuietTime(processor_seconds)
    for command in (
        ["docs/tools/build_docs.py", "--out", str(folder / "docs")],
        ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder / "site")],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return clock.read()


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
