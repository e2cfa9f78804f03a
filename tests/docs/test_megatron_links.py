"""Every link to Megatron's repository leads to a file, a line and a name that are there, at one tag.

What is there was recorded from a clone by docs/tools/records/megatron_files.py.
"""

import json
import re
from html import unescape
from pathlib import Path

import pytest

from records import megatron_files as recorded
from tests.docs.conftest import ROOT

LINK = re.compile(
    r'href="https://github\.com/NVIDIA/Megatron-LM/(?:blob|tree)/([^/"]+)/([^"#]*)(?:#L(\d+))?"[^>]*>'
    # The link's words, and a name in brackets behind it.
    r"(.*?)</a>(?:\s*\(<code>(.*?)</code>)?",
    re.DOTALL,
)
TAG = re.compile(r"<[^>]*>")
MACRO = re.compile(r"\{\{ megatron ([\w/.]+?)(?:#L(\d+))? \}\}(?: \(`([^`]+)`\))?")
"""In a page's source: file, line, and the name behind it."""
RECORD_AGAIN = "python docs/tools/record.py megatron-files CLONE"


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(recorded.FILES.read_text())


def faults_of(html: str, record: dict) -> list[str]:
    """What is wrong with the links of a page."""
    found = []
    for tag, path, line, words, behind in LINK.findall(html):
        shown = f"{path}#L{line}" if line else path
        if tag != record["tag"]:
            found.append(f"{shown}: at {tag}, and not at {record['tag']}")
        elif not has_path(path, record):
            found.append(f"{shown}: no such file at {tag}")
        elif line:
            text = record["lines"].get(path, {}).get(line)
            words = unescape(TAG.sub("", words)).strip()
            name = unescape(TAG.sub("", behind)) if "/" in words else words.rpartition(".")[2]
            if text is None:
                found.append(f"{shown}: not recorded; run {RECORD_AGAIN}")
            elif not text or name not in text:
                found.append(f"{shown}: {name or 'nothing'!r} is not in the line {text!r}")
    return found


def has_path(path: str, record: dict) -> bool:
    """A file, or a folder that has files."""
    folder = path.rstrip("/") + "/"
    return path in record["paths"] or any(other.startswith(folder) for other in record["paths"])


def test_links_of_the_site(site: Path, record):
    found, number = [], 0
    for page in sorted(site.rglob("*.html")):
        html = page.read_text()
        number += len(LINK.findall(html))
        found += [f"{page.relative_to(site)}: {fault}" for fault in faults_of(html, record)]
    assert number > 300
    assert not found, "\n".join(found)


def test_links_outside_the_site(record):
    """In READMEs, notebooks and docstrings."""
    files = [ROOT / "README.md", *ROOT.glob("notebooks/*"), *ROOT.glob("minimegatron/**/*.*")]
    for path in files:
        if path.suffix in (".md", ".py", ".ipynb"):
            for tag, name in re.findall(
                r"NVIDIA/Megatron-LM/(?:blob|tree)/([\w.]+)/([\w/.]+)", path.read_text()
            ):
                assert tag == record["tag"] and has_path(name, record), f"{path}: {name} at {tag}"


def faults_of_claims(text: str, record: dict) -> list[str]:
    """What is wrong with what a page of the tour, in its source, says that Megatron has.

    A link to a file has a line, and a name that is in that line. Each claim of the section "What
    Megatron-Core does beyond this" is an item of a list, with one such link.
    """
    found = []
    for path, line, name in MACRO.findall(text):
        if path.endswith(".py") and not (
            name and name in record["lines"].get(f"megatron/{path}", {}).get(line, "")
        ):
            found.append(f"{path}: no line of it that has {name or 'a name'}")
    for section in re.findall(
        r"^## What Megatron-Core does beyond this\n(.*?)^## ", text, re.M | re.S
    ):
        head, *claims = re.split(r"^- ", section, flags=re.M)
        if head.strip():
            found.append(f"no item of a list: {head.strip()}")
        found += [f"not one link: {claim}" for claim in claims if len(MACRO.findall(claim)) != 1]
    return found


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "tour").glob("*.md")), ids=lambda p: p.stem
)
def test_e_each_claim_about_megatron_has_a_file_and_a_name(page, record):
    found = faults_of_claims(page.read_text(), record)
    assert not found, "\n".join([*found, f"after a new link run {RECORD_AGAIN}"])


def test_e_a_claim_without_a_name_is_found(record):
    path = "core/pipeline_parallel/schedules.py"
    lines = record["lines"][f"megatron/{path}"]
    line = next(n for n, text in lines.items() if "def backward_step(" in text)
    good = f"{{{{ megatron {path}#L{line} }}}} (`backward_step`)"
    page = "## What Megatron-Core does beyond this\n\n{}\n\n## Ask yourself\n"
    assert not faults_of_claims(page.format(f"- It has one: {good}."), record)
    for wrong in (
        f"It has one: {good}.",
        "- It has Mamba layers.",
        f"- It has one: {good}, and {good}.",
        f"- It has one: {{{{ megatron {path} }}}}.",
        f"- It has one: {good.replace('(`backward_step`)', '(`Mamba`)')}.",
        f"- It has one: {good.replace(line, '999999')}.",
    ):
        assert len(faults_of_claims(page.format(wrong), record)) == 1, wrong


def test_a_wrong_link_is_found(record):
    url = "https://github.com/NVIDIA/Megatron-LM/blob"
    path = "megatron/core/pipeline_parallel/schedules.py"
    line = next(n for n, text in record["lines"][path].items() if "def backward_step(" in text)
    good = f'<a href="{url}/{record["tag"]}/{path}#L{line}">'
    assert not faults_of(f"{good}<code>backward_step</code></a>", record)
    assert not faults_of(
        f"{good}<code>megatron/x.py</code></a> (<code>backward_step</code>)", record
    )
    assert not faults_of(f'<a href="{url}/{record["tag"]}/megatron/core">core</a>', record)
    for wrong in (
        f"{good}<code>forward_step</code></a>",
        f"{good}<code>megatron/x.py</code></a> (<code>forward_step</code>)",
        f'<a href="{url}/main/{path}">x</a>',
        f'<a href="{url}/{record["tag"]}/megatron/core/gone.py">x</a>',
        f'<a href="{url}/{record["tag"]}/{path}#L999999">x</a>',
    ):
        assert len(faults_of(wrong, record)) == 1, wrong
