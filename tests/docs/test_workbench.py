"""A schedule of the reader's own: planned and checked by the package, in Python and in the page."""

import importlib
import json
import subprocess
import sys
import zipfile

import pytest
from playwright.sync_api import expect

from tests.docs.conftest import Watched

browser_python = importlib.import_module("browser_python")
in_browser = importlib.import_module("in_browser")

ALL_FORWARDS = """
def mine(stage):
    for i in range(stage.num_microbatches):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
    for i in range(stage.num_microbatches):
        yield stage.recv_backward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)
"""
BOTH_RECEIVE = """
def mine(stage):
    for i in range(stage.num_microbatches):
        yield stage.recv_backward(i)
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)
"""


def answer(source: str, p: int = 2, M: int = 3, v: int = 1, G: int = 0) -> dict:
    return json.loads(in_browser.answer(source, p, M, v, G))


# -- What Python answers --


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_what_a_reader_starts_from_is_right(package, name, v):
    text = browser_python.starting_text(package, browser_python.SCHEDULES[name])
    said = answer(text, 4, 8, v, 4)
    assert said["problems"] == []
    assert [len(actions) for actions in said["ranks"]]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (("        yield stage.send_forward(i)\n", ""), "leak"),
        (("        yield stage.recv_forward(i)\n", ""), "dependency"),
        (("        yield stage.backward(i)\n", ""), "absent"),
        (("stage.forward(i)", "stage.forward(9)"), "range"),
    ],
)
def test_faults_are_named(change, kind):
    said = answer(ALL_FORWARDS.replace(*change))
    assert kind in {problem["kind"] for problem in said["problems"]}
    assert ("ranks" in said) == (kind != "range")


def test_a_deadlock_is_named():
    said = answer(BOTH_RECEIVE)
    (problem,) = [problem for problem in said["problems"] if problem["kind"] == "deadlock"]
    assert "rank 0 waits for rank 1 in recv_backward" in problem["text"]


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("def mine(stage:\n", 1, "SyntaxError"),
        ("def mine(stage):\n    yield stage.forword(0)\n", 2, "forword"),
        ("def mine(stage):\n    yield 3\n", None, "yielded 3"),
        ("def mine():\n    yield 3\n", None, "one argument"),
        ("x = 1\n", None, "there is no function"),
        ("def mine(stage):\n    while True: yield stage.forward(0)\n", None, "goes on"),
    ],
)
def test_errors_have_a_line(source, line, words):
    said = answer(source)
    assert words in said["error"] and said.get("line") == line


# -- What the site carries --


def test_the_planner_runs_from_its_archive_alone(package, tmp_path):
    """Without torch, and without anything else of the package."""
    archive = tmp_path / "planner.zip"
    browser_python.planner_zip(package, archive)
    assert all(
        not name.startswith("minimegatron/training") for name in zipfile.ZipFile(archive).namelist()
    )
    program = (
        "import sys; sys.modules['torch'] = None\n"
        f"import in_browser; print(in_browser.answer({ALL_FORWARDS!r}, 2, 3, 1, 0))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = [{str(archive)!r}]\n{program}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert json.loads(done.stdout)["problems"] == [], done.stderr


def test_without_npm_the_page_says_so(package, tmp_path, monkeypatch, capsys):
    def fail():
        raise FileNotFoundError("npm is not installed")

    monkeypatch.setattr(browser_python, "fetch_pyodide", fail)
    browser_python.write_browser_python(package, tmp_path)
    assert "npm is not installed" in capsys.readouterr().out
    assert not (tmp_path / "python").exists()
    assert (tmp_path / "javascripts" / "workbench_data.js").exists()


# -- In the page --


def test_editing_the_python(browser, address, site):
    if not (site / "python").exists():
        pytest.skip("the site was built without Python for the browser: npm could not fetch it")
    with Watched(browser, (address,), viewport={"width": 1200, "height": 1100}) as watched:
        page = watched.page
        page.goto(address)
        page.locator(".mm-player[data-ready]").wait_for()
        player = "document.querySelector('.mm-player').mmPlayer"
        ours = page.evaluate(f"{player}.plan.ranks")
        page.get_by_role("button", name="Edit the Python").click()
        bench = page.get_by_role("region", name="A schedule of your own")
        verdict, text = bench.get_by_role("status"), bench.get_by_role("textbox")
        expect(bench).to_contain_text("MB) from this site")
        assert not any("/python/" in url for url in watched.requests)

        bench.get_by_role("button", name="Run").click()
        # Under four busy loops, Python was once not loaded within 30 s.
        expect(verdict).to_contain_text("one_forward_one_backward is right", timeout=240_000)
        expect(verdict).to_contain_text("It takes 33; 1F1B takes 33")
        assert page.evaluate(f"{player}.plan.name") == "one_forward_one_backward"
        assert page.evaluate(f"{player}.plan.ranks") == ours

        text.fill(BOTH_RECEIVE)
        text.press("Control+Enter")
        expect(verdict).to_contain_text("deadlock: rank 2 waits for rank 3 in recv_backward")
        watched.sees(".mmp-figures", "until it stands still")

        text.fill("def mine(stage):\n    yield stage.forword(0)\n")
        text.press("Control+Enter")
        expect(verdict).to_contain_text("Line 2: AttributeError")
        watched.sees(".mmp-figures", "= (M + p − 1)(f + b)")

        text.fill(ALL_FORWARDS)
        text.press("Control+Enter")
        expect(verdict).to_contain_text("mine is right")
        watched.sees(".mmp-figures", "8 8 8 8")
        page.get_by_role("slider", name="Microbatches").press("ArrowLeft")
        watched.sees(".mmp-figures", "7 7 7 7")
