"""What a newcomer finds: templates of issues and pull requests, how to report, cite and release.

The templates are held to what GitHub takes: a form that breaks a rule of its is not shown at all.
"""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
KINDS = {"checkboxes", "dropdown", "input", "markdown", "textarea"}
CFF_KEYS = {
    *("abstract", "authors", "cff-version", "keywords", "license", "message", "title"),
    *("type", "version"),
}
FILES = (
    "CHANGELOG.md",
    "CITATION.cff",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
    ".github/PULL_REQUEST_TEMPLATE.md",
)


def form_problems(text: str) -> list[str]:
    """What is wrong with a form for issues."""
    form = yaml.safe_load(text)
    problems = [f"no {key}" for key in ("name", "description", "body") if not form.get(key)]
    ids: set[str] = set()
    for field in form.get("body", []):
        if field.get("type") not in KINDS:
            problems.append(f"a field of type {field.get('type')}")
            continue
        label = field.get("attributes", {}).get("label")
        if not label:
            problems.append(f"a field without a label: {field.get('id')}")
        if field.get("id") in ids:
            problems.append(f"two fields of id {field['id']}")
        ids.add(field.get("id"))
        if not set(field) <= {"type", "id", "attributes", "validations"}:
            problems.append(f"unknown keys beside {label}")
    return problems


def commands(text: str) -> set[str]:
    """Targets of make that a text names."""
    return set(re.findall(r"`make ([\w-]+)", text))


def targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


def test_forms_for_issues():
    forms = {path.stem: path.read_text() for path in FORMS.glob("*.yml")}
    assert yaml.safe_load(forms.pop("config")) == {"blank_issues_enabled": False}
    assert set(forms) == {"bug", "question", "wrong_page"}
    assert {
        name: problems for name, text in forms.items() if (problems := form_problems(text))
    } == {}


@pytest.mark.parametrize(
    "right, wrong, says",
    [
        ("type: input", "type: line", "a field of type line"),
        ("id: command", "id: version", "two fields of id version"),
        ("label: What it printed\n", "x: 1\n", "without a label: output"),
        ("name: A bug\n", "", "no name"),
        ("validations:", "validation:", "unknown keys"),
    ],
)
def test_a_planted_mistake_in_a_form_is_found(right, wrong, says):
    text = (FORMS / "bug.yml").read_text()
    assert right in text and form_problems(text) == []
    assert any(says in problem for problem in form_problems(text.replace(right, wrong)))


def test_a_report_of_a_mistake_has_versions():
    form = yaml.safe_load((FORMS / "bug.yml").read_text())
    asked = [field for field in form["body"] if "--version" in field["attributes"]["label"]]
    assert len(asked) == 1 and asked[0]["validations"] == {"required": True}


def test_the_citation_has_what_its_format_asks_for():
    """Of https://github.com/citation-file-format/citation-file-format, version 1.2.0."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert set(cited) == CFF_KEYS
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert cited["authors"] == [{"name": "The minimegatron developers"}]
    assert all(isinstance(cited[key], str) for key in CFF_KEYS - {"authors", "keywords"})


@pytest.mark.parametrize("name", FILES)
def test_commands_and_files_that_a_text_names_exist(name):
    text = (ROOT / name).read_text()
    assert commands(text) <= targets()
    for path in re.findall(r"`((?:docs|tests|minimegatron)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_a_newcomer_is_led_to_all_of_them():
    page = (ROOT / "docs/contributing.md").read_text()
    assert {"test", "lint", "docs", "docs-version", "release-check"} <= commands_of_page(page)
    assert commands_of_page(page) <= targets()
    readme = (ROOT / "README.md").read_text()
    for name in ("CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff"):
        assert f"]({name})" in readme, name


def commands_of_page(text: str) -> set[str]:
    """Of its blocks too."""
    return commands(text) | set(re.findall(r"^\$ make ([\w-]+)", text, re.M))


def test_commands_are_found_where_a_text_has_them():
    assert commands("see `make docs-version VERSION=dev`, make haste, `make lint`.") == {
        *("docs-version", "lint")
    }
    assert commands_of_page("```\n$ make docs    # x\n```\n`make test`") == {"docs", "test"}
