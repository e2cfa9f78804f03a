"""Schedule player and replay in a browser, opened as files: by mouse and by keyboard alone."""

import re
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.docs.conftest import Watched
from tests.figures import figure

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>test</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"></head>
<body style="margin: 8px">{body}<script src="javascripts/player.js"></script></body></html>"""
PLAYER = '<div class="mm-player" data-schedule="1f1b" data-pp="4" data-microbatches="8"></div>'
REPLAY = '<div class="mm-replay" data-recording="1f1b-paced"></div>'
MAX_REDRAW_MS = 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Path:
    """Two pages that hold nothing but a player and a replay, with the site's own scripts."""
    out = tmp_path_factory.mktemp("player")
    for name in ("javascripts", "stylesheets", "recordings", "python"):
        if (site / name).exists():
            (out / name).symlink_to(site / name)
    (out / "player.html").write_text(PAGE.format(body=PLAYER))
    (out / "replay.html").write_text(PAGE.format(body=REPLAY))
    return out


class Opened(Watched):
    """A page whose player or replay is there."""

    def __init__(
        self, browser: Browser, folder: Path, name: str, fragment: str = "", **options: Any
    ):
        super().__init__(browser, ("file:",), **options)
        self.page.goto((folder / name).as_uri() + fragment)
        self.page.locator("[data-ready]").wait_for()

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)


# -- The player --


def test_figures_beside_formulas(browser, folder) -> None:
    with Opened(browser, folder, "player.html") as opened:
        for words in ("33", "27.3 %", "3/11", "37.5 %", "3/8", "4 3 2 1", "min(M, p − r)"):
            opened.sees(".mmp-figures", words)
        opened.page.get_by_role("radio", name="GPipe").check()
        opened.sees(".mmp-figures", "8 8 8 8")
        opened.page.get_by_text("Times, balance, memory").click()
        opened.page.get_by_label("Memory cap, microbatches").fill("4")
        opened.sees(".mmp-figures", "4 stages above the cap of 4")
        opened.page.get_by_label("Work of stage 2").press("ArrowRight")
        opened.sees(".mmp-figures", "with equal stages, free messages")


def test_keyboard_alone(browser, folder) -> None:
    with Opened(browser, folder, "player.html", reduced_motion="reduce") as opened:
        timeline = opened.page.locator(".mmp-timeline")
        opened.keys("Tab", "ArrowRight")
        expect(timeline).to_have_attribute("aria-label", re.compile("Interleaved 1F1B"))
        opened.keys("ArrowLeft")
        for _ in range(12):
            opened.keys("Tab")
            if opened.page.evaluate("document.activeElement.className") == "mmp-timeline":
                break
        opened.keys("Home", "ArrowRight", "ArrowRight", "ArrowRight")
        opened.sees(".mmp-details", "Stage 0: forward of microbatch 3")
        opened.keys("ArrowRight")
        opened.sees(".mmp-details", "Stage 0 computes nothing for 6")
        opened.sees(".mmp-details", "waiting for B0 on stage 1, which ends at 10")
        expect(opened.page.locator(".mmp-timeline + [aria-live]")).to_contain_text("idle for 6")
        opened.keys("ArrowDown", "+", "0", " ")
        opened.sees(".mmp-play", "Pause")
        opened.keys(" ")
        opened.sees(".mmp-play", "Play")


