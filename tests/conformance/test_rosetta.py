"""Rosetta names what there is in megatron-core, and our parameters are Megatron's, in its order."""

import dataclasses
import importlib
import importlib.metadata
import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from minimegatron.core.datasets.gpt_dataset import GPTDatasetConfig
from minimegatron.core.distributed import DistributedDataParallelConfig
from minimegatron.core.optimizer import OptimizerConfig
from minimegatron.core.optimizer.optimizer import make_torch_optimizer
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.conformance.megatron import megatron_module

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))
record_left_out = importlib.import_module("records.left_out")
rosetta = importlib.import_module("rosetta.rosetta")
rosetta_names = importlib.import_module("rosetta.rosetta_names")
signatures = importlib.import_module("rosetta.signatures")


@pytest.fixture(scope="module")
def package():
    return importlib.import_module("source.package").Package.read()


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
    """After a counterpart was renamed: record.py megatron-core --repository."""
    recorded = rosetta.Record().repository
    named = {entry.counterpart for entry in entries} - {""}
    others = {name for name in named if not name.startswith("megatron.core.")}
    assert len(others) > 40 and others == set(recorded)
    assert not [entry.name for entry in entries if entry.newer]


def test_the_page_says_what_is_not_compared_and_what_differs(entries, package):
    page = rosetta.rosetta_page(package).partition("\n## Names that a package offers\n")[0]
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
    known |= set(record_left_out.counterparts())
    known |= {name for name, _ in pairs(entries, signatures.Source(ROOT))}
    assert not set(json.loads(rosetta.DATA.read_text())["symbols"]) - known


