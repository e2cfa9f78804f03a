"""The pages of unrolled steps: every recorded line, every call of the replay, what was edited since."""

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from minimegatron.tracing.unrolled_page import page_text
from tests.docs.conftest import Watched

ROOT = Path(__file__).parents[2]
UNROLLED = ROOT / "docs" / "recordings" / "unrolled"
NAMES = sorted(path.stem for path in UNROLLED.glob("*.json") if path.stem != "functions")
MAX_BYTES = 300_000
MANY = ("one-rank", "1f1b-paced", "zero1", "combined-paced")


@pytest.fixture(scope="module")
def pages():
    return importlib.import_module("pages.unrolled_pages")


@pytest.fixture
def site_page(browser, address: str) -> Iterator[Page]:
    """A page of the site; addresses are relative to it."""
    with Watched(browser, (address,), base_url=address) as watched:
        yield watched.page


# -- The data --


def test_there_is_one_of_each_kind(pages) -> None:
    found = pages.read_unrolled()
    assert list(found)[: len(pages.FIRST)] == list(pages.FIRST)
    assert set(found) == set(importlib.import_module("player.emit_player").read_recordings())
    assert {name: len(data["ranks"]) for name, data in found.items()} == {
        name: int(re.search(r"--nproc-per-node (\d+)", data["provenance"]["command"])[1])
        for name, data in found.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_no_function_is_gone(name: str, pages, package) -> None:
    explained = pages.explain(name, pages.read_unrolled()[name], package)
    gone = [
        function[0]
        for function, links in zip(explained["functions"], explained["links"], strict=True)
        if links.get("status") == pages.GONE
    ]
    assert not gone, "run make traces"
    without_page = [n for n, links in enumerate(explained["links"]) if "tour" not in links]
    assert not without_page, [explained["functions"][n][0] for n in without_page]


@pytest.mark.parametrize("name", NAMES)
def test_every_call_of_the_replays_stacks_is_in_it(name: str, pages) -> None:
    recording = json.loads((ROOT / "docs" / "recordings" / f"{name}.json").read_text())
    ranks = {rank["rank"]: rank for rank in pages.read_unrolled()[name]["ranks"]}
    data, num_without, num_events = pages.read_unrolled()[name], 0, 0
    for step in recording["steps"]:
        for owner in step["ranks"]:
            nodes = ranks[owner["rank"]]["nodes"]
            for event in owner["events"]:
                num_events += 1
                if "u" not in event:
                    num_without += 1
                    continue
                own, source = recording["functions"][event["f"]]
                path = _functions_above(nodes, event["u"], data)
                assert path[-1] == recording["sources"][source][0], own
                _check_stack(recording, event, path)
    # A wait comes where a neighbour is late: not always in both of the two steps.
    assert num_without <= 0.02 * num_events


def _functions_above(nodes: list, number: int, data: dict) -> list[str]:
    """Names of the functions from the step down to a call."""
    path = []
    while number >= 0:
        path.append(data["functions"][data["views"][nodes[number][0]][0]][0])
        number = nodes[number][1]
    return path[::-1]


def _check_stack(recording: dict, event: dict, path: list[str]) -> None:
    """From `train_step` on, each frame of the stack is a call of the path, in order."""
    names = [
        recording["sources"][recording["frames"][n][0]][0] for n in recording["stacks"][event["st"]]
    ]
    assert path[0] in names
    above = iter(path)
    for frame in names[names.index(path[0]) :]:
        # Comprehensions are parts of the function around them.
        assert "<" in frame.rpartition(".")[2] or frame in above, (frame, path)


@pytest.mark.parametrize("name", NAMES)
def test_messages_lead_to_each_other(name: str, pages) -> None:
    ranks = {rank["rank"]: rank for rank in pages.read_unrolled()[name]["ranks"]}
    for number, rank in ranks.items():
        for place, message in enumerate(rank["messages"]):
            _, is_sent, payload, microbatch, _, peer, other, _, _ = message
            assert other >= 0
            back = ranks[peer]["messages"][other]
            assert (back[5], back[6]) == (number, place)
            assert (back[1], back[2], back[3]) == (1 - is_sent, payload, microbatch)


def test_a_planted_change_is_shown_as_such(pages, package) -> None:
    data = pages.read_unrolled()["one-rank"]
    names = [function[0] for function in data["functions"]]
    name = "minimegatron.core.pipeline_parallel.steps.backward_step"
    number = names.index(name)
    module = name.rpartition(".")[0]

    def links(edit) -> tuple[dict, list]:
        page = package.pages[module]
        annotated = importlib.import_module("source.annotate").annotate(
            page.path, edit(page.source)
        )
        edited = importlib.import_module("source.package").Package(
            package.pages | {module: annotated}
        )
        explained = pages.explain("one-rank", data, edited)
        return explained["links"][number], explained["functions"][number]

    same, before = links(lambda source: source)
    assert "status" not in same
    moved, after = links(lambda source: source.replace('"""\n', '"""\n\nEARLIER = 1\n', 1))
    assert "status" not in moved, "an edit elsewhere in its file"
    assert after[2] == before[2] + 2, "its lines are counted where they are today"
    changed, shown = links(
        lambda source: source.replace("def backward_step(\n", "def backward_step(\n    x,\n")
    )
    assert changed["status"] == pages.CHANGED
    assert shown[3:] == data["functions"][number][3:], "the lines that ran then"
    gone, _ = links(lambda source: source.replace("def backward_step(", "def other_step("))
    assert gone == {"status": pages.GONE} | ({"tour": gone["tour"]} if "tour" in gone else {})


def test_a_docstring_alone_changes_nothing(pages) -> None:
    text = 'def f(a):\n    """One.\n\n    Two.\n    """\n    return a\n'
    other = text.replace("Two.", "Three. And four.")
    assert (
        page_text(text, (2, 5))
        == page_text(other, (2, 5))
        == ("One", 2, 5, "def f(a):\n    return a")
    )


# -- The pages --


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_small(name: str, site: Path) -> None:
    files = [f"unrolled/{name}.html", f"unrolled/{name}.js"]
    assert sum((site / file).stat().st_size for file in files) < MAX_BYTES


@pytest.mark.parametrize("name", MANY)
def test_it_shows_each_line_that_ran_and_no_other(name: str, pages, site_page: Page) -> None:
    data = pages.read_unrolled()[name]
    site_page.goto(f"unrolled/{name}.html#depth=all")
    site_page.wait_for_selector(".mm-unrolled[data-ready]")
    for rank in data["ranks"]:
        site_page.get_by_label("Rank", exact=True).select_option(str(rank["rank"]))
        shown = site_page.evaluate(
            """() => {
              const { tree } = document.querySelector(".mm-unrolled").mmUnrolled;
              const lines = ":scope > .u-code > .u-line:not(.u-foldline)";
              return tree.nodes.filter((node) => node.isOpen).map((node) => [node.number,
                [...node.body.querySelectorAll(lines)].map((line) => line.firstChild.data)]);
            }"""
        )
        new = [number for number, node in enumerate(rank["nodes"]) if node[7]]
        assert [number for number, _ in shown] == new, "every function, at its first call"
        functions = {data["views"][node[0]][0] for node in rank["nodes"]}
        assert {data["views"][rank["nodes"][number][0]][0] for number, _ in shown} == functions
        for number, lines in shown:
            assert [line for line in lines if line.strip()] == expected_lines(
                data, rank["nodes"][number]
            )


def expected_lines(data: dict, node: list) -> list[str]:
    """The function's lines that are in no fold, blank ones apart."""
    number, folds, _ = data["views"][node[0]]
    *_, first, last, text = data["functions"][number]
    lines = text.split("\n")
    whole = lines[: first - 1] + [""] * (last - first + 1) + lines[first - 1 :] if first else lines
    folded = {n for begin, end, _ in folds for n in range(begin, end + 1)}
    return [line for n, line in enumerate(whole, 1) if n not in folded and line.strip()]


def test_it_opens_with_who_calls_whom(site_page: Page) -> None:
    site_page.goto("unrolled/1f1b-paced.html")
    site_page.wait_for_selector(".mm-unrolled[data-ready]")
    assert visible(site_page, ".u-code") == []
    rows = visible(site_page, ".u-open")
    assert rows[:4] == [
        "train_step",
        "DistributedDataParallel.zero_grad_buffer",
        "forward_backward_pipelining_without_interleaving",
        "one_f_one_b",
    ]
    assert 30 < len(rows) < 80
    assert re.search(r"about \d min", site_page.inner_text(".u-time"))


def visible(page: Page, selector: str) -> list[str]:
    texts = page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)]
            .filter((element) => element.checkVisibility()).map((element) => element.innerText)""",
        selector,
    )
    return [text.strip() for text in texts if text]


def test_the_keyboard_alone_opens_and_closes(site_page: Page) -> None:
    site_page.goto("unrolled/1f1b-paced.html#rank-1")
    site_page.wait_for_selector(".mm-unrolled[data-ready]")
    site_page.locator(".u-open").first.focus()

    def focused() -> str:
        return site_page.evaluate("document.activeElement.innerText")

    site_page.keyboard.press("ArrowDown")
    assert focused() == "DistributedDataParallel.zero_grad_buffer"
    site_page.keyboard.press("ArrowUp")
    site_page.keyboard.press("ArrowRight")
    (code,) = [text for text in visible(site_page, ".u-code") if "forward_backward_func(" in text]
    assert "losses_reduced" in code
    assert "call=0" in site_page.evaluate("location.hash")
    site_page.keyboard.press("ArrowDown")
    assert focused() == "get_args", "a helper has a row where its caller is open"
    site_page.keyboard.press("ArrowLeft")
    assert focused() == "train_step"
    site_page.keyboard.press("ArrowLeft")
    assert visible(site_page, ".u-code") == []
    site_page.keyboard.press("+")
    site_page.keyboard.press("+")
    expect(site_page.get_by_label("Show", exact=True)).to_have_value("2")
    assert "depth=2" in site_page.evaluate("location.hash")
    site_page.keyboard.press("Enter")
    site_page.keyboard.press("-")
    expect(site_page.get_by_label("Show", exact=True)).to_have_value("1")


def test_addresses_lead_to_calls_and_messages(site_page: Page) -> None:
    site_page.goto("unrolled/1f1b-paced.html#rank=1&microbatch=3&depth=1")
    site_page.wait_for_selector(".mm-unrolled[data-ready]")
    sent = site_page.locator("li", has_text=re.compile("^→ gradient of microbatch 3 to rank 0"))
    expect(sent).to_be_visible()
    rows = visible(site_page, ".u-messages li")
    assert rows and all("microbatch 3" in row for row in rows)
    sent.get_by_role("link").first.click()
    expect(site_page.get_by_label("Rank", exact=True)).to_have_value("0")
    arrived = site_page.locator(".u-messages .u-here")
    expect(arrived).to_be_in_viewport()
    assert arrived.inner_text().startswith("← gradient of microbatch 3 from rank 1")
    site_page.goto("unrolled/1f1b-paced.html#rank-2-call-9999")
    site_page.reload()
    site_page.wait_for_selector(".mm-unrolled[data-ready]")
    assert "none" in site_page.inner_text(".u-time")


def test_lines_that_are_not_open_are_found_by_the_browsers_search(site_page: Page) -> None:
    site_page.goto("unrolled/1f1b-paced.html#rank-3")
    site_page.wait_for_selector(".mm-unrolled[data-ready]")
    code = site_page.locator(".u-code", has_text="ctx.fp16 = ").or_(
        site_page.locator(".u-code", has_text="def backward_step(")
    )
    hidden = code.first.evaluate("(element) => element.getAttribute('hidden')")
    assert hidden == "until-found"
    code.first.evaluate("(element) => element.dispatchEvent(new Event('beforematch'))")
    expect(code.first).to_be_visible()


def test_a_fold_opens(site_page: Page) -> None:
    site_page.goto("unrolled/one-rank.html#depth=1")
    site_page.wait_for_selector(".mm-unrolled[data-ready]")
    fold = site_page.locator(".u-fold", has_text="lines: arguments").first
    line = site_page.get_by_text("data_iterator: Iterator | list[Iterator] | None,").first
    expect(line).to_be_hidden()
    fold.click()
    expect(line).to_be_visible()
    expect(fold).to_have_attribute("aria-expanded", "true")


def test_without_scripts_there_is_the_outline_with_links(site: Path) -> None:
    html = (site / "unrolled" / "1f1b-paced.html").read_text()
    for rank in range(4):
        assert f'id="rank-{rank}"' in html
    ids = set(re.findall(r'\bid="?(rank-[\w-]+)', html))
    links = re.findall(r'href="?#(rank-[\w-]+)', html)
    assert len(links) == 96 and set(links) <= ids
    assert "../source/minimegatron.core.pipeline_parallel.loops.html#one_f_one_b" in html


def test_the_replay_leads_into_it_and_back(site_page: Page) -> None:
    site_page.goto("tour/whole-step.html#replay.recording=1f1b-paced&replay.at=1:B3")
    site_page.get_by_role("link", name="The lines that this call ran").click()
    site_page.wait_for_selector(".mm-unrolled[data-ready]")
    assert site_page.evaluate("document.activeElement.innerText") == "backward_step"
    expect(site_page.get_by_label("Microbatch", exact=True)).to_have_value("3")
    site_page.get_by_role("link", name="this moment in the replay").first.click()
    site_page.wait_for_selector(".mm-replay[data-ready]")
    assert "replay.at=1:B3" in site_page.url
