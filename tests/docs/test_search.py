"""What a newcomer types leads to a lesson: thirty queries, asked of the real search in a browser."""

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest
import search_index
from playwright.sync_api import Page, expect

from tests.docs.conftest import ROOT, Watched
from tests.figures import figure, slowness

QUERIES = """
warmup
bubble
hang
deadlock
ZeRO
OOM
loss too large
M times too large
gradient norm
tied embedding
resume differs
nan
microbatch
interleaved
send_forward_recv_backward
finalize_model_grads
who divides the gradient
activation memory
recompute
sequence parallel
rank died
why times 2
1f1b
AllReduce
vpp
process group
loss scale
mixed precision
forward_step
get_forward_backward_func
""".strip().splitlines()
LESSON = re.compile(r"/(tour|symptoms)/|/glossary\.html")
MAX_FIRST_ANSWER_MS = 1000
MAX_INDEX_BYTES = 1_400_000

# Types a query and waits for what the theme shows; [address, title] of each result.
ASK = """async query => {
  const input = document.querySelector(".md-search__input");
  const list = document.querySelector(".md-search-result__list");
  list.replaceChildren();
  input.focus();
  input.value = query;
  input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
  for (let i = 0; i < 3000 && !list.children.length; i++) await new Promise(f => setTimeout(f, 5));
  return [...list.children].map(item => [
    item.querySelector("a").href,
    item.querySelector("h1").innerText,
    [...item.querySelectorAll("h2")].map(h => h.innerText)]);
}"""


def ask(page: Page, query: str) -> list[list]:
    return page.evaluate(ASK, query)


def test_there_are_thirty():
    assert len(set(QUERIES)) == 30


def test_a_lesson_is_among_the_first_three(browser, address):
    """And the first answer comes within a second of the first word, index and all."""
    with Watched(browser, (address,)) as watched:
        page = watched.page
        page.goto(address + "tour/p2p.html", wait_until="load")
        begun = page.evaluate("performance.now()")
        assert ask(page, "stage")
        first = page.evaluate("performance.now()") - begun
        figure(f"search: first answer after {first:.0f} ms")
        assert first < MAX_FIRST_ANSWER_MS * max(1, slowness())
        missing = []
        for query in QUERIES:
            found = [href for href, *_ in ask(page, query)[:3]]
            if not any(LESSON.search(href) for href in found):
                missing.append(f"{query}: {found}")
        assert not missing, "\n".join(missing)


def test_symbols_have_bare_names_and_the_reference_comes_last(browser, address):
    with Watched(browser, (address,)) as watched:
        page = watched.page
        page.goto(address + "index.html?q=forward_backward_no_pipelining", wait_until="load")
        # The address asks already; nothing was clicked.
        page.locator(".md-search-result__item").first.wait_for()
        found = ask(page, "deallocate_output_tensor")
        kinds = [href.split("/")[3] for href, *_ in found]
        assert kinds.index("source") < kinds.index("reference")
        for href, title, _ in found:
            if "/source/" in href or "/reference/" in href:
                assert not title.startswith("minimegatron"), title
        source = next(entry for entry in found if "pipeline_parallel.steps" in entry[0])
        assert source[1].split() == ["steps", "Source", "·", "core.pipeline_parallel"]
        assert "deallocate_output_tensor" in source[2]
        # What is typed is text, not HTML.
        assert ask(page, "gradient <img src=x onerror=fail()>")
        assert page.locator(".md-search-result img").count() == 0


def test_search_works_in_pages_opened_from_a_folder(browser, site: Path):
    with Watched(browser, ("file:",)) as watched:
        page = watched.page
        page.goto((site / "tour" / "p2p.html").as_uri(), wait_until="load")
        assert not any("pages.js" in url for url in watched.requests)
        page.keyboard.press("/")
        page.keyboard.type("warmup")
        first = page.locator(".md-search-result__item a").first
        expect(first).to_have_attribute("href", re.compile(r"file:.*/glossary\.html"))
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"glossary\.html"))


# -- The index --


@pytest.fixture(scope="module")
def data(site: Path) -> dict:
    text = (site / "search" / "pages.js").read_text()
    return json.loads(text.partition("searchData = ")[2].rstrip(";\n"))


def test_the_index_is_small_and_holds_every_page(site, data):
    size = (site / "search" / "pages.js").stat().st_size
    figure(f"search: index of {size / 1e6:.2f} MB")
    assert size < MAX_INDEX_BYTES
    urls = {page["url"] for page in data["pages"]}
    assert {"tour/p2p.html", "glossary.html", "rosetta.html", "formulas.html"} <= urls
    # The theme's own index is asked for with every page.
    assert json.loads((site / "search" / "search_index.json").read_text())["docs"] == []


def test_every_section_of_the_index_is_there(site, data):
    for page in data["pages"]:
        if page["kind"] in ("tour", "glossary", "reference"):
            text = (site / page["url"]).read_text()
            for anchor, title, _ in page["sections"]:
                place = title if anchor == search_index.SAME else anchor
                assert not place or f'id="{place}"' in text, f"{page['url']}#{place}"


def test_every_kind_of_page_has_its_word(data):
    words = json.loads((ROOT / "docs" / "strings" / "en.json").read_text())
    kinds = {page["kind"] for page in data["pages"]}
    missing = {kind for kind in kinds if f"search.kind.{kind}" not in words}
    assert not missing, f"docs/strings/en.json: search.kind. {missing}"


def test_names_in_quoted_code_are_kept():
    code = "x = <b>send_forward</b>(P2PCommunicator)"
    html = f'<figure class="mm-quote"><pre>{code}</pre></figure> is_not'
    assert search_index.quoted_names(html) == "P2PCommunicator send_forward"


@pytest.mark.parametrize("name", ["search_index", "page_heads"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed


def test_a_word_has_one_group_of_synonyms():
    found = search_index.synonyms()
    words = [word.lower() for group in found["same"] for word in group]
    assert len(words) == len(set(words)), "a word is in two groups of `same`"
    assert all(isinstance(meant, list) and meant for meant in found["means"].values())
