"""All benchmarks in turn, each in a process of its own.

Run: python -m tests.benchmarks [--out docs/benchmarks] [--quick] [NAME ...], or `make bench`. Writes
one file per benchmark into the folder, and `summary.json` over those that are there; the
documentation shows them (docs/tools/pages/benchmarks_page.py). Takes about 45 minutes, during which
nothing else should run.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.summary import summarise

NAMES = (
    "step_time",
    "paced",
    "releases",
    "demo_speed",
    "bucket_overlap",
    "backend_speed",
    "context_speed",
    "scan_speed",
    "policy_speed",
    "rerun_speed",
    "planner_speed",
    "start_time",
    "tracing_cost",
    "doctor_cost",
    "gpu_mfu",
)
DEFAULT_OUT = "docs/benchmarks"


def main() -> int:
    """Exit code 1 if a benchmark could not run; claims that the figures break are printed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", choices=[*NAMES, []], metavar="NAME", help="all of them, if none"
    )
    parser.add_argument("--out", type=Path, help=f"folder; {DEFAULT_OUT}, or none for --quick")
    parser.add_argument("--quick", action="store_true", help="the smallest run of each")
    options = parser.parse_args()
    for name in options.names:
        if name not in NAMES:
            parser.error(f"{name!r} is no benchmark; use {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = options.out or Path(thrown_away if options.quick else DEFAULT_OUT)
        folder.mkdir(parents=True, exist_ok=True)
        failed = [name for name in options.names or NAMES if not _run(name, folder, options.quick)]
        claims = summarise(folder)
    for claim in claims:
        print(f"{'kept' if claim['is_kept'] else 'BROKEN'}: {claim['text']}: {claim['found']}")
    for name in failed:
        print(f"{name} could not run")
    return 1 if failed else 0


def _run(name: str, folder: Path, quick: bool) -> bool:
    """False if it ended without a result."""
    result = folder / f"{name}.json"
    begun, before = time.time(), result.stat().st_mtime if result.exists() else None
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--json", str(result)]
    subprocess.run([*command, *(["--quick"] if quick else [])])
    print(f"\n-- {name}: {time.time() - begun:.0f} s --\n", flush=True)
    return result.exists() and result.stat().st_mtime != before


if __name__ == "__main__":
    sys.exit(main())
