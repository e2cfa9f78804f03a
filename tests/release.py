"""Whether this commit can be released: `make release-check` runs it, `make test` tests how it judges.

    python -m tests.release [--torch REQUIREMENT] [--tag vX.Y.Z]

It needs Python 3.11 with venv, git, and the package index that pip knows. From what is committed, and
nothing else, it builds the sdist and the wheel, and looks into them. Then it installs the wheel in a
fresh virtual environment, far from the checkout, and types what a new user types. The first problem
ends it, with exit code 1. If there was none, the two files are in dist/.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "release"
DIST = ROOT / "dist"
TOOLS = ("build>=1.2,<2", "twine>=6.1,<8")
NOTEBOOKS_IN_WHEEL = "data/share/minimegatron/notebooks"
INSTALL_SECONDS, USE_SECONDS = 900, 180
SMALL_GPT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 "
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-2 "
    "--log-interval 1 --eval-iters 0 --pipeline-model-parallel-size 2"
)


@dataclass(frozen=True)
class Use:
    """A command that a new user types, and what its output must hold."""

    words: Sequence[str]
    finds: str

    def problem(self, code: int, output: str) -> str:
        """What is wrong with its end; "" if nothing is."""
        typed = " ".join(self.words)
        if code != 0:
            return f"`{typed}` ended with code {code}:\n{output}"
        if self.finds not in output:
            return f"the output of `{typed}` does not hold {self.finds!r}:\n{output}"
        return ""


def uses(version: str, num_notebooks: int) -> list[Use]:
    """First use, in its order."""
    show = "import minimegatron; print('version', minimegatron.__version__, minimegatron.__file__)"
    train = "torchrun --standalone --nproc-per-node 2 -m minimegatron.pretrain_gpt"
    typed = [
        ("minimegatron --version", f"minimegatron {version}, torch "),
        ("minimegatron plan --pp 4 --microbatches 8", "idle / total"),
        ("minimegatron groups --world-size 8 --tp 2 --pp 2", "tp 2 x cp 1 x dp 2 x pp 2"),
        ("minimegatron exercises list", "ex05_predict_1f1b"),
        ("minimegatron notebooks mine", f"Notebooks put into mine: {num_notebooks}\n"),
        ("minimegatron convert --help", "Hugging Face"),
        (f"{train} {SMALL_GPT}", "iteration 2/2 | lm loss"),
    ]
    return [
        Use(["python", "-c", show], f"version {version} "),
        *(Use(command.split(), finds) for command, finds in typed),
    ]


# -- Judging: what is wrong, as sentences --


def version_problems(version: str, changelog: str, citation: str, tag: str = "") -> list[str]:
    """Where the package's version is not the one that CHANGELOG, CITATION or the tag names.

    With a tag, the newest section of CHANGELOG has a date; without one it may say Unreleased.
    """
    problems = []
    heads = re.findall(r"^## \[(\S+)\] - (Unreleased|\d{4}-\d{2}-\d{2})$", changelog, re.M)
    newest, date = heads[0] if heads else ("", "")
    if newest != version:
        problems.append(
            f"the newest section of CHANGELOG.md is of version {newest or 'none'}, and the package "
            f"is {version}: begin a section '## [{version}] - Unreleased'"
        )
    cited = re.findall(r"^version: *\"?([^\"\s]+)\"?$", citation, re.M)
    if cited != [version]:
        problems.append(
            f"CITATION.cff names version {', '.join(cited) or 'none'}, and the package is {version}: "
            f"write 'version: {version}' there"
        )
    if tag and tag != f"v{version}":
        problems.append(
            f"the tag is {tag}, and the package is {version}: the tag of this commit is v{version}; "
            "for another version, change __version__ first"
        )
    if tag and date == "Unreleased":
        problems.append(
            f"CHANGELOG.md still says that {newest} is Unreleased: write the day in its place"
        )
    return problems


def wheel_problems(names: Iterable[str], tracked: Iterable[str]) -> list[str]:
    """Where a wheel's files are not those that git tracks: the package, and the notebooks."""
    held = {name: _place_in_repository(name) for name in names}
    wanted = {
        name
        for name in tracked
        if name.startswith("minimegatron/") or re.fullmatch(r"notebooks/[^/]+\.ipynb", name)
    }
    lacking = sorted(wanted - set(held.values()))
    leaked = sorted(name for name, place in held.items() if place and place not in wanted)
    problems = [f"the wheel lacks {name}: see package-data in pyproject.toml" for name in lacking]
    problems += [f"the wheel holds {name}, which is no file of the package" for name in leaked]
    if "minimegatron/py.typed" not in held:
        problems.append("the wheel has no minimegatron/py.typed: type checkers would not look in")
    return problems


