"""The schedule player in a browser, opened as a file: by mouse, by keyboard alone, by fingers."""

import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from minimegatron.planner.plan import plan
from minimegatron.planner.simulator import Costs, simulate
from minimegatron.planner.svg_shapes import contrast
from tests.docs.player_pages import Opened, Shared, write_pages
from tests.figures import figure

SIZES = [(1440, 900), (1024, 768), (768, 1024), (360, 740)]
MAX_REDRAW_MS = {"p=8&M=64": 50, "schedule=interleaved&p=16&M=128&v=2": 150}
SHOWN = "header:visible, .mmp-inspector:visible"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Path:
    return write_pages(tmp_path_factory.mktemp("player"), site)


@pytest.fixture(scope="module")
def shared(browser, folder) -> Iterator[Shared]:
    with Shared(browser, folder, "player.html") as opened:
        yield opened


@pytest.fixture
def shown(shared):
    """`with shown(fragment) as opened`: in the page that most tests share."""
    return shared.shown


# -- What is shown --


def test_figures_beside_formulas(shown) -> None:
    with shown() as opened:
        for words in ("33", "27.3 %", "3/11", "37.5 %", "3/8", "4 3 2 1", "min(M, p − r)"):
            opened.sees(".mmp-figurebox", words)
        opened.page.get_by_role("radio", name="GPipe").check()
        opened.sees(".mmp-figurebox", "8 8 8 8")
        opened.page.get_by_text("Times, balance, memory").click()
        opened.page.get_by_label("Memory cap, microbatches").fill("4")
        opened.sees(".mmp-figurebox", "4 stages above the cap of 4")
        opened.page.get_by_label("Work of stage 2").press("ArrowRight")
        opened.sees(".mmp-figurebox", "with equal stages, free messages")


def test_one_stage_is_drawn_as_what_was_chosen(shown) -> None:
    """Combined 1F1B has pairs on one stage too; what needs a pipeline becomes "no pipelining"."""
    num_pairs = "player.scenes.map((scene) => scene.plan.ranks[0].filter((x) => x.parts).length)"
    words = "each backward follows its forward"
    with shown("#schedule=combined&p=1&M=4") as opened:
        assert opened.player(num_pairs) == [3]
        opened.sees(".mmp-figurebox", "1 (+ a layer)")
        assert words not in opened.text(".mm-player")
    with shown("#schedule=1f1b&p=1&M=4&vs=combined") as opened:
        assert opened.player(num_pairs) == [0, 3]
        opened.sees(".mm-player", words)


@pytest.mark.parametrize("sizes", MAX_REDRAW_MS)
def test_a_change_is_drawn_at_once(shown, sizes) -> None:
    with shown(f"#{sizes}") as opened:
        times = opened.page.evaluate(
            """async () => {
              const player = document.querySelector(".mm-player").mmPlayer, times = [];
              for (let number = 0; number < 20; number++) {
                await new Promise(requestAnimationFrame);
                const before = performance.now();
                player.set("f", 1 + (number % 5) / 4);
                times.push(performance.now() - before);
              }
              return times;
            }"""
        )
        median, least = statistics.median(times), min(times)
        figure(f"{sizes} redrawn in {median:.1f} ms (median of {len(times)}; least {least:.1f})")
        assert least < MAX_REDRAW_MS[sizes]


def test_numbers_or_density(shown) -> None:
    """Bars below 6 pixels become a density; what is chosen is seen in both, and zooming brings bars."""
    with shown("#schedule=1f1b&p=16&M=128") as opened:
        assert opened.player("player.timeline.layout.isDense")
        opened.sees(".mmp-legend", "zoom in for single bars")
        opened.player("player.timeline.zoomTo(12)")
        assert not opened.player("player.timeline.layout.isDense")
        expect(opened.page.locator(".mmp-map")).to_be_visible()
        opened.player("player.timeline.centre(player.timeline.layout.width / 2)")
        assert opened.player("player.timeline.scroller.scrollLeft") > 1000


def test_what_is_chosen_is_seen_on_every_kind(shown) -> None:
    with shown() as opened:
        shades = opened.page.evaluate("MM.orders.shades")
        fills = [fill for kinds in shades.values() for of in kinds.values() for fill, *_ in of]
        for scheme in ("light", "dark"):
            opened.page.emulate_media(color_scheme=scheme)
            opened.page.wait_for_timeout(50)
            colours = opened.player("MM.painters.readColours(player.timeline.box)")
            rings = colours["outer"], colours["inner"]
            assert contrast(*rings) > 10
            for fill in [*fills, colours["track"], colours["held"], colours["transfer"]]:
                assert max(contrast(ring, fill) for ring in rings) >= 4, fill


