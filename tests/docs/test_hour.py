"""What the pages of the hour share: one drawing of 1F1B, the calls of a step, two controls."""

import importlib
import re

import pytest
from playwright.sync_api import expect

from tests.docs.conftest import Watched

drawing = importlib.import_module("cases.step_drawing")
chain = importlib.import_module("cases.chain_table")
cases = importlib.import_module("cases.cases")
tour = importlib.import_module("tour.tour")

HOUR = tour.pages_of(tour.read_routes()[0])
MARKS = {
    "phases": ("phases",),
    "forward": ("work", ("forward", 2, 3)),
    "backward": ("work", ("backward", 2, 3)),
    "messages": ("messages", 1, 2),
    "end": ("end",),
}


def bars(svg: str) -> list[tuple[bool, str, int, int]]:
    """(marked, title, left edge, width) of each bar."""
    found = re.findall(
        r'<g( class="mm-faint")?><title>(.+?)</title><rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"',
        svg,
    )
    return [
        (not faint, title, round(float(x)), round(float(w)) + 1) for faint, title, x, w in found
    ]


@pytest.mark.parametrize("about", MARKS)
def test_each_drawing_has_the_same_bars_and_they_are_the_plans(about):
    step, shown = cases.step("1f1b", 4, 8), bars(drawing.step_drawing(*MARKS[about]))
    wanted = {}
    for rank in range(4):
        for index, action in enumerate(step.plan.ranks[rank]):
            if action.kind in ("forward", "backward"):
                start, end = step.starts[rank][index], step.ends[rank][index]
                title = f"stage {rank}: {action.kind} of microbatch {action.microbatch}"
                wanted[title] = (start, end - start)
    assert len(shown) == len(wanted) == 2 * 4 * 8
    for _, title, left, width in shown:
        start, length = wanted[title]
        assert abs(left - (drawing.LEFT + drawing.UNIT * start)) <= 1, title
        assert abs(width - drawing.UNIT * length) <= 1, title


def marked(about: str) -> list[str]:
    return [
        title for is_marked, title, *_ in bars(drawing.step_drawing(*MARKS[about])) if is_marked
    ]


def test_a_drawing_marks_what_its_page_is_about():
    assert len(marked("phases")) == 64
    assert marked("forward") == ["stage 2: forward of microbatch 3"]
    assert marked("backward") == ["stage 2: backward of microbatch 3"]
    assert marked("end") == [f"stage {rank}: backward of microbatch 7" for rank in range(4)]
    both = marked("messages")
    assert {title[:7] for title in both} == {"stage 1", "stage 2"}
    # Stage 1 warms up with two forwards and cools down with as many backwards; stage 2 with one.
    assert len(both) == (16 - 4) + (16 - 2)


def test_arrows_go_from_the_end_of_work_to_the_beginning_of_the_next():
    for about, number in (("forward", 2), ("backward", 2), ("messages", 6 + 6)):
        arrows = re.findall(
            r'class="mm-way" x1="(\d+)" y1="(\d+)" x2="(\d+)" y2="(\d+)"',
            drawing.step_drawing(*MARKS[about]),
        )
        assert len(arrows) == number, about
        assert all(int(x1) < int(x2) for x1, _, x2, _ in arrows), about
        downward = [int(y1) < int(y2) for _, y1, _, y2 in arrows]
        assert all(downward) is (about == "forward")
        assert any(downward) is (about != "backward")


def test_pages_of_the_hour_share_the_drawing():
    having = [page.page for page in HOUR if "step_drawing(" in page.text]
    assert having == [
        "one-f-one-b",
        "forward-step",
        "backward-step",
        "p2p",
        "after-the-last-backward",
    ]
    # No other drawing of that step is on them but the player's and the replay's.
    assert not any('timeline("1f1b", 4, 8)' in page.text for page in HOUR)


def test_the_way_down_and_up_is_as_often_as_the_plan_says():
    calls = {path[-1]: number for path, number in chain.chain_calls().items()}
    plan = cases.plan("1f1b", 4, chain.num_microbatches())
    names = [a.kind for a in plan.work(chain.RANK)]
    assert (
        calls["steps.forward_step"] == calls["pretrain_gpt.forward_step"] == names.count("forward")
    )
    assert calls["backward_step"] == names.count("backward")
    assert (
        calls["train_step"] == calls["finalize_model_grads"] == calls["MegatronOptimizer.step"] == 1
    )
    above = {path[-1]: path[:-1] for path in chain.chain_calls()}
    schedule = "forward_backward_pipelining_without_interleaving"
    assert above["finalize_model_grads"] == ("train_step", schedule)
    assert above["MegatronOptimizer.step"] == ("train_step",)
    assert above["pretrain_gpt.forward_step"][-2:] == ("one_f_one_b", "steps.forward_step")


# -- The player with two controls --


def test_the_first_player_starts_with_two_controls(browser, address):
    with Watched(browser, (address,), viewport={"width": 1440, "height": 900}) as watched:
        page = watched.page
        page.goto(f"{address}tour/train-step.html")
        player = page.locator(".mm-player[data-ready]")
        inputs = player.locator("input:visible, select:visible, button:visible")
        expect(inputs).to_have_count(2)
        assert [inputs.nth(i).get_attribute("type") for i in (0, 1)] == ["range", "range"]
        # Both work, and what they change is said.
        inputs.nth(1).focus()
        page.keyboard.press("End")
        expect(player.locator(".mmp-figurebox")).to_contain_text(str(3 * (4 + 128 - 1)))
        player.locator(".mmp-rest > summary").focus()
        page.keyboard.press("Enter")
        assert inputs.count() > 12
        player.get_by_label("GPipe", exact=True).first.check()
        expect(
            player.locator(".mmp-timeline [role=application], .mmp-timeline").first
        ).to_be_visible()
        page.wait_for_url(re.compile("schedule=gpipe"))


def test_an_address_that_asks_for_more_opens_more(browser, address):
    with Watched(browser, (address,), viewport={"width": 1440, "height": 900}) as watched:
        page = watched.page
        page.goto(f"{address}tour/train-step.html#player.schedule=gpipe")
        rest = page.locator(".mm-player[data-ready] .mmp-rest")
        expect(rest).to_have_attribute("open", "")
        page.goto(f"{address}index.html")
        page.goto(f"{address}tour/train-step.html#player.M=16")
        expect(page.locator(".mm-player[data-ready] .mmp-rest")).not_to_have_attribute("open", "")
