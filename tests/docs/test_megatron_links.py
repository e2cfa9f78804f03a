"""Every link to Megatron's repository leads to a file, a line and a name that are there, at one tag.

What is there was recorded from a clone: docs/tools/record_megatron_files.py.
"""

import json
import re
from html import unescape
from pathlib import Path

import pytest
import record_megatron_files as recorded

from tests.docs.conftest import ROOT

LINK = re.compile(
    r'href="https://github\.com/NVIDIA/Megatron-LM/(?:blob|tree)/([^/"]+)/([^"#]*)(?:#L(\d+))?"[^>]*>'
    # The link's words, and a name in brackets behind it.
    r"(.*?)</a>(?:\s*\(<code>(.*?)</code>)?",
    re.DOTALL,
)
TAG = re.compile(r"<[^>]*>")
RECORD_AGAIN = "python docs/tools/record_megatron_files.py CLONE"


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
