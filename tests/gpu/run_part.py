"""One part of the check, in this process: `python -m tests.gpu.run_part NAME FILE ...`.

Called by: `report`. Writes a line of JSON for each finding, as soon as there is one, so what a part has
found before it is ended is kept; and a last line once it is done.
"""

import argparse
import importlib
import json
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]
DONE = {"done": True}
FOR_STACKS = 8.0
"""Seconds before its end at which ranks that hang are asked where they stand."""


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 1 if the part raised."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", help="module:function, below tests.gpu")
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-gpus", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=300.0)
    args = parser.parse_args(argv)
    ends_at = time.monotonic() + args.seconds - min(FOR_STACKS, args.seconds / 4)
    # Notebooks and pages are made by tools of the documentation.
    sys.path.insert(0, str(ROOT / "docs" / "tools"))
    with args.file.open("a") as file:
        try:
            from tests.gpu.place import Place

            place = Place(args.device, args.num_gpus, args.quick, ends_at)
            module, _, function = args.run.partition(":")
            for finding in getattr(importlib.import_module(f"tests.gpu.{module}"), function)(place):
                _write(file, asdict(finding))
        except Exception as error:  # whatever a part meets is what it found
            traceback.print_exc()
            first = (str(error).strip() or "no words").splitlines()[0]
            found = f"{type(error).__name__}: {first}"
            _write(file, {"what": "error", "found": found, "expected": "none", "holds": False})
            return 1
        _write(file, DONE)
    return 0


def _write(file: TextIO, line: dict) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
