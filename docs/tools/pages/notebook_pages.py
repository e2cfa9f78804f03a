"""Pages of the site from notebooks: what is written, the code, and what a fresh run put out.

Called by: `build_docs`, `every_page`. Calls: `notebook_runs` for the outputs, nbconvert for
Markdown.

`make docs` runs notebooks whose outputs are not known yet, once. A build without that shows them
without outputs, and says so.
"""

import io
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import DictLoader
from jupytext import read
from nbconvert import MarkdownExporter
from PIL import Image
from traitlets.config import Config

from cases.gpu_page import statement
from pages.notebook_runs import ANSI, ROOT, executing, remembered, sources, table

MAX_BYTES = 200_000
"""Of a page; and of its figures together twice that."""
TEMPLATE = r"""
{%- extends 'markdown/index.md.j2' -%}
{%- block input -%}
{{ '```python' }}
{{ cell.source }}
{{ '```' }}
{% endblock input -%}
{%- block stream -%}{{ output.text | fenced }}{%- endblock stream -%}
{%- block data_text scoped -%}{{ output.data['text/plain'] | fenced }}{%- endblock data_text -%}
{%- block traceback_line -%}{{ line | fenced }}{%- endblock traceback_line -%}
{%- block data_svg -%}{{ output.metadata.filenames['image/svg+xml'] | figure }}{%- endblock -%}
{%- block data_png -%}{{ output.metadata.filenames['image/png'] | figure }}{%- endblock -%}
"""
NOT_RUN = "!!! note\n    This page was built without running its notebook; `make docs` runs it.\n"


def write_notebook_pages(out: Path, run: bool) -> None:
    """One page per notebook below `out`, and an index; with `run`, unknown outputs are made."""
    paths = sources()
    outputs = {path: remembered(path) for path in paths}
    if run and (missing := [path for path in paths if outputs[path] is None]):
        with executing(missing) as runs:
            results = {path: runs[path.stem].result() for path in missing}
        print(table({path.stem: result.seconds for path, result in results.items()}))
        for path, result in results.items():
            if result.error:
                raise SystemExit(f"{path.relative_to(ROOT)} does not run:\n{result.error}")
            outputs[path] = result.notebook
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for path in paths:
        write_page(path, outputs[path], out)
    (out / "index.md").write_text(index_page(paths))


def write_page(path: Path, executed: nbformat.NotebookNode | None, out: Path) -> None:
    """The page of one notebook, and its figures."""
    text, figures = notebook_page(path, executed)
    page = out / f"{path.stem}.md"
    page.write_text(text)
    drawn = 0
    for name, data in figures.items():
        data = smaller_png(data) if name.endswith(".png") else data
        (out / name).write_bytes(data)
        drawn += len(data)
    size = page.stat().st_size
    if size > MAX_BYTES or drawn > 2 * MAX_BYTES:
        raise SystemExit(
            f"the page of {path.name} has {size} bytes, its figures {drawn}; {MAX_BYTES} and "
            f"{2 * MAX_BYTES} are allowed: print less, or draw smaller"
        )


def notebook_page(
    path: Path, executed: nbformat.NotebookNode | None
) -> tuple[str, dict[str, bytes]]:
    """(Markdown, {file: bytes} of its figures); without outputs where no run of it is known."""
    text, figures = to_markdown(executed or read(path), path.stem)
    title, _, rest = text.lstrip().partition("\n")
    beginning = f"{title}\n\n{_where_it_is(path)}\n" + ("" if executed else f"\n{NOT_RUN}")
    return f"{beginning}{rest}\n", figures


def smaller_png(data: bytes) -> bytes:
    """The same picture with a palette: a third of the size, for plots."""
    small = io.BytesIO()
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return min(data, small.getvalue(), key=len)


def to_markdown(notebook: nbformat.NotebookNode, stem: str) -> tuple[str, dict[str, bytes]]:
    """(Markdown, {file: bytes} of its figures). Links into docs/ become links of the site."""
    exporter = MarkdownExporter(
        config=Config({"NbConvertBase": {"display_data_priority": PRIORITY}}),
        extra_loaders=[DictLoader({"page.md.j2": TEMPLATE})],
        template_file="page.md.j2",
        filters={"fenced": _fenced, "figure": _figure},
    )
    text, resources = exporter.from_notebook_node(
        notebook, resources={"unique_key": stem, "output_files_dir": "."}
    )
    figures: dict[str, Any] = {Path(n).name: d for n, d in (resources.get("outputs") or {}).items()}
    text = re.sub(r"\n{4,}", "\n\n", text)
    text = re.sub(r"\]\(\.\./docs/", "](../", text)
    text = re.sub(r"\]\(\.\./minimegatron/exercises/catalog/(\w+)/page", r"](../exercises/\1", text)
    return re.sub(r"\]\((\d\d_\w+)\.(?:ipynb|py)\)", r"](\1.md)", text), figures


PRIORITY = ["image/svg+xml", "image/png", "text/markdown", "text/plain", "text/html"]
"""HTML comes last: a notebook folds errors with it and keeps lines whole, which a page does anyway."""


def _fenced(text: str) -> str:
    plain = ANSI.sub("", text).strip("\n")
    return f"\n```{{.text .mm-output}}\n{plain}\n```\n\n" if plain else ""


def _figure(name: str) -> str:
    return f"\n![What the cell above draws]({Path(name).name})\n\n"


def _where_it_is(path: Path) -> str:
    return (
        f"*A notebook: `notebooks/{path.stem}.ipynb`. `make notebooks` opens it, to be run and "
        "changed; below is what a run on a machine without a GPU put out.*"
    )


def title_of(first: str) -> str:
    """The title of a notebook, from its first cell."""
    return first.splitlines()[0].lstrip("# ")


def index_page(paths: list[Path]) -> str:
    """Every notebook with its question."""
    rows = []
    for path in paths:
        first = read(path).cells[0].source
        title = title_of(first)
        question = re.search(r"\*\*The question\.?\*\*:?\s*(.+?)(?:\n\n|$)", first, re.DOTALL)
        asked = " ".join(question[1].split()) if question else ""
        rows.append(f"| [{title}]({path.stem}.md) | {asked} |")
    return "\n".join(
        [
            "# Notebooks",
            "",
            "Real ranks, stopped and looked at between two actions. `make notebooks` opens them in "
            "JupyterLab; a laptop with two cores is enough. Where each rank has a GPU, the same "
            f"notebooks use NCCL. [The check on GPUs](../gpu.md) runs them too: "
            f"{statement()} A notebook takes about 20 minutes: a question, a prediction to make, the "
            "run, and an assertion that checks the claim.",
            "",
            "| notebook | its question |",
            "|---|---|",
            *rows,
            "",
        ]
    )
