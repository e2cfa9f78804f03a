"""How an exercise is checked, and `main`, which every exercise's file ends with.

Called by: each `catalog/exNN_name/check.py`, and a student's file under `torchrun`. Calls:
`feedback`, `recording`, `engine`. Megatron has no counterpart.

# How to write an exercise

A folder `catalog/exNN_name/` with `__init__.py` (its `Exercise`), `stub.py`, `solution.py`,
`hints.md`, `page.md` and `check.py`. The check has two functions:

    from minimegatron.exercises.check import Case, Result, check_numbers, installed, recorded

    def cases(seed: int) -> list[Case]:
        "Seed 0: what students see. Other seeds: other data and other sizes, for grading."
        sizes = random.Random(seed).sample([(2, 3), (4, 2), (4, 8)], 2) if seed else [(4, 8), (4, 2)]
        return [Case(f"pp {p}, {m} microbatches", pp=p, m=m, seed=seed) for p, m in sizes]

    def run(student: ModuleType, case: Case) -> Result:
        "On every rank (once, if num_ranks is 0). Raises Wrong if the student's code is wrong."
        with installed(student.forward_backward, "minimegatron.core....forward_backward"):
            with recorded() as recording:
                loss = train_one_step(case.m)
        check_numbers("loss", loss, reference(case), rank=dist.get_rank(), layout={"dp": 2})
        return Result({"bubble": "27 %"}, recording)

What the engine does around it: each check starts `num_ranks` fresh processes with gloo on the CPU,
one torch thread each; loads the student's file on each; calls `run` for one case after the other on
the same ranks. Groups made by `parallel_state.initialize_model_parallel` are destroyed between
cases. The first rank that raises ends the check.

* **Raise `Wrong`** for what the student got wrong; its first line says which invariant broke, where.
  Build it with the helpers, or write it: `raise Wrong(f"rank {r}: the loss of microbatch {i} ...")`.
  Any other exception is the student's crash if their file is in its traceback, and else reported as
  a defect of the check.
* `check_numbers(name, got, expected, rank, layout)`: tensors, numbers or dicts of them (the first
  parameter that differs is named); says the ratio and what it usually means for those sizes.
  `check_order(plan, done, rank)`: planner actions or words like "F0"; the plan beside what was done.
  `check_value(what, got, expected, why)`: everything else. `wrong_numbers`, `wrong_order` and
  `wrong_value` take the same and return the `Wrong` without comparing.
* **Compare on every rank**, and only after the last communication of a step if you can: a rank that
  raises early leaves the others waiting. That is no harm (they are stopped at once), but of several
  ranks that raise within 0.2 s the earliest is shown.
* `installed(function, "minimegatron.core.x.name")` puts the student's function where ours is, for
  a `with` block: in its module, and wherever it was imported by name. `"...x.Class.method"` works too.
  A `@traced` function's replacement is traced likewise.
* `recorded()` records the step (all ranks, or none); `.step(0)` has actions, bubble and figures once
  the block has ended. Return it in the `Result` and the student gets a page that replays the run.
* `Result(achieved)`: shown on success, as {"bubble": "27.3 % = 3/11", "peak": "4 microbatches"}: a
  dict of short words; rank 0's is shown. Say what *their* code did, measured or counted.
* A hang needs no care: after 3 s without a traced or torch.distributed call the doctor explains it.
  So no call of yours may take as long, and the whole check should take well under 2 s. Nothing may
  depend on the speed of the machine.
* The student's code must not import torch in the way of `num_ranks = 0` exercises needing it; their
  check runs in a process of its own all the same.
* Helpers of several exercises belong beside this file, in a module whose name begins with `bench_`
  (`bench_pipeline.py`, ...), not in the catalogue.

Try it: `python -m minimegatron.exercises.engine FILE [--seed N]` with a stub, a solution or a wrong
one; FILE's exercise is told from its folder's or its own name (ex06...).
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minimegatron.exercises.engine import check_with_command
from minimegatron.exercises.feedback import (
    Wrong,
    check_numbers,
    check_order,
    check_value,
    wrong_numbers,
    wrong_order,
    wrong_value,
)
from minimegatron.exercises.recording import recorded
from minimegatron.exercises.torchrun import check_in_torchrun

__all__ = [
    "Case",
    "Result",
    "Wrong",
    "check_numbers",
    "check_order",
    "check_value",
    "installed",
    "main",
    "recorded",
    "wrong_numbers",
    "wrong_order",
    "wrong_value",
]


class Case:
    """One configuration to check: a name that students see, and the values behind it.

    >>> case = Case("pp 4, 8 microbatches", pp=4, num_microbatches=8)
    >>> case.pp, case.values["num_microbatches"], str(case)
    (4, 8, 'pp 4, 8 microbatches')
    """

    def __init__(self, name: str, **values: Any):
        self.name, self.values = name, values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(f"the case has no value {name!r}") from None

    def __str__(self) -> str:
        return self.name


@dataclass
class Result:
    """What a case achieved, in words by what they are of; and the recording of its run, if any."""

    achieved: Mapping[str, Any] = field(default_factory=dict)
    recording: Any = None


@contextlib.contextmanager
def installed(function: Callable, symbol: str) -> Iterator[None]:
    """For the length of the block, `function` stands wherever ours, at dotted path `symbol`, does."""
    holder, name = _locate(symbol)
    original = getattr(holder, name)
    replacement = _traced_like(original, function)
    places = [(holder, name)]
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("minimegatron.") and module is not holder:
            places += [(module, key) for key, value in vars(module).items() if value is original]
    for place, key in places:
        setattr(place, key, replacement)
    try:
        yield
    finally:
        for place, key in places:
            setattr(place, key, original)


def _locate(symbol: str) -> tuple[Any, str]:
    """The module or class that holds `symbol`, and its name there."""
    path, _, name = symbol.rpartition(".")
    try:
        holder = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, class_name = path.rpartition(".")
        holder = getattr(importlib.import_module(module), class_name)
    if not hasattr(holder, name):
        raise ValueError(f"{symbol} does not exist")
    return holder, name


def _traced_like(original: Callable, function: Callable) -> Callable:
    """`function`, seen by observers as `original` is."""
    decorate = getattr(original, "decorate", None)
    return function if decorate is None else decorate(function)


def main(file: str) -> None:
    """Checks the student's file, as part of torchrun or on its own; ends the process."""
    path = Path(file).resolve()
    if dist.is_torchelastic_launched():
        raise SystemExit(check_in_torchrun(path))
    raise SystemExit(check_with_command(path))
