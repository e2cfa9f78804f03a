"""Pages in Chinese: words around them, one word for a term, their place in the site; in Chromium."""

import importlib
import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urldefrag

import pytest
from playwright.sync_api import expect

from tests.docs.conftest import ROOT, Watched

chain_map = importlib.import_module("tour.chain_map")
hook = importlib.import_module("mkdocs_hook")
macros_module = importlib.import_module("pages.macros")
page_words = importlib.import_module("source.page_words")
problems = importlib.import_module("tour.problems")
strings = importlib.import_module("player.strings")
tour = importlib.import_module("tour.tour")
tour_frame = importlib.import_module("tour.tour_frame")
translations = importlib.import_module("pages.translations")

DOCS = ROOT / "docs"
ZH = DOCS / "zh"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in ZH.rglob("*.md"))
SHOWN = [page for page in PAGES if not page.startswith("zh/problems/")]
TOUR = [page for page in tour.read_tour() if f"zh/tour/{page.page}.md" in PAGES]
TERM = re.compile(r"\{\{ term (.+?)(?: \| (.+?))? \}\}")
STEPS = "minimegatron.core.pipeline_parallel.steps"


def words(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "", html))).strip()


def links(html: str) -> list[str]:
    return re.findall(r'href="([^"]+)"', html)


def in_chinese(name: str, **values: object) -> str:
    with page_words.speaking("zh"):
        return page_words.say(name, **values)


def html_of(site: Path, page: str) -> str:
    return (site / page).with_suffix(".html").read_text()


# -- One word for a term --


def test_the_table_has_each_entry_of_the_glossary_and_no_other():
    for path in page_words.STRINGS.glob("*_terms.toml"):
        table = page_words.terms(path.stem.removesuffix("_terms"))
        assert set(table) == macros_module.read_glossary(DOCS / "glossary.md")
        assert all(table.values())


def test_the_glossary_in_chinese_has_the_same_entries_in_the_same_order():
    entry = re.compile(r"^### .*\{ #([\w-]+) \}", re.MULTILINE)
    for path in ZH.glob("glossary.md"):
        assert entry.findall(path.read_text()) == entry.findall((DOCS / "glossary.md").read_text())


@pytest.mark.parametrize("page", PAGES)
def test_a_term_is_shown_by_its_one_word(page):
    table = page_words.terms("zh")
    for name, shown in TERM.findall((DOCS / page).read_text()):
        anchor = name.lower().replace(" ", "-")
        assert not shown or shown == table[anchor], (
            f"{name}: {shown}, but the table says {table[anchor]}"
        )


def test_a_term_leads_to_the_glossary_of_its_language(package):
    macros = macros_module.Macros(package, "zh/tour/page.md", {"bubble", "gpipe"})
    folder = "zh/" if "zh/glossary.md" in PAGES else ""
    shown = page_words.terms("zh").get("bubble", "bubble")
    for macro, expected in (("term bubble | 气泡", "气泡"), ("term bubble", shown)):
        wanted = f"[{expected}](../../{folder}glossary.md#bubble){{ .mm-term }}"
        assert macros.expand(f"{{{{ {macro} }}}}") == wanted
    english = macros_module.Macros(package, "tour/page.md", {"bubble"})
    assert english.expand("{{ term bubble }}") == "[bubble](../glossary.md#bubble){ .mm-term }"


# -- Words around a page --


def test_a_text_is_said_in_the_language_of_its_page():
    assert (
        page_words.say("page.how-far", number=1, all=34, minutes=11) == "Page 1 of 34 · 11 minutes"
    )
    with page_words.speaking("zh"):
        own = page_words.own_texts("zh")
        assert page_words.say("page.problems") == own.get("page.problems", "Problems")
    assert page_words.say("page.problems") == "Problems"
    assert [page_words.say("page.folded", n=n) for n in (1, 5)] == [
        "1 line folded",
        "5 lines folded",
    ]