def _place_in_repository(name: str) -> str:
    """Where a wheel's file comes from; "" for what the build has written about the wheel."""
    top, _, rest = name.partition("/")
    if top.endswith(".dist-info"):
        return ""
    if top.endswith(".data") and rest.startswith(f"{NOTEBOOKS_IN_WHEEL}/"):
        return f"notebooks/{rest.rpartition('/')[2]}"
    return name


def differences(one: Path, other: Path) -> list[str]:
    """Files that two wheels do not share byte by byte."""
    contents = []
    for path in (one, other):
        with zipfile.ZipFile(path) as wheel:
            contents.append({name: wheel.read(name) for name in wheel.namelist()})
    first, second = contents
    return sorted(name for name in first.keys() | second if first.get(name) != second.get(name))


def metadata_problems(text: str, version: str) -> list[str]:
    """What the wheel says of itself, beside what the source says."""
    said = Parser().parsestr(text)
    problems = []
    if said["Version"] != version:
        problems.append(f"the wheel is of version {said['Version']}, and the source of {version}")
    if not any(needed.startswith("torch") for needed in said.get_all("Requires-Dist", [])):
        problems.append("the wheel does not ask for torch: see dependencies in pyproject.toml")
    return problems


# -- Doing --


class Release:
    """One check, from the commit to the new user; prints each step and when it had ended."""

    def __init__(self, tag: str, torch: str):
        self.tag, self.torch, self.began = tag, torch, time.monotonic()
        self.num_steps = 0
        self.files = _git("ls-tree", "-r", "--name-only", "HEAD").splitlines()
        self.version = source_version(_git("show", "HEAD:minimegatron/__init__.py"))

    def run(self) -> None:
        """All of it. Raises SystemExit at the first problem."""
        if changed := _git("status", "--porcelain").splitlines():
            print(f"{len(changed)} changed or new files are not committed, and so are not checked")
        texts = [_git("show", f"HEAD:{name}") for name in ("CHANGELOG.md", "CITATION.cff")]
        of_tag = f", the tag {self.tag}" * bool(self.tag)
        self.judge(
            f"{self.version} in the package, CHANGELOG.md, CITATION.cff{of_tag}",
            version_problems(self.version, *texts, self.tag),
        )
        shutil.rmtree(FOLDER, ignore_errors=True)
        built = FOLDER / "dist"
        wheel = self.build(built)
        self.look_into(wheel)
        with tempfile.TemporaryDirectory(prefix="release-check-") as folder:
            self.use(wheel, Path(folder))
        DIST.mkdir(exist_ok=True)
        for old in DIST.glob("minimegatron-*"):
            old.unlink()
        for path in built.iterdir():
            shutil.copy2(path, DIST)

    def build(self, built: Path) -> Path:
        """The sdist, the wheel from the sdist, and one from the sources: both wheels are equal."""
        python = _environment(FOLDER / "tools")
        self.do("the tools", [python, "-m", "pip", "install", "--quiet", *TOOLS], INSTALL_SECONDS)
        command = [python, "-m", "build", "--outdir"]
        for name in ("sources", "again"):
            _export(FOLDER / name)
        self.do("the sdist, and the wheel from it", [*command, built, FOLDER / "sources"])
        self.do("the wheel from the sources", [*command, FOLDER, "--wheel", FOLDER / "again"])
        (wheel,), (direct,) = built.glob("*.whl"), FOLDER.glob("*.whl")
        different = [
            f"{name} is not the same in the wheels from the sdist and from the sources"
            for name in differences(wheel, direct)
        ]
        self.judge("the sdist builds the same wheel", different)
        twine = [python, "-m", "twine", "check", "--strict", *built.iterdir()]
        self.do("metadata, for the package index", twine)
        return wheel

    def look_into(self, wheel: Path) -> None:
        """Its files and what it says of itself."""
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            text = archive.read(about).decode()
        problems = wheel_problems(names, self.files) + metadata_problems(text, self.version)
        self.judge(f"{len(names)} files in {wheel.name}, as git has them", problems)

    def use(self, wheel: Path, folder: Path) -> None:
        """A new user: an environment of their own, an empty folder, the first commands."""
        python = _environment(folder / "venv")
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", self.torch, wheel]
        self.do("the wheel in a fresh environment", install, INSTALL_SECONDS)
        place = folder / "empty"
        place.mkdir()
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(folder)}
        num_notebooks = sum(bool(re.fullmatch(r"notebooks/.+\.ipynb", name)) for name in self.files)
        for one in uses(self.version, num_notebooks):
            command = [shutil.which(one.words[0], path=path) or one.words[0], *one.words[1:]]
            done = _run(command, USE_SECONDS, cwd=place, env=environment)
            output = done.stdout + done.stderr
            shown = " ".join(one.words)
            problem = one.problem(done.returncode, output)
            self.judge(shown if len(shown) < 70 else f"{shown[:67]}...", [problem] * bool(problem))

    def do(self, what: str, command: Sequence, seconds: int = USE_SECONDS) -> None:
        """A command that must end well."""
        done = _run(command, seconds)
        problem = f"code {done.returncode}:\n{done.stdout}{done.stderr}"
        self.judge(what, [problem] * bool(done.returncode))

    def judge(self, what: str, problems: list[str]) -> None:
        """A line about the step, or the end with all its problems."""
        mark = "not right: " if problems else ""
        print(f"{time.monotonic() - self.began:6.1f} s  {mark}{what}", flush=True)
        if problems:
            raise SystemExit("\n".join([*problems, f"minimegatron {self.version}: not to release"]))
        self.num_steps += 1


