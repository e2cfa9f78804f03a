"""A part that fails, hangs or dies leaves the others and the report whole; pages say what it shows."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cases import gpu_page
from tests.gpu import __main__ as command
from tests.gpu import planted, report
from tests.gpu.parts import PARTS, Part
from tests.gpu.place import at_most, is_equal
from tests.gpu.processes import Ended, run_limited
from tests.gpu.report import Check

ROOT = Path(__file__).parents[2]
SECONDS = 60.0


def part(function, seconds: float = SECONDS, **options) -> Part:
    name = function.__name__
    return Part(name, f"a part that {name}", f"planted:{name}", 0, seconds, **options)


def check_in(folder: Path, seconds: float = 200.0, num_gpus: int = 0) -> Check:
    check = Check(folder / "report.json", time.monotonic() + seconds, "cpu", say=lambda text: None)
    machine = {"torch": "2", "commit": "c1", "date": "2026-01-01"}
    check.report = {"machine": machine, "gpu": "planted GPU", "num_gpus": num_gpus, "parts": []}
    return check


def written(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


# -- What becomes of a part --


@pytest.fixture(scope="module")
def of_all(tmp_path_factory) -> dict[str, dict]:
    """What the report says of every planted part but the one that hangs; the last one holds."""
    functions = [
        planted.does_not_hold,
        planted.finds_nothing,
        planted.raises,
        planted.is_killed,
        planted.leaves,
        planted.prints_nonsense,
        planted.floods,
        planted.goes_on,
        planted.holds,
    ]
    folder = tmp_path_factory.mktemp("planted")
    check_in(folder).run([part(function) for function in functions])
    return {entry["name"]: entry for entry in written(folder)["parts"]}


def test_states(of_all):
    assert {name: entry["state"] for name, entry in of_all.items()} == {
        "does_not_hold": "failed",
        "finds_nothing": "failed: it ended without a result",
        "raises": "failed: exit code 1",
        "is_killed": "failed: killed by SIGKILL",
        "leaves": "failed: it ended without a result",
        "prints_nonsense": "failed",
        "floods": "holds",
        "goes_on": "failed",
        "holds": "holds",
    }


@pytest.mark.parametrize("name", ["raises", "is_killed", "leaves", "prints_nonsense"])
def test_what_a_part_found_before_is_kept(of_all, name):
    assert of_all[name]["findings"][0]["what"] == "before"


def test_an_error_is_a_finding_and_its_stack_is_kept(of_all):
    finding = of_all["raises"]["findings"][1]
    assert (finding["found"], finding["holds"]) == ("ArithmeticError: planted", False)
    assert "ArithmeticError: planted" in of_all["raises"]["log"]


def test_a_section_that_fails_leaves_the_next(of_all):
    found = [(finding["what"], finding["holds"]) for finding in of_all["goes_on"]["findings"]]
    assert found == [("before", True), ("error", False), ("x", True)]


def test_of_a_flood_the_end_is_kept(of_all):
    assert of_all["floods"]["log"][-1] == "last words"
    assert sum(map(len, of_all["floods"]["log"])) < 1000


def test_nonsense_is_told_and_what_follows_is_read(of_all):
    entry = of_all["prints_nonsense"]
    whats = [finding["what"] for finding in entry["findings"]]
    assert whats == ["before", *["what the part wrote"] * 4, "after"]
    assert len(entry["log"]) <= report.LOG_LINES and "last words" in entry["log"][-1]
    assert all(text.isprintable() and len(text) < 700 for text in entry["log"])
    assert entry["findings"][0]["found"].isprintable()


def test_a_part_that_hangs_is_ended_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setenv(planted.FOLDER, str(tmp_path))
    begun = time.monotonic()
    check_in(tmp_path).run([part(planted.hangs, 4.0), part(planted.holds)])
    assert time.monotonic() - begun < 40
    hung, after = written(tmp_path)["parts"]
    assert hung["state"] == "failed: ended after 4 s, its time"
    assert [finding["what"] for finding in hung["findings"]] == ["before"]
    assert after["state"] == "holds"
    (note,) = [path for path in tmp_path.iterdir() if path.name.isdigit()]
    assert [pid for pid in (note.name, *note.read_text().split()) if is_running(int(pid))] == []


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_output_of_a_process_that_is_left_keeps_nobody_waiting(tmp_path):
    program = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('x')"
    ended = run_limited([sys.executable, "-c", program], 60, tmp_path / "log", tmp_path)
    assert (ended.code, ended.left) == (0, 0) and ended.seconds < 50
    assert (tmp_path / "log").read_text() == "x\n"


# -- The time of all together --


def test_no_part_begins_after_the_limit(tmp_path):
    check = check_in(tmp_path, seconds=report.RESERVE_SECONDS + report.LEAST_SECONDS - 1)
    check.run([part(planted.holds)])
    (entry,) = written(tmp_path)["parts"]
    assert entry["state"] == "not run: the time of the check was up"


def test_a_part_gets_no_more_than_what_is_left(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(
        report, "run_limited", lambda command, seconds, *_: given.append(seconds) or Ended(0, 1.0)
    )
    left = 25.0
    check_in(tmp_path, report.RESERVE_SECONDS + left).run([part(planted.holds)])
    assert left - 5 < given[0] <= left


def test_the_first_parts_have_time_even_if_each_hangs():
    """Of the most telling ones, three at least begin within the limit."""
    assert sum(one.seconds for one in PARTS[:2]) + report.PROBE_SECONDS < 8 * 60


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_whoever_stops_it_finds_a_whole_report(tmp_path, number):
    program = (
        "import time; from pathlib import Path; from tests.gpu import __main__ as command, report\n"
        "from tests.gpu.parts import Part\n"
        "command.PARTS = tuple(Part(n, n, f'planted:{n}', 0) for n in ('holds', 'hangs', 'raises'))\n"
        "def probe(self, gpus=None):\n"
        "    machine = {'torch': '2', 'commit': 'c'}\n"
        "    self.report = {'machine': machine, 'gpu': 'g', 'num_gpus': 1, 'parts': []}\n"
        "    return True\n"
        "report.Check.probe = probe\n"
        f"raise SystemExit(command.main(['--report', {str(tmp_path / 'report.json')!r}]))\n"
    )
    environment = {**os.environ, planted.FOLDER: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment) as process:
        deadline = time.monotonic() + 60
        while not [path for path in tmp_path.iterdir() if path.name.isdigit()]:
            assert time.monotonic() < deadline, "the part that hangs has not begun"
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    states = [entry["state"] for entry in written(tmp_path)["parts"]]
    cut_off = "failed: the check was ended during it"
    assert states == ["holds", cut_off, "not run: the check ended before"]
    (note,) = [path for path in tmp_path.iterdir() if path.name.isdigit()]
    assert [pid for pid in (note.name, *note.read_text().split()) if is_running(int(pid))] == []


# -- What is left out, and what is kept --


def test_what_needs_more_gpus_or_packages_says_so(tmp_path):
    large = part(planted.holds)._replace(num_gpus=8)
    lacking = part(planted.holds, packages=("no_such_package", "json"))
    check_in(tmp_path, num_gpus=1).run([large, lacking, part(planted.holds)])
    assert [entry["state"] for entry in written(tmp_path)["parts"]] == [
        "not run: needs 8 GPUs, here is 1",
        "not run: needs no_such_package, not installed here",
        "holds",
    ]


@pytest.mark.parametrize("change", [{"gpu": "another"}, {"num_gpus": 8}, {"rehearsal": True}])
def test_with_only_the_others_keep_what_was_found(tmp_path, change):
    parts = [part(planted.holds), part(planted.does_not_hold)]
    check_in(tmp_path).run(parts)
    again = check_in(tmp_path)
    again.report["machine"]["commit"] = "c2"
    again.run(parts, ["does_not_hold"])
    states = [(entry["state"], entry["commit"]) for entry in written(tmp_path)["parts"]]
    assert states == [("holds", "c1"), ("failed", "c2")]
    elsewhere = check_in(tmp_path)
    elsewhere.report |= change
    elsewhere.run(parts, ["does_not_hold"])
    first, second = written(tmp_path)["parts"]
    assert (first["state"], second["state"]) == ("not run: not asked for", "failed")


def test_each_figure_is_shown_beside_what_was_expected(of_all):
    assert "x: 1   expected: at most 2" in report.in_words(of_all["holds"])
    assert "! error: ArithmeticError: planted" in report.in_words(of_all["raises"])
    assert at_most("x", float("nan"), 1.0).holds is False
    assert is_equal("x", 1, 2).holds is False


# -- The command and the page --


@pytest.fixture
def no_signals(monkeypatch):
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)


def test_without_a_gpu_nothing_is_checked_and_nothing_written(
    tmp_path, monkeypatch, capsys, no_signals
):
    monkeypatch.setattr(Check, "probe", planted_probe(0))
    assert command.main(["--report", str(tmp_path / "report.json")]) == 0
    assert capsys.readouterr().out.strip() == command.NO_GPU
    assert not list(tmp_path.iterdir())


def planted_probe(num_gpus: int):
    def probe(self, pretend_gpus=None):
        machine = {"torch": "2.x", "commit": report.commit_here(), "date": "2026-01-01"}
        self.report = {"machine": machine, "gpu": "planted GPU", "num_gpus": num_gpus, "parts": []}
        return True

    return probe


def test_a_check_writes_report_and_page(tmp_path, monkeypatch, capsys, no_signals):
    path = tmp_path / "report.json"
    large = part(planted.holds)._replace(name="large", num_gpus=8)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(
        command, "PARTS", (part(planted.holds), part(planted.prints_nonsense), large)
    )
    monkeypatch.setattr(Check, "probe", planted_probe(1))
    assert command.main(["--report", str(path)]) == 1
    page = (tmp_path / "gpu.md").read_text()
    said = gpu_page.statement(path)
    assert said in page
    assert "Run on 1 x planted GPU, torch 2.x," in said
    assert said.endswith("of 3 parts 1 holds (1), 1 failed (2), 1 was not run (3).")
    assert "| x | 1 | at most 2 | holds |" in page
    assert "- 3, a part that holds: needs 8 GPUs, here is 1" in page
    assert r"| before | �\[31m\|\*\`&lt;b&gt;� |  | holds |" in page
    assert "Written after" in capsys.readouterr().out


def test_the_command_keeps_the_parts_that_are_not_asked_for(tmp_path, monkeypatch, no_signals):
    path = tmp_path / "report.json"
    monkeypatch.setattr(command, "PARTS", (part(planted.holds), part(planted.raises)))
    monkeypatch.setattr(Check, "probe", planted_probe(1))
    assert command.main(["--report", str(path)]) == 1
    assert command.main(["--report", str(path), "--only", "raises"]) == 1
    assert command.main(["--report", str(path), "--only", "holds"]) == 1
    states = [entry["state"] for entry in written(tmp_path)["parts"]]
    assert states == ["holds", "failed: exit code 1"]


def test_the_page_of_a_check_that_was_stopped(tmp_path):
    check = check_in(tmp_path)
    check.report["parts"] = [report._blank(1, part(planted.holds))]
    check.report["parts"][0]["state"] = f"{report.FAILED}: {report.CUT_OFF}"
    check.write()
    assert "failed: the check was ended during it" in gpu_page.gpu_page(check.path, [])


def test_torch_that_does_not_work_is_told_and_written(tmp_path, monkeypatch, capsys, no_signals):
    (tmp_path / "torch.py").write_text("raise OSError('libplanted.so: cannot open')")
    monkeypatch.setattr(report, "_environment", lambda: {"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    path = tmp_path / "report.json"
    assert command.main(["--report", str(path)]) == 2
    assert "libplanted.so: cannot open" in capsys.readouterr().out
    assert written(tmp_path)["problem"] == "torch does not say what is here: exit code 1"
    assert "torch does not say what is here" in gpu_page.statement(path)


def test_a_gpu_that_torch_cannot_use_is_no_missing_gpu(tmp_path, monkeypatch, capsys, no_signals):
    """An old driver, say: torch warns, and has no GPU then. That must not look like a laptop."""
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "torch.py").write_text(
        "import sys\nfrom types import SimpleNamespace as N\n"
        "print('UserWarning: CUDA initialization: the driver is too old', file=sys.stderr)\n"
        "__version__, version = '2', N(cuda='13.0')\ncuda = N(is_available=lambda: False)\n"
    )
    monkeypatch.setattr(
        report, "_environment", lambda: {"PYTHONPATH": f"{tmp_path / 'probe'}:{ROOT}"}
    )
    path = tmp_path / "report.json"
    assert command.main(["--report", str(path)]) == 2
    assert "the driver is too old" in capsys.readouterr().out
    assert written(tmp_path)["problem"] == "torch finds a GPU here that it cannot use"


def test_a_report_that_cannot_be_written_does_not_end_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(report.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "file").write_text("")
    said = []
    check = check_in(tmp_path)
    check.path, check.say = tmp_path / "file" / "report.json", said.append
    check.run([part(planted.holds)])
    assert check.path == tmp_path / "temporary" / "report.json"
    assert json.loads(check.path.read_text())["parts"][0]["state"] == "holds"
    assert len([text for text in said if "cannot be written" in text]) == 1


def test_nobody_has_to_listen(monkeypatch):
    with open(os.devnull) as not_for_writing:
        monkeypatch.setattr(sys, "stdout", not_for_writing)
        command._say("x")


@pytest.mark.parametrize(
    "words",
    [["--limit-minutes", "nan"], ["--limit-minutes", "0.1"], ["--gpus", "0"], ["--only", "x"]],
)
def test_what_the_command_refuses(words, capsys):
    with pytest.raises(SystemExit):
        command._arguments(words)
    assert "error:" in capsys.readouterr().err


def test_readme_and_site_say_what_the_report_shows():
    said = gpu_page.statement()
    assert said in (ROOT / "README.md").read_text()
    for page in ("docs/teachers.md", "docs/recipes/multi_node.md"):
        assert "{{ value gpu_statement() }}" in (ROOT / page).read_text()
    assert said in gpu_page.gpu_page(gpu_page.REPORT, gpu_page.planned_parts())


def test_a_rehearsal_is_never_the_report_of_the_site():
    args = command._arguments(["--rehearse"])
    assert args.report is None and command.REHEARSAL.parent.name == "build"
    assert gpu_page.REPORT == command.REPORT


def test_the_command_of_make():
    done = subprocess.run(
        ["make", "--dry-run", "gpu-check"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "-m tests.gpu" in done.stdout
