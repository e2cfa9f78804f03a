"""The tour's frame: paths and their minutes, the map and the strip, why next, folded code; and home."""

import importlib
import re
import tomllib
from html import unescape
from itertools import pairwise
from math import ceil

import pytest

from tests.docs.conftest import ROOT, Watched

tour = importlib.import_module("tour.tour")
tour_frame = importlib.import_module("tour.tour_frame")
chain_map = importlib.import_module("tour.chain_map")
callers = importlib.import_module("source.callers")
quotes = importlib.import_module("source.quotes")
folding = importlib.import_module("source.folding")
macros_module = importlib.import_module("pages.macros")
spine = importlib.import_module("source.spine")
repository = importlib.import_module("pages.repository")

PAGES = tour.read_tour()
CHAIN = tour.read_chain()
CODE = re.compile(r"\{\{ code (.+?) \}\}")
PAGE_TEXT = {page.page: page.text for page in PAGES}


def links(html: str) -> list[str]:
    return re.findall(r'href="([^"]+)"', html)


def words(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html))


# -- Pages and paths --


def test_every_page_is_listed_once():
    """A new page of docs/tour gets an entry in docs/tour.toml."""
    listed = [page.page for page in PAGES]
    assert sorted(listed) == sorted(
        path.stem for path in (ROOT / "docs" / "tour").glob("*.md") if path.stem != "index"
    )
    sections = [page.section for page in PAGES]
    assert len(set(sections)) == 1 + sum(a != b for a, b in pairwise(sections))


def test_it_begins_with_the_step():
    assert [page.page for page in PAGES[:2]] == ["train-step", "one-f-one-b"]
    assert "{{ player" in PAGES[0].text
    order = [page.page for page in PAGES]
    assert order.index("launching") > order.index("whole-step")


def test_titles_have_no_numbers():
    for page in PAGES:
        assert not re.match(r"\d+\. ", page.title)
        plain = page.title.replace("`", "")
        assert re.search(r"^title: (.+)$", page.text, re.MULTILINE)[1] == plain


def test_paths_fit_their_time(package):
    hour, day, weekend = tour.read_routes()
    minutes = [tour.minutes_of_route(route, package) for route in (hour, day, weekend)]
    assert 45 <= minutes[0] <= hour.most_minutes == 60, tour.report(package)
    assert 120 <= minutes[1] <= day.most_minutes == 360, tour.report(package)
    asides = sum(tour.minutes_of(page, package) for page in PAGES if page.aside)
    # Two pages along the sequence, two on other models, two on rewards, one each on a captured step
    # and on one that is run again; two of them have a player.
    assert 0 < sum(quick_minutes(page, package) for page in PAGES if page.aside) < 95
    assert sum(quick_minutes(page, package) for page in tour.pages_of(day)) <= 240
    assert minutes[2] == minutes[1] + asides + sum(link.minutes for link in spine.read_spine())
    assert tuple(tour.pages_of(weekend)) == PAGES
    pages = [page for page in PAGES if not page.aside]
    assert tour.pages_of(day) == pages
    assert tour.pages_of(hour) == pages[: len(tour.pages_of(hour))]
    # What the hour is for: each of these links of the chain has its page in it.
    about = {page.link for page in tour.pages_of(hour)}
    chain = ["train_step", "forward_backward_func", "forward_step", "backward_step"]
    assert {*chain, "P2PCommunicator"} <= about


def quick_minutes(page, package) -> int:
    """Of a reader with 150 words a minute who opens no folded code."""
    amount, speeds = tour.amount_of(page, package), tour.read_speeds()
    found = [quotes.read_quote(package, code) for code in CODE.findall(page.text)]
    shown = sum(q.num_full(p.numbers) for q in found for p in q.parts if not p.is_folded)
    looked_at = amount.pictures * speeds.minutes_per_picture + amount.players * 3
    return ceil(amount.words / 150 + shown / spine.lines_per_minute() + looked_at)


def test_the_hour_is_counted_for_a_slow_reader_who_opens_all_code():
    assert tour.read_speeds().words_per_minute == 100
    assert spine.lines_per_minute() == 10


