"""Every name that the four texts of the walk-throughs use leads to a page of the site.

The texts lie beside this repository where its authors have them; the record of their names is in it.
"""

import sys
from pathlib import Path

import pytest

from rosetta import older_names
from rosetta.named_in_texts import main, names_in, pages_with, recorded

ROOT = Path(__file__).parents[2]
TEXTS = sorted((ROOT.parent / "shared" / "seeds").glob("*.txt"))
WORDS = {"TODO"}
"""What a text writes like a call and is a word."""


def test_the_record_has_the_names_of_the_texts():
    names, joined = recorded()
    found = {name for text in TEXTS for name in names_in(text.read_text(encoding="utf-8"))}
    assert found - names - joined.keys() == WORDS & found
    assert len(names) > 700 and names & joined.keys() == set()
    for words in joined.values():
        assert {word for word in words if "_" in word} <= names


def test_names_are_found_in_code_and_in_sentences():
    text = "args = get_args()timers 调用forward_step函数 self.grad_accs class BertModel:"
    assert names_in(text) == {"get_args", "forward_step", "grad_accs", "BertModel"}


def test_every_name_leads_to_a_page(site):
    names, _ = recorded()
    pages = pages_with(names, site)
    assert names - pages.keys() == set()
    # Not all of them to a list of names, and some to nothing else.
    only_there = {name for name, found in pages.items() if found == ["rosetta"]}
    assert 50 < len(only_there) < 250


def test_each_row_of_older_names_is_for_names_of_the_texts(package):
    names, _ = recorded()
    rows = older_names.rows()
    text = "\n".join(older_names.section(package))
    for row in rows:
        assert set(row) == {"names", "was", "here", "megatron"}
        assert all(f"`{name}`" in text for name in row["names"])
    listed = {name for row in rows for name in row["names"]}
    assert len(listed & names) > 150


def test_a_name_without_a_place_is_printed(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.html"
    page.write_text("<body>grad_accs<article><p>loss_func</p></article>")
    monkeypatch.setattr(sys, "argv", ["tell.py names", str(tmp_path)])
    names, _ = recorded()
    assert main() == len(names) - 1
    out = capsys.readouterr().out
    assert f"{'loss_func':55} page\n" in out and f"{'grad_accs':55} NOWHERE\n" in out


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"names": ["a", "b"]}, "has a, b in two rows"),
        (
            {"names": ["c"], "here": "<minimegatron.core.nowhere>"},
            "leads to minimegatron.core.nowhere",
        ),
    ],
)
def test_a_row_that_cannot_be_is_refused(row, words, package, monkeypatch):
    whole = {"was": "", "here": "", "megatron": ""} | row
    monkeypatch.setattr(older_names, "rows", lambda: [whole, whole])
    with pytest.raises(ValueError, match=words):
        older_names.section(package)
