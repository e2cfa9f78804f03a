"""The replay of recorded runs in a browser, opened as a file."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.docs.conftest import ROOT
from tests.docs.player_pages import Opened, write_pages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Path:
    return write_pages(tmp_path_factory.mktemp("replay"), site)


def test_stepping_through_a_run(browser, folder) -> None:
    with Opened(browser, folder, "replay.html") as opened:
        opened.sees(".mmp-figures", "followed exactly")
        opened.sees(".mmp-badge", "paced")
        expect(opened.page.locator(".mmp-stack")).to_have_count(4)
        opened.page.focus(".mmp-timeline")
        opened.keys("Home", ".", ".", ".")
        opened.sees(".mmp-inspector", "calls")
        expect(opened.page.locator(".mmp-current")).to_have_count(1)
        # The address is written a moment after the last key; until then it names an earlier call.
        opened.page.wait_for_function(
            """() => {
              const { event } = document.querySelector(".mm-replay").mmReplay.current;
              return new URLSearchParams(location.hash.slice(1)).get("replay.at") === event.id;
            }"""
        )
        address = opened.page.evaluate("location.hash")
        words = opened.text(".mmp-inspector h3")
        opened.page.get_by_text("A recorded run").click()
        opened.sees(".mmp-source", "torchrun")
    with Opened(browser, folder, "replay.html", address) as again:
        again.sees(".mmp-inspector h3", words)


def test_messages_have_shapes_and_gaps_have_reasons(browser, folder) -> None:
    with Opened(browser, folder, "replay.html") as opened:
        said = opened.page.evaluate(
            """() => {
              const next = document.querySelector("[aria-label='One action on']"), said = [];
              for (let number = 0; number < 12; number++) {
                next.click();
                said.push(document.querySelector(".mmp-inspector").innerText);
              }
              return said.join(" ");
            }"""
        )
        assert re.search(r"\[64 × 1 × 64\] float32", said)
        assert re.search(r"(activation|gradient) of microbatch \d+ [→←] stage \d", said)
        opened.replay("replay.timeline.choose('1:idle-before-B0')")
        opened.sees(".mmp-inspector", "waiting for")
        causes = opened.page.locator(".mmp-causes li").all_inner_texts()
        names = [re.match(r"[FB]\d on stage \d", words)[0] for words in causes]
        assert names[0] == "F0 on stage 0" and names[-2:] == ["B0 on stage 2", "B0 on stage 1"]


def test_a_microbatch_is_followed(browser, folder) -> None:
    with Opened(browser, folder, "replay.html", "#replay.follow=2") as opened:
        way = opened.replay("replay.scene.route(2).map((step) => [step.kind, step.rank])")
        down = [[kind, rank] for rank in range(3) for kind in ("work", "message")]
        up = [[kind, rank] for rank in (3, 2, 1) for kind in ("work", "message")]
        assert way == [*down, ["work", 3], *up, ["work", 0]]
        opened.sees(".mmp-narration", "Stage 0 runs the forward")
        opened.page.get_by_role("button", name="Next", exact=True).click()
        opened.sees(".mmp-narration", "sends its output to stage 1")
        opened.sees(".mmp-sourceline", "p2p.")
        opened.address_has("replay.follow=2")


def test_what_an_address_asks_for_is_checked(browser, folder) -> None:
    fragment = "#replay.recording=none&replay.pipeline=-1&replay.at=9:F9"
    with Opened(browser, folder, "replay.html", fragment) as opened:
        for words in ("recording = “none”", "pipeline = “-1”", "This step has no 9:F9"):
            opened.sees(".mmp-status", words)
        assert "NaN" not in opened.text(".mm-replay")
    recording = json.loads((ROOT / "docs" / "recordings" / "1f1b.json").read_text())
    call = recording["steps"][0]["ranks"][2]["events"][16]["i"]
    with Opened(browser, folder, "replay.html", f"#recording=1f1b&call=2:{call}") as opened:
        assert opened.replay("[replay.name, replay.current.rank, replay.current.event.i]") == [
            "1f1b",
            2,
            call,
        ]


def test_the_last_recording_asked_for_is_shown(browser, folder) -> None:
    """Also where the one before it is there only after it."""
    with Opened(browser, folder, "replay.html", "#replay.recording=1f1b-paced") as opened:
        title = opened.replay("replay.data.title")
        opened.page.evaluate(
            """async () => {
              const replay = document.querySelector(".mm-replay").mmReplay;
              await Promise.all(["interleaved-paced", "1f1b-paced"].map((name) => replay.open(name)));
            }"""
        )
        assert opened.replay("replay.data.title") == title
        assert opened.page.locator(".mmp-status").is_hidden()


def test_a_link_to_the_end_is_good(browser, folder) -> None:
    """The address has whole milliseconds, and the step may end before the next one."""
    lengths = {
        path.stem: json.loads(path.read_text())["steps"][0]["length"]
        for path in sorted((ROOT / "docs" / "recordings").glob("*.json"))
    }
    ends_before = [name for name, length in lengths.items() if length / 1000 % 1 > 0.5]
    with Opened(browser, folder, "replay.html", f"#replay.recording={ends_before[0]}") as opened:
        opened.page.get_by_role("button", name="To the end").click()
        assert opened.replay("1000 * replay.values().t > replay.step.length")
        opened.replay("replay.goAsAsked(replay.values(), [])")
        expect(opened.page.locator(".mmp-status")).to_be_hidden()
        assert opened.replay("replay.timeline.marks.t === replay.step.length")
        opened.replay("replay.goAsAsked({ t: 99999 }, [])")
        opened.sees(".mmp-status", "asks for t = 99999, which does not exist")


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
            ids = opened.replay("[...replay.scene.ids.keys()]")
            assert len(ids) == len(set(ids))


def test_g_the_time_line_cuts_through_no_number(browser, folder) -> None:
    """On a phone, at every moment: paints with a pen that only notes what it is told."""
    with Opened(browser, folder, "replay.html") as opened:
        found = opened.page.evaluate("""() => {
          const {timeline, step} = document.querySelector(".mm-replay").mmReplay;
          const {view, colours, shades} = timeline;
          const layout = MM.draw.measure(view, 328), cut = [];
          let numLines = 0;
          const isNow = ([x, , to, , colour]) => x === to && colour === colours.mark;
          const isNumber = ([x, y]) => x > layout.names && y < layout.bottom;
          for (let t = 0; t < step.length; t += step.length / 97) {
            const lines = [], numbers = [];
            const pen = new Proxy({}, {get: (_, name) => (...given) => {
              if (name === "line" && isNow(given)) lines.push(given);
              if (name === "text" && isNumber(given)) numbers.push(given);
            }});
            MM.draw.paint(pen, view, layout, {...timeline.marks, t}, colours, shades);
            numLines += lines.length;
            for (const [x, top, , bottom] of lines)
              for (const [middle, base, words, {size}] of numbers) {
                const isBeside = Math.abs(middle - x) >= 0.28 * size * words.length;
                if (!isBeside && top < base && bottom > base - 0.7 * size) cut.push([t, words]);
              }
          }
          return [cut, numLines];
        }""")
        assert found[0] == [] and found[1] > 97