def test_an_action_leads_to_its_source(browser, folder) -> None:
    with Opened(browser, folder, "player.html", "#schedule=1f1b&p=4&M=8&at=1:1") as opened:
        for words in ("Needs", "F0 on stage 0", "recv_forward"):
            opened.sees(".mmp-details", words)
        chain = opened.page.locator(".mmp-chain a")
        chain.first.wait_for()
        links = chain.evaluate_all("all => all.map(a => a.href)")
        schedules = "minimegatron.core.pipeline_parallel.schedules"
        assert any(
            re.search(rf"/source/{re.escape(schedules)}\.html#L\d+$", link) for link in links
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
        expect(again.page.locator(".mmp-timeline")).to_have_attribute("aria-label", label)
        again.sees(".mmp-details", details)


def test_wrong_predictions_are_explained(browser, folder) -> None:
    needs = re.compile("needs (F0 of this very stage first|the gradient that B0 makes on stage 2)")
    too_much = re.compile("Stage 1 has done its 2 warm-up forwards|needs the activation")
    with Opened(browser, folder, "player.html") as opened:
        opened.page.get_by_role("button", name="Predict the next action").click()
        choose = opened.page.get_by_role("group", name="Answers").get_by_role("button")
        choose.get_by_text("B0", exact=True).click()
        opened.sees(".mmp-quiz .mmp-verdict", needs)
        for answer in ("F0", "F1", "F2"):
            choose.get_by_text(answer, exact=True).click()
            opened.sees(".mmp-quiz .mmp-verdict", f"Yes, {answer}.")
        choose.get_by_text("F3", exact=True).click()
        opened.sees(".mmp-quiz .mmp-verdict", too_much)
        choose.get_by_text("B0", exact=True).click()
        opened.sees(".mmp-quiz .mmp-verdict", "It starts after waiting")
        opened.sees(".mmp-score", "4 of 16, 2 wrong")


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
        median, least = statistics.median(times), min(times)
        figure(f"p=8, M=64 redrawn in {median:.1f} ms (median of {len(times)}; least {least:.1f})")
        assert least < MAX_REDRAW_MS


def test_svg_and_table_say_the_same(browser, folder) -> None:
    with Opened(browser, folder, "player.html") as opened:
        with opened.page.expect_download() as waiting:
            opened.page.get_by_role("button", name="Save as SVG").click()
        picture = ElementTree.parse(waiting.value.path()).getroot()
        texts = ["".join(node.itertext()) for node in picture.iter() if node.tag.endswith("}text")]
        assert "stage 3" in texts
        num_bars = sum(text.isdigit() for text in texts)
        assert num_bars >= 64
        opened.page.get_by_text("The same as a table").click()
        # Drawn once the browser has told that the table was opened.
        rows = opened.page.locator(".mmp-table tbody tr").filter(has_text=re.compile(r"[FB]\d"))
        expect(rows.nth(63)).to_be_attached()
        opened.sees(".mmp-table", "waiting for B0 on stage 1")


def test_no_motion_where_none_is_wanted(browser, folder) -> None:
    with Opened(browser, folder, "player.html", reduced_motion="reduce") as opened:
        opened.page.select_option("[aria-label=Speed]", "4")
        assert opened.page.evaluate(
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


@pytest.mark.parametrize("name", ["player.html", "replay.html"])
def test_a_phone(browser, folder, name) -> None:
    size = {"width": 360, "height": 700}
    ink = (
        "getComputedStyle(document.querySelector('.mm-player, .mm-replay'))"
        ".getPropertyValue('--mmp-ink').trim()"
    )
    with Opened(browser, folder, name, viewport=size, color_scheme="light") as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
        assert opened.page.evaluate(ink) == "#1c2733"
        opened.page.emulate_media(color_scheme="dark")
        opened.page.wait_for_function(f"{ink} === '#e6ebf0'")


# -- The replay --


def test_stepping_through_a_run(browser, folder) -> None:
    with Opened(browser, folder, "replay.html") as opened:
        opened.sees(".mmp-figures", "followed exactly")
        opened.sees(".mmp-badge", "paced")
        expect(opened.page.locator(".mmp-stack")).to_have_count(4)
        opened.page.focus(".mmp-timeline")
        opened.keys("Home", ".", ".", ".")
        opened.sees(".mmp-details", "calls")
        expect(opened.page.locator(".mmp-current")).to_have_count(1)
        # The address is written a moment after the last key; until then it names an earlier call.
        opened.page.wait_for_function(
            """() => {
              const { rank, event } = document.querySelector(".mm-replay").mmReplay.current;
              return new URLSearchParams(location.hash.slice(1)).get("call") === `${rank}:${event.i}`;
            }"""
        )
        address = opened.page.evaluate("location.hash")
        words = opened.text(".mmp-details")
        opened.page.get_by_text("A recorded run").click()
        opened.sees(".mmp-source", "torchrun")
    with Opened(browser, folder, "replay.html", address) as again:
        again.sees(".mmp-details", words)


def test_messages_have_shapes_and_gaps_have_reasons(browser, folder) -> None:
    with Opened(browser, folder, "replay.html") as opened:
        said = opened.page.evaluate(
            """() => {
              const next = document.querySelector("[aria-label='One action on']"), said = [];
              for (let number = 0; number < 12; number++) {
                next.click();
                said.push(document.querySelector(".mmp-details").innerText);
              }
              return said.join(" ");
            }"""
        )
        assert re.search(r"\[64 × 1 × 64\] float32", said)
        assert re.search(r"(activation|gradient) of microbatch \d+ [→←] stage \d", said)
        opened.page.evaluate(
            "document.querySelector('.mm-replay').mmReplay.timeline.choose('3:g0')"
        )
        opened.sees(".mmp-details", "waiting for")


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
            expect(opened.page.locator(".mmp-stack a").nth(4)).to_be_attached()