# -- Asking --


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
        opened.sees(".mmp-inspector", "Stage 0: forward of microbatch 3")
        opened.keys("ArrowRight")
        opened.sees(
            ".mmp-inspector",
            "Stage 0 computes nothing for 6 units: it waits for B0 on stage 1",
        )
        opened.sees(".mmp-inspector", "A forward takes 1 unit here.")
        opened.sees(".mmp-inspector", "waiting for B0 on stage 1, which ends at 10")
        expect(opened.page.locator("[aria-live]").first).to_contain_text("idle for 6 units")
        opened.keys("Enter")
        assert opened.page.evaluate("document.activeElement.className") == "mmp-inspector-body"
        opened.keys("Escape")
        expect(opened.page.locator(".mmp-inspector")).to_be_hidden()
        opened.keys("ArrowDown", "+", "0", " ")
        opened.sees(".mmp-play", "Pause")
        opened.keys(" ")
        opened.sees(".mmp-play", "Play")


def test_an_action_leads_to_its_source(shown) -> None:
    with shown("#player.p=4&player.at=1:F0") as opened:
        for words in ("Needs", "F0 on stage 0", "recv_forward", "input_tensor"):
            opened.sees(".mmp-inspector", words)
        chain = opened.page.locator(".mmp-chain a")
        links = chain.evaluate_all("all => all.map(a => a.href)")
        schedules = "minimegatron.core.pipeline_parallel.schedules"
        assert any(
            re.search(rf"/source/{re.escape(schedules)}\.html#L\d+$", link) for link in links
        )
        assert links[-1].endswith("minimegatron.core.pipeline_parallel.steps.html#forward_step")


def test_a_gap_is_explained_down_to_its_root(shown) -> None:
    with shown("#player.at=0:idle-before-B0") as opened:
        opened.page.locator(".mmp-inspector details summary").first.click()
        items = opened.page.locator(".mmp-causes li").all_inner_texts()
        names = [re.match(r"[FB]\d on stage \d", item)[0] for item in items]
        down = [f"F0 on stage {rank}" for rank in range(4)]
        assert names == down + [f"B0 on stage {rank}" for rank in (3, 2, 1, 0)]
        assert "the root" in items[0]
        assert opened.player("player.timeline.marks.paths[0].length") == 8
        opened.page.get_by_role("button", name="B0 on stage 3").click()
        opened.sees(".mmp-inspector h3", "Stage 3: backward of microbatch 0")


def test_the_critical_path_is_one_line(shown) -> None:
    step = simulate(plan("1f1b", 4, 8), Costs(1, 2))
    with shown("#player.critical=1") as opened:
        path = opened.player("player.timeline.marks.paths[0].map((x) => [x.track, x.s])")
        assert path == [[rank, step.starts[rank][i]] for rank, i in step.critical_path()]


def test_one_microbatch_is_followed(shown) -> None:
    with shown("#player.c=0.25") as opened:
        opened.page.get_by_role("button", name="Follow a microbatch").click()
        opened.page.locator(".mmp-followhead select").select_option("3")
        said = []
        for _ in range(13):
            said.append(opened.text(".mmp-narration"))
            assert opened.page.locator(".mmp-sourceline").inner_text().strip()
            opened.page.get_by_role("button", name="Next", exact=True).click()
        said.append(opened.text(".mmp-narration"))
        way = ["runs the forward", "sends its output"] * 3 + ["runs the forward"]
        way += ["runs the backward", "sends the gradient"] * 3 + ["runs the backward"]
        for words, sentence in zip(way, said, strict=True):
            assert words in sentence
        stages = [int(re.match(r"Stage (\d)", sentence)[1]) for sentence in said]
        assert stages == [0, 0, 1, 1, 2, 2, 3, 3, 3, 2, 2, 1, 1, 0]
        opened.address_has("player.follow=3")
        opened.page.get_by_role("button", name="Stop following").click()
        expect(opened.page.locator(".mmp-inspector")).to_be_hidden()