def source_version(text: str) -> str:
    """What `minimegatron/__init__.py` says, without running it."""
    found = re.findall(r'^__version__ = "([^"]+)"$', text, re.M)
    if len(found) != 1:
        raise ValueError(
            f'minimegatron/__init__.py has {len(found)} lines `__version__ = "..."`; it needs 1'
        )
    return found[0]


def _run(command: Sequence, seconds: int, **options) -> subprocess.CompletedProcess:
    """Without this checkout on Python's path."""
    options.setdefault("env", {k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=seconds, **options)


def _environment(folder: Path) -> Path:
    """A new virtual environment; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def _export(folder: Path) -> None:
    """The committed files, in a new folder."""
    tar = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(fileobj=io.BytesIO(tar.stdout)) as archive:
        archive.extractall(folder, **safely)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(
            f"`git {' '.join(words)}` ended with code {done.returncode}: {done.stderr}"
        )
    return done.stdout


def main() -> None:
    """Checks the commit that is checked out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="torch", help="requirement (default: %(default)s)")
    parser.add_argument("--tag", default="", help="the tag that the commit has, or will have")
    args = parser.parse_args()
    release = Release(args.tag, args.torch)
    release.run()
    seconds = time.monotonic() - release.began
    print(
        f"minimegatron {release.version} can be released: {release.num_steps} steps in "
        f"{seconds:.0f} s; its files are in dist/"
    )


if __name__ == "__main__":
    main()
