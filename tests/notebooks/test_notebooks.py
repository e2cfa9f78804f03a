"""Every notebook: its two files agree, nothing is committed that a run put out, and it runs.

What a notebook claims, it asserts itself; here it only has to come to its end.
"""

import ast
import doctest
import fnmatch
import io
import json
import re
import subprocess
import tokenize
from pathlib import Path

import jupytext
import nbformat
import pytest

from minimegatron.notebook import predictions
from minimegatron.notebook.wide_text import in_frame
from pages import notebook_pages, notebook_runs
from pages.notebook_runs import ROOT, sources
from tests.figures import figure, slowness

SECONDS = 60
"""What one may take by itself. They run two at a time here, so twice that is allowed."""

MAX_CELL_LINES = 12
"""Lines of code of a cell, without imports, comments and docstrings."""
MAX_FUNCTION_LINES = 25
"""The same of a cell that is one function or class, to be read as a whole: 1F1B, for one."""
LEAST_DISTANCE = 5
"""Lines of cells between the reader's answers and the first prose that may tell them."""

each_notebook = pytest.mark.parametrize("path", sources(), ids=lambda path: path.stem)


@each_notebook
def test_pair_agrees(path):
    pair = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    assert notebook_runs.same_cells(jupytext.read(path), pair), (
        f"{path.name} was edited alone; run: python docs/tools/record.py notebooks --pairs"
    )


