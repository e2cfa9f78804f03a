"""Rosetta names what there is in megatron-core, and our parameters are Megatron's, in its order."""

import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))
rosetta = importlib.import_module("rosetta")
signatures = importlib.import_module("signatures")


@pytest.fixture(scope="module")
def package():
    return importlib.import_module("package").Package.read()


@pytest.fixture(scope="module")
def entries(package):
    return rosetta.entries(package)


def test_names_and_parameters_are_megatrons(entries):
    source, symbols = signatures.Source(ROOT), rosetta.Record().symbols
    core = [entry for entry in entries if entry.counterpart.startswith("megatron.core.")]
    assert len(core) > 200
    assert not [
        fault
        for entry in core
        for fault in rosetta.faults(entry, source.find(entry.name), symbols.get(entry.counterpart))
    ]


def test_a_counterpart_outside_the_package_is_in_the_repository(entries):
    """After a counterpart was renamed: record_megatron.py --repository."""
    recorded = rosetta.Record().repository
    named = {entry.counterpart for entry in entries} - {""}
    others = {name for name in named if not name.startswith("megatron.core.")}
    assert len(others) > 40 and others == set(recorded)
    assert not [entry.name for entry in entries if entry.newer]


def test_the_page_says_what_is_not_compared_and_what_differs(entries, package):
    page = rosetta.rosetta_page(package)
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| [")]
    words = {re.search(r"source/(.*)\)", row[0])[1]: row[2].strip(" |") for row in rows}
    assert len(words) == len(entries)
    record = rosetta.Record()
    for entry in entries:
        said = words[f"{entry.module}.md#{entry.symbol}"]
        assert said.startswith("–") != (entry.counterpart in record.symbols), entry.name
    for symbol in DIFFERENT:
        assert all(
            said not in ("", "–") for key, said in words.items() if key.endswith(f"#{symbol}")
        )


DIFFERENT = [
    "unwrap_model",
    "get_tensor_shapes",
    "AttnMaskType",
    "LayerType",
    "custom_backward",
    "ensure_divisibility",
    "get_attr_wrapped_model",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
]
"""Same parameters, or same name, and not the same."""


def test_every_note_is_of_a_symbol_that_exists(entries):
    known = {entry.name.removeprefix("minimegatron.") for entry in entries}
    assert not set(json.loads(rosetta.DATA.read_text())["symbols"]) - known


def test_the_record_is_that_of_the_installed_package(entries):
    """After another release was installed, or a counterpart renamed: make rosetta."""
    recorder, recorded = (
        importlib.import_module("record_megatron"),
        json.loads(rosetta.RECORD.read_text()),
    )
    try:
        found = recorder.record(entry.counterpart for entry in entries)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("megatron-core is not installed")
    found = json.loads(json.dumps(found))
    if found["version"] != recorded["version"]:
        pytest.skip(f"megatron-core {found['version']} here, {recorded['version']} recorded")
    assert found["symbols"] == recorded["symbols"]
    assert set(recorded) == {"version", "symbols", "repository"}


@pytest.mark.parametrize(
    ("ours", "theirs", "added", "words"),
    [
        (("a", "b"), ("a", "b", "c"), {}, None),
        (("a", "z"), ("a",), {}, "parameter z is not"),
        (("a", "z"), ("a",), {"z": "why"}, None),
        (("a",), ("a",), {"a": "why"}, "which is Megatron's too"),
        (("b", "a"), ("a", "b"), {}, "order"),
        (("a",), None, {}, "has no"),
    ],
)
def test_faults_are_found(ours, theirs, added, words):
    entry = rosetta.Entry("m", "f", "function", "megatron.core.m.f", "", added)
    signature = signatures.Signature("function", "m.py", 1, ours)
    counterpart = None if theirs is None else signatures.Signature("function", "x.py", 1, theirs)
    found = rosetta.faults(entry, signature, counterpart)
    assert len(found) == (words is not None)
    assert not found or words in found[0]