def test_the_focus_stays_where_a_reader_works(shown) -> None:
    focused = "document.activeElement.dataset.name ?? document.activeElement.className"
    with shown() as opened:
        opened.page.locator(".mmp-timeline").press("Home")
        opened.page.get_by_role("button", name="B0 on stage 0").press("Enter")
        opened.sees(".mmp-inspector h3", "Stage 0: backward of microbatch 0")
        assert opened.page.evaluate(focused) == "mmp-inspector-body"
        opened.page.locator(".mmp-close").press("Enter")
        assert opened.page.evaluate(focused) == "mmp-timeline"
        opened.player("player.follow(2)")
        for place in (1, 2):
            opened.keys("Enter")
            assert opened.player("player.following.place") == place
            assert opened.page.evaluate(focused) == "on"
        opened.player("player.following.move(Infinity)")
        assert opened.page.evaluate(focused) == "back"  # there is nothing after it
        opened.page.locator(".mmp-timeline").focus()
        opened.keys("ArrowLeft", "ArrowLeft")
        assert opened.player("player.following.place") == 11
        assert opened.page.evaluate(focused) == "mmp-timeline"
        opened.page.locator(".mmp-timeline").press(" ")  # play is of the way, not of the step
        assert opened.player("Boolean(player.following.timer) && !player.clock.running")


def test_a_followed_microbatch_is_found_again(shown) -> None:
    fragment = "#player.vs=gpipe&player.follow=b|2&player.step=3&player.critical=1"
    with shown(fragment) as opened:
        state = "[player.following.scene.prefix, player.following.mb, player.following.place]"
        assert opened.player(state) == ["b|", 2, 3]
        opened.player("player.set('messages', 1)")
        assert opened.player(state) == ["b|", 2, 3]
        assert opened.player("player.timeline.marks.paths.length") == 2


def test_two_schedules_on_one_axis(shown) -> None:
    with shown() as opened:
        opened.page.get_by_label("Compare with").select_option("interleaved")
        opened.sees(".mmp-figurebox", "Interleaved 1F1B, 4 stages, 2 chunks per stage")
        other = float(simulate(plan("interleaved", 4, 8, 2), Costs.of_stages(1, 2, 2)).makespan)
        assert opened.player("player.scenes.map(({ step }) => step.makespan)") == [33, other]
        assert opened.player("player.timeline.view.span") == 33
        assert opened.player("player.timeline.view.tracks.length") == 8
        opened.player("player.timeline.choose('b|2:F0.1')")
        opened.sees(".mmp-inspector h3", "Stage 2: forward of microbatch 0, chunk 1")
        opened.address_has("player.vs=interleaved")


def test_wrong_predictions_are_explained(shown) -> None:
    needs = re.compile("needs (F0 of this very stage first|the gradient that B0 makes on stage 2)")
    too_much = re.compile("Stage 1 has done its 2 warm-up forwards|needs the activation")
    with shown() as opened:
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
        opened.sees(".mmp-score", "4 of 16 done, 2 wrong")
        # Nothing on the page, and no key, tells what is to be predicted.
        expect(opened.page.locator(".mmp-spoiler:visible, .mmp-figurebox:visible")).to_have_count(0)
        opened.player("player.set('critical', 1)")
        assert opened.player("player.timeline.marks.paths") is None
        opened.page.locator(".mmp-timeline").press(" ")
        assert not opened.player("player.clock.running")
        opened.player("player.timeline.choose('1:F0')")
        assert "Needed by" not in opened.text(".mmp-inspector")
        opened.page.get_by_role("button", name="Follow a microbatch").click()
        opened.sees(".mmp-narration", "Stage 0 runs the forward")
        expect(opened.page.locator(".mmp-quiz")).to_have_count(0)


def test_a_link_to_what_is_predicted(shown) -> None:
    """It opens without complaint, also from the middle; a place that it asks for stays hidden."""
    with shown("#player.predict=1") as opened:
        answers = opened.page.get_by_role("group", name="Answers").get_by_role("button")
        answers.get_by_text("F0", exact=True).click()
        opened.player("player.timeline.choose('0:F0')")
        assert opened.player("player.timeline.marks.t") > 0
        opened.address_has("player.predict=1")
        address = opened.player("player.address.with(player.values())")
        assert "player.t=" not in address and "player.at=" not in address
    with shown(address) as opened:
        expect(opened.page.locator(".mmp-quiz")).to_have_count(1)
        expect(opened.page.locator(".mmp-status")).to_be_hidden()
    for place in ("t=5", "at=0:B0", "follow=2"):
        with shown(f"#player.predict=1&player.{place}") as opened:
            opened.sees(".mmp-status", "is hidden")
            assert opened.player("player.timeline.marks.chosen") is None