def test_folded_lines_and_lines_in_a_fence_count_too(package, monkeypatch):
    page = next(page for page in PAGES if page.page == "one-f-one-b")
    before = tour.amount_of(page, package)
    fence = "```python\na = 1\n\nb = 2\n```"
    code = '{{ code minimegatron.training.training.train shows="train_step(" }}'
    num_lines = quotes.read_quote(package, code[8:-3]).num_lines
    monkeypatch.setattr(tour.Page, "text", property(lambda self: more))
    more = f"{PAGE_TEXT[page.page]}\n\n{fence}\n\n{code}\n"
    after = tour.amount_of.__wrapped__(page, package)
    assert num_lines > 60
    assert after == before._replace(code_lines=before.code_lines + 2 + num_lines)


def test_the_shortened_pretrain_calls_what_pretrain_calls(package):
    """train-step has `pretrain` and `train` in ten lines: the same calls, in the order of the code."""
    (sketch,) = re.findall(r"```python\n(.+?)```", PAGE_TEXT["train-step"], re.DOTALL)
    functions = re.split(r"\n\n", sketch.strip())
    found = {}
    for text in functions:
        name, *calls = re.findall(r"(\w+)\(", text)
        found[name] = calls
        place = package.find(f"minimegatron.training.training.{name}")
        lines = place.page.lines[place.definition.line : place.definition.end_line]
        body = "\n".join(lines)
        # What a rank's chunks share one call of: pretrain has a helper for it.
        body = body.replace("_iterators_of_all_chunks(", "build_train_valid_test_data_iterators(")
        places = [list(re.finditer(rf"\b{call}\(", body))[-1].start() for call in calls]
        assert places == sorted(places), name
    assert {"initialize_megatron", "train"} <= set(found["pretrain"])
    assert found["train"] == ["_connect_schedule", "get_forward_backward_func", "train_step"]
    assert sum(bool(line.strip()) for line in sketch.splitlines()) <= 10


def test_minutes_follow_from_what_there_is_to_read(package, monkeypatch):
    page = PAGES[0]
    before = tour.amount_of(page, package)
    more = f"{page.text}\n\n{'word ' * 10}\n\n$$x$$\n\n{{{{ figure f(1) | two words }}}}\n"
    monkeypatch.setattr(tour.Page, "text", property(lambda self: more))
    after = tour.amount_of.__wrapped__(page, package)
    assert (after.words, after.pictures) == (before.words + 12, before.pictures + 2)
    speeds, amount = tour.read_speeds(), tour.Amount(0, 0, 0, 0)
    assert amount.minutes == 0
    assert amount._replace(words=speeds.words_per_minute * 2 + 1).minutes == 3
    assert amount._replace(code_lines=spine.lines_per_minute()).minutes == 1


def test_the_index_shows_the_sums(site, package):
    text = (site / "tour" / "index.html").read_text()
    tables = re.findall(r"<table>.*?</table>", text, re.DOTALL)
    assert len(tables) == 4
    for table in tables:
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
        minutes = [int(row[-1]) for row in rows]
        assert minutes[-1] == sum(minutes[:-1])
    named = re.findall(r'href="([\w-]+)\.html">', "".join(tables[:3]))
    assert named == [page.page for page in sorted(PAGES, key=lambda page: page.aside)]
    for route in tour.read_routes():
        assert words(text).count(tour.time_words(tour.minutes_of_route(route, package))) >= 2


def test_the_exam_is_offered_where_the_tour_ends(site):
    for page in (PAGES[-1].page, "index"):
        assert "../exam.html" in links((site / "tour" / f"{page}.html").read_text())


LATE = PAGES[[page.page for page in PAGES].index("interleaving") :]
ANSWER = re.compile(r'<div class="mm-question".*?</div>\n\n\*\*In short:\*\* (.+?)\n\n', re.DOTALL)
HOUR = ("train-step", "one-f-one-b", "forward-step", "backward-step", "p2p", "whole-step", "index")
IN_MACROS = re.compile(r"\{\{.*?\}\}|`[^`]*`", re.DOTALL)


@pytest.mark.parametrize("page", LATE, ids=lambda page: page.page)
def test_a_late_page_answers_its_question_first(page):
    """In one sentence, right after the question."""
    found = ANSWER.search(page.text)
    assert found, f"{page.page}.md has no **In short:** after its question"
    assert found[1].endswith(".") and not re.search(r"[.?!]\s", found[1]), found[1]


