"""Records what the installed megatron-core offers under the names that Rosetta gives.

Run by: `make rosetta`, after a change of `rosetta.json`, of the names in modules that mirror Megatron,
or of the version of megatron-core. Calls: `left_out`, `rosetta`, `signatures`. Writes
megatron_core.json beside this file, so that the site is built without megatron-core, and
minimegatron/core/left_out.json; tests/conformance compares both with the package.

`megatron.training` and `megatron.rl` are not in that package but in Megatron's repository alone.
`--repository FOLDER` records where their names are, from a checkout of the same release:

    git clone --depth 1 -b core_v0.16.1 https://github.com/NVIDIA/Megatron-LM FOLDER

Without it, those of the last recording stay.
"""

import argparse
import dataclasses
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path

from records import left_out
from rosetta.rosetta import RECORD, entries
from rosetta.signatures import Source
from source.package import Package
from source.places import read_json


def record(names: Iterable[str]) -> dict:
    """{"version": ..., "symbols": {dotted name: signature}}; what does not exist is left out."""
    distribution = importlib.metadata.distribution("megatron-core")
    source = Source(Path(str(distribution.locate_file(""))))
    core = sorted({name for name in names if name.startswith("megatron.core.")})
    found = {name: source.find(name) for name in core}
    return {
        "version": distribution.version,
        "symbols": {name: dataclasses.asdict(x) for name, x in found.items() if x is not None},
    }


def record_repository(names: Iterable[str], folder: Path) -> dict[str, list]:
    """Of the names that only the repository has, file and line; what does not exist is left out."""
    source = Source(folder)
    if source.path("megatron.training.training") is None:
        raise SystemExit(f"{folder} has no megatron/training/training.py; give a checkout")
    wanted = sorted(
        {name for name in names if name.startswith(("megatron.training.", "megatron.rl."))}
    )
    found = {name: source.find(name) for name in wanted}
    return {name: [x.file, x.line] for name, x in found.items() if x is not None}


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", type=Path, help="a checkout of Megatron-LM at this release")
    args = parser.parse_args()
    names = [entry.counterpart for entry in entries(Package.read())]
    data = record(names)
    data["repository"] = read_json(RECORD).get("repository", {})
    if args.repository:
        data["repository"] = record_repository(names, args.repository)
    text = json.dumps(data, separators=(",", ":"))
    RECORD.write_text(text.replace('},"', '},\n"').replace('],"megatron', '],\n"megatron') + "\n")
    counts = f"{len(data['symbols'])} names of megatron-core {data['version']}"
    print(f"{RECORD.name}: {counts}, {len(data['repository'])} of the repository")
    folder = args.repository or importlib.metadata.distribution("megatron-core").locate_file("")
    print(left_out.write(Source(Path(str(folder))), data["version"]))