# -- In view, whatever the screen --


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_answer_is_in_view(shown, size) -> None:
    """Of the first and of the last stage, before anybody scrolls; and the bar is not beneath it."""
    with shown() as opened:
        opened.page.set_viewport_size({"width": size[0], "height": size[1]})
        for id in ("0:F0", "3:B7", "1:idle-before-B0"):
            opened.player(f"player.timeline.choose({id!r})")
            answer = opened.page.locator(".mmp-inspector h3").bounding_box()
            source = opened.page.locator(".mmp-inspector").bounding_box()
            bar = opened.player(f"player.timeline.boxOf({id!r}).toJSON()")
            assert answer["y"] >= 0 and answer["y"] + answer["height"] <= size[1], id
            assert answer["x"] >= 0 and answer["x"] + answer["width"] <= size[0], id
            assert bar["top"] >= 0 and bar["bottom"] <= size[1], id
            beside = bar["right"] <= source["x"] or bar["bottom"] <= source["y"]
            assert beside, (id, bar, source)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= size[0]


@pytest.mark.parametrize("size", SIZES[:2], ids=str)
def test_the_last_of_many_stages_is_in_view(shown, size) -> None:
    with shown("#player.p=16&player.M=16") as opened:
        opened.page.set_viewport_size({"width": size[0], "height": size[1]})
        opened.player("player.timeline.choose('15:F3')")
        bar = opened.player("player.timeline.boxOf('15:F3').toJSON()")
        assert bar["top"] >= 0 and bar["bottom"] <= size[1]
        opened.player("player.timeline.zoomTo(5)")
        opened.page.emulate_media(media="print")
        opened.page.wait_for_function(
            "document.querySelector('.mm-player').mmPlayer.timeline.zoom === 1"
        )
        expect(opened.page.locator(".mmp-printed")).to_have_text("1F1B, 16 stages, 16 microbatches")
        expect(opened.page.locator(".mmp-controls")).to_be_hidden()


def test_fingers_zoom_choose_and_read(browser, folder) -> None:
    viewport = {"width": 360, "height": 740}
    phone = {"viewport": viewport, "has_touch": True, "is_mobile": True}
    with Opened(browser, folder, "player.html", "#player.p=4&player.M=32", **phone) as opened:
        opened.player("player.timeline.box.scrollIntoView({ block: 'start' })")
        buttons = opened.page.locator(".mmp button:visible:not(.mmp-link)").all()
        sizes = [button.bounding_box() for button in buttons]
        assert len(sizes) >= 10
        assert all(box["height"] >= 44 and box["width"] >= 44 for box in sizes)
        pitch = opened.player("player.timeline.layout.tracks.map((x) => x.top)")
        assert all(below - above >= 44 for above, below in zip(pitch, pitch[1:], strict=False))
        box = opened.page.locator(".mmp-timeline canvas").bounding_box()
        x, y = box["x"] + 180, box["y"] + 60
        fingers = opened.context.new_cdp_session(opened.page)

        def touch(kind: str, *spread: float) -> None:
            points = [{"x": x + side, "y": y, "id": n} for n, side in enumerate(spread)]
            fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", -30, 30)
        for spread in (45, 70, 100, 120):
            touch("touchMove", -spread, spread)
        touch("touchEnd")
        zoom = opened.player("player.timeline.zoom")
        assert 3 < zoom < 5
        expect(opened.page.locator(".mmp-map")).to_be_visible()
        opened.page.touchscreen.tap(x, y)
        title = opened.page.locator(".mmp-inspector h3")
        expect(title).to_be_in_viewport()
        assert re.match(r"Stage \d", title.inner_text())
        opened.page.locator(".mmp-close").tap()
        expect(opened.page.locator(".mmp-inspector")).to_be_hidden()


