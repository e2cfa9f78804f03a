"""Pages of the site from exercises: the problem, the stub, the hints folded; an index with the labs.

Called by: `build_docs`, `every_page`. Calls: `minimegatron.exercises` for what there is; runs no
check. Solutions are not shown.
"""

import shutil
import textwrap
from pathlib import Path

from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.exercise import (
    TIERS,
    Exercise,
    exercises,
)
from minimegatron.exercises.labs.labs import LABS, OUTCOMES, layout_words, patch_words
from minimegatron.exercises.student.pages import page_words
from minimegatron.exercises.student.student_folder import hints

INTRODUCTION = """\
# Exercises

Most are holes in the real code: a file with the piece to write, and a check that puts your piece where
ours was, trains with it on real ranks, and compares with one process. A check says which invariant
broke, on which rank; of a hang, who waits for whom; of a wrong order, where it first leaves the plan.
When yours is right, it says what your code achieved; of a schedule of yours it links a replay.

```console
$ pip install minimegatron
$ mkdir classroom && cd classroom
$ minimegatron exercises            # the list, and how far you are
$ minimegatron exercises watch      # starts the next one; checks whenever you save, h for a hint
```

Two cores are enough; no GPU, no data. The same file also runs as
`torchrun --nproc-per-node N exNN.py`. Files, hints and progress stay in your folder; `minimegatron
exercises submit` packs them. The folder also gets an `AGENTS.md`, which asks coding assistants for
hints instead of solutions.
"""

LAB_INTRODUCTION = """\
## Break it on purpose

A lab is a copy of the package with one small mistake in it, mostly one that was made in earnest
somewhere. Look at the change, predict what one training step will do, then run it:

```console
$ minimegatron exercises lab list
$ minimegatron exercises lab start gradients-overwritten
$ minimegatron exercises lab run gradients-overwritten --predict gradient
```
"""


def write_exercise_pages(out: Path) -> None:
    """One page per exercise below `out`, and an index."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for exercise in exercises():
        (out / f"{exercise.name}.md").write_text(exercise_page(exercise))
    (out / "index.md").write_text(index_page())


def exercise_page(exercise: Exercise) -> str:
    """The problem, what to write, and hints to unfold."""
    ranks = num_of(exercise.num_ranks, "rank") if exercise.num_ranks else "no ranks"
    facts = f"{exercise.tier.capitalize()}, about {exercise.minutes} minutes, checked on {ranks}."
    heading, _, body = page_words(exercise).partition("\n\n")
    stub = (exercise.folder / "stub.py").read_text().partition("\n\nif __name__")[0]
    parts = [
        heading,
        f"*{facts}* `minimegatron exercises start {exercise.number}`",
        body.rstrip(),
        "## The file",
        _folded("note", f"{exercise.name}.py", f"```python\n{stub.rstrip()}\n```"),
        "## Hints",
        *(_folded("tip", f"Hint {n}", text) for n, text in enumerate(hints(exercise), 1)),
    ]
    return "\n\n".join(parts) + "\n"


def _folded(kind: str, title: str, text: str) -> str:
    return f'??? {kind} "{title}"\n\n' + textwrap.indent(
        text, "    ", lambda line: bool(line.strip())
    )


def index_page() -> str:
    """Every exercise by tier, and every lab."""
    parts = [INTRODUCTION.rstrip()]
    for tier in TIERS:
        of_tier = [exercise for exercise in exercises() if exercise.tier == tier]
        if of_tier:
            parts.append(f"## {tier.capitalize()}")
            rows = [
                f"| {one.number} | [{one.title}]({one.name}.md) | {one.summary} | {one.minutes} min |"
                for one in of_tier
            ]
            parts.append("\n".join(["| | | | |", "|---|---|---|---|", *rows]))
    parts.append(LAB_INTRODUCTION.rstrip())
    outcomes = ", ".join(f"`{name}` ({words})" for name, words in OUTCOMES.items())
    parts.append(f"What may be predicted: {outcomes}.")
    parts += [_folded("bug", lab_title(lab), lab_text(lab)) for lab in LABS]
    return "\n\n".join(parts) + "\n"


def lab_title(lab) -> str:
    """Its name and where it runs."""
    return f"{lab.name}: {layout_words(lab)}"


def lab_text(lab) -> str:
    """The change; what comes of it is for the reader to find out."""
    lines = [line.removeprefix("  ") for line in patch_words(lab.fault).splitlines()]
    return "\n".join(["```diff", *lines, "```"])