def test_pictures_speak_the_language_of_their_page():
    """What is left in Latin letters are names."""
    drawn = (
        'timeline("gpipe", 4, 8)',
        'timeline("1f1b", 4, 8)',
        "run_drawing()",
        "compare_schedules()",
    )
    marks = ('"phases"', '"work", ("backward", 2, 3)', '"messages", 1, 2', '"end"')
    names = macros_module.names_of_cases()
    for expression in (*drawn, *(f"step_drawing({mark})" for mark in marks)):
        english = eval(expression, names)
        with page_words.speaking("zh"):
            chinese = eval(expression, names)
        assert eval(expression, names) == english
        if page_words.own_texts("zh"):
            text = re.sub(r"<desc.*?</desc>", "", chinese, flags=re.DOTALL)
            shown = [*re.findall(r">([^<>]+)<", text), *re.findall(r'aria-label="([^"]+)"', text)]
            left = set(re.findall(r"[A-Za-z_.]{4,}", " ".join(shown)))
            assert left <= {"GPipe", "rank", "finalize_model_grads", "optimizer.step"}, expression


def test_macros_work_two_folders_deep(package):
    macros = macros_module.Macros(
        package,
        "zh/tour/page.md",
        {"bubble"},
        {"notebooks/01_a.md": "A", "exercises/ex01_b.md": "B"},
    )
    text = macros.expand(
        "{{ link "
        + STEPS
        + ".forward_step }}\n\n{{ repository_link }}\n\n{{ practice 01 ex01 | 做 }}\n"
    )
    assert f"(../../source/{STEPS}.md#forward_step)" in text
    assert "(../../notebooks/01_a.md)" in text and "(../../exercises/ex01_b.md)" in text
    assert f"## {in_chinese('page.do-it-yourself')} {{ #do-it-yourself }}" in text
    macros.expand(
        "{{ code " + STEPS + '.custom_backward shows="run_backward" }}\n\n{{ calculator }}\n'
    )
    code, form = macros.stash.pieces
    assert f'href="../../source/{STEPS}.html#custom_backward"' in code
    assert 'src="../../javascripts/calculator.js"' in form
    # As on an English page, an excerpt says what it shows.
    macros.expand("{{ code " + STEPS + ".custom_backward }}")
    assert not macros.faults[:-1] and "say which words it shows" in macros.faults[-1]


@pytest.mark.parametrize("page", TOUR, ids=lambda page: page.page)
def test_a_page_of_the_tour_has_what_the_english_one_has_around_it(site, page):
    chinese, english = (html_of(site, f"{way}tour/{page.page}.html") for way in ("zh/", ""))
    shown = words(re.search(r'<p class="mm-how-far".*?</p>', chinese)[0])
    there = words(re.search(r'<p class="mm-how-far".*?</p>', english)[0])
    number, every, minutes = re.findall(r"\d+", there)  # as long as the English page
    assert shown == in_chinese("page.how-far", number=number, all=every, minutes=minutes)
    strips = [re.search(r'<nav class="mm-strip".*?</nav>', text)[0] for text in (chinese, english)]
    names = [re.findall(r"<code>.*?</code>", strip) for strip in strips]
    assert names[0] == names[1]
    assert f'aria-label="{in_chinese("page.where")}"' in strips[0]
    for link in links(strips[0]):
        url = urldefrag(link)[0]
        assert (site / "zh" / "tour" / url).is_file()
        # No link to an English page of which there is one in Chinese.
        name = Path(url).stem
        assert not (url.startswith("../../tour/") and f"zh/tour/{name}.md" in PAGES), link


@pytest.mark.parametrize("page", TOUR, ids=lambda page: page.page)
def test_why_next_is_said_in_chinese(site, page):
    end = html_of(site, f"zh/tour/{page.page}.html").partition('<div class="mm-next">')[2]
    end = end.partition("</div>")[0]
    reason = tour.read_why_next("zh")[page.page]
    assert reason.replace("`", "") in words(end)
    following = tour.page_after(page)
    with page_words.speaking("zh"):
        assert links(end)[-1] == following.own_way("html")
        assert following.own_title.replace("`", "") in words(end)
        assert (page_words.say("page.in-english") in words(end)) is not following.is_spoken


