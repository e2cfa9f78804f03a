"""What a newcomer types leads to the page that explains it: asked of the real search in a browser."""

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from pages import search_index
from source import page_words
from tests.docs.conftest import ROOT, Watched
from tests.figures import figure, slowness

# What a newcomer types -> the page that must stand first. Symbols, flags, words, symptoms, Chinese.
FIRST = {
    "loss_func": "tour/loss-contract",
    "no_sync": "tour/grad-buffers",
    "num_layers_per_virtual_pipeline_stage": "tour/interleaving",
    "--num-layers-per-virtual-pipeline-stage": "tour/interleaving",
    "--pipeline-model-parallel-layout": "tour/layouts",
    "--overlap-grad-reduce": "tour/grad-buffers",
    "use-distributed-optimizer": "tour/distributed-optimizer",
    "forward_step_func": "tour/forward-step",
    "get_forward_backward_func": "tour/get-forward-backward-func",
    "send_forward_recv_backward": "tour/p2p",
    "finalize_model_grads": "tour/finalize",
    "train_step": "tour/train-step",
    "num_microbatches": "tour/train-step",
    "calculate_per_token_loss": "tour/loss-contract",
    "deallocate_output_tensor": "tour/backward-step",
    "RingAttention": "tour/a-ring-of-attention",
    "warmup": "tour/one-f-one-b",
    "bubble": "tour/one-f-one-b",
    "1f1b": "tour/one-f-one-b",
    "microbatch": "tour/one-f-one-b",
    "interleaved": "tour/interleaving",
    "vpp": "tour/interleaving",
    "ZeRO": "tour/distributed-optimizer",
    "AllReduce": "tour/tensor-parallel-layers",
    "sequence parallel": "tour/tensor-parallel-layers",
    "gradient norm": "tour/optimizer",
    "loss scale": "tour/optimizer",
    "mixed precision": "tour/optimizer",
    "tied embedding": "tour/finalize",
    "process group": "tour/process-groups",
    "checkpoint": "tour/checkpoints",
    "mamba": "tour/a-stage-that-is-no-transformer",
    "grpo": "tour/reinforcement-learning",
    "cuda graph": "tour/a-step-that-is-captured",
    "transient error": "tour/a-step-that-is-run-again",
    "should_run_forward_backward": "tour/a-step-that-is-run-again",
    "torchrun": "tour/launching",
    "rank died": "tour/a-rank-died",
    "why times 2": "tour/why-times-two",
    "what is a bucket": "tour/grad-buffers",
    "who divides the gradient": "tour/one-gradient",
    "hang": "symptoms/hang",
    "deadlock": "symptoms/hang",
    "NCCL timeout": "symptoms/hang",
    "OOM": "symptoms/out-of-memory",
    "loss is nan": "symptoms/nan",
    "loss too large": "symptoms/loss-factor",
    "M times too large": "symptoms/loss-factor",
    "resume differs": "symptoms/resume",
    "grad norm spikes": "symptoms/gradient-norm",
    "slow": "symptoms/slow",
    "流水线": "zh/tour/one-f-one-b",
    "流水线并行 气泡": "zh/tour/one-f-one-b",
    "分布式优化器": "tour/distributed-optimizer",
    "死锁": "symptoms/hang",
}
RANKS = [("tour",), ("exercises", "notebooks"), ("glossary",), ("source",)]
"""The order in which the first page of each kind must stand."""
WITH_ALL = ("warmup", "bubble", "1f1b", "interleaved", "loss scale", "expert bias", "all-to-all")
"""All four kinds of page have something on these."""
NO_HIT = ("zzzzqqq", "梯形图", "qwertz uiop", "🙂", "--")
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


def kind_of(href: str) -> str:
    return search_index.kind_of(href.split("/", 3)[3].partition("#")[0])


@pytest.fixture(scope="module")
def answers(browser, address) -> dict[str, list[str]]:
    """Query -> the addresses of what is found, the first one first."""
    with Watched(browser, (address,)) as watched:
        page = watched.page
        page.goto(address + "tour/p2p.html", wait_until="load")
        begun = page.evaluate("performance.now()")
        assert ask(page, "stage")
        first = page.evaluate("performance.now()") - begun
        figure(f"search: first answer after {first:.0f} ms")
        # Within a second of the first word, index and all.
        assert first < MAX_FIRST_ANSWER_MS * max(1, slowness())
        asked = dict.fromkeys([*FIRST, *WITH_ALL])
        return {query: [href for href, *_ in ask(page, query)] for query in asked}


