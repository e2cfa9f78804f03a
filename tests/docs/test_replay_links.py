"""Every frame that the replay shows leads, on the built site, to a line with the recorded call."""

import html
import re
from functools import cache
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.docs.conftest import Watched

PAGE = "tour/whole-step.html"
RECORDINGS = ["1f1b-paced", "interleaved-paced", "tp2-pp2", "one-rank"]
ALIKE = "1f1b"
"""The same calls as those of 1f1b-paced."""

# Steps through all calls of all pipelines, as a reader would with the button, and notes each link.
COLLECT = """async (name) => {
  const root = document.querySelector(".mm-replay"), replay = root.mmReplay, links = new Map();
  const next = root.querySelector("[aria-label='One action on']");
  root.querySelector("[aria-label='To the start']").click();
  replay.timeline.draw = replay.inspector.show = () => {}; // neither is looked at here
  for (let number = 0; number <= replay.calls.length; number++) {
    next.click();
    for (const item of root.querySelectorAll(".mmp-stack li")) {
      const link = item.querySelector("a"), line = item.querySelector(".mmp-line");
      const text = line ? line.textContent : "";
      links.set((link ? link.href : "none") + text, [link && link.href, text, item.textContent]);
    }
  }
  return [...links.values()];
}"""


@cache
def lines_of(path: Path) -> dict[str, str]:
    """The lines of an annotated page by their id, prose lines without text."""
    page = path.read_text()
    shown = re.findall(r'<span class="mm-line" id="(L\d+)">(.*?)\n</span>', page, re.DOTALL)
    texts = {anchor: html.unescape(re.sub(r"<[^>]+>", "", line)) for anchor, line in shown}
    ids = dict.fromkeys(re.findall(r' id="([^"]+)"', page), "")
    return ids | texts


@pytest.mark.parametrize("name", [*RECORDINGS, pytest.param(ALIKE, marks=pytest.mark.full)])
def test_every_frame_leads_to_its_line(browser, address, site: Path, name):
    with Watched(browser, (address,)) as watched:
        watched.page.goto(f"{address}{PAGE}#recording={name}")
        watched.page.locator(".mm-replay[data-ready]").wait_for()
        watched.page.select_option(".mm-replay select >> nth=0", name)
        watched.page.wait_for_function(
            "name => document.querySelector('.mm-replay').mmReplay.data?.title && "
            "document.querySelector('.mm-replay').mmReplay.name === name",
            arg=name,
        )
        found = watched.page.evaluate(COLLECT, name)
        lines = [link for link, text, _ in found if text]
        assert len(lines) > 5
        for link, text, shown in found:
            assert link, f"{shown} has no link"
            path, _, anchor = link.removeprefix(address).partition("#")
            known = lines_of(site / path)
            assert anchor in known, f"{shown}: {link}"
            assert known[anchor].strip() == text or not text, f"{link} is {known[anchor]!r}"


def test_a_click_on_a_frame_shows_the_line(browser, address):
    with Watched(browser, (address,)) as watched:
        watched.page.goto(address + PAGE)
        watched.page.locator(".mm-replay[data-ready]").wait_for()
        watched.page.locator(".mm-replay [aria-label='One action on']").click()
        frames = watched.page.locator(".mmp-current > .mmp-chain li")
        frame = frames.filter(has=watched.page.locator(".mmp-line")).last
        text = frame.locator(".mmp-line").inner_text()
        frame.get_by_role("link").click()
        line = watched.page.locator(".mm-line:target")
        expect(line).to_be_in_viewport()
        expect(line).to_contain_text(text)
