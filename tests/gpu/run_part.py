"""One part of the check, in this process: `python -m tests.gpu.run_part NAME FILE ...`.

Called by: `report`. Writes a line of JSON for each finding, as soon as there is one, so what a part has
found before it is ended is kept; and a last line once it is done.
"""

import argparse
import ctypes
import importlib
import json
import resource
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from tests.gpu.place import Place, error_of

ROOT = Path(__file__).parents[2]
DONE = {"done": True}
MOST_BYTES = 4 << 30
PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent has ended."""
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
    _stay_within_bounds()
    # Notebooks and pages are made by tools of the documentation.
    sys.path.insert(0, str(ROOT / "docs" / "tools"))
    with args.file.open("a") as file:
        try:
            place = Place(args.device, args.num_gpus, args.quick, ends_at)
            module, _, function = args.run.partition(":")
            for finding in getattr(importlib.import_module(f"tests.gpu.{module}"), function)(place):
                _write(file, asdict(finding))
        except Exception as error:  # whatever a part meets is what it found
            _write(file, asdict(error_of(error)))
            return 1
        _write(file, DONE)
    return 0


def _stay_within_bounds() -> None:
    """No file grows without end, and this process does not outlive the check."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _write(file: TextIO, line: dict) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
