"""Rosetta names what there is in megatron-core, and our parameters are Megatron's, in its order."""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))
rosetta = importlib.import_module("rosetta")
signatures = importlib.import_module("signatures")


@pytest.fixture(scope="module")
def entries():
    return rosetta.entries(importlib.import_module("package").Package.read())


def test_names_and_parameters_are_megatrons(entries):
    source, symbols = signatures.Source(ROOT), rosetta.Record().symbols
    core = [entry for entry in entries if entry.counterpart.startswith("megatron.core.")]
    assert len(core) > 200
    assert not [
        fault
        for entry in core
        for fault in rosetta.faults(entry, source.find(entry.name), symbols.get(entry.counterpart))
    ]


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
