"""What is said of GPUs is what the last committed report shows."""

import json
import subprocess
from pathlib import Path

import gpu_page
import pytest
import torch

from tests.gpu import __main__ as check
from tests.gpu import report
from tests.gpu.parts import PARTS
from tests.gpu.place import Finding, Place, at_most, is_equal
from tests.gpu.report import NO_GPU, Part, run_parts

ROOT = Path(__file__).parents[2]
HOLDS = Part("a", 0, lambda place: [at_most("x", 1.0, 2.0)])
FAILS = Part("b", 0, lambda place: [at_most("x", 3.0, 2.0)])
RAISES = Part("c", 0, lambda place: [1 / 0])
EMPTY = Part("d", 0, lambda place: [])
LARGE = Part("e", 8, lambda place: [is_equal("x", 1, 1)])


def states(*parts: Part) -> list[str]:
    report = run_parts(parts, Place("cpu"), lambda text: None)
    return [entry["state"] for entry in report["parts"]]


def test_thirteen_parts():
    assert len(PARTS) == 13
    assert gpu_page.planned_parts() == [(part.title, part.num_gpus) for part in PARTS]


@pytest.mark.parametrize("bad", [FAILS, RAISES, EMPTY])
def test_the_first_failure_ends_it(bad):
    assert states(HOLDS, bad, HOLDS) == ["holds", "failed", "not run: an earlier part failed"]


def test_a_part_for_more_gpus_is_left_out():
    assert states(LARGE, HOLDS) == ["not run: needs 8 GPUs, here are 0", "holds"]


def test_each_figure_is_shown_beside_what_was_expected():
    said = []
    run_parts([HOLDS, RAISES], Place("cpu"), said.append)
    assert "x: 1   expected: at most 2" in said[0]
    assert "! error: ZeroDivisionError: division by zero" in said[1]


def test_without_a_gpu_nothing_is_checked_and_nothing_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check, "REPORT", tmp_path / "report.json")
    assert check.main() == 0
    assert capsys.readouterr().out.strip() == NO_GPU
    assert not list(tmp_path.iterdir())


def test_a_check_writes_report_and_page(tmp_path, monkeypatch):
    path = tmp_path / "docs" / "gpu" / "report.json"
    monkeypatch.setattr(check, "REPORT", path)
    monkeypatch.setattr(check, "PARTS", (HOLDS, FAILS, LARGE))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "planted GPU")
    assert check.main() == 1
    page = (tmp_path / "build" / "gpu.md").read_text()
    said = gpu_page.statement(path)
    assert "Run on 1 x planted GPU" in said and f"commit {report.commit()}: of 3 parts" in said
    assert said.endswith("of 3 parts 1 holds (1), 1 failed (2), 1 not run (3).")
    assert said in page
    assert "| x | 3 | at most 2 | **does not hold** |" in page
    assert json.loads(path.read_text())["parts"][2]["state"] == "not run: an earlier part failed"


def test_a_report_of_odd_words_makes_a_table(tmp_path):
    odd = Part("a", 0, lambda place: [Finding("a|b", "<x>", "*", True)])
    report = run_parts([odd], Place("cpu"), lambda text: None)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert r"| a\|b | &lt;x&gt; | \* | holds |" in gpu_page.gpu_page(path, [])


def test_readme_and_site_say_what_the_report_shows():
    said = gpu_page.statement()
    assert said in (ROOT / "README.md").read_text()
    for page in ("docs/teachers.md", "docs/recipes/multi_node.md"):
        assert "{{ value gpu_statement() }}" in (ROOT / page).read_text()
    assert said in gpu_page.gpu_page(gpu_page.REPORT, gpu_page.planned_parts())


def test_the_command_of_make(tmp_path):
    command = subprocess.run(
        ["make", "--dry-run", "gpu-check"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "-m tests.gpu" in command
