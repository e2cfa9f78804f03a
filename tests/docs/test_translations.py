"""Ready for languages: a page says which text it was made from, and older translations are found."""

import re
from pathlib import Path

from pages import translations


def test_a_page_says_which_text_it_was_made_from(site: Path):
    for page in ("index.md", "tour/one-f-one-b.md", "symptoms/hang.md", "glossary.md"):
        html = (site / page.replace(".md", ".html")).read_text()
        said = re.search(r'name="minimegatron:made-from" content="(\S+) (\w+)"', html)
        assert said.groups() == (page, translations.made_from(page))
    assert "made-from" not in (site / "source" / "index.html").read_text()


def test_older_translations_are_found(tmp_path: Path):
    for name, text in {"a.md": "one", "b.md": "two", "c.md": "three", "d.md": "four"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "zh").mkdir()
    head = "---\ntitle: x\nmade_from: {}\n---\n\n# x\n"
    (tmp_path / "zh" / "a.md").write_text(head.format(translations.digest("one")))
    (tmp_path / "zh" / "b.md").write_text(head.format(translations.digest("two, before")))
    (tmp_path / "zh" / "c.md").write_text("# x\n")
    assert translations.to_do("zh", tmp_path) == {
        "b.md": "of an older text",
        "c.md": "says not which text it is of",
        "d.md": "missing",
    }


def test_pages_written_by_hand():
    found = translations.pages()
    assert {"index.md", "tour/index.md", "problems/p2p.md", "glossary.md"} <= {*found}
    assert not any(page.startswith(("tools/", "zh/")) for page in found)


def test_a_page_says_its_language_and_leads_to_the_others(site: Path):
    english = (site / "walkthroughs.html").read_text()
    chinese = (site / "zh" / "walkthroughs.html").read_text()
    assert '<html lang="en"' in english and '<html lang="zh"' in chinese
    assert 'href="zh/walkthroughs.html" hreflang="zh" lang="zh">中文</a>' in english
    assert 'href="../walkthroughs.html" hreflang="en" lang="en">English</a>' in chinese
    for page in translations.pages():
        path = site / page.replace(".md", ".html")
        has_another = (translations.DOCS / "zh" / page).is_file()
        if path.is_file():
            assert ('class="mm-languages"' in path.read_text()) is has_another, page


def test_no_page_is_of_an_older_text():
    for language in translations.LANGUAGES:
        found = set(translations.to_do(language).values())
        assert found <= {"missing"}, translations.to_do(language)
