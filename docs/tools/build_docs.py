"""Writes what MkDocs reads into build/docs. `make docs` runs this first, then `mkdocs build`.

The pages of docs/ are copied with their macros filled in (see `pages.macros`); the annotated source,
the table of symbols, the reference and the pictures are generated. No plugin of MkDocs is involved, so
that another generator of static pages can take its place.
"""

import argparse
import gc
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
# Imported by nbformat's checker, it would compile a grammar of addresses; notebooks have none to check.
sys.modules.setdefault("rfc3987_syntax", None)

from cases.gpu_page import write_gpu_page  # noqa: E402
from pages.benchmarks_page import write_benchmarks_page  # noqa: E402
from pages.exercise_pages import write_exercise_pages  # noqa: E402
from pages.notebook_pages import write_notebook_pages  # noqa: E402
from pages.redirects import read_redirects, write_redirects  # noqa: E402
from pages.site_pages import write_pages  # noqa: E402
from pages.source_pages import write_source_pages  # noqa: E402
from pages.unrolled_pages import write_unrolled_pages  # noqa: E402
from player.browser_python import write_browser_python  # noqa: E402
from player.emit_player import write_player  # noqa: E402
from player.strings import write_strings  # noqa: E402
from source.package import Package  # noqa: E402
from source.places import ROOT, python_path  # noqa: E402

OUT = ROOT / "build" / "docs"
LINK = re.compile(r"\[([^\]]+)\]\(\.\./((?:notebooks|exercises)/[\w.-]+\.md)\)")
SKIPPED = {"tools", "overrides", "problems", "recordings", "strings", "__pycache__", "node_modules"}
"""Folders of docs/ that are no part of the site."""
READ = (".md", ".toml")
"""Files of docs/ from which something else is written."""


def build(out: Path = OUT, run_notebooks: bool = False) -> None:
    """Writes everything below `out`, and removes what an earlier build left there.

    Pages of notebooks show what a run put out: with `run_notebooks` of all, else of those that
    have been run since they, and the package, were last changed.
    """
    written = out.with_name("docs.new")
    shutil.rmtree(written, ignore_errors=True)
    written.mkdir(parents=True)
    pieces = out.with_name("pieces")
    shutil.rmtree(pieces, ignore_errors=True)
    with started_orders(written / "javascripts") as orders:
        write_generated(written, pieces, run_notebooks)
    if orders.returncode:
        raise SystemExit("docs/tools/player/emit_orders.py has failed; what it said is above")
    for path in sorted((ROOT / "docs").rglob("*")):
        relative = path.relative_to(ROOT / "docs")
        target = written / relative
        if relative.parts[0] in SKIPPED or not path.is_file() or path.suffix in READ:
            continue
        if target.exists():
            raise SystemExit(f"docs/{relative} is generated; remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    write_redirects(written, read_redirects())
    shutil.rmtree(out, ignore_errors=True)
    written.rename(out)


def started_orders(folder: Path) -> subprocess.Popen:
    """All plans of the schedule player, written by a second process: they need nothing of the rest."""
    environment = os.environ | {"PYTHONPATH": python_path(ROOT, HERE)}
    return subprocess.Popen([sys.executable, "-m", "player.emit_orders", folder], env=environment)


def write_generated(written: Path, pieces: Path, run_notebooks: bool) -> None:
    """All pages and scripts that are computed, but the orders."""
    package = Package.read()
    write_source_pages(package, written / "source", pieces / "source")
    write_practice(written, run_notebooks)
    write_pages(package, written, pieces)
    write_strings(written)
    write_player(package, written)
    write_unrolled_pages(package, written, pieces)
    write_benchmarks_page(written)
    write_gpu_page(written)
    write_browser_python(package, written)


def write_practice(out: Path, run_notebooks: bool) -> None:
    """Pages of notebooks and exercises, which other pages link to where they are there."""
    write_notebook_pages(out / "notebooks", run_notebooks)
    write_exercise_pages(out / "exercises")
    for path in [*out.glob("notebooks/*.md"), *out.glob("exercises/*.md")]:
        path.write_text(LINK.sub(lambda match: without_dead(match, out), path.read_text()))


def without_dead(match: re.Match, out: Path) -> str:
    """A link between notebooks and exercises, or its words alone if there is no such page."""
    return match[0] if (out / match[2]).exists() else match[1]


if __name__ == "__main__":
    # It would look again and again through the trees of all modules, which are kept until the end.
    gc.disable()
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description="Writes what MkDocs reads.")
    parser.add_argument("--run-notebooks", action="store_true", help="where they have changed")
    parser.add_argument("--out", type=Path, default=OUT, help="default: build/docs")
    args = parser.parse_args()
    build(args.out.absolute(), args.run_notebooks)
    print(f"{args.out} written in {time.monotonic() - begun:.1f} s")