def test_the_record_is_that_of_the_installed_package(entries):
    """After another release was installed, or a counterpart renamed: make rosetta."""
    recorder, recorded = (
        importlib.import_module("records.megatron_core"),
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


def test_arguments_that_are_left_out_are_recorded_as_they_are_installed():
    """After a decorator was added, or another release installed: make rosetta."""
    source, version = installed()
    recorded = json.loads(rosetta_names.LEFT_OUT.read_text())
    found = record_left_out.record_left_out(source, recorded["symbols"])
    assert recorded == {"version": version, "symbols": json.loads(json.dumps(found))}


CONFIGS = [
    (TransformerConfig, "transformer.transformer_config"),
    (OptimizerConfig, "optimizer.optimizer_config"),
    (DistributedDataParallelConfig, "distributed.distributed_data_parallel_config"),
    (GPTDatasetConfig, "datasets.gpt_dataset"),
]


@pytest.mark.parametrize(("config", "module"), CONFIGS, ids=lambda x: getattr(x, "__name__", ""))
def test_f3_fields_that_are_left_out_read_as_the_installed_ones(config, module):
    theirs = getattr(megatron_module(module), config.__name__)
    ours, wrong = object.__new__(config), {}
    left_out = [x for x in dataclasses.fields(theirs) if x.init and not hasattr(config, x.name)]
    left_out = [x for x in left_out if x.name not in config.__dataclass_fields__]
    for field in left_out:
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default
        read = getattr(ours, field.name, "cannot be read")
        if read != default and not str(read) == str(default) != "":
            wrong[field.name] = (read, default)
    assert len(left_out) > 10 and not wrong


def test_an_argument_is_taken_or_the_reason_is_given(entries):
    """No function or method lacks Megatron's arguments without the door, or a word in rosetta.json."""
    theirs, ours = installed()[0], signatures.Source(ROOT)
    door, notes = record_left_out.counterparts(), json.loads(rosetta.DATA.read_text())["symbols"]
    lacking = {}
    for name, counterpart in pairs(entries, ours):
        own, other = ours.arguments(f"minimegatron.{name}"), theirs.arguments(counterpart)
        if own is not None and other is not None:
            missing = {x.name for x in other} - {x.name for x in own}
            if missing and name not in door:
                lacking[name] = missing
    explained = {name for name, note in notes.items() if "own signature" in note} - set(door)
    assert set(lacking) == explained, {x: lacking.get(x) for x in set(lacking) ^ explained}


def test_positions_are_megatrons(entries):
    """What one gives by position comes in Megatron's order, and what is ours comes after it."""
    theirs, ours = installed()[0], signatures.Source(ROOT)
    notes = json.loads(rosetta.DATA.read_text())["symbols"]
    wrong = []
    for name, counterpart in [*pairs(entries, ours), *record_left_out.counterparts().items()]:
        own, other = ours.arguments(f"minimegatron.{name}"), theirs.arguments(counterpart)
        found = ours.find(f"minimegatron.{name}")
        if own is None or other is None or found and found.kind == "record":
            continue
        by_position = [x.name for x in own if x.by_position]
        expected = [x.name for x in other if x.by_position]
        is_prefix = by_position == expected[: len(by_position)]
        if not is_prefix and by_position[: len(expected)] != expected:
            wrong.append(f"{name}: {by_position}, in Megatron {expected}")
    assert not [text for text in wrong if "own signature" not in notes.get(text.split(":")[0], {})]


def pairs(entries, ours) -> list[tuple[str, str]]:
    """Our functions, classes and their public methods, where they are written -> Megatron's names."""
    found = []
    for entry in entries:
        if not entry.counterpart.startswith("megatron.core."):
            continue
        short = entry.name.removeprefix("minimegatron.")
        found.append((short, entry.counterpart))
        if entry.kind == "class":
            body = dict(record_left_out.definitions(ours.tree(entry.module).body))
            methods = [x.rpartition(".")[2] for x in body if x.startswith(f"{entry.symbol}.")]
            found += [(f"{short}.{x}", f"{entry.counterpart}.{x}") for x in methods if x[0] != "_"]
    return found


@cache
def installed():
    """megatron-core's source, and its version; that of the record."""
    version = json.loads(rosetta.RECORD.read_text())["version"]
    distribution = importlib.metadata.distribution("megatron-core")
    assert distribution.version == version, "run: make rosetta"
    return signatures.Source(Path(str(distribution.locate_file("")))), version


def test_what_is_offered_left_out_and_refused_is_on_the_page(package):
    page = rosetta.rosetta_page(package)
    names, arguments, refused = (
        page.index(f"\n## {title}\n")
        for title in (
            "Names that a package offers",
            "Arguments that are left out",
            "What is refused",
        )
    )
    assert names < arguments < refused
    for export in rosetta_names.exports():
        assert f"`{export.name}`" in page[names:arguments]
    for name, left_out in rosetta_names.left_out().items():
        assert f"[`{rosetta_names._split(name)[1]}`]" in page[arguments:refused] or not left_out
        assert all(f"<code>{x}</code>:" in page[arguments:refused] for x in left_out)
    data = json.loads(rosetta.DATA.read_text())
    for kind in ("refuses", "stricter", "not here"):
        assert len(data[kind]) > 2 and all(why in page[refused:] for why in data[kind].values())


def test_what_is_not_here_is_not_here(package):
    """And is in megatron-core."""
    source = installed()[0]
    for name in json.loads(rosetta.DATA.read_text())["not here"]:
        assert package.find(f"minimegatron.{name}") is None, name
        theirs = f"megatron.{name}"
        assert source._definition(theirs) or source.path(theirs), name


def test_f_weight_decay_without_a_scheduler_is_told(package):
    """Here the groups have theirs when they are made; there all have the configuration's."""
    weights = [{"params": [torch.nn.Parameter(torch.ones(2))], "wd_mult": x} for x in (1.0, 0.0)]
    made = make_torch_optimizer(weights, OptimizerConfig(lr=0.1, weight_decay=0.5))
    assert [group["weight_decay"] for group in made.param_groups] == [0.5, 0.0]
    row = next(
        x for x in rosetta.rosetta_page(package).splitlines() if "get_megatron_optimizer`" in x
    )
    assert "in Megatron an `OptimizerParamScheduler` sees to that" in row
