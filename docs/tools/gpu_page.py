"""The page on GPUs, and the sentence that README and the site say of them: from the last report.

Called by: `build_docs`, `cases`, and tests/gpu, whose check of thirteen parts writes the report
(`make gpu-check`). Without a report nothing has been run, and that is what is said.
"""

import html
import json
import re
from pathlib import Path
from typing import Any

from case_words import table
from package import ROOT

REPORT = ROOT / "docs" / "gpu" / "report.json"
"""The last one, once a check has been run on a GPU and its report committed."""
NOT_RUN = "Not run: no line of this project has been run on a GPU by its authors yet."

BEGINNING = """---
title: On GPUs
---

# On GPUs

**{statement}**

The same commands are written for both: with a visible GPU for every rank, ranks use NCCL, and
otherwise the CPU and gloo. `--device cpu` and `--device cuda` ask for one of them.

```console
$ make gpu-check
```

This command runs thirteen parts, in the order of this page, each on as many GPUs as it needs. It shows
every figure beside what was expected. It stops at the first part that does not hold, and its exit
code is then 1. Without a GPU it checks nothing, says so, and ends with 0. It writes
`docs/gpu/report.json`. This page, and what the site says of GPUs, are made from the report that was
committed last. A test compares README with it.

The tests run each part on the CPU, in small, so that its code is tried. The figures of such a run say
nothing about a GPU and are not shown here.
"""

DIFFERENCES = """
## What a rank does otherwise on a GPU

A GPU does its work later than the program asks for it. To read a number out of a tensor then means to
wait for all work that is queued. So the program reads few numbers, and starts few kernels.

"""
ROWS = (
    ("the update", "parameter by parameter", "fused kernels, each for many parameters"),
    (
        "the gradient norm",
        "float64, block by block",
        "all gradients in a few kernels, each in its own dtype",
    ),
    (
        "a gradient that is not finite",
        "looked for before each bucket's sum",
        "noted before each bucket's sum; looked for once, with the norm and before the update",
    ),
    ("sizes of a batch, with t > 1", "sent with each microbatch", "sent with the first"),
    ("products of float32", "in full", "in full; with `--tf32` faster, and less exact"),
    (
        "a rank that waits",
        "stands in the call that waits",
        "has left the call: the hang doctor asks torch's flight recorder what the GPU waits for",
    ),
    (
        "a recording",
        "when each call began and ended",
        "also when each NCCL communicator worked: `minimegatron trace show DIR --lanes`",
    ),
)


def statement(path: Path = REPORT) -> str:
    """What may be said of GPUs: what the last committed report shows, and no more.

    >>> statement(Path("no such report"))
    'Not run: no line of this project has been run on a GPU by its authors yet.'
    """
    if not path.exists():
        return NOT_RUN
    report = json.loads(path.read_text())
    by_state: dict[str, list[int]] = {}
    for entry in report["parts"]:
        by_state.setdefault(entry["state"].partition(":")[0], []).append(entry["number"])
    counts = ", ".join(
        f"{len(numbers)} {state} ({', '.join(map(str, numbers))})"
        for state, numbers in by_state.items()
    )
    machine = report["machine"]
    where = f"{report['num_gpus']} x {report['gpu']}, {machine['date']}, commit {machine['commit']}"
    return f"Run on {where}: of {len(report['parts'])} parts {counts}."


def gpu_page(path: Path, planned: list[tuple[str, int]]) -> str:
    """The page of the report at `path`; without one, the parts that would be run."""
    parts = [BEGINNING.format(statement=statement(path))]
    if not path.exists():
        parts += ["| | part | GPUs that it needs |", "|---|---|---|"]
        for number, (title, num_gpus) in enumerate(planned, 1):
            parts.append(f"| {number} | {title} | {num_gpus} |")
        return "\n".join([*parts, DIFFERENCES + table(["", "on the CPU", "on a GPU"], ROWS), ""])
    report = json.loads(path.read_text())
    parts += ["| | |", "|---|---|"]
    parts += [f"| {key} | {_escaped(value)} |" for key, value in report["machine"].items()]
    for entry in report["parts"]:
        parts += _section(entry)
    return "\n".join([*parts, DIFFERENCES + table(["", "on the CPU", "on a GPU"], ROWS), ""])


def _section(entry: dict[str, Any]) -> list[str]:
    lines = [f"\n## {entry['number']}. {entry['title']}\n"]
    lines.append(f"{_escaped(entry['state'])}, {entry['seconds']:.1f} s\n")
    if entry["findings"]:
        lines += ["| | found | expected | |", "|---|---|---|---|"]
    for finding in entry["findings"]:
        cells = [finding["what"], finding["found"], finding["expected"]]
        holds = "holds" if finding["holds"] else "**does not hold**"
        lines.append("| " + " | ".join([*map(_escaped, cells), holds]) + " |")
    return lines


def _escaped(text: str) -> str:
    return re.sub(r"([|*_\[\]`])", r"\\\1", html.escape(text, quote=False))


def planned_parts() -> list[tuple[str, int]]:
    """(title, GPUs that it needs) of each part, in order.

    Read from tests/gpu/parts.py, which is not imported: it needs torch, and what the tests need.
    """
    text = (ROOT / "tests" / "gpu" / "parts.py").read_text()
    found = re.findall(r'^    Part\("(.+?)", (\d)', text, re.MULTILINE)
    return [(title, int(num_gpus)) for title, num_gpus in found]


def write_gpu_page(out: Path, path: Path = REPORT) -> Path:
    """`out`/gpu.md."""
    page = out / "gpu.md"
    page.write_text(gpu_page(path, planned_parts()))
    return page
