"""The site in a browser: no errors, no other host, phones, both colour schemes, accessibility."""

import dataclasses
import functools
import http.server
import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from minimegatron.core.pipeline_parallel.steps import backward_step
from minimegatron.planner import memory
from minimegatron.planner.formulas import bubble_formulas
from minimegatron.planner.stage import PlanConfig

MAIN_PAGES = [
    "index.html",
    "tour/one-f-one-b.html",
    "tour/whole-step.html",
    "source/index.html",
    "source/minimegatron.core.pipeline_parallel.steps.html",
    "formulas.html",
    "rosetta.html",
    "glossary.html",
    "reference/core.tensor_parallel.html",
    "teachers.html",
    "contributing.html",
]
"""One of each type."""


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(_Handler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.fail("the tests of the site need chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


class Watched:
    """A page, and what went wrong while it loaded."""

    def __init__(self, context: BrowserContext, address: str, timeout: float = 60_000):
        self.page = context.new_page()
        self.page.set_default_timeout(timeout)
        self.address, self.errors, self.elsewhere, self.num_bytes = address, [], [], 0
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._asked)

    def _heard(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.elsewhere.append(request.url)

    def open(self, name: str) -> None:
        self.errors.clear()
        self.page.goto(self.address + name, wait_until="load")

    def check(self, name: str) -> None:
        assert not self.errors, f"{name}: {self.errors}"
        assert not self.elsewhere, f"{name} asks other hosts: {self.elsewhere}"


def test_pages_load_quietly(browser, address, site):
    """All pages, but of the annotated modules, which are made alike, every thirtieth."""
    context = browser.new_context()
    watched = Watched(context, address)
    names = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html"))]
    modules = [name for name in names if name.startswith("source/minimegatron")]
    for name in sorted({*names} - {*modules} | {*modules[::30]}):
        if name != "404.html":
            watched.open(name)
            watched.check(name)
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_pages_fit(browser, address, scheme, width):
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
    )
    watched = Watched(context, address)
    for name in MAIN_PAGES:
        watched.open(name)
        watched.check(name)
        wide = watched.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{name} is {wide} wide on a screen of {width}"
        shown = watched.page.evaluate("document.body.dataset.mdColorScheme")
        assert shown == ("default" if scheme == "light" else "slate"), name
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_for_axe(browser, address, scheme):
    context = browser.new_context(color_scheme=scheme)
    watched = Watched(context, address)
    axe, found = Axe(), []
    for name in MAIN_PAGES:
        watched.open(name)
        for violation in axe.run(watched.page).response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                where = [node["html"][:120] for node in violation["nodes"][:3]]
                found.append(f"{name}: {violation['id']} x {len(violation['nodes'])}: {where}")
    context.close()
    assert not found, "\n".join(found)


def test_code_stands_beside_prose_or_below_it(browser, address):
    for width, beside in ((1400, True), (360, False)):
        context = browser.new_context(viewport={"width": width, "height": 800})
        watched = Watched(context, address)
        watched.open("source/minimegatron.core.pipeline_parallel.steps.html#backward_step")
        box = "e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right] }"
        row = watched.page.locator(".mm-row:has([id='backward_step'])")
        prose = row.locator(".mm-prose").evaluate(box)
        code = row.locator(".mm-code").evaluate(box)
        assert (code[0] >= prose[2]) == beside
        context.close()


def test_a_line_is_addressable(browser, address):
    number = backward_step.__wrapped__.__code__.co_firstlineno
    context = browser.new_context()
    watched = Watched(context, address)
    watched.open(f"source/minimegatron.core.pipeline_parallel.steps.html#L{number}")
    line = watched.page.locator(f"#L{number}")
    assert line.evaluate("e => e.matches(':target')")
    assert 0 < line.evaluate("e => e.getBoundingClientRect().top") < 720
    context.close()


def test_a_name_leads_to_its_definition(browser, address):
    context = browser.new_context()
    watched = Watched(context, address)
    watched.open("tour/one-f-one-b.html")
    watched.page.locator(".mm-quote a.mm-name", has_text="finish_step").first.click()
    watched.page.wait_for_url(
        "**/source/minimegatron.core.pipeline_parallel.utils.html#finish_step"
    )
    context.close()


def test_search_waits_until_it_is_wanted(browser, address):
    context = browser.new_context()
    watched = Watched(context, address)
    asked: list[str] = []
    watched.page.on("request", lambda request: asked.append(request.url))
    watched.open("index.html")
    watched.page.wait_for_timeout(300)
    assert not any("search_index" in url for url in asked)
    watched.page.locator(".md-search__input").click()
    watched.page.keyboard.type("backward_step")
    watched.page.locator(".md-search-result__item").first.wait_for()
    context.close()


def test_rosetta_can_be_filtered(browser, address):
    context = browser.new_context()
    watched = Watched(context, address)
    watched.open("rosetta.html")
    rows = watched.page.locator("#mm-rosetta tbody tr:visible")
    before = rows.count()
    watched.page.locator("#mm-filter").fill("finalize_model_grads")
    assert 1 <= rows.count() < before / 10
    context.close()


def test_the_calculator_counts_as_python_does(browser, address):
    context = browser.new_context()
    watched = Watched(context, address)
    watched.open("formulas.html")
    grid = [
        (s, b, 128, 8, t, c, sp, recompute)
        for s, b, t, c in itertools.product((64, 96), (1, 3), (1, 2, 8), (1, 2))
        for sp in (False, True)
        for recompute in ("none", "selective", "full")
    ]
    expected = [float(memory.activation_bytes_per_layer(*sizes)) for sizes in grid]
    script = "grid => grid.map(x => MMFormulas.activation_bytes_per_layer(...x))"
    assert watched.page.evaluate(script, grid) == pytest.approx(expected)

    states = list(itertools.product((1000, 64), (2, 4), (2, 4), (1, 4), (False, True)))
    script = "grid => grid.map(x => MMFormulas.model_state_bytes(...x).total)"
    expected = [float(memory.model_state_bytes(*sizes).total) for sizes in states]
    assert watched.page.evaluate(script, states) == pytest.approx(expected)

    configs = [
        PlanConfig(schedule, p, m, v, p)
        for schedule, v in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("no-pipelining", 1))
        for p, m in ((2, 4), (4, 8), (8, 64))
    ]
    script = "configs => configs.map(c => MMFormulas.bubble_formulas(c)[1].value)"
    found = watched.page.evaluate(script, [dataclasses.asdict(config) for config in configs])
    assert found == pytest.approx([float(bubble_formulas(c)[1].value) for c in configs])

    rows = watched.page.locator(".mm-results tr")
    before = rows.first.inner_text()
    watched.page.get_by_label("microbatches M").fill("8")
    assert rows.first.inner_text() != before
    context.close()


def test_answers_are_folded(browser, address):
    context = browser.new_context()
    watched = Watched(context, address)
    watched.open("tour/interleaving.html")
    answer = watched.page.locator("details.question").first
    assert answer.get_attribute("open") is None
    answer.locator("summary").focus()
    watched.page.keyboard.press("Enter")
    assert answer.get_attribute("open") is not None
    context.close()