@each_notebook
def test_nothing_that_a_run_put_out_is_committed(path):
    listed = subprocess.run(
        ["git", "show", f":notebooks/{path.stem}.ipynb"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:  # no repository, as in an unpacked archive; or not added yet
        pytest.skip("git does not know it")
    pair = nbformat.reads(listed.stdout, as_version=4)
    run = [c for c in pair.cells if c.cell_type == "code" and (c.outputs or c.execution_count)]
    assert not run, f"{path.stem}.ipynb has outputs; clear them before committing"


@each_notebook
def test_is_made_as_the_others_are(path):
    cells = jupytext.read(path).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert text.startswith(f"# {path.stem[:2]} ")
    assert "**The question.**" in cells[0].source
    for part in ("## Predict", "## Change it", "## Where next"):
        assert part in text, f"{path.name} has no {part}"
    assert re.search(r"^\s*assert ", code, re.MULTILINE), f"{path.name} checks nothing"


def code_of(path: Path) -> list[tuple[int, str]]:
    """(number, source) of every cell of code, without its magics."""
    cells = jupytext.read(path).cells
    return [
        (number, re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE))
        for number, cell in enumerate(cells)
        if cell.cell_type == "code"
    ]


def count_lines(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = set()
    for token in tokens:
        if token.type not in nothing and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


@each_notebook
def test_cells_are_short_and_draw_nothing_themselves(path):
    for number, source in code_of(path):
        assert "plt." not in source and "matplotlib" not in source, f"cell {number}"
        body = [
            node
            for node in ast.parse(source).body
            if not isinstance(node, ast.Import | ast.ImportFrom)
        ]
        is_one = len(body) == 1 and isinstance(body[0], ast.FunctionDef | ast.ClassDef)
        limit = MAX_FUNCTION_LINES if is_one else MAX_CELL_LINES
        assert count_lines(source) <= limit, f"cell {number} has {count_lines(source)} lines"


def answers(path: Path, function: str) -> dict[str, int]:
    """Name -> cell, of what is given to `predict` or `compare`. No name may be given twice."""
    found = {}
    for number, source in code_of(path):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == function:
                for keyword in node.keywords:
                    assert keyword.arg not in found, f"{keyword.arg} is given twice"
                    found[keyword.arg] = number
    return found


@each_notebook
def test_what_is_predicted_is_compared_in_a_later_cell_and_told_further_down(path):
    predicted, compared = answers(path, "predict"), answers(path, "compare")
    assert predicted and predicted.keys() == compared.keys()
    cells = jupytext.read(path).cells
    for name in predicted:
        assert predicted[name] < compared[name]
        prose = next(n for n, c in enumerate(cells) if n > compared[name] and c.cell_type != "code")
        between = [cell.source.splitlines() for cell in cells[predicted[name] + 1 : prose]]
        assert sum(map(len, between)) >= LEAST_DISTANCE, name


@each_notebook
def test_a_reader_who_shall_predict_can_do_so_at_once(path):
    cells = jupytext.read(path).cells
    for cell, following in zip(cells, cells[1:], strict=False):
        asks = cell.cell_type == "markdown" and re.search(r"\bPredict\b", cell.source)
        if asks and "## Change it" not in cell.source:
            assert "predict(" in following.source, cell.source


@each_notebook
def test_what_to_change_stands_before_the_ranks_stop(path):
    cells = [cell.source for cell in jupytext.read(path).cells]
    stops = [number for number, source in enumerate(cells) if "ranks.stop()" in source]
    assert len(stops) == any("live_ranks(" in source for source in cells)
    (change,) = (number for number, source in enumerate(cells) if "## Change it" in source)
    assert all(change < stop for stop in stops)


def test_of_the_two_files_of_a_notebook_one_is_listed():
    command = ["make", "--dry-run", "notebooks"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = re.search(r'JUPYTER_CONFIG_PATH="([^"]+)"', done.stdout)
    settings = json.loads((Path(found[1]) / "jupyter_server_config.json").read_text())
    hidden = settings["ContentsManager"]["hide_globs"]
    listed = [
        path.name
        for path in (ROOT / "notebooks").iterdir()
        if not any(fnmatch.fnmatch(path.name, glob) for glob in (*hidden, ".*"))
    ]
    assert sorted(listed) == [f"{path.stem}.ipynb" for path in sources()]


# -- What their cells call --


def test_predictions_are_locked_in_and_compared():
    result = doctest.testmod(predictions)
    assert result.attempted > 5 and not result.failed


def test_a_prediction_may_be_changed_until_it_is_compared(monkeypatch, capsys):
    monkeypatch.setattr(predictions, "_locked", {})
    monkeypatch.setattr(predictions, "_compared", set())
    predictions.predict(a=1, b=None)
    predictions.predict(a=2, b=None)
    predictions.compare(a=2)
    predictions.predict(a=3, b=7)
    predictions.compare(a=2, b=8)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "Locked in: a = 2. Not answered: b."
    assert re.fullmatch(r"a +2 +2 +as predicted", shown[3])
    assert shown[4].startswith("`a` is not taken")
    assert re.fullmatch(r"a +2 +2 +as predicted", shown[-2])
    assert re.fullmatch(r"b +7 +8 +not as predicted", shown[-1])


def test_wide_text_is_not_wrapped():
    shown = in_frame("a <b>\n" + 200 * "x")
    assert re.search(r'<pre style="white-space: pre; [^"]*overflow-x: auto', shown)
    assert "a &lt;b&gt;\n" in shown and 200 * "x" in shown


@each_notebook
def test_its_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if "://" in target:
            continue
        exercise = re.fullmatch(r"\.\./docs/exercises/(ex\d\d_\w+)\.md", target)
        where = ROOT / f"minimegatron/exercises/catalog/{exercise[1]}" if exercise else None
        assert (where or path.parent / target).exists(), f"{path.name} links to {target}"


@each_notebook
def test_runs_from_scratch(path, runs, tmp_path):
    done = runs[path.stem].result()  # its cells have a time-out
    assert not done.error, done.error
    figure(f"{done.seconds:.1f} s from a fresh kernel, two notebooks at a time")
    assert done.seconds < 2 * SECONDS * slowness()
    # And it fits on a page of the site, which fetches nothing from elsewhere.
    notebook_pages.write_page(path, done.notebook, tmp_path)
    page = (tmp_path / f"{path.stem}.md").read_text()
    assert not re.search(r"<(script|link|iframe|img)[^>]*(src|href)=", page)
    assert not re.search(r"!\[[^]]*\]\(https?:", page)


# -- The tests' own tools --


def test_a_failing_cell_is_reported_with_its_error(tmp_path, capfd):
    path = tmp_path / "99_fails.py"
    path.write_text("# %%\nx = 1\n\n# %%\nassert x == 2, 'x is one'\n")
    done = notebook_runs.execute(path)
    assert "x is one" in done.error
    assert not list(notebook_runs.CACHE.glob("99_fails*"))
    assert "WARNING" not in capfd.readouterr().err  # kernels over TCP, for one


def test_pairs_are_written_and_kept(tmp_path):
    path = tmp_path / "01_small.py"
    path.write_text("# %% [markdown]\n# # 01 Small\n\n# %%\n1 + 1\n")
    assert notebook_runs.write_pairs([path]) == [path.with_suffix(".ipynb")]
    assert notebook_runs.write_pairs([path]) == []
    pair = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    pair.cells[1].outputs = [nbformat.v4.new_output("stream", text="2")]
    nbformat.write(pair, path.with_suffix(".ipynb"))
    path.write_text(path.read_text() + "\n# %%\n2 + 2\n")
    notebook_runs.write_pairs([path])
    pair = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    assert [cell.source for cell in pair.cells] == ["# 01 Small", "1 + 1", "2 + 2"]
    assert pair.cells[1].outputs[0].text == "2"


def test_a_page_has_outputs_figures_and_links_of_the_site(tmp_path):
    path = tmp_path / "01_small.py"
    path.write_text(
        "# %% [markdown]\n# # 01 Small\n#\n# **The question.** Why?\n#\n"
        "# [p2p](../docs/tour/p2p.md), [next](02_next.ipynb),\n"
        "# [ex](../minimegatron/exercises/catalog/ex01_x/page.md)\n\n# %%\n1\n"
    )
    notebook = jupytext.read(path)
    notebook.cells[1].outputs = [
        nbformat.v4.new_output("stream", text="\x1b[31mred\x1b[0m\n"),
        nbformat.v4.new_output("display_data", {"image/svg+xml": "<svg/>", "text/plain": "no"}),
        nbformat.v4.new_output("display_data", {"text/html": "<pre>x</pre>", "text/plain": "x"}),
    ]
    notebook_pages.write_page(path, notebook, tmp_path)
    page = (tmp_path / "01_small.md").read_text()
    assert "[p2p](../tour/p2p.md), [next](02_next.md),\n[ex](../exercises/ex01_x.md)" in page
    assert "```{.text .mm-output}\nred\n```" in page
    assert "```{.text .mm-output}\nx\n```" in page and "<pre>" not in page
    assert [file.read_text() for file in tmp_path.glob("*.svg")] == ["<svg/>"]
    assert f"]({next(tmp_path.glob('*.svg')).name})" in page and "no" not in page.split("```")
    assert "[01 Small](01_small.md) | Why? |" in notebook_pages.index_page([path])
