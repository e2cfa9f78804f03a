"""The spine on the site, and who calls what: read off the source when the pages are made."""

import importlib
import re

import pytest

from tests.docs.conftest import ROOT

annotate = importlib.import_module("source.annotate")
caller_lists = importlib.import_module("source.caller_lists")
callers = importlib.import_module("source.callers")
package_module = importlib.import_module("source.package")
site_pages = importlib.import_module("pages.site_pages")
source_pages = importlib.import_module("pages.source_pages")
spine = importlib.import_module("source.spine")

FILES = {
    "p/a.py": '''"""A."""


def work(x):
    """Works."""
    return x


class Thing:
    """A thing."""


def _hidden():
    return work(Thing())
''',
    "p/b.py": '''"""B."""

from p.a import Thing, work


def first():
    def inner():
        return work(1)

    return inner


class Of:
    def method(self, thing: Thing):
        return [work]


TABLE = {"work": work}
''',
    "p/c.py": '''"""C."""

from p import a

a.work(a.Thing())
''',
}


@pytest.fixture(scope="module")
def small():
    pages = {page.module: page for page in (annotate.annotate(*file) for file in FILES.items())}
    return package_module.Package(pages)


def test_callers_are_found(small):
    sites = callers.sites_of(small)
    assert [one[:5] for one in sites["p.a", "work"]] == [
        ("p.a", 14, "_hidden", "work", "call"),
        ("p.b", 8, "first", "work", "call"),
        ("p.b", 15, "Of.method", "work", "handed on"),
        ("p.b", 18, "", "work", "handed on"),
        ("p.c", 5, "", "work", "call"),
    ]
    # Annotations name a class; only making one is a call.
    assert [one[:5] for one in sites["p.a", "Thing"]] == [
        ("p.a", 14, "_hidden", "Thing", "call"),
        ("p.b", 14, "Of.method", "Thing", "handed on"),
        ("p.c", 5, "", "Thing", "call"),
    ]
    assert ("p.b", "first") not in sites


def shown(text: str) -> list[list[str]]:
    lists = re.findall(r'<div class="mm-callers">(.*?)</div>', text)
    return [[re.sub("<.*?>", "", words) for words in re.split("<ul>|</li>", one)] for one in lists]


def test_callers_are_shown(small):
    page = small.pages["p.a"]
    by_symbol = {row.symbol: source_pages.callers_of(row, page, small) for row in page.rows}
    # This file's own first, then the spine's files and the others.
    assert shown(by_symbol["work"]) == [
        ["Called by", "_hidden:14", "b.first:8", "p.c:5", ""],
        ["Handed on in", "p.b:18", "b.Of.method:15", ""],
    ]
    assert shown(by_symbol["Thing"]) == [["Called by", "_hidden:14", "p.c:5", ""]]
    assert by_symbol["_hidden"] == by_symbol[""] == ""
    assert 'href="p.b.html#L8"' in by_symbol["work"] and 'href="#L14"' in by_symbol["work"]
    assert 'title="p.b.Of.method, line 15"' in by_symbol["work"]


def test_many_callers_are_folded_and_lines_of_one_stand_together(package):
    page = package.pages["minimegatron.core.tracing"]
    by_symbol = {row.symbol: source_pages.callers_of(row, page, package) for row in page.rows}
    text = by_symbol["traced"]
    first, _, rest = text[text.index("Decorates<ul>") :].partition("<details>")
    assert first.count("<li>") == caller_lists.SHOWN
    assert f"<summary>{rest.count('<li>')} more</summary>" in rest and rest.count("<li>") > 20
    page = package.pages["minimegatron.core.pipeline_parallel.p2p_communication"]
    (row,) = [row for row in page.rows if row.symbol == "P2PCommunicator.recv_forward"]
    items = re.findall(r"<li>(.*?)</li>", source_pages.callers_of(row, page, package))
    (written,) = [item for item in items if "one_f_one_b" in item]
    numbers = re.findall(r"loops\.html#L(\d+)", written)
    lines = package.pages["minimegatron.core.pipeline_parallel.loops"].lines
    assert len(numbers) == 2  # in warm-up, and before the steady state
    assert all("p2p.recv_forward(" in lines[int(number) - 1] for number in numbers)


def test_the_chain_of_the_package_is_found(package):
    chain = [
        ("pretrain_gpt", "main", "training.training", "pretrain"),
        ("training.training", "train", "training.training", "train_step"),
        ("core.pipeline_parallel.steps", "ModelChunk.backward_step", None, "backward_step"),
    ]
    for module, symbol, other, called in chain:
        sites = callers.sites_of(package)[f"minimegatron.{other or module}", called]
        assert (f"minimegatron.{module}", symbol) in [(one.module, one.symbol) for one in sites]


def test_every_listed_file_leads_to_the_next(package):
    links = spine.read_spine()
    assert {link.module for link in links} <= set(package.pages)
    for link, following in zip(links, links[1:], strict=False):
        text = source_pages._place_in_spine(link.module)
        assert f"Link {link.number} of {len(links)}" in text and f"{link.minutes} minutes" in text
        assert f'next: <a href="{following.module}.html">' in text
        assert f'previous: <a href="{link.module}.html">' in source_pages._place_in_spine(
            following.module
        )
    assert "previous" not in source_pages._place_in_spine(links[0].module)
    assert "next" not in source_pages._place_in_spine(links[-1].module)
    assert "Second reading" in source_pages._place_in_spine("minimegatron.planner.simulator")


@pytest.mark.parametrize(
    ("module", "room"),
    [
        ("minimegatron.backend", "shared memory"),
        ("minimegatron.backend.mesh", "shared memory"),
        ("minimegatron.core.rerun.current", "watchers"),
        ("minimegatron.core.left_out", "left-out arguments"),
    ],
)
def test_a_file_in_a_room_says_so(module, room):
    assert f"In the room “{room}”" in source_pages._place_in_spine(module)


def test_the_index_names_each_room(package):
    text = site_pages.source_index(package)
    table = text[text.index("### Rooms") : text.index("## Second reading")]
    for room in spine.read_rooms():
        words = f"{room.what} It may stay shut: {room.shut} The door is {room.door}."
        assert f"* **{room.name}**: {words} `" in table


def test_the_index_has_every_module_once(package):
    text = site_pages.source_index(package)
    assert sorted(re.findall(r"\]\((minimegatron[\w.]*)\.md\)", text)) == sorted(package.pages)
    first = text[text.index("## The spine") : text.index("## Second reading")]
    listed = re.findall(r"\]\((minimegatron[\w.]*)\.md\)", first)
    assert listed == [link.module for link in spine.read_spine()]


def test_no_page_types_the_figures():
    """They are computed: in README by `docs/tools/source/spine.py`, elsewhere when the site is made."""
    for path in (ROOT / "docs").rglob("*.md"):
        assert not spine.SENTENCE.search(path.read_text()), path
    for name in ("index.md", "tour/index.md"):
        assert "{{ value spine_sentence() }}" in (ROOT / "docs" / name).read_text()