def test_one_word_for_one_thing():
    """What comes later in a row is after what comes before, and a ring goes in rounds."""
    docs = ROOT / "docs"
    paths = [path for path in (docs / "tour").glob("*.md") if path.stem not in HOUR]
    paths += [docs / "glossary.md", docs / "formulas.md", *(docs / "symptoms").glob("*.md")]
    wrong = re.compile(r"\bbehind\b|\bsteps? per stage\b|\bchunks? of (?:queries|keys|tokens)\b")
    for path in [*paths, *(docs / "problems").glob("*.md")]:
        assert not (found := wrong.search(IN_MACROS.sub("", path.read_text()))), (path.name, found)


# -- The chain --


def test_every_link_is_called_where_the_map_says(package):
    """What calls it has these words in its code."""
    for call in CHAIN.values():
        tour.place_of(package, call)
        if call.under is None:
            continue
        caller = package.find(call.inside or CHAIN[call.under].symbol)
        first = caller.definition.first_line
        code = "\n".join(caller.page.lines[first - 1 : caller.definition.end_line])
        assert call.calls in code, call
    assert [call.name for call in CHAIN.values() if call.under is None] == ["pretrain"]


def test_e_readme_shows_the_chain_as_the_tour_has_it():
    """Each name hangs from the function that calls it: `get_forward_backward_func` from `train`."""
    tree = (
        (ROOT / "README.md")
        .read_text()
        .split("```")[1]
        .replace("the schedule", "forward_backward_func")
    )
    path, found = [], {}
    for line in tree.strip().splitlines():
        branch = re.match(r"[\s│├└─]*", line)[0]
        name, depth = line[len(branch) :].split()[0], len(branch) // 3
        path[depth:] = [name]
        found[name] = path[depth - 1] if depth else None
    known = {name: CHAIN[name].under for name in found if name in CHAIN}
    assert {name: found[name] for name in known} == known and len(known) >= 10


def test_a_link_that_is_not_defined_ends_the_build(package):
    call = CHAIN["train"]._replace(symbol="minimegatron.training.training.no_such")
    with pytest.raises(ValueError, match="does not define"):
        tour.place_of(package, call)


def test_every_page_is_on_the_map_and_in_the_navigation(site, package):
    found = links(chain_map.map_html(package))
    for page in PAGES:
        assert f"../tour/{page.page}.html" in found
        assert page.link in CHAIN
    for call in CHAIN.values():
        assert f"../source/{tour.place_of(package, call).url}" in found
    assert 'class="mm-map"' in (site / "tour" / "index.html").read_text()
    for page in PAGES:  # the navigation shows the pages of the section that one is in
        text = (site / "tour" / f"{page.page}.html").read_text()
        text = text.replace('href="./"', f'href="{page.page}.html"')
        nav = text[text.index("md-nav--primary") : text.index('<div class="md-content"')]
        beside = [other.page for other in PAGES if other.section == page.section]
        shown = [link.removesuffix(".html") for link in links(nav)]
        assert [name for name in dict.fromkeys(shown) if name in beside] == beside, page.page
    sections = [entry for entry in tour_frame.tour_nav() if isinstance(entry, dict)]
    listed = [name for entry in sections for names in entry.values() for name in names]
    assert listed == [f"tour/{page.page}.md" for page in PAGES]


def strip_in(text: str) -> str:
    (strip,) = re.findall(r'<nav class="mm-strip".*?</nav>', text, re.DOTALL)
    return strip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.page)
def test_the_strip_says_where_a_page_is(site, page):
    strip = strip_in((site / "tour" / f"{page.page}.html").read_text())
    line = [call.name for call in chain_map.line_to(CHAIN[page.link])]
    crumbs = re.findall(r"<li[^>]*>(.*?)</li>", strip)
    assert [words(crumb) for crumb in crumbs] == line and line[0] == "pretrain"
    assert strip.count('aria-current="true"') == 1
    assert words(re.search(r'<li aria-current="true">(.*?)</li>', strip)[1]) == page.link
    for call in chain_map.children_of(page.link):
        assert call.name in words(strip)
    for link in links(strip):
        assert (site / "tour" / link.partition("#")[0]).is_file() and link != f"{page.page}.html"


def test_the_strip_of_a_module(site, package):
    at = "minimegatron.core.pipeline_parallel.steps"
    strip = strip_in((site / "source" / f"{at}.html").read_text())
    assert words(re.search(r'<li aria-current="true">(.*?)</li>', strip)[1]) == (
        "forward_step, forward_step_calc_loss, backward_step"
    )
    assert {f"{at}.html#backward_step", "../tour/loss-contract.html"} <= {*links(strip)}
    for module in {tour.place_of(package, call).page.module for call in CHAIN.values()}:
        assert strip_in((site / "source" / f"{module}.html").read_text())
    assert "mm-strip" not in (site / "source" / "minimegatron.planner.simulator.html").read_text()


