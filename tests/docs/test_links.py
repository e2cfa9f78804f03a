"""What links.txt says of the package: it is about the files as they are, and leads to what is there."""

import importlib
import random

import pytest

from tests.figures import figure

families = importlib.import_module("source.class_families")
links = importlib.import_module("source.links")
package_module = importlib.import_module("source.package")

COMMAND = "run: python docs/tools/record.py links"
CORE = "minimegatron.core."


def test_the_record_is_about_the_files_as_they_are(package):
    known = links.recorded(package)
    old = [module for module in package.pages if module not in known]
    assert not old, COMMAND
    places = sum(map(len, known.values()))
    figure(f"{places} places of {len(known)} files whose object links.txt knows")
    paths = {path for path, _ in links._entries()}
    assert paths == {page.path for page in package.pages.values()}, COMMAND


def test_each_link_leads_to_a_definition(package):
    for module, uses in links.uses_of(package).items():
        lines = package.pages[module].lines
        for use in uses:
            place, symbol = use.target
            assert not symbol or symbol in package.pages[place].definitions, (module, use)
            is_there = lines[use.line - 1][use.column :].startswith(use.name)
            assert is_there or use.how == "with", (module, use)


FILES = {
    "work": "class Above: ...\nclass Work(Above):\n    def run(self): ...\n",
    "user": "from p.work import Work\ndef use(work: Work): work.run()\n",
    "other": "def nothing(): ...\n",
}


def package_of(files: dict[str, str]):
    annotate = importlib.import_module("source.annotate").annotate
    pages = [annotate(f"p/{name}.py", text) for name, text in files.items()]
    return package_module.Package({page.module: page for page in pages})


@pytest.mark.parametrize(
    ("change", "known", "leads_to"),
    [
        ({}, {"p.work", "p.user", "p.other"}, "Work.run"),
        ({"other": "def more(): ...\n"}, {"p.work", "p.user"}, "Work.run"),
        # The method has moved to the class above, where the record's class finds it.
        (
            {"work": "class Above:\n    def run(self): ...\nclass Work(Above): ...\n"},
            {"p.user", "p.other"},
            "Above.run",
        ),
        ({"work": FILES["work"].replace("run", "go")}, {"p.other"}, None),
        ({"work": FILES["work"].replace("Work", "Job") + "Work = Job\n"}, {"p.other"}, "Job.run"),
    ],
    ids=["nothing", "another file", "a method moves", "a method's name", "a class's name"],
)
def test_what_a_change_makes_invalid(monkeypatch, tmp_path, capsys, change, known, leads_to):
    monkeypatch.setattr(links, "RECORD", tmp_path / "links.txt")
    package = package_of(FILES)
    links.record(package, links.asked(package, package.pages))
    package = package_of(FILES | change)
    assert links.recorded(package).keys() == known
    found = [use.target[1] for use in links.uses_of(package)["p.user"]]
    assert found == ([leads_to] if leads_to else [])
    assert all(f"p.{name}" in capsys.readouterr().err for name in change)


@pytest.mark.full
def test_jedi_says_today_what_is_recorded(package):
    drawn = random.Random(0).sample(sorted(package.pages), 12)
    known = links.recorded(package)
    assert links.asked(package, drawn) == {module: known[module] for module in drawn}
