"""Schedule player and replay in a browser, opened as files: by mouse and by keyboard alone."""

import importlib
import re
import shutil
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>test</title>
<meta name="viewport" content="width=device-width, initial-scale=1"></head>
<body style="margin: 8px">{body}<script src="javascripts/player.js"></script></body></html>"""
PLAYER = '<div class="mm-player" data-schedule="1f1b" data-pp="4" data-microbatches="8"></div>'
REPLAY = '<div class="mm-replay" data-recording="1f1b-paced"></div>'
MAX_REDRAW_MS = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, package) -> Path:
    """Two pages that hold nothing but a player and a replay."""
    out = tmp_path_factory.mktemp("player")
    for name in ("javascripts", "stylesheets"):
        shutil.copytree(DOCS / name, out / name)
    importlib.import_module("emit_player").write_player(package, out)
    (out / "player.html").write_text(PAGE.format(body=PLAYER))
    (out / "replay.html").write_text(PAGE.format(body=REPLAY))
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as running:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        started = running.chromium.launch(executable_path=chromium, args=arguments)
        yield started
        started.close()


class Opened:
    """A page whose player or replay is there; `close` checks that nothing went wrong."""

    def __init__(self, browser: Any, folder: Path, name: str, address: str = "", **options: Any):
        options = {"viewport": {"width": 1200, "height": 900}, **options}
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        self.page.on("request", self._asked)
        self.page.goto((folder / name).as_uri() + address)
        self.page.wait_for_selector("[data-ready]")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.elsewhere.append(request.url)

    def keys(self, *names: str) -> None:
        for name in names:
            self.page.keyboard.press(name)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.context.close()
        if kind is None:
            assert not self.errors
            assert not self.elsewhere


# -- The player --


def test_figures_beside_formulas(browser, folder) -> None:
    with Opened(browser, folder, "player.html") as opened:
        figures = opened.text(".mmp-figures")
        for words in ("33", "27.3 %", "3/11", "37.5 %", "3/8", "4 3 2 1", "min(M, p − r)"):
            assert words in figures
        opened.page.get_by_role("radio", name="GPipe").check()
        assert "8 8 8 8" in opened.text(".mmp-figures")
        opened.page.get_by_text("Times, balance, memory").click()
        opened.page.get_by_label("Memory cap, microbatches").fill("4")
        assert "4 stages above the cap of 4" in opened.text(".mmp-figures")
        opened.page.get_by_label("Work of stage 2").press("ArrowRight")
        assert "with equal stages, free messages" in opened.text(".mmp-figures")


def test_keyboard_alone(browser, folder) -> None:
    with Opened(browser, folder, "player.html", reduced_motion="reduce") as opened:
        opened.keys("Tab", "ArrowRight")
        assert "Interleaved 1F1B" in opened.page.get_attribute(".mmp-timeline", "aria-label")
        opened.keys("ArrowLeft")
        for _ in range(12):
            opened.keys("Tab")
            if opened.page.evaluate("document.activeElement.className") == "mmp-timeline":
                break
        opened.keys("Home", "ArrowRight", "ArrowRight", "ArrowRight")
        assert "Stage 0: forward of microbatch 3" in opened.text(".mmp-details")
        opened.keys("ArrowRight")
        assert "Stage 0 computes nothing for 6" in opened.text(".mmp-details")
        assert "waiting for B0 on stage 1, which ends at 10" in opened.text(".mmp-details")
        assert "idle for 6" in opened.page.text_content(".mmp-timeline + [aria-live]")
        opened.keys("ArrowDown", "+", "0", " ")
        opened.page.wait_for_function("document.querySelector('.mmp-play').textContent === 'Pause'")
        opened.keys(" ")
        assert opened.text(".mmp-play") == "Play"


def test_an_action_leads_to_its_source(browser, folder) -> None:
    with Opened(browser, folder, "player.html", "#schedule=1f1b&p=4&M=8&at=1:1") as opened:
        details = opened.text(".mmp-details")
        assert "Needs" in details
        assert "F0 on stage 0" in details
        assert "recv_forward" in details
        links = opened.page.eval_on_selector_all(".mmp-chain a", "all => all.map(a => a.href)")
        assert any(
            re.search(r"/source/minimegatron\.core\.pipeline_parallel\.schedules\.html#L\d+$", link)
            for link in links
        )
        assert links[-1].endswith("minimegatron.core.pipeline_parallel.steps.html#forward_step")


def test_the_address_holds_the_state(browser, folder) -> None:
    with Opened(browser, folder, "player.html") as opened:
        opened.page.get_by_role("radio", name="Interleaved").check()
        opened.page.get_by_role("slider", name="Microbatches").press("ArrowRight")
        opened.page.locator(".mmp-timeline").press("Home")
        opened.page.wait_for_function("location.hash.includes('at=')")
        address = opened.page.evaluate("location.hash")
        label = opened.page.get_attribute(".mmp-timeline", "aria-label")
        details = opened.text(".mmp-details")
    with Opened(browser, folder, "player.html", address) as again:
        assert again.page.get_attribute(".mmp-timeline", "aria-label") == label
        assert again.text(".mmp-details") == details


def test_wrong_predictions_are_explained(browser, folder) -> None:
    with Opened(browser, folder, "player.html") as opened:
        opened.page.get_by_role("button", name="Predict the next action").click()
        choose = opened.page.get_by_role("group", name="Answers").get_by_role("button")
        choose.get_by_text("B0", exact=True).click()
        assert "needs F0 of this very stage first" in opened.page.text_content(".mmp-verdict") or (
            "needs the gradient that B0 makes on stage 2" in opened.text(".mmp-verdict")
        )
        for answer in ("F0", "F1", "F2"):
            choose.get_by_text(answer, exact=True).click()
            assert f"Yes, {answer}." in opened.text(".mmp-verdict")
        choose.get_by_text("F3", exact=True).click()
        assert "Stage 1 has done its 2 warm-up forwards" in opened.text(".mmp-verdict") or (
            "needs the activation" in opened.text(".mmp-verdict")
        )
        choose.get_by_text("B0", exact=True).click()
        assert "It starts after waiting" in opened.text(".mmp-verdict")
        assert "4 of 16, 2 wrong" in opened.text(".mmp-score")


def test_a_change_is_drawn_at_once(browser, folder) -> None:
    with Opened(browser, folder, "player.html", "#schedule=1f1b&p=8&M=64") as opened:
        times = opened.page.evaluate(
            """async () => {
              const player = document.querySelector(".mm-player").mmPlayer, times = [];
              for (let number = 0; number < 25; number++) {
                await new Promise(requestAnimationFrame);
                const before = performance.now();
                player.set("f", 1 + (number % 5) / 4);
                  times.push(performance.now() - before);
              }
              return times;
            }"""
        )
        median = statistics.median(times)
        print(
            f"\np=8, M=64 redrawn in {median:.1f} ms (median of {len(times)}; least {min(times):.1f})"
        )
        assert min(times) < MAX_REDRAW_MS


def test_svg_and_table_say_the_same(browser, folder) -> None:
    with Opened(browser, folder, "player.html") as opened:
        with opened.page.expect_download() as waiting:
            opened.page.get_by_role("button", name="Save as SVG").click()
        picture = ElementTree.parse(waiting.value.path()).getroot()
        texts = ["".join(node.itertext()) for node in picture.iter() if node.tag.endswith("}text")]
        assert "stage 3" in texts
        assert sum(text.isdigit() for text in texts) >= 64
        opened.page.get_by_text("The same as a table").click()
        rows = opened.page.locator(".mmp-table tbody tr")
        rows.first.wait_for()  # drawn once the browser has told that the table was opened
        assert rows.count() >= 64
        assert "waiting for B0 on stage 1" in opened.text(".mmp-table")


def test_no_motion_where_none_is_wanted(browser, folder) -> None:
    with Opened(browser, folder, "player.html", reduced_motion="reduce") as opened:
        opened.page.select_option("[aria-label=Speed]", "4")
        seen = opened.page.evaluate(
            """async () => {
              const player = document.querySelector(".mm-player").mmPlayer, seen = new Set();
              player.clock.play(0);
              for (const end = performance.now() + 900; performance.now() < end; ) {
                await new Promise(requestAnimationFrame);
                seen.add(player.timeline.marks.t);
              }
              player.clock.pause();
              return [...seen].every((t) => t === 0 || t === null || player.endings.includes(t));
            }"""
        )
        assert seen


@pytest.mark.parametrize("name", ["player.html", "replay.html"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(browser, folder, name, scheme) -> None:
    size = {"width": 360, "height": 700}
    with Opened(browser, folder, name, viewport=size, color_scheme=scheme) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
        ink = opened.page.evaluate(
            "getComputedStyle(document.querySelector('.mm-player, .mm-replay'))"
            ".getPropertyValue('--mmp-ink').trim()"
        )
        assert ink == ("#1c2733" if scheme == "light" else "#e6ebf0")


# -- The replay --


def test_stepping_through_a_run(browser, folder) -> None:
    with Opened(browser, folder, "replay.html") as opened:
        assert "followed exactly" in opened.text(".mmp-figures")
        assert "paced" in opened.text(".mmp-badge")
        assert opened.page.locator(".mmp-stack").count() == 4
        opened.page.focus(".mmp-timeline")
        opened.keys("Home", ".", ".", ".")
        assert "calls" in opened.text(".mmp-details")
        assert opened.page.locator(".mmp-current").count() == 1
        opened.page.wait_for_function("location.hash.includes('call=')")
        address = opened.page.evaluate("location.hash")
        words = opened.text(".mmp-details")
        opened.page.get_by_text("A recorded run").click()
        assert "torchrun" in opened.text(".mmp-source")
    with Opened(browser, folder, "replay.html", address) as again:
        assert again.text(".mmp-details") == words


def test_messages_have_shapes_and_gaps_have_reasons(browser, folder) -> None:
    with Opened(browser, folder, "replay.html") as opened:
        said = ""
        for _ in range(12):
            opened.page.get_by_role("button", name="One action on").click()
            said += opened.text(".mmp-details")
        assert re.search(r"\[64 × 1 × 64\] float32", said)
        assert re.search(r"(activation|gradient) of microbatch \d+ [→←] stage \d", said)
        opened.page.evaluate(
            "document.querySelector('.mm-replay').mmReplay.timeline.choose('3:g0')"
        )
        assert "waiting for" in opened.text(".mmp-details")


def test_other_recordings(browser, folder) -> None:
    with Opened(browser, folder, "replay.html") as opened:
        for name in ("interleaved-paced", "tp2-pp2", "1f1b"):
            opened.page.select_option(".mmp-controls select >> nth=0", name)
            opened.page.wait_for_function(
                "name => document.querySelector('.mm-replay').mmReplay.name === name "
                "&& document.querySelector('.mm-replay').mmReplay.data.title",
                arg=name,
            )
            opened.page.get_by_role("button", name="One action on").click()
            assert opened.page.locator(".mmp-stack a").count() > 4
