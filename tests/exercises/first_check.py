"""From nothing to the first green check, as a new user: `python -m tests.exercises.first_check`.

Makes a wheel, a fresh virtual environment and a folder, then types what docs/teachers.md says, and
prints after how many seconds each command had ended. The student's own time is not in it: instead of
somebody who writes the answer, the reference solution is copied.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from minimegatron.exercises.catalog import exercises, find

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Runs it once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torch", default="torch==2.13.0", help="requirement (default: %(default)s)"
    )
    parser.add_argument("--exercise", default="ex05", help="default: %(default)s")
    parser.add_argument("--wheel", type=Path, help="default: one made now, before the clock starts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _run(Path(folder), args)


def _run(folder: Path, args: argparse.Namespace) -> None:
    wheel = args.wheel or _make_wheel(folder)
    exercise = find(args.exercise)
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors, ", end="")
    print(f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, {wheel.name}")
    bin_folder = folder / "venv" / "bin"
    tool = str(bin_folder / "minimegatron")
    classroom = folder / "classroom"
    classroom.mkdir()
    stub = classroom / f"{exercise.name}.py"
    steps = [
        ([sys.executable, "-m", "venv", str(folder / "venv")], 0),
        ([str(bin_folder / "pip"), "install", "--quiet", args.torch, str(wheel)], 0),
        ([tool, "exercises"], 0),
        ([tool, "exercises", "start", exercise.number], 0),
        ([tool, "exercises", "check"], 1),
        (None, 0),
        ([tool, "exercises", "check"], 0),
    ]
    began = time.monotonic()
    for command, code in steps:
        if command is None:
            shutil.copyfile(exercise.folder / "solution.py", stub)
            print(f"{'':8}(the student writes {stub.name}; about {exercise.minutes} minutes)")
            continue
        start = time.monotonic()
        done = subprocess.run(command, cwd=classroom, capture_output=True, text=True)
        now = time.monotonic()
        words = " ".join([Path(command[0]).name, *command[1:]]).replace(f"{folder}/", "")
        first = done.stdout.strip().splitlines()[:1]
        answer = f"   -> {first[0]}" if "check" in command and first else ""
        print(f"{now - began:6.1f} s {words} ({now - start:.1f} s){answer}", flush=True)
        if done.returncode != code:
            raise SystemExit(
                f"exit code {done.returncode}, not {code}:\n{done.stdout}{done.stderr}"
            )
    print(f"{len(exercises())} exercises; first green check after {time.monotonic() - began:.0f} s")


def _make_wheel(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("minimegatron-*.whl"))


if __name__ == "__main__":
    main()