def test_g_numbers_that_cannot_be_are_said(browser, folder) -> None:
    """Beside the field; the picture keeps the last number that can."""
    with Opened(browser, folder, "player.html") as opened:
        page = opened.page
        page.locator(".mmp-more summary").first.click()
        step = page.locator(".mmp-figures dd").first
        before = step.inner_text()
        for name, texts in {
            "Forward": ["", "0", "-1", "1e9"],
            "Backward": ["0", "-2"],
            "Message": ["", "-1"],
            "Memory cap": ["1.5", "-1", "5000"],
        }.items():
            field = page.locator(".mmp-grid .mmp-field", has_text=name).first
            for text in texts:
                field.locator("input").fill(text)
                expect(field.locator(".mmp-fault")).to_contain_text("the picture has")
                expect(field.locator("input")).to_have_attribute("aria-invalid", "true")
                assert step.inner_text() == before
            field.locator("input").fill("" if name == "Memory cap" else "2")
            expect(field.locator(".mmp-fault")).to_be_empty()
            page.locator(".mmp-tools button", has_text="Reset").click()


def test_a_small_one_answers_inside(browser, folder) -> None:
    with Opened(browser, folder, "small.html") as opened:
        opened.sees(".mmp-inspector", "nothing for 6 units: it waits for B0 on stage 1")
        opened.sees(".mmp-inspector", "waiting for B0 on stage 1")
        assert (
            opened.page.evaluate(
                "getComputedStyle(document.querySelector('.mmp-inspector')).position"
            )
            == "static"
        )


@pytest.mark.parametrize("name", ["player.html", "replay.html", "small.html"])
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


# -- The address --


def test_the_address_holds_the_state(browser, folder) -> None:
    with Opened(browser, folder, "player.html") as opened:
        opened.page.get_by_role("radio", name="Interleaved").check()
        timeline = opened.page.locator(".mmp-timeline")
        expect(timeline).to_have_attribute("aria-label", re.compile("Interleaved 1F1B"))
        opened.page.get_by_role("slider", name="Microbatches").press("ArrowRight")
        opened.page.locator(".mmp-timeline").press("Home")
        opened.address_has("player.at=")
        address = opened.page.evaluate("location.hash")
        label = opened.page.get_attribute(".mmp-timeline", "aria-label")
        details = opened.text(".mmp-inspector")
    with Opened(browser, folder, "player.html", address) as again:
        expect(again.page.locator(".mmp-timeline")).to_have_attribute("aria-label", label)
        again.sees(".mmp-inspector", details)


def test_each_widget_has_its_own_part(browser, folder) -> None:
    fragment = "#player2.p=8&replay.at=1:B2&player.M=4"
    with Opened(browser, folder, "three.html", fragment) as opened:
        assert opened.player("[player.state.p, player.state.M]") == [4, 4]
        assert opened.player("[player.state.p, player.state.schedule]", 1) == [8, "gpipe"]
        assert opened.replay("replay.current.event.id") == "1:B2"
        opened.player("player.set('M', 16)", 1)
        opened.address_has("player2.M=16")
        address = opened.page.evaluate("location.hash")
        assert "replay.at=1:B2" in address and "player.M=4" in address
        opened.page.evaluate("location.hash = '#player.M=12'")
        opened.page.wait_for_function(
            "document.querySelector('.mm-player').mmPlayer.scene.plan.config.M === 12"
        )
        assert opened.player("player.state.M", 1) == 16


ASKED = {
    "#schedule=1f1b&p=4&t=foo": "t = “foo”",
    "#player.f=1e308": "f = “1e308”",
    "#player.f=-1&player.b=NaN": "f = “-1”",
    "#player.p=17": "a whole number from 1 to 16",
    "#player.p=9": "no plan for 9",
    "#player.M=1e9": "a whole number from 1 to 128",
    "#player.schedule=zigzag": "one of gpipe, 1f1b, interleaved",
    "#player.at=7:F99": "This step has no 7:F99; its stages are 0 to 3",
    "#player.at=%3Cb%3E": "the name of something",
    "#player.vs=breadth-first&player.p=4&player.M=31": "nothing to compare with",
    "#player.balance=1,2,x": "balance",
    "#player.balance=1,2": "2 factors of work, but there are 4 stages",
    "#player.follow=120": "asks for follow = 120, which does not exist",
    "#player.t=999": "asks for t = 999, which does not exist",
    "#player.v=2": "1F1B runs one chunk per stage",
    "#player.schedule=interleaved&player.v=2&player.G=5": "no plan for 5",
    "#player.vs=1f1b": "shown already",
    "#player.vs=zz": "one of gpipe",
    "#player.foo=1": "player.foo, but nothing here has that name",
}
"""Address -> what the player says of it, instead of showing something else without a word."""


