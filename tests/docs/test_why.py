"""`why.py` says of every page where it comes from, and of some exactly what is in them."""

import importlib
from pathlib import Path

import pytest

from tests.docs.conftest import ROOT

why = importlib.import_module("why")
observed_module = importlib.import_module("pages.observed")
places = importlib.import_module("source.places")


@pytest.fixture(scope="module")
def pages(package):
    return importlib.import_module("pages.every_page").every_page(package)


@pytest.fixture(scope="module")
def seen(pages):
    """What is seen while a page is made; each page is made once."""
    known = {}

    def observe(name):
        if name not in known:
            known[name] = observed_module.observe(pages[name])
        return known[name]

    return observe


def test_every_page_of_the_site_has_its_source(site: Path, pages):
    built = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    assert built - {"404"} == pages.keys()
    missing = {name: origin.file for name, origin in pages.items() if not origin.file.exists()}
    assert not missing


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("tour/p2p", "tour/p2p"),
        ("tour/p2p.html#the-code", "tour/p2p"),
        ("tour", "tour/index"),
        (".", "index"),
        ("index", "index"),
        (str(ROOT / "docs" / "tour" / "p2p.md"), "tour/p2p"),
        (str(ROOT / "minimegatron" / "moved.py"), "source/minimegatron.moved"),
        (str(ROOT / "notebooks" / "03_point_to_point.py"), "notebooks/03_point_to_point"),
    ],
)
def test_a_page_is_found_by_its_address_or_its_file(pages, words, name):
    assert why.find_page(words, pages) == name


def test_near_pages_are_named_where_there_is_none(pages):
    with pytest.raises(why.NoSuchPageError, match=r"no page tour/p2q; near it are .*tour/p2p"):
        why.find_page("tour/p2q", pages)
    with pytest.raises(why.NoSuchPageError, match="no page zzzz$"):
        why.find_page("zzzz", pages)


def test_messages_between_stages(pages, seen):
    """Numbers with the line of their function, excerpts with theirs, tools in order."""
    found = seen("tour/p2p")
    assert pages["tour/p2p"].file == ROOT / "docs" / "tour" / "p2p.md"
    path, code = place_of("messages")
    assert observed_module.Number("messages(4, 8)", [f"{path}:{code}"]) in found.numbers
    assert found.macros["code"] == len(found.excerpts) == 3
    assert {one.path for one in found.excerpts} == {
        "minimegatron/core/pipeline_parallel/p2p_communication.py"
    }
    assert found.excerpts[0].symbol == "P2PCommunicator.send_forward_recv_backward"
    tools = [tool.place for tool in found.tools]
    drawing, numbers = "cases/step_drawing.step_drawing", "cases/cases.message_bytes"
    order = ["tour/tour_frame.framed", "source/folding.parts_of", drawing]
    assert numbers not in tools  # a function of the package
    assert [tool for tool in tools if tool in order] == order
    assert not [path for path in found.records if path.is_relative_to(places.RECORDINGS)]


def place_of(name: str) -> tuple[Path, int]:
    code = getattr(importlib.import_module("cases.cases"), name).__code__
    return Path(code.co_filename).relative_to(ROOT), code.co_firstlineno


def test_a_rank_died(seen):
    """A record, with the command that makes it anew."""
    found = seen("tour/a-rank-died")
    record = places.RECORDS / "restart.json"
    assert record in found.records and found.opened[record] == "cases/symptoms"
    assert why.made_by(record, "") == "python docs/tools/record.py restart"


def test_a_page_with_a_replay(pages, seen):
    """What only the reader's browser loads, and the script that asks for it."""
    found = seen("tour/whole-step")
    assert places.RECORDINGS / "1f1b-paced.json" in found.records
    assert why.made_by(places.RECORDINGS / "ring.json", "").endswith("record.py traces ring")
    assert any(script.startswith("player.js (looks for") for script in found.scripts)


@pytest.mark.parametrize(
    ("name", "tool", "record"),
    [
        ("source/minimegatron.moved", "source/caller_lists.callers_of", None),
        ("rosetta", "rosetta/rosetta.rosetta_page", "docs/tools/records/megatron_core.json"),
        (
            "unrolled/ring",
            "pages/unrolled_pages.read_unrolled",
            "docs/recordings/unrolled/ring.json",
        ),
        ("exercises/ex12_interleaved_table", "pages/exercise_pages.exercise_page", None),
        ("notebooks/03_point_to_point", "pages/notebook_pages.notebook_page", None),
        ("benchmarks", "pages/benchmarks_page.benchmarks_page", "docs/benchmarks/summary.json"),
        ("gpu", "cases/gpu_page.planned_parts", None),
        ("reference/tracing", "pages/site_pages.reference_page", None),
        ("source/index", "pages/site_pages.source_index", None),
    ],
)
def test_other_kinds_of_pages(seen, name, tool, record):
    found = seen(name)
    assert tool in [one.place for one in found.tools]
    assert record is None or ROOT / record in found.records


def test_what_is_said_is_short(pages, seen):
    """Every tool says something of itself, and nothing is left out with --all."""
    name = "tour/p2p"
    said = why.explain(name, pages[name], seen(name))
    assert len(said.splitlines()) <= 40 and all(
        len(line) <= why.WIDTH for line in said.splitlines()
    )
    assert said.startswith("tour/p2p.html is made from docs/tour/p2p.md\n")
    assert all(tool.about for tool in seen(name).tools)
    assert "more (--all)" not in why.explain(name, pages[name], seen(name), has_all=True)


def test_what_was_remembered_is_read_again(pages, seen):
    """A record shows up on each page that has it, not only on the first."""
    seen("tour/a-rank-died")
    again = observed_module.observe(pages["tour/a-rank-died"])
    assert places.RECORDS / "restart.json" in again.records