def calls_of(package, module: str) -> list[str]:
    """The names that a source page's head says its file calls."""
    found = re.search(r"<p>calls: (.*?)</p>", chain_map.strip_html(package, module))
    return [words(link) for link in re.findall(r"<a .*?</a>", found[1])] if found else []


def test_g_heads_of_source_pages_list_the_calls_of_their_file(package):
    """Each listed call is in the file; each call of the chain that the file makes is listed."""
    sites = callers.sites_of(package)
    lines = {call.name: call.calls for call in CHAIN.values() if call.calls}
    defined = {call.name: tour.place_of(package, call) for call in CHAIN.values()}
    count = 0
    for module, page in package.pages.items():
        listed = calls_of(package, module)
        code = "\n".join(line.partition("#")[0] for line in page.lines)
        for name in listed:  # in the words of docs/tour.toml, or by its own name
            last = re.split(r"[ .]", name)[-1]
            assert lines.get(name, f"{last}(") in code or f"{last}(" in code, f"{module}: no {name}"
            count += 1
        if not chain_map.strip_html(package, module):
            continue
        for name, place in defined.items():
            at = sites.get((place.page.module, place.symbol), ())
            here = [one for one in at if one.module == module and one.how == callers.CALL]
            is_own = place.page.module == module
            if any(one.because or not one.through for one in here) and not is_own:
                assert name in listed, f"{module} calls {name}"
    assert count > 30


def test_g_training_asks_for_the_schedule_itself(package):
    listed = calls_of(package, "minimegatron.training.training")
    assert "get_forward_backward_func" in listed and "schedule_of_run" not in listed
    assert calls_of(package, "minimegatron.training.pipeline_schedule") == []
    assert calls_of(package, "minimegatron.core.pipeline_parallel.step_frame") == [
        "finalize_model_grads"
    ]


def test_the_strip_stands_above_the_replay(site):
    text = (site / "tour" / "whole-step.html").read_text()
    assert 0 < text.index('class="mm-strip"') < text.index('class="mm-replay"')


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.page)
def test_why_next_leads_on(site, page):
    text = (site / "tour" / f"{page.page}.html").read_text()
    _, _, end = text.partition('<div class="mm-next">')
    end = end.partition("</div>")[0]
    following = tour.page_after(page)
    target = "../source/index.html#the-spine" if following is None else f"{following.page}.html"
    assert links(end)[-1] == target
    reason = re.sub(r"\s+", " ", words(end))
    assert page.why_next.replace("`", "") in reason
    for path in tour.read_routes():
        pages = tour.pages_of(path)
        if page in pages[:-1]:
            assert f"{pages[pages.index(page) + 1].page}.html" in links(end)


# -- Excerpts --


def excerpts() -> list[tuple[str, str]]:
    return [(page.page, found) for page in PAGES for found in CODE.findall(page.text)]


def test_folded_lines_complete_the_excerpt(package):
    """Every line is there once, shown, folded, or as a comment beside; what is said is not folded."""
    num_folded = 0
    for name, argument in excerpts():
        quote = quotes.read_quote(package, argument)
        lines = quote.place.page.lines
        html = quotes.quote_html(quote, package, "../source/")
        code = [int(n) for n in re.findall(r'data-n="(\d+)"', html)]
        notes = re.findall(r'data-first="(\d+)" data-last="(\d+)"', html)
        comments = [n for first, last in notes for n in range(int(first), int(last) + 1)]
        full = [n for n in quote.numbers if lines[n - 1].strip()]
        assert sorted(n for n in code + comments if lines[n - 1].strip()) == full, argument
        open_part = re.sub(r'<details class="mm-fold">.*?</details>', "", html, flags=re.DOTALL)
        shown = re.sub(r"\s+", "", words(open_part))
        for word in re.search(r'shows="((?:[^"\\]|\\.)+)"', argument)[1].split(", "):
            wanted = re.sub(r"\s+", "", word.replace('\\"', '"'))
            assert wanted in shown, f"{name}: {word!r} is folded"
        for number in re.findall(r"<summary>(\d+) lines folded", html):
            assert int(number) >= folding.FEWEST
            num_folded += int(number)
    assert num_folded > 200