def test_what_an_address_asks_for_is_checked(browser, folder) -> None:
    first, *others = ASKED
    with Opened(browser, folder, "player.html", first) as opened:
        for fragment in (first, *others):
            if fragment != first:
                opened.page.evaluate("hash => { location.hash = hash }", fragment)
            opened.sees(".mmp-status", ASKED[fragment])
            text = re.sub("“.*?”", "", opened.text(".mm-player"))
            assert "NaN" not in text and "Infinity" not in text
            assert 0 < opened.player("player.scene.step.makespan") < 1000


def test_addresses_whose_orders_are_on_their_way(browser, folder) -> None:
    """Nothing is shown before they are there, and nothing of an address after which another came."""
    state = "[player.state.schedule, player.state.p, player.state.M, player.timeline.marks.chosen]"
    open_all = """async (fragments) => {
      const player = document.querySelector(".mm-player").mmPlayer, opened = [];
      player.reset();
      for (const fragment of fragments) {
        history.replaceState(null, "", fragment);
        opened.push(player.openAsAsked(false));
      }
      await Promise.all(opened);
    }"""
    late = "#player.schedule=interleaved&player.v=2&player.p=8&player.at=0:F0.0"
    other = "#player.schedule=breadth-first&player.v=2&player.p=8&player.at=0:F0.0"
    with Opened(browser, folder, "player.html", "#player.predict=1") as opened:
        opened.page.evaluate(open_all, [late])
        assert opened.player(state) == ["interleaved", 8, 8, "0:F0.0"]
        expect(opened.page.locator(".mmp-quiz")).to_have_count(0)
        opened.page.evaluate(open_all, [other, "#player.M=12"])
        assert opened.player(state) == ["1f1b", 4, 12, None]
        expect(opened.page.locator(".mmp-status")).to_be_hidden()


def test_an_address_that_is_given_is_not_written_over(browser, folder) -> None:
    """By what the player was about to write of the state before."""
    with Opened(browser, folder, "player.html") as opened:
        opened.page.evaluate(
            """() => {
              document.querySelector(".mm-player").mmPlayer.set("M", 12);
              location.hash = "#player.M=16";
              for (const end = performance.now() + 200; performance.now() < end; );
            }"""
        )
        opened.page.wait_for_timeout(300)
        assert opened.player("player.state.M") == 16
        assert opened.page.evaluate("location.hash").endswith("player.M=16")


def test_the_largest_sizes_and_links_of_before(shown) -> None:
    fragment = "#schedule=interleaved&p=16&M=128&v=2"
    with shown(fragment) as opened:
        assert opened.player("[player.state.p, player.state.M, player.state.v]") == [16, 128, 2]
        assert opened.player("player.scene.plan.ranks.length") == 16
        expect(opened.page.locator(".mmp-status")).to_be_hidden()


def test_a_link_can_be_copied(shown) -> None:
    with shown() as opened:
        opened.player("player.set('M', 12)")
        opened.page.get_by_role("button", name="Copy link").click()
        shown = opened.page.locator(".mmp-copied")
        expect(shown).not_to_be_empty()
        link = opened.player("player.address.link(player.values())")
        assert link.endswith("player.html#player.schedule=1f1b&player.p=4&player.M=12")


# -- Files, tables, motion --


def test_svg_and_table_say_the_same(shown) -> None:
    with shown("#player.vs=gpipe") as opened:
        with opened.page.expect_download() as waiting:
            opened.page.get_by_role("button", name="Save as SVG").click()
        picture = ElementTree.parse(waiting.value.path()).getroot()
        texts = ["".join(node.itertext()) for node in picture.iter() if node.tag.endswith("}text")]
        assert "stage 3" in texts
        assert sum(text.isdigit() for text in texts) >= 128
        for words in ("forward", "backward", "idle", "activations held"):
            assert words in texts
        assert any("player.vs=gpipe" in text for text in texts)
        opened.page.get_by_text("The same as a table").click()
        # Drawn once the browser has told that the table was opened.
        rows = opened.page.locator(".mmp-table tbody tr").filter(has_text=re.compile(r"[FB]\d"))
        expect(rows.nth(127)).to_be_attached()
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
              return [...seen].every((t) => t === 0 || t === null || player.endings().includes(t));
            }"""
        )
