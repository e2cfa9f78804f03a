"""From nothing to all of it, as a new user, no clone: `python -m tests.exercises.first_use`.

Makes a wheel, a fresh virtual environment and a folder, then types what docs/teachers.md says, and
prints after how many seconds each command had ended: the first green check, the first replay, a graded
folder, the first picture of a notebook. The student's own time is not in it: instead of somebody who
writes the answer, the reference solution is copied.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from minimegatron.exercises.exercise import find

ROOT = Path(__file__).parents[2]
PURE, RANKED = find("ex05"), find("ex06")
FIRST_PICTURE = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
client = nbclient.NotebookClient(notebook, timeout=120)
with client.setup_kernel():
    for number, cell in enumerate(notebook.cells):
        client.execute_cell(cell, number)
        kinds = {kind for one in cell.get("outputs", []) for kind in one.get("data", {})}
        if kinds & {"image/png", "image/svg+xml"}:
            raise SystemExit(print(f"the first picture comes from cell {number + 1}"))
raise SystemExit("no cell drew a picture")
"""


def main() -> None:
    """Runs it once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torch", default="torch==2.13.0", help="requirement (default: %(default)s)"
    )
    parser.add_argument("--wheel", type=Path, help="default: one made now, before the clock starts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = args.wheel or _make_wheel(Path(folder))
        FirstUse(Path(folder)).everything(args.torch, wheel)


class FirstUse:
    """One new user, in a folder of their own."""

    def __init__(self, folder: Path):
        self.folder, self.classroom = folder, folder / "classroom"
        self.classroom.mkdir()
        self.bin, self.began = folder / "venv" / "bin", time.monotonic()

    def everything(self, torch: str, wheel: Path) -> None:
        """Types it all."""
        print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors, ", end="")
        print(f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, {wheel.name}")
        self.type(sys.executable, "-m", "venv", str(self.folder / "venv"))
        self.type("pip", "install", "--quiet", torch, str(wheel))
        self.type("minimegatron", "exercises")
        self.type("minimegatron", "exercises", "start", PURE.number)
        self.type("minimegatron", "exercises", "check", code=1)
        self.write(PURE)
        self.type("minimegatron", "exercises", "check", what="first green check")
        self.type("minimegatron", "exercises", "start", RANKED.number)
        self.write(RANKED)
        self.type("minimegatron", "exercises", "check", what="first replay")
        replay = self.classroom / "replays" / f"{RANKED.name}.html"
        assert replay.stat().st_size > 10_000
        self.hand_in()
        grading = ("minimegatron", "exercises", "grade", "submissions", "--out", "grades.csv")
        self.type(*grading, what="a graded folder")
        print("".join(f"{'':8}| {line}\n" for line in self.read("grades.csv")), end="")
        self.type("pip", "install", "--quiet", f"minimegatron[notebooks] @ {wheel.as_uri()}")
        self.type("minimegatron", "notebooks")
        first = next(iter(sorted((self.classroom / "notebooks").glob("*.ipynb"))))
        (self.folder / "run.py").write_text(FIRST_PICTURE)
        program = (str(self.folder / "run.py"), f"notebooks/{first.name}")
        self.type("python", *program, what="first notebook picture")

    def type(self, *words: str, code: int = 0, what: str = "") -> None:
        """Runs a command, and prints when it had ended. `what`: what the user has now."""
        program = words[0] if os.path.isabs(words[0]) else str(self.bin / words[0])
        start = time.monotonic()
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [program, *words[1:]],
            cwd=self.classroom,
            capture_output=True,
            text=True,
            env={"PATH": path, "HOME": str(self.folder)},
        )
        now = time.monotonic()
        shown = " ".join([Path(words[0]).name, *words[1:]]).replace(f"{self.folder}/", "")
        shown = re.sub(r" @ file:\S+", "", shown)
        answer = f"   -> {what}" * bool(what)
        print(f"{now - self.began:6.1f} s {shown} ({now - start:.1f} s){answer}", flush=True)
        if done.returncode != code:
            raise SystemExit(
                f"exit code {done.returncode}, not {code}:\n{done.stdout}{done.stderr}"
            )

    def write(self, exercise) -> None:
        """What the student writes."""
        name = f"{exercise.name}.py"
        shutil.copyfile(exercise.folder / "solution.py", self.classroom / name)
        print(f"{'':8}(the student writes {name}; about {exercise.minutes} minutes)")

    def hand_in(self) -> None:
        """Two students: one with both files, one with a stub."""
        for student in ("ada", "bob"):
            (self.classroom / "submissions" / student).mkdir(parents=True)
        for path in self.classroom.glob("ex*.py"):
            shutil.copy(path, self.classroom / "submissions" / "ada")
        shutil.copy(PURE.folder / "stub.py", self.classroom / f"submissions/bob/{PURE.name}.py")

    def read(self, name: str) -> list[str]:
        """The lines of a file."""
        return (self.classroom / name).read_text().splitlines()


def _make_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True)
    return next(folder.glob("minimegatron-*.whl"))


if __name__ == "__main__":
    main()