def in_language_of(query: str, page: str) -> str:
    """The page in Chinese where a query in Chinese has one."""
    is_chinese = page_words.HAN.search(query) and page_words.is_there(f"zh/{page}.md")
    return f"zh/{page}" if is_chinese else page


def test_g_search_leads_to_the_page_that_explains(answers, address):
    wrong = []
    for query, page in FIRST.items():
        expected = in_language_of(query, page)
        found = [href.removeprefix(address) for href in answers[query][:3]]
        has_hang = any(href.startswith("symptoms/hang") for href in found)
        if not found[0].startswith(f"{expected}.html") or has_hang != (expected == "symptoms/hang"):
            wrong.append(f"{query}: {found}")
    assert not wrong, "\n".join(wrong)


def test_g_search_ranks_tour_practice_glossary_source(answers):
    for query, found in answers.items():
        kinds = [kind_of(href) for href in found[:5]]
        firsts = [min(map(kinds.index, {*kinds} & {*rank}), default=None) for rank in RANKS]
        places = [place for place in firsts if place is not None]
        assert places == sorted(places), f"{query}: {kinds}"
        if query in WITH_ALL:
            assert places == [0, 1, 2, 3], f"{query}: {kinds}"


def test_an_english_query_shows_no_chinese_page_before_the_english_one(answers, address):
    for query, found in answers.items():
        urls = [href.removeprefix(address).partition("#")[0] for href in found]
        for place, url in enumerate(urls):
            english = url.removeprefix("zh/")
            if url == english:
                continue
            if page_words.HAN.search(query):
                assert english not in urls[:place], f"{query}: {url} comes after {english}"
            else:
                assert not [other for other in urls[place:] if not other.startswith("zh/")], query


def test_g_a_query_without_a_hit_says_so(browser, address):
    """However it came: typed, pasted, composed, or in the address."""
    begin = "Type to start searching"
    with Watched(browser, (address,)) as watched:
        page = watched.page
        page.goto(address + "tour/p2p.html", wait_until="load")
        said, field = page.locator(".md-search-result__meta"), page.locator(".md-search__input")
        field.focus()
        expect(said).to_have_text(re.compile(begin))
        for words in NO_HIT:
            field.fill(words)  # as pasting does, without a key
            expect(said).to_contain_text(f"Nothing found for “{words}”")
            expect(page.locator(".md-search-result__item")).to_have_count(0)
        field.fill("死锁")
        expect(said).not_to_contain_text("Nothing")
        page.goto(address + "index.html?q=梯形图", wait_until="load")
        expect(said).to_contain_text("Nothing found for “梯形图”")


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
        expect(first).to_have_attribute("href", re.compile(r"file:.*/one-f-one-b\.html"))
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"one-f-one-b\.html"))


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


@pytest.mark.parametrize("name", ["pages.search_index", "pages.page_heads"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed


def test_a_word_has_one_group_of_synonyms():
    found = search_index.synonyms()
    words = [word.lower() for group in found["same"] for word in group]
    assert len(words) == len(set(words)), "a word is in two groups of `same`"
    assert all(isinstance(meant, list) and meant for meant in found["means"].values())


def test_a_symbol_stands_on_the_page_that_explains_it(site, data):
    """In its text or code, or as a flag. One page of each kind explains a word."""
    urls = {page["url"]: page for page in data["pages"]}
    known: dict[tuple[str, str], str] = {}
    for url, words in search_index.explained().items():
        assert url in urls, url
        text = search_index.plain((site / url).read_text()).lower()
        for word in words:
            forms = {word, word.replace("_", "-")}
            if "_" in word:
                assert any(form.lower() in text for form in forms), f"{url} does not have {word}"
            other = known.setdefault((urls[url]["kind"], word), url)
            assert other == url, f"{word}: {other} and {url}"
