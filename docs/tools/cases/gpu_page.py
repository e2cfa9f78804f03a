"""The page on GPUs, and the sentence that README and the site say of them: from the last report.

Called by: `build_docs`, `every_page`, `cases`, `notebook_pages`, and tests/gpu, whose check writes
the report (`python3 -m tests.gpu`). Without a report nothing has been run, and that is what is
said.
"""

import runpy
from pathlib import Path
from typing import Any

from cases.case_words import escaped, table
from source.places import DOCS, ROOT, read_json

REPORT = DOCS / "gpu" / "report.json"
"""The last one, once a check has been run on a GPU and its report committed."""
NOT_RUN = "Not run: no line of this project has been run on a GPU by its authors yet."

BEGINNING = """---
title: On GPUs
---

# On GPUs

**{statement}**

The same commands are written for both: with a visible GPU for every rank, ranks use it and
NCCL, otherwise the CPU. `--device cpu` and `--device cuda` ask for one of them.

```console
$ python3 -m tests.gpu
```

This command needs a clone, Python 3.11 or newer, torch, numpy and tqdm. It installs nothing: a part
that needs another package, or more GPUs, says so in one line. The parts run in the order of this
page, each in a process of its own with a time limit of its own. After a part that fails, the next one
runs. All parts together take at most eight minutes; `--limit-minutes` changes that, `--only` names
parts. Beside a figure stands what was expected, if anything was. The exit code is 1 if a part does not
hold, and 2 if torch does not work. Without a GPU nothing is checked, and the exit code is 0.
`make gpu-check` first installs all packages.

The report, `docs/gpu/report.json`, is written after every part; `--report FILE` puts it, and a page
of it, elsewhere. This page, and what the site says of GPUs, come from `docs/gpu/report.json`. README
repeats the sentence at the top of this page, and a test compares the two: who adds a report changes
README in the same commit.

With `--rehearse`, the parts run on the CPU, in small, so that their code is tried; the tests do so too.
The figures of such a run say nothing about a GPU and are not shown here.
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
    report = read_json(path)
    machine = report["machine"]
    when = f"{machine.get('date', 'an unknown day')}, commit {machine['commit']}"
    if "problem" in report:
        return f"Not run, {when}: {report['problem']}."
    by_state: dict[str, list[int]] = {}
    for entry in report["parts"]:
        by_state.setdefault(entry["state"].partition(":")[0], []).append(entry["number"])
    counts = ", ".join(
        f"{_verb(state, len(numbers))} ({', '.join(map(str, numbers))})"
        for state, numbers in by_state.items()
    )
    where = f"{report['num_gpus']} x {report['gpu']}, torch {machine['torch']}, {when}"
    begun = "Rehearsed" if report.get("rehearsal") else "Run"
    return f"{begun} on {where}: of {len(report['parts'])} parts {counts}."


def _verb(state: str, number: int) -> str:
    """
    >>> _verb("holds", 9), _verb("not run", 1)
    ('9 hold', '1 was not run')
    """
    several = {"holds": "hold", "not run": "were not run"}
    one = {"not run": "was not run"}
    return f"{number} {(one if number == 1 else several).get(state, state)}"


def gpu_page(path: Path, planned: list[tuple[str, int]]) -> str:
    """The page of the report at `path`; without one, the parts that would be run."""
    parts = [BEGINNING.format(statement=statement(path))]
    ending = DIFFERENCES + table(["", "on the CPU", "on a GPU"], ROWS)
    if not path.exists():
        parts += ["| | part | GPUs that it needs |", "|---|---|---|"]
        for number, (title, num_gpus) in enumerate(planned, 1):
            parts.append(f"| {number} | {title} | {num_gpus} |")
        return "\n".join([*parts, ending, ""])
    report = read_json(path)
    parts += ["| | |", "|---|---|"]
    rows = {"GPU": f"{report['num_gpus']} x {report['gpu']}"} | report["machine"]
    parts += [f"| {key} | {escaped(str(value))} |" for key, value in rows.items()]
    left_out = [entry for entry in report["parts"] if entry["state"].startswith("not run")]
    parts += ["\n## What was not run\n"] if left_out else []
    for entry in left_out:
        reason = entry["state"].partition(": ")[2]
        parts.append(f"- {entry['number']}, {escaped(entry['title'])}: {escaped(reason)}")
    for entry in report["parts"]:
        parts += [] if entry in left_out else _section(entry, report["machine"]["commit"])
    return "\n".join([*parts, ending, ""])


def _section(entry: dict[str, Any], commit: str) -> list[str]:
    lines = [f"\n## {entry['number']}. {entry['title']}\n"]
    # A part that was cut off has none.
    own = entry.get("commit", commit)
    when = "" if own == commit else f", commit {own}"
    lines.append(f"{escaped(entry['state'])}, {entry['seconds']:.1f} s{when}\n")
    if entry["findings"]:
        lines += ["| | found | expected | |", "|---|---|---|---|"]
    for finding in entry["findings"]:
        cells = [finding["what"], finding["found"], finding["expected"]]
        holds = "holds" if finding["holds"] else "**does not hold**"
        lines.append("| " + " | ".join([*map(escaped, cells), holds]) + " |")
    if entry.get("log") and not entry["state"].startswith("holds"):
        # Indented, so nothing in it is Markdown.
        lines += ["\nIts last words:\n", *(f"    {line}" for line in entry["log"][-40:])]
    return lines


def planned_parts() -> list[tuple[str, int]]:
    """(title, GPUs that it needs) of each part, in order."""
    # By its path: the folder of this file is on the path of imports, that of the tests may not be.
    parts = runpy.run_path(str(ROOT / "tests" / "gpu" / "parts.py"))["PARTS"]
    return [(part.title, part.num_gpus) for part in parts]


def write_gpu_page(out: Path, path: Path = REPORT) -> Path:
    """`out`/gpu.md."""
    page = out / "gpu.md"
    page.write_text(gpu_page(path, planned_parts()))
    return page
