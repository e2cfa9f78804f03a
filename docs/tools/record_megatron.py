"""Records what the installed megatron-core offers under the names that Rosetta gives.

Run by: `make rosetta`, after a change of `rosetta.json`, of the names in modules that mirror Megatron,
or of the version of megatron-core. Calls: `rosetta`, `signatures`. Writes megatron_core.json beside
this file, so that the site is built without megatron-core; tests/conformance compares the two.
"""

import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from package import Package  # noqa: E402
from rosetta import RECORD, entries  # noqa: E402
from signatures import Source  # noqa: E402


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


if __name__ == "__main__":
    data = record(entry.counterpart for entry in entries(Package.read()))
    text = json.dumps(data, separators=(",", ":"))
    RECORD.write_text(text.replace('},"', '},\n"') + "\n")
    print(f"{RECORD.name}: {len(data['symbols'])} names of megatron-core {data['version']}")
