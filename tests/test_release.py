"""`make release-check`: what it judges, on small cases with planted mistakes. Nothing is built here."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest

import minimegatron
from minimegatron.__main__ import COMMANDS, main
from tests import release

ROOT = Path(__file__).parents[1]
VERSION = minimegatron.__version__
TRACKED = [
    "README.md",
    "minimegatron/__init__.py",
    "minimegatron/py.typed",
    "minimegatron/tracing/assets/page.html",
    "notebooks/01_ranks.ipynb",
    "notebooks/01_ranks.py",
    "tests/test_release.py",
]
WHEEL = [
    "minimegatron/__init__.py",
    "minimegatron/py.typed",
    "minimegatron/tracing/assets/page.html",
    "minimegatron-0.1.0.data/data/share/minimegatron/notebooks/01_ranks.ipynb",
    "minimegatron-0.1.0.dist-info/METADATA",
    "minimegatron-0.1.0.dist-info/licenses/LICENSE",
]
CHANGES = "# Changes\n\n## [0.2.0] - {}\n\n- More.\n\n## [0.1.0] - 2026-01-01\n"
CITED = "cff-version: 1.2.0\nversion: 0.2.0\n"


# -- One version --


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "minimegatron.__version__"
    }
    assert release.source_version((ROOT / "minimegatron/__init__.py").read_text()) == VERSION
    with pytest.raises(ValueError, match="has 0 lines"):
        release.source_version("__version__ = compute()\n")


def test_changelog_and_citation_are_of_the_package_s_version():
    texts = [(ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff")]
    assert release.version_problems(VERSION, *texts) == []


def test_versions_that_agree():
    assert release.version_problems("0.2.0", CHANGES.format("Unreleased"), CITED) == []
    assert release.version_problems("0.2.0", CHANGES.format("2026-02-03"), CITED, "v0.2.0") == []


@pytest.mark.parametrize(
    "version, date, cited, tag, says",
    [
        ("0.3.0", "Unreleased", CITED.replace("0.2", "0.3"), "", "section of CHANGELOG.md is of"),
        ("0.2.0", "soon", CITED, "", "is of version 0.1.0"),
        (
            "0.2.0",
            "Unreleased",
            CITED.replace("0.2", "0.1"),
            "",
            "CITATION.cff names version 0.1.0",
        ),
        ("0.2.0", "Unreleased", "title: x\n", "", "CITATION.cff names version none"),
        ("0.2.0", "2026-02-03", CITED, "v0.2.1", "the tag is v0.2.1"),
        ("0.2.0", "2026-02-03", CITED, "0.2.0", "the tag is 0.2.0"),
        ("0.2.0", "Unreleased", CITED, "v0.2.0", "write the day"),
    ],
)
def test_versions_that_do_not(version, date, cited, tag, says):
    (problem,) = release.version_problems(version, CHANGES.format(date), cited, tag)
    assert says in problem


# -- What is in the wheel --


def test_a_wheel_with_every_file():
    assert release.wheel_problems(WHEEL, TRACKED) == []


@pytest.mark.parametrize("lost", [WHEEL[0], WHEEL[2], WHEEL[3]])
def test_a_file_that_the_wheel_lacks(lost):
    (problem,) = release.wheel_problems([name for name in WHEEL if name != lost], TRACKED)
    assert problem.startswith("the wheel lacks ") and Path(lost).name in problem


def test_a_wheel_without_the_mark_of_types():
    without = [name for name in WHEEL if "py.typed" not in name]
    assert len(release.wheel_problems(without, TRACKED)) == 2
    (problem,) = release.wheel_problems(without, [name for name in TRACKED if "typed" not in name])
    assert "type checkers" in problem


@pytest.mark.parametrize("leaked", ["tests/test_release.py", "minimegatron/mine.py", "docs/x.md"])
def test_a_file_that_is_no_part_of_the_package(leaked):
    (problem,) = release.wheel_problems([*WHEEL, leaked], TRACKED)
    assert f"the wheel holds {leaked}" in problem


def test_wheels_are_compared_byte_by_byte(tmp_path):
    def wheel(name: str, **files: str) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for place, text in files.items():
                archive.writestr(place, text)
        return tmp_path / name

    one = wheel("one", a="1", b="2", c="3")
    assert release.differences(one, wheel("same", c="3", b="2", a="1")) == []
    assert release.differences(one, wheel("other", a="1", b="4", d="3")) == ["b", "c", "d"]


def test_what_the_wheel_says_of_itself():
    said = (
        "Metadata-Version: 2.4\nName: minimegatron\nVersion: 0.1.0\nRequires-Dist: torch>=2\n\nText"
    )
    assert release.metadata_problems(said, "0.1.0") == []
    assert "of version 0.1.0, and" in release.metadata_problems(said, "0.2.0")[0]
    (problem,) = release.metadata_problems(said.replace("torch", "numpy"), "0.1.0")
    assert "does not ask for torch" in problem


# -- First use --


def test_how_a_command_must_end():
    use = release.Use(["minimegatron", "plan"], "idle")
    assert use.problem(0, "busy 3, idle 1") == ""
    assert "ended with code 2:\nidle" in use.problem(2, "idle")
    assert "does not hold 'idle'" in use.problem(0, "busy")


def test_first_use_names_commands_that_exist(capsys):
    """Those that need no torch are run here, so that a key word that has changed is noticed at once."""
    typed = [use for use in release.uses(VERSION, 16) if use.words[0] == "minimegatron"]
    quick = ("plan", "groups", "--version")
    assert {use.words[1] for use in typed} <= {*COMMANDS, "--version"}
    for use in typed:
        if use.words[1] in quick:
            code = main(use.words[1:])
            assert use.problem(code, capsys.readouterr().out) == ""
    assert {use.words[1] for use in typed} >= set(quick)


def test_the_first_problem_ends_the_check(capsys):
    run = object.__new__(release.Release)
    run.began, run.num_steps, run.version = 0.0, 0, "0.2.0"
    run.judge("the first step", [])
    assert run.num_steps == 1 and re.search(r"\d s  the first step\n", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="no file\nminimegatron 0.2.0: not to release"):
        run.judge("the second step", ["no file"])
    assert "not right: the second step" in capsys.readouterr().out
