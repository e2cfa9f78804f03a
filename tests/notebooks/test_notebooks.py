"""Every notebook: its two files agree, nothing is committed that a run put out, and it runs.

What a notebook claims, it asserts itself; here it only has to come to its end.
"""

import re
import subprocess

import jupytext
import nbformat
import notebook_pages
import notebook_runs
import pytest
from notebook_runs import ROOT, sources

from tests.figures import figure, slowness

SECONDS = 60
"""What one may take by itself. They run two at a time here, so twice that is allowed."""

each_notebook = pytest.mark.parametrize("path", sources(), ids=lambda path: path.stem)


@each_notebook
def test_pair_agrees(path):
    pair = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    assert notebook_runs.same_cells(jupytext.read(path), pair), (
        f"{path.name} was edited alone; run: python docs/tools/notebook_runs.py --pairs"
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


def test_a_failing_cell_is_reported_with_its_error(tmp_path):
    path = tmp_path / "99_fails.py"
    path.write_text("# %%\nx = 1\n\n# %%\nassert x == 2, 'x is one'\n")
    done = notebook_runs.execute(path)
    assert "x is one" in done.error
    assert not list(notebook_runs.CACHE.glob("99_fails*"))


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
    ]
    notebook_pages.write_page(path, notebook, tmp_path)
    page = (tmp_path / "01_small.md").read_text()
    assert "[p2p](../tour/p2p.md), [next](02_next.md),\n[ex](../exercises/ex01_x.md)" in page
    assert "```{.text .mm-output}\nred\n```" in page
    assert [file.read_text() for file in tmp_path.glob("*.svg")] == ["<svg/>"]
    assert f"]({next(tmp_path.glob('*.svg')).name})" in page and "no" not in page.split("```")
    assert "[01 Small](01_small.md) | Why? |" in notebook_pages.index_page([path])
