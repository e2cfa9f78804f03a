"""What an exercise's check is made of, and `main`, which every exercise's file ends with.

Megatron has no counterpart.

# How to write an exercise

A folder `catalog/exNN_name/` with `__init__.py` (its `Exercise`), `stub.py`, `solution.py`,
`hints.md`, `page.md`, and one or both of

* `alone.py`: pure parts. Its room is one process without torch; `import torch` in the student's file
  gives a stand-in there. Every question is asked twice: an answer that changes is told.
* `check.py`: what needs ranks (or torch): `num_ranks` processes with gloo on the CPU, one torch
  thread each. It is asked when `alone` is right.

Both have three functions:

    REPLACES = ("minimegatron.core....forward_backward",)   # ours, empty in the student's room

    def cases(seed: int) -> list[Case]:
        "Judge. Seed 0: what students see. Other seeds: other data and numbers, for grading."
        sizes = [(4, random.Random(seed).choice([7, 8, 9])), (4, 2)]
        return [Case(f"pp {p}, {m} microbatches", part="the loop", pp=p, m=m) for p, m in sizes]

    def run(student: ModuleType, case: Case) -> Any:
        "Room, on every rank: calls the student's functions, and returns what came of it."
        with installed(student.forward_backward, REPLACES[0]), recorded() as recording:
            losses = train_one_step(case.m)
        return {"losses": losses, "recording": recording()}

    def judge(case: Case, answers: list) -> Result | None:
        "Judge, once: what all ranks returned (in `alone`: what the one room returned)."
        for rank, answer in enumerate(answers):
            check_numbers("losses", answer["losses"], reference(case), rank)
        return Result({"bubble": "27 %"}, run_of(answers))

`run` is in the same process as the student's code, so it must not know what is right. It returns plain
data (`plain_data`): numbers, strings, lists, tuples, dicts, tensors, of exactly these types. `judge`
is in another process; whatever it imports or computes, the student's code cannot see.

* **The seed draws numbers, and no kinds.** Whatever can go wrong alone (an empty rank, M below p, a NaN
  on another rank) is a fixed case, public and hidden; else a grade depends on the seed.
* **What does nothing clever fails**: the input returned, a constant, the stub's order, no exchange, no
  overlap, nothing freed. Such files are among the known mistakes, as `does_nothing_...`.
* **Raise `Wrong`** for what the student got wrong; its first line says which invariant broke, where.
  Below, it asks a question. The answer stands in `hints.md`, under `## When "words of the message"`.
  Build it with the helpers, or write it: `raise Wrong(f"rank {r}: the loss of microbatch {i} ...")`.
  `run` may raise it too, for what it notices at once (`_start` returned None). Any other exception
  is the student's crash if their file is in its traceback, and else a defect of the check.
* `check_numbers(name, got, expected, rank, layout)` (`feedback_numbers`): tensors, numbers or dicts of
  them (the first parameter that differs is named); says the ratio and what it usually means for those
  sizes. `check_order(plan, done, rank)`: planner actions or words like "F0"; the plan beside what was
  done. `check_value(what, got, expected, why)`: everything else. `wrong_numbers`, `wrong_order` and
  `wrong_value` take the same and return the `Wrong` without comparing.
  `num_of(1, "rank")` counts: "1 rank", "2 ranks".
* `installed(function, "minimegatron.core.x.name")` puts the student's function where ours is, for
  a `with` block: in its module, and wherever it was imported by name. `"...x.Class.method"` works too.
  A `@traced` function's replacement is traced likewise.
* `recorded()` records the step (all ranks, or none). What it yields, called after the block, is plain
  data; `run_of(answers)` is the `Trace` of all ranks: `.step(0)` has actions, bubble and figures.
  Return it in the `Result`, and the student gets a page that replays the run.
* `Result(achieved)`: shown on success, as {"bubble": "27.3 % = 3/11", "peak": "4 microbatches"}: a
  dict of short words. Say what *their* code did, measured or counted.
* A hang needs no care: after some seconds without a traced or torch.distributed call the doctor
  explains it. But where one mistake too many or too few makes the hang, say so first:
  `judge_hang(case, notes)` gets what each rank noted (`noting.note`) until then, and may raise Wrong.
  The whole check should take well under 2 s. Nothing may depend on the speed of the machine.
* Helpers of several exercises belong beside this file, in the folder `bench`, not in the
  catalogue.

Try it: `python -m minimegatron.exercises.check.engine FILE [--seed N]` with a stub, a solution or a
wrong one; FILE's exercise is told from its folder's or its own name (ex06...).
"""

import importlib
import os
from pathlib import Path

from minimegatron.exercises.bench.cases import Case, Result, Wrong, data_seed
from minimegatron.exercises.bench.feedback import (
    check_order,
    check_value,
    wrong_order,
    wrong_value,
)
from minimegatron.exercises.bench.replacing import installed

__all__ = [
    "Case",
    "Result",
    "Wrong",
    "check_order",
    "check_value",
    "data_seed",
    "installed",
    "main",
    "wrong_order",
    "wrong_value",
]


def main(file: str) -> None:
    """Checks the student's file, as part of torchrun or on its own; ends the process."""
    path = Path(file).resolve()
    # Imported here: every `alone` and `check` imports this module, and a room needs neither.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torchrun = importlib.import_module("minimegatron.exercises.check.torchrun")
        raise SystemExit(torchrun.check_in_torchrun(path))
    engine = importlib.import_module("minimegatron.exercises.check.engine")
    raise SystemExit(engine.check_with_command(path))