@pytest.mark.parametrize("page", TOUR, ids=lambda page: page.page)
def test_problems_are_those_of_the_language(site, page):
    html = html_of(site, f"zh/tour/{page.page}.html")
    own = problems.read_problems(page.page, "zh")
    assert len(own) in (0, len(problems.read_problems(page.page)))
    assert html.count('id="problems"') == bool(own)
    for number in range(1, len(own) + 1):
        assert in_chinese("page.solution", number=number) in html


def test_problems_are_read_below_their_front_matter(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "DOCS", tmp_path)
    monkeypatch.setattr(problems, "PROBLEMS", tmp_path / "problems")
    path = tmp_path / "zh" / "problems" / "p2p.md"
    path.parent.mkdir(parents=True)
    text = '---\nmade_from: 0\n---\n\np = 2？\n\n??? question "解答"\n    {{ value 2 }}。\n'
    path.write_text(text)
    assert problems.read_problems("p2p") == []
    assert [problem.question for problem in problems.read_problems("p2p", "zh")] == ["p = 2？"]
    path.write_text(text + "\n多余的话。\n")
    with pytest.raises(ValueError, match="no solution follows"):
        problems.read_problems("p2p", "zh")


ENGLISH = (
    *("Do it yourself", "Notebook: ", "Exercise: ", "Problem ", "Solution of", "lines folded"),
    *(
        "in the source",
        "Next: ",
        "beside it: ",
        "calls: ",
        "Page ",
        " minutes",
        " hours",
        "Scripts are",
    ),
    *(
        "Table of contents",
        "Back to top",
        "Type to start",
        "Skip to",
        "Copy to clipboard",
        "Footer",
    ),
)
"""What tools and the theme write around an English page."""


@pytest.mark.parametrize("page", SHOWN)
def test_no_english_words_are_left_around_a_page(site, page):
    text = html_of(site, page)
    assert '"clipboard.copy"' in text  # in the theme's settings, as a name
    text = words(re.sub(r"<(style|pre)\b.*?</\1>", "", text, flags=re.DOTALL))
    assert not [english for english in ENGLISH if english in text]


# -- Their place in the site --


def test_a_page_loads_the_words_of_its_language(site):
    for path in (site / "zh").rglob("*.html"):
        loaded = re.findall(r"javascripts/(words\w*\.js)", path.read_text())
        assert loaded == ["words_zh.js"], path
    for name in ("index", "glossary", "tour/p2p"):
        assert re.findall(r"javascripts/(words\w*\.js)", html_of(site, f"{name}.html")) == [
            "words.js"
        ]
    text = (site / "javascripts" / "words_zh.js").read_text()
    shown = json.loads(text.partition("strings = ")[2].rstrip(";\n"))
    every = strings.read_strings("zh")
    assert shown == {name: every[name] for name in every if not name.startswith("page.")}


TAB = re.compile(r'class="md-tabs__link">\s*(.*?)\s*</a>', re.DOTALL)


@pytest.mark.parametrize("language", (page_words.DEFAULT, *page_words.LANGUAGES))
def test_tabs_are_named_in_the_language_of_the_page(site, language):
    every = strings.read_strings(language)
    named = [every[name] for name in translations.TABS.values()]
    folder = "" if language == page_words.DEFAULT else f"{language}/"
    for page in ("index", "glossary", "tour/p2p"):
        assert TAB.findall(html_of(site, f"{folder}{page}.html")) == named
    if language == page_words.DEFAULT:
        assert named == list(translations.TABS)


