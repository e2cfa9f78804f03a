"""The page of benchmarks: every table, command and claim from what `make bench` wrote.

Called by: `build_docs`, `every_page`. Reads docs/benchmarks/*.json, in the form of
tests/benchmarks/results.py. Nothing here or on the page is a typed figure.
"""

import re
from pathlib import Path
from typing import Any

from cases.case_words import escaped
from source.places import DOCS, read_json

RESULTS = DOCS / "benchmarks"
TITLES = {
    "step_time": "Step time",
    "paced": "Paced pipelines",
    "releases": "What all changes cost together",
    "demo_speed": "The demo",
    "bucket_overlap": "Buckets",
    "backend_speed": "The backend beside gloo",
    "context_speed": "A shared sequence",
    "scan_speed": "A state-space scan",
    "policy_speed": "Reinforcement learning",
    "rerun_speed": "A step that is run again",
    "gpu_mfu": "One GPU",
    "planner_speed": "The planner",
    "start_time": "Starting",
    "tracing_cost": "Tracing",
    "doctor_cost": "The hang doctor",
}
"""In the order of the page."""

BEGINNING = """---
title: Benchmarks
---

# Benchmarks

Every figure here was written by a command, shown beside it, and the page is made from what it wrote.
All of them: `make bench`, about 45 minutes on a machine that does nothing else.

What is compared takes turns in the same run, so that the ratios hold although the seconds are those of
one machine. Shown are medians. One implementation runs under two names, as *ours* and *ours'*: the gap
between the two is noise, and a gap no larger than that is a tie.
"""
NOT_RUN = "\n!!! note\n    Nothing has been measured yet; `make bench` does.\n"


def write_benchmarks_page(out: Path) -> None:
    """`out`/benchmarks.md. Pictures and data are copied with the rest of docs/."""
    (out / "benchmarks.md").write_text(benchmarks_page(RESULTS))


def benchmarks_page(folder: Path) -> str:
    """The page, from the results in `folder`; one without figures if there are none."""
    kept = {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
    summary = kept.pop("summary", None)
    parts = [BEGINNING]
    if not kept or summary is None:
        return "".join([*parts, NOT_RUN])
    names = [name for name in TITLES if name in kept]
    machine = kept[names[0]]["machine"]
    parts += _machine(machine)
    parts += _summary(summary)
    for name in names:
        parts += _section(kept[name], machine)
    return "\n".join(parts) + "\n"


def _machine(facts: dict[str, str]) -> list[str]:
    rows = [[key, value] for key, value in facts.items()]
    return ["## The machine\n", *_table([["", ""], *rows], [True, True])]


def _summary(summary: dict[str, Any]) -> list[str]:
    """Scores against peers, then every claim."""
    words = summary["words"]
    scores = [["benchmark", *words]]
    for row in summary["rows"]:
        if any(row[word] for word in words):
            name = row["benchmark"]
            link = f"[{TITLES[name]}](#{_anchor(name)})"
            scores.append([link, *(str(row[word]) for word in words)])
    claims = [["what should hold", "found", ""]]
    for claim in summary["claims"]:
        found = claim["found"]
        claims.append([escaped(claim["text"]), escaped(found), _kept(claim["is_kept"])])
    parts = ["## In short\n"]
    if len(scores) > 1:
        parts += ["Ours against each peer in each case.\n"]
        parts += _table(scores, [True, False, False, False])
    return [*parts, *_table(claims, [True, True, True])]


def _kept(is_kept: bool) -> str:
    return "holds" if is_kept else "**does not hold**"


def _anchor(name: str) -> str:
    return name.replace("_", "-")


def _section(kept: dict[str, Any], machine: dict[str, str]) -> list[str]:
    """Title, what is measured, the command, the tables, the pictures; the processor, if another."""
    name, own = kept["benchmark"], kept["machine"]
    where = "" if own["processor"] == machine["processor"] else f" on {own['processor']}"
    parts = [f"\n## {TITLES[name]} {{#{_anchor(name)}}}\n", f"{kept['title']}\n"]
    parts += [_about(kept["about"]), "```console", f"$ {kept['command']}", "```\n"]
    if not kept["tables"]:
        parts.append("Not measured: this machine has not what it needs.\n")
    for table in kept["tables"]:
        columns = table["columns"]
        lines = [[escaped(heading) for heading, _ in columns.values()]]
        for row in table["rows"]:
            lines.append([escaped(_written(row.get(k), f)) for k, (_, f) in columns.items()])
        parts.append(f"**{escaped(table['title'])}**\n")
        parts += _table(lines, [form == "" for _, form in columns.values()])
        if table["note"]:
            parts.append(f"{escaped(table['note'])}\n")
    for picture in kept["pictures"]:
        parts.append(f"![{escaped(kept['title'])}](benchmarks/{picture})\n")
    file = f"benchmarks/{name}.json"
    parts.append(f"Took {kept['seconds']:.0f} s{where}; [all figures](<{file}>).\n")
    return parts


def _about(text: str) -> str:
    """The module's docstring: without the line on how to run it, which comes below."""
    paragraphs = text.split("\n\n")
    kept = [part for part in paragraphs if not part.startswith("Run: ")]
    # A list needs an empty line before it.
    kept = [re.sub(r"(?<=[:\w.])\n(?=[-*] )", "\n\n", part) for part in kept]
    return "\n\n".join(kept).replace("<", "&lt;") + "\n"


def _written(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(lines: list[list[str]], is_text: list[bool]) -> list[str]:
    rule = ["---" if text else "--:" for text in is_text]
    head, *rows = lines
    return ["| " + " | ".join(line) + " |" for line in [head, rule, *rows]] + [""]
