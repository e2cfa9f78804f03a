"""The workflows of GitHub: they call `make` and nothing else, may do little, and end in time.

Read as YAML, with every target of `make` tried by a dry run. Mistakes are planted in texts.
"""

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.name: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
MAY_WRITE = {
    ("docs.yml", "publish"): {"contents": "write"},
    ("wheels.yml", "publish"): {"id-token": "write"},
}
"""Jobs that are allowed more than to read the repository: what they publish needs it."""
MOST_MINUTES = 120

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

ACTION = re.compile(r"(actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v1)")

PLANTED = """
name: planted
on: [push]
permissions:
  contents: read
concurrency:
  group: planted
jobs:
  only:
    runs-on: ubuntu-24.04
    timeout-minutes: 5
    strategy:
      matrix:
        python: ["3.11", "3.13"]
    steps:
      - uses: actions/checkout@v6
        with:
          persist-credentials: false
      - uses: actions/setup-python@v6
        with:
          python-version: ${{ matrix.python }}
      - run: make lint
"""


def problems(name: str, text: str) -> list[str]:
    """What is wrong with a workflow, as sentences."""
    try:
        workflow = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"no YAML: {error}"]
    found = []
    if workflow.get("permissions") != {"contents": "read"}:
        found.append("the permissions of all jobs are not `contents: read`")
    if True not in workflow:  # YAML's `on` is a truth value
        found.append("no events start it")
    for job_name, job in workflow["jobs"].items():
        found += [f"{job_name}: {one}" for one in _job_problems(name, job_name, job)]
        if "concurrency" not in workflow | job:
            found.append(f"{job_name}: no concurrency group")
    return found


def _job_problems(name: str, job_name: str, job: dict) -> Iterator[str]:
    if not 0 < job.get("timeout-minutes", 0) <= MOST_MINUTES:
        yield f"its time-out is not within {MOST_MINUTES} minutes"
    if job.get("permissions", {}) != (allowed := MAY_WRITE.get((name, job_name), {})):
        yield f"its permissions are {job.get('permissions')}, not {allowed}"
    versions = job.get("strategy", {}).get("matrix", {}).get("python", [])
    for step in job["steps"]:
        options = step.get("with", {})
        action = step.get("uses", "")
        if action and not ACTION.fullmatch(action):
            yield f"{action} is unknown, or has no major version"
        # A job that pushes needs the token that the checkout leaves.
        is_checkout = action.startswith("actions/checkout@") and "contents" not in allowed
        if is_checkout and options.get("persist-credentials") is not False:
            yield "its checkout leaves the token to all that runs later"
        if "python-version" in options and "matrix" not in options["python-version"]:
            versions = [*versions, options["python-version"]]
        if "run" in step:
            yield from _command_problems(step["run"])
    for version in versions:
        if not isinstance(version, str) or _numbers(version) < _numbers(oldest_python()):
            yield f"Python {version} is older than {oldest_python()}, or no text"


def _command_problems(command: str) -> Iterator[str]:
    program, *words = shlex.split(command)
    targets = [word for word in words if "=" not in word]
    if program != "make" or len(targets) != 1 or "${{" in command or "\n" in command.strip():
        yield f"`{command}` is not one call of make with one target"
    elif code := dry_run(*words):
        yield f"`{command}` does not work: make ends with code {code}"


def dry_run(*words: str) -> int:
    """The exit code of make, which prints what it would do."""
    command = ["make", "--dry-run", *words]
    return subprocess.run(command, capture_output=True, cwd=ROOT).returncode


def oldest_python() -> str:
    """As in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["requires-python"].removeprefix(">=")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_there_are_four():
    assert set(WORKFLOWS) == {"tests.yml", "docs.yml", "wheels.yml", "torch.yml"}
    commands = {
        command for text in WORKFLOWS.values() for command in re.findall(r"run: (.+)", text)
    }
    called = {shlex.split(command)[1] for command in commands}
    assert called == {"test", "lint", "docs", "docs-version", "release-check", "torch-check"}


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_a_workflow_is_right(name):
    assert problems(name, WORKFLOWS[name]) == []


def test_every_python_that_the_package_names_is_used():
    text = (ROOT / "pyproject.toml").read_text()
    named = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text))
    assert named == set(re.findall(r'"(3\.\d+)"', "".join(WORKFLOWS.values())))


def test_a_release_is_sent_from_its_tag_alone():
    """What goes to PyPI is what the check has built, of a commit whose tag is its version."""
    jobs = yaml.safe_load(WORKFLOWS["wheels.yml"])["jobs"]
    check, publish = jobs["check"], jobs["publish"]
    assert publish["needs"] == "check" and publish["environment"] == "pypi"
    assert "github.ref_type == 'tag'" in publish["if"]
    assert not any("run" in step for step in publish["steps"])
    assert "github.ref_name" in check["env"]["TAG"]
    made = subprocess.run(
        ["make", "--dry-run", "release-check", "TAG=v0.0.9"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert "-m tests.release" in made.stdout and "--tag 'v0.0.9'" in made.stdout


def test_the_planted_workflow_is_right_before_a_mistake_is_planted():
    assert problems("planted.yml", PLANTED) == []


@pytest.mark.parametrize(
    "right, wrong, says",
    [
        ("make lint", "make lnit", "make ends with code 2"),
        ("make lint", "pytest", "not one call of make"),
        ("make lint", "make lint && rm -r x", "not one call of make"),
        ("make lint", "make lint X=${{ github.head_ref }}", "not one call of make"),
        ("    timeout-minutes: 5\n", "", "time-out"),
        ("minutes: 5", "minutes: 500", "time-out"),
        ("contents: read", "contents: write", "permissions of all jobs"),
        ("    steps:", "    permissions: write-all\n    steps:", "its permissions"),
        ("concurrency:\n  group: planted\n", "", "concurrency"),
        ("on: [push]\n", "", "no events"),
        ("    runs-on", "\truns-on", "no YAML"),
        ("checkout@v6", "checkout@main", "no major version"),
        ("actions/setup-python@v6", "someone/setup-python@v6", "unknown"),
        ("          persist-credentials: false", "          fetch-depth: 1", "leaves the token"),
        ('["3.11", "3.13"]', '["3.10", "3.13"]', "Python 3.10 is older"),
        ('["3.11", "3.13"]', "[3.11, 3.13]", "or no text"),
        ("${{ matrix.python }}", '"3.9"', "Python 3.9 is older"),
    ],
    ids=lambda text: text.strip()[:30],
)
def test_a_planted_mistake_is_found(right, wrong, says):
    assert right in PLANTED
    found = problems("planted.yml", PLANTED.replace(right, wrong))
    assert len(found) >= 1 and any(says in one for one in found), found