def test_navigation_of_a_language(tmp_path):
    for name in ("walkthroughs", "glossary", "tour/p2p", "tour/one-f-one-b", "index"):
        path = tmp_path / "zh" / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    nav = translations.nav_of("zh", tmp_path)
    (home,) = nav[0].values()
    others = ["tour/one-f-one-b", "tour/p2p", "glossary", "walkthroughs"]
    assert [home, *nav[1:]] == ["zh/index.md", *(f"zh/{name}.md" for name in others)]
    found = hook.with_translations(
        ["a.md", {"中文": "zh/walkthroughs.md"}, {"B": "b.md"}], tmp_path
    )
    assert found == ["a.md", {"中文": nav}, {"B": "b.md"}]


def test_before_and_after_a_page_are_pages_in_its_language():
    names = ("index.md", "a.md", "zh/index.md", "zh/a.md", "b.md")
    pages = [SimpleNamespace(file=SimpleNamespace(src_uri=name)) for name in names]
    hook.on_nav(SimpleNamespace(pages=pages), None, None)
    for language, order in (("en", (0, 1, 4)), ("zh", (2, 3))):
        assert page_words.language_of(names[order[0]]) == language
        chain = [pages[n] for n in order]
        assert chain[0].previous_page is None and chain[-1].next_page is None
        for one, other in pairwise(chain):
            assert one.next_page is other and other.previous_page is one


def test_after_the_last_translated_page_of_the_tour_comes_the_one_that_its_end_names():
    names = ("tour/p2p.md", "tour/after-the-last-backward.md", "zh/tour/p2p.md", "zh/glossary.md")
    pages = [SimpleNamespace(file=SimpleNamespace(src_uri=name)) for name in names]
    hook.on_nav(SimpleNamespace(pages=pages), None, None)
    assert [page.next_page for page in pages] == [pages[1], None, pages[1], None]
    assert pages[1].previous_page is pages[0] and pages[3].previous_page is pages[2]


def test_pages_stand_under_look_up_in_their_order(site):
    order = [
        next(iter(entry.values())) if isinstance(entry, dict) else entry
        for entry in translations.nav_of("zh", DOCS)
    ]
    order = [page for page in order if page in SHOWN]
    assert sorted(order) == SHOWN
    last = f"zh/tour/{TOUR[-1].page}.md"
    for before, page in pairwise(order):
        if before == last:
            page = f"tour/{tour.page_after(TOUR[-1]).page}.md"
        footer = html_of(site, before).partition('class="md-footer"')[2]
        assert Path(page).with_suffix(".html").name in footer, f"{before}: {page}"
    text = html_of(site, order[-1])
    nav = text[text.index("md-nav--primary") : text.index('<div class="md-content"')]
    here = (site / order[-1]).parent
    shown = [(here / link).resolve().relative_to(site).as_posix() for link in links(nav)]
    urls = [page.replace(".md", ".html") for page in order]
    assert [url for url in dict.fromkeys(shown) if url in urls] == urls
    assert 'class="md-tabs__link">中文' not in text


