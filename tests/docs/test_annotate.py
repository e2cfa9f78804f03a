"""Annotated source: every line once, under its true number, with anchors that can be relied on."""

import collections
import doctest
import importlib
import re

import pytest

from tests.docs.conftest import ROOT

annotate = importlib.import_module("source.annotate")
source_pages = importlib.import_module("pages.source_pages")
stash_module = importlib.import_module("source.stash")

EXAMPLE = '''"""About the module."""

import os


# Why this one exists.
@property
def first(x):
    """Says what it does.

    >>> first(1)
    """
    y = x  # an ordinary comment

    # -- Clamp to the count --
    # Deeper than the batch is no use.
    y = min(y, 3)
    return y


class Thing:
    """A thing."""

    size: int = 0

    def grow(self):
        return self.size + first(1)

    # -- Other ways --

    @staticmethod
    def shrink(): "on one line"
'''


@pytest.fixture(scope="module")
def example():
    return annotate.annotate("pkg/example.py", EXAMPLE)


def test_rows_of_an_example(example):
    rows = {row.anchor: row for row in example.rows}
    assert list(rows) == [
        "pkg.example",
        "first",
        "first--clamp-to-the-count",
        "Thing",
        "Thing.grow",
        "Thing--other-ways",
        "Thing.shrink",
    ]
    assert rows["first"].prose.startswith("Says what it does.")
    assert rows["first"].prose_lines == (9, 10, 11, 12)
    assert rows["first"].code_lines == (6, 7, 8, 13)
    clamp = rows["first--clamp-to-the-count"]
    assert (clamp.title, clamp.prose) == ("Clamp to the count", "Deeper than the batch is no use.")
    assert clamp.prose_lines == (15, 16) and clamp.code_lines == (17, 18)


def test_a_docstring_that_shares_its_line_stays_code(example):
    (shrink,) = [row for row in example.rows if row.anchor == "Thing.shrink"]
    assert not shrink.prose and shrink.code_lines == (31, 32)


def test_names_lead_to_definitions(example):
    targets = {r.target for r in example.references}
    assert {"pkg.example.Thing.size", "pkg.example.first"} <= targets


def test_local_names_hide_those_of_the_module():
    page = annotate.annotate("pkg/x.py", "a = 1\ndef f(a):\n    return a\ndef g():\n    return a\n")
    assert [(r.line, r.target) for r in page.references] == [(5, "pkg.x.a")]


def test_every_nonblank_line_once(package):
    assert len(package.pages) > 100
    for page in package.pages.values():
        count = collections.Counter(
            n for row in page.rows for n in (*row.prose_lines, *row.code_lines)
        )
        for number, line in enumerate(page.lines, start=1):
            if line.strip():
                assert count[number] == 1, f"{page.path}:{number} stands {count[number]} times"


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)])
def test_every_line_shows_its_own_text_under_its_number(package, every):
    """On the rendered page, not only in the rows."""
    for page in list(package.pages.values())[::every]:
        stash = stash_module.Stash()
        source_pages.source_page(page, package, stash)
        html = "".join(stash.pieces)
        ids = re.findall(r' id="L(\d+)"', html)
        assert len(ids) == len(set(ids)), page.path
        nonblank = {n for n, line in enumerate(page.lines, 1) if line.strip()}
        assert nonblank <= set(map(int, ids)), page.path
        shown = re.findall(r'<span class="mm-line" id="L(\d+)">(.*?)\n</span>', html, re.DOTALL)
        for number, content in shown:
            text = re.sub(r"<[^>]+>", "", content)
            for entity, mark in (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
                text = text.replace(entity, mark)
            assert text == page.lines[int(number) - 1], f"{page.path}:{number}"


def test_anchors_are_unique(package):
    for page in package.pages.values():
        anchors = [row.anchor for row in page.rows]
        assert len(anchors) == len(set(anchors)), page.path
        assert not any(re.fullmatch(r"L\d+", anchor) for anchor in anchors), page.path


def test_anchors_do_not_move_with_lines():
    later = annotate.annotate(
        "pkg/example.py", EXAMPLE.replace("import os", "import os\nimport re")
    )
    now = annotate.annotate("pkg/example.py", EXAMPLE)
    assert [row.anchor for row in later.rows] == [row.anchor for row in now.rows]


def test_references_stand_where_their_name_stands(package):
    num_resolved = 0
    for page in package.pages.values():
        for reference in page.references:
            line = page.lines[reference.line - 1]
            name = line[reference.column : reference.column + reference.length]
            assert name.isidentifier() or "." in name, f"{page.path}:{reference.line} {name!r}"
            place = package.find(reference.target)
            if place and place.definition:
                num_resolved += 1
                target = place.page.lines[place.definition.line - 1]
                last = place.symbol.rpartition(".")[2].partition("-")[0]
                assert last in target, f"{reference.target} leads to {target!r}"
    assert num_resolved > 5000


def test_re_exports_lead_to_the_definition(package):
    place = package.find("minimegatron.core.pipeline_parallel.schedules.backward_step")
    assert place.page.module == "minimegatron.core.pipeline_parallel.steps"
    place = package.find("minimegatron.core.dist_checkpointing.save_tensors")  # on first use
    assert place.page.module == "minimegatron.core.dist_checkpointing.serialization"


def test_importing_nothing():
    """What the pages say must not depend on whether torch is there."""
    page = annotate.annotate("pkg/bad.py", '"""Doc."""\nimport no_such_module\n1 / 0\n')
    assert page.rows[0].code_lines == (2, 3)


@pytest.mark.parametrize(
    "name",
    [
        "source.annotate",
        "pictures.architecture",
        "cases.calculator",
        "source.caller_lists",
        "cases.case_words",
        "source.excerpts",
        "source.ask_jedi",
        "cases.memory_cases",
        "player.in_browser",
        "source.prose",
        "rosetta.signatures",
        "pages.trim_css",
    ],
)
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed


def test_paths_are_relative_to_the_repository(package):
    for page in package.pages.values():
        assert (ROOT / page.path).exists()