def test_what_is_not_spoken_of_is_folded():
    source = ["def f(x):", "    # -- First --", "    # Why.", "    a(x)", "    if x:"]
    source += ["        b(x)", *["        more(x)"] * 5, "    else:", "        c(x)"]
    source += ["    # Not said.", *["    rest(x)"] * 4]
    parts = folding.parts_of(source, range(1, len(source) + 1), ["a(x)", "c(x)"])
    assert [(part.is_folded, part.numbers[0]) for part in parts] == [
        (False, 1),
        (True, 6),
        (False, 12),
        (True, 14),
    ]
    assert folding.parts_of(source[:4], range(1, 5), ["a(x)"])[0].numbers == [1, 2, 3, 4]


def test_comments_stand_beside_the_code_where_there_is_room(browser, address):
    with Watched(browser, (address,), viewport={"width": 1440, "height": 900}) as watched:
        page = watched.page
        page.goto(f"{address}tour/one-f-one-b.html")
        row = page.locator(".mm-quote-row:has(.mm-note)").first
        note, code = row.locator(".mm-note"), row.locator(".mm-code")
        wide = note.bounding_box(), code.bounding_box()
        assert wide[0]["x"] + wide[0]["width"] <= wide[1]["x"] + 1
        page.set_viewport_size({"width": 360, "height": 740})
        narrow = note.bounding_box(), code.bounding_box()
        assert narrow[0]["y"] + narrow[0]["height"] <= narrow[1]["y"] + 1
        page.goto(f"{address}tour/launching.html")
        fold = page.locator(".mm-fold").first
        assert not fold.locator(".mm-line").first.is_visible()
        fold.locator("summary").click()
        assert fold.locator(".mm-line").first.is_visible()


# -- Home --


@pytest.mark.parametrize("size", [(1440, 900), (360, 740)], ids=str)
def test_home_says_first_what_it_is(browser, address, size):
    """Two sentences, three links and a picture, in view before anything moves."""
    width, height = size
    with Watched(browser, (address,), viewport={"width": width, "height": height}) as watched:
        page = watched.page
        page.goto(f"{address}index.html")
        lead, go = page.locator(".mm-lead"), page.locator(".mm-go")
        sentences = re.findall(r"[^.]+\.(?=\s|$)", lead.inner_text())
        assert len(sentences) == 2 and "PyTorch" in sentences[1] and "Megatron" in sentences[0]
        anchors = go.locator("p > a")
        assert anchors.count() == 3
        assert anchors.nth(0).get_attribute("href") == "tour/train-step.html"
        picture = page.locator(".mm-player[data-ready] .mmp-timeline canvas").first
        picture.wait_for()
        page.wait_for_timeout(300)  # until sizes have settled
        box = picture.bounding_box()
        assert box["y"] + 0.7 * box["height"] <= height, f"the picture is at {box}"
        for element in [lead, *(anchors.nth(i) for i in range(3))]:
            box = element.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width
            assert box["y"] + box["height"] <= height
        assert all(anchors.nth(i).bounding_box()["height"] >= 44 for i in range(3))
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_home_has_a_small_player_with_a_gap_chosen(package):
    macros = macros_module.Macros(package, "index.md", set())
    macros.expand('{{ player schedule="1f1b" pp=4 microbatches=8 small=true choose="gap" }}')
    (html,) = macros.stash.pieces
    assert 'data-small="true" data-choose="gap"' in html
    home = (ROOT / "docs" / "index.md").read_text()
    assert len(re.findall(r"\{\{ player [^}]*small=true choose=\"gap\" \}\}", home)) == 1


def test_where_the_repository_is(package, monkeypatch):
    monkeypatch.setenv("REPOSITORY_URL", "https://host.example/group/minimegatron")
    macros = macros_module.Macros(package, "index.md", set())
    text = macros.expand("{{ clone }}\n\nx {{ repository_link }}")
    assert "$ git clone https://host.example/group/minimegatron\n$ cd minimegatron" in text
    assert "[Repository](https://host.example/group/minimegatron)" in text
    monkeypatch.delenv("REPOSITORY_URL")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    assert repository.repository_url() == urls.get("Repository", "")
    assert "(../contributing.md)" in repository.repository_link("", "../")


def test_g_no_address_no_line_that_clones(package, monkeypatch):
    monkeypatch.setattr(macros_module, "repository_url", lambda: "")
    text = macros_module.Macros(package, "index.md", set()).expand("a\n\n{{ clone }}\n\nb")
    assert "git clone" not in text and "ADDRESS" not in text