def test_a_page_of_an_older_text_says_so(tmp_path):
    english = tmp_path / "tour" / "p2p.md"
    chinese = tmp_path / "zh" / "tour" / "p2p.md"
    for path in (english, chinese):
        path.parent.mkdir(parents=True)
    english.write_text("# One\n")
    head = "---\nmade_from: {}\n---\n\n# 一\n"
    chinese.write_text(head.format(translations.digest("# One\n")))
    assert translations.older_notice("zh/tour/p2p.md", tmp_path) == ""
    english.write_text("# Two\n")
    notice = translations.older_notice("zh/tour/p2p.md", tmp_path)
    assert links(notice) == ["../../tour/p2p.html"] and 'class="mm-older"' in notice
    assert words(notice) == in_chinese("page.older", link=in_chinese("page.older.link"))
    assert translations.older_notice("tour/p2p.md", tmp_path) == ""
    # Its problems are part of the page.
    chinese.write_text(head.format(translations.digest("# Two\n")))
    for folder, text in (("problems", "1?\n"), ("zh/problems", head.format("0"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "p2p.md").write_text(text)
    assert translations.older_notice("zh/tour/p2p.md", tmp_path)


def test_no_page_of_this_site_is_older(site):
    assert not [path for path in (site / "zh").rglob("*.html") if "mm-older" in path.read_text()]


# -- In Chromium --

HAN = re.compile("[\u4e00-\u9fff]")


def own_words(text: str) -> str:
    """The words of a text that has no place to fill in."""
    return text if isinstance(text, str) and "{" not in text else ""


@pytest.mark.parametrize("way", ["server", "file"])
def test_widgets_speak_chinese(browser, address, site, way):
    """All that a player and a replay show comes from zh.json: no word of English is left."""
    english, chinese = strings.read_strings(), strings.read_strings("zh")
    begin = address if way == "server" else f"{site.as_uri()}/"
    with Watched(browser, (begin,)) as watched:
        page = watched.page
        for path in sorted((site / "zh").rglob("*.html")):
            if not re.search('class="mm-(?:player|replay)"', path.read_text()):
                continue
            page.goto(begin + path.relative_to(site).as_posix())
            widget = page.locator(":is(.mm-player, .mm-replay)[data-ready]").first
            widget.wait_for()
            shown = widget.inner_text()
            assert HAN.search(shown), path
            for name, text in english.items():
                if len(own_words(text)) > 12 and chinese[name] != text:
                    assert text not in shown, f"{path}: {name}"
            said = page.evaluate("MM.say('time.units', {n: 1, time: 1})")
            form = chinese["time.units"]
            form = form if isinstance(form, str) else form["other"]
            assert said == form.replace("{time}", "1")


def recorded_texts() -> list[str]:
    """Each sentence that a replay shows as it was recorded."""
    found = []
    for path in sorted((DOCS / "recordings").glob("*.json")):
        data = json.loads(path.read_text())
        found += [data["title"], *data["words"]]
        for step in data["steps"]:
            found += [step["label"], step["paced"]]
            found += [figure[key] for figure in step["figures"] for key in figure if key != "bad"]
            found += [message["x"] for message in step["messages"]]
            found += [gap["x"] for rank in step["ranks"] for gap in rank["gaps"]]
    pretty = (("->", "→"), ("<-", "←"), (" x ", " × "))
    for before, after in pretty:
        found = [text.replace(before, after) for text in found]
    return sorted(set(found))


def test_what_was_recorded_is_said_in_the_language_of_the_page(browser, address):
    texts = recorded_texts()
    numbers = re.compile(r"|\[.*|[\d.+−-]+ (?:%|ms)|\(p - 1\)/\(Mv? \+ p - 1\) = [\d.]+ %")
    with Watched(browser, (address,)) as watched:
        page = watched.page
        for url in ("tour/whole-step.html", "zh/tour/whole-step.html"):
            if url.startswith("zh/") and url.replace(".html", ".md") not in PAGES:
                continue
            page.goto(address + url)
            page.locator(".mm-replay[data-ready]").wait_for()
            said = page.evaluate("texts => texts.map(MM.recorded)", texts)
            shorter = page.evaluate("texts => texts.map(MM.withoutZeros).map(MM.recorded)", texts)
            if not url.startswith("zh/"):
                assert said == texts
                continue
            for before, *after in zip(texts, said, shorter, strict=True):
                assert all(map(HAN.search, after)) or numbers.fullmatch(before), before
                left = set(re.findall(r"\b[a-z]{4,}", " ".join(after)))
                assert numbers.fullmatch(before) or left <= {"rank", "ring"}, before


def test_what_search_says_on_a_chinese_page(browser, address):
    chinese = strings.read_strings("zh")
    with Watched(browser, (address,)) as watched:
        page = watched.page
        page.goto(f"{address}zh/walkthroughs.html", wait_until="load")
        dialog = page.locator('.md-search[role="dialog"]')
        expect(dialog).to_have_attribute("aria-label", chinese["search.name"])
        page.locator(".md-search__input").fill("zzzzqqq")
        expect(page.locator(".md-search-result__meta")).to_have_text(
            chinese["search.none"].replace("{words}", "zzzzqqq")
        )
