"""What the page on steps that are run again shows: verdicts, messages, what must be put back.

Called by: `problem_cases`; pages find it as `reruns`. Calls: the package's own machine, in one
process, with results that are written down here.
"""

import contextlib
import json
import logging
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch

from cases.case_words import table
from minimegatron.core.rerun import random_numbers, states, step_runs, verdicts
from minimegatron.core.rerun.data_iterator import RerunDataIterator
from minimegatron.core.rerun.differences import relative_difference
from minimegatron.core.rerun.states import RerunMode, RerunState
from minimegatron.core.rerun_state_machine import (
    RerunStateMachine,
    destroy_rerun_state_machine,
    set_rerun_state_machine,
)

GO_ON = (False, False, 0)
NAN = math.nan
MICROBATCHES = 2

# -- The machine, and what it says --


def new_machine(mode: RerunMode = RerunMode.VALIDATE_RESULTS, device: str = "0", **options):
    """A machine that judges: its first step is over."""
    machine = RerunStateMachine(mode=mode, **options)
    machine.first_iteration_complete = True
    machine.judge.device_of_rank = lambda: ("node", device)
    return machine


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What machines say meanwhile, without rank, iteration and results; nothing is printed."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words = re.sub(r"^.*?iteration \d+: ", "", record.getMessage())
            said.append(re.sub(r"^unexpected result \S+: | \(first .*\)$", "", words))

    ear = Ear()
    was, verdicts.logger.propagate = verdicts.logger.propagate, False
    verdicts.logger.addHandler(ear)
    try:
        yield said
    finally:
        verdicts.logger.removeHandler(ear)
        verdicts.logger.propagate = was


def is_rejected(result: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(result)


def judge_step(
    machine: RerunStateMachine,
    runs: Sequence[Sequence[float]],
    fatal: bool = True,
    rejection_func: Callable[[torch.Tensor], bool | torch.Tensor] = is_rejected,
    tolerance: float = 0.0,
) -> tuple[list[RerunState], tuple[bool, bool, int]]:
    """One step, whose n-th run gives the results `runs[n]`: the states passed, and the exits."""
    passed, left = [], [*runs]
    while machine.should_run_forward_backward(None):
        passed.append(machine.state)
        for result in left.pop(0):
            given = torch.tensor(result), rejection_func, "the loss is not finite"
            machine.validate_result(*given, fatal=fatal, tolerance=tolerance)
    if left:
        raise ValueError(
            f"the step ran {len(runs) - len(left)} times, and {len(runs)} were written"
        )
    return [*passed, machine.state], machine.should_checkpoint_and_exit()


def resumed(machine: RerunStateMachine, device: str) -> RerunStateMachine:
    """The machine of a new process that has read the checkpoint which `machine` leaves."""
    other = new_machine(device=device)
    other.load_state_dict(json.loads(json.dumps(machine.state_dict())))
    return other


# -- Every verdict --


def drawing() -> str:
    """The drawing in the module of states, as it stands there."""
    drawn = re.search(r"\n\n((?: {4}.*\n)+)", states.__doc__)[1]
    return f"```text\n{textwrap.dedent(drawn)}```"


class Case(NamedTuple):
    """A step, and what its runs give."""

    runs: tuple[float, ...]
    fatal: bool = True
    device: str = ""
    """Where the run is resumed from the checkpoint; "" for not at all."""
    times: int = 1
    """How often it is."""
    about: str = ""
    """What else is not as usual: `FIRST_STEP`, or `DISABLED`."""


ANOTHER, SUSPECTED = "another device", "the suspected device"
FIRST_STEP, DISABLED = "first step of a process", "mode `disabled`"
CASES = (
    Case((2.0,)),
    Case((NAN, 2.0)),
    Case((NAN, 2.0), fatal=False),
    Case((NAN, NAN)),
    Case((NAN, NAN), fatal=False),
    Case((NAN, NAN, 2.0), device=ANOTHER),
    Case((NAN, NAN, NAN), device=ANOTHER),
    Case((NAN, NAN, NAN), device=SUSPECTED),
    Case((NAN, NAN, NAN), device=SUSPECTED, times=3),
    Case((NAN,), about=FIRST_STEP),
    Case((NAN,), about=DISABLED),
)


class Outcome(NamedTuple):
    states: list[RerunState]
    """Of the last process that ran the step, after each question whether to run it."""
    exits: tuple[bool, bool, int] | None
    """None where it raised RuntimeError."""
    said: str
    """Its last words."""


def outcome(case: Case) -> Outcome:
    """What the machine makes of it."""
    runs = [[result] for result in case.runs]
    machine = new_machine(RerunMode.DISABLED if case.about == DISABLED else "validate_results")
    machine.first_iteration_complete = case.about != FIRST_STEP
    with heard() as said:
        try:
            found = judge_step(machine, runs[:2], case.fatal)
        except RuntimeError as error:
            return Outcome([machine.state], None, str(error))
        for _ in range(case.times if case.device else 0):
            machine = resumed(machine, "1" if case.device == ANOTHER else "0")
            found = judge_step(machine, runs[2:], case.fatal)
    return Outcome(*found, said[-1] if said else "")


def verdicts_table() -> str:
    """Every way through the machine, in the words of the machine."""
    rows = [
        [_runs_words(case), "yes" if case.fatal else "no", *_outcome_words(outcome(case))]
        for case in CASES
    ]
    head = ["runs", "fatal", "states", "checkpoint, exit, code", "the rank says"]
    return table(head, rows)


def _runs_words(case: Case) -> str:
    """
    >>> _runs_words(CASES[0]), _runs_words(CASES[-1])
    ('2', 'NaN, in mode `disabled`')
    >>> _runs_words(CASES[-3])
    'NaN, NaN; three times on the suspected device: NaN'
    """
    first, third = [f"{result:g}".replace("nan", "NaN") for result in case.runs], ""
    if case.device:
        often = {1: "", 3: "three times "}[case.times]
        third = f"; {often}on {case.device}: {first.pop()}"
    about = f", in {case.about}".replace("in first", "in the first") if case.about else ""
    return ", ".join(first) + third + about


def _outcome_words(found: Outcome) -> list[str]:
    """
    >>> _outcome_words(Outcome([RerunState.INITIAL_RUN, RerunState.NOT_RUNNING_YET], GO_ON, "yes: no"))
    ['1', 'go on', 'yes']
    >>> _outcome_words(Outcome([RerunState.WILL_RERUN_FROM_CHECKPOINT], (True, True, 16), ""))
    ['3', 'yes, yes, 16', 'nothing']
    """
    passed = [str(state.value) for state in dict.fromkeys(found.states) if state.value]
    words = re.split("[:;,] | of node", found.said)
    is_not_judged = "not judged" in found.said
    return [" → ".join(passed), _exit_words(found.exits), words[is_not_judged] or "nothing"]


def states_words() -> str:
    """
    >>> states_words()[:35]
    '1 is `INITIAL_RUN`, 2 `RERUNNING_IN'
    """
    first, *others = (f"`{state.name}`" for state in RerunState if state.value)
    named = [f"1 is {first}", *(f"{number} {name}" for number, name in enumerate(others, 2))]
    return f"{', '.join(named[:-1])} and {named[-1]}"


def _exit_words(exits: tuple[bool, bool, int] | None) -> str:
    """
    >>> _exit_words(GO_ON), _exit_words((False, True, 17)), _exit_words(None)
    ('go on', 'no, yes, 17', '`RuntimeError`')
    """
    if exits is None or exits == GO_ON:
        return "`RuntimeError`" if exits is None else "go on"
    *yes_or_no, code = exits
    return ", ".join([*("yes" if is_so else "no" for is_so in yes_or_no), str(code)])


# -- What it costs --


class Cost(NamedTuple):
    runs: int
    numbers: list[int]
    """How many are in each of the machine's messages."""
    kept: int
    """Microbatches, at the end of the last run."""


def cost(machine: RerunStateMachine, *runs: Sequence[float]) -> Cost:
    """Of one step of two microbatches, whose losses `runs` has, run by run."""
    sent: list[int] = []
    with _is_the_one(machine), mock.patch.object(step_runs, "of_any_rank", partial(_note, sent)):
        iterator, num_runs, kept = RerunDataIterator(iter(range(100))), 0, 0
        while machine.should_run_forward_backward(iterator):
            for result in runs[num_runs]:
                next(iterator)
                machine.validate_result(torch.tensor(result), is_rejected, "loss", fatal=False)
            num_runs, kept = num_runs + 1, len(iterator.saved_microbatches)
    return Cost(num_runs, sent, kept)


def _note(sent: list[int], *wishes: bool) -> tuple[bool, ...]:
    """Stands in for the message between ranks; the others wish for nothing."""
    sent.append(len(wishes))
    return wishes


@contextlib.contextmanager
def _is_the_one(machine: RerunStateMachine) -> Iterator[None]:
    """An iterator asks the machine of its process; a page leaves none behind."""
    set_rerun_state_machine(machine)
    try:
        with heard():
            yield
    finally:
        destroy_rerun_state_machine()


GOOD, BAD = (2.0,) * MICROBATCHES, (2.0, NAN)


def _third_run() -> RerunStateMachine:
    with heard():
        machine = new_machine()
        judge_step(machine, [BAD, BAD])
        return resumed(machine, "1")


def costs() -> dict[tuple[str, str], Cost]:
    """Mode and kind of step -> what it costs."""
    statistics = new_machine(RerunMode.REPORT_DETERMINISM_STATS)
    return {
        ("disabled", "any"): cost(new_machine(RerunMode.DISABLED), GOOD),
        ("validate_results", "all results are good"): cost(new_machine(), GOOD),
        ("validate_results", "one is rejected"): cost(new_machine(), BAD, GOOD),
        ("validate_results", "its third run"): cost(_third_run(), GOOD),
        ("report_determinism_stats", "any"): cost(statistics, GOOD, GOOD),
    }


def costs_table() -> str:
    """Runs, messages and memory of a step of two microbatches, by mode."""
    rows = [
        [f"`{mode}`", kind, found.runs, _messages_words(found.numbers), found.kept]
        for (mode, kind), found in costs().items()
    ]
    return table(["mode", "step", "runs", "messages", "microbatches kept"], rows)


def _messages_words(numbers: Sequence[int]) -> str:
    """
    >>> _messages_words([]), _messages_words([1, 3])
    ('0', '2, of 1 and 3 numbers')
    >>> _messages_words([1])
    '1, of 1 number'
    """
    if not numbers:
        return "0"
    plural = "" if [*numbers] == [1] else "s"
    return f"{len(numbers)}, of {' and '.join(map(str, numbers))} number{plural}"


def messages_of(num_steps: int, num_rejected: int) -> int:
    """Of a run in mode `validate_results`, in which so many steps ran twice.

    >>> messages_of(100, 1)
    101
    """
    found = costs()
    good = len(found["validate_results", "all results are good"].numbers)
    rejected = len(found["validate_results", "one is rejected"].numbers)
    return good * (num_steps - num_rejected) + rejected * num_rejected


# -- What must be put back --

THRESHOLD = 10.0
"""A loss above it is rejected."""


class NoRewind(RerunDataIterator):
    def rewind(self) -> None:
        """Forgotten."""


class Repeated(NamedTuple):
    """A step that was run twice, and was accepted."""

    first: float
    """The rejected loss."""
    second: float
    said: str
    gradient: float


def repeat(
    iterator_class: type[RerunDataIterator] = RerunDataIterator,
    puts_back: bool = True,
    zero: bool = True,
) -> Repeated:
    """A weight w = 1; the loss of a number x is (w x u)², and u is drawn. What may be left out is."""
    machine, losses, gradient = new_machine(), [], 0.0
    iterator = iterator_class(iter(torch.tensor([2.0, 5.0, 3.0, 4.0])))
    forgets = mock.patch.object(random_numbers, "keep_random_numbers", lambda: lambda: None)
    with _is_the_one(machine), torch.random.fork_rng(devices=[]), contextlib.ExitStack() as stack:
        said = stack.enter_context(heard())
        if not puts_back:
            stack.enter_context(forgets)
        torch.manual_seed(0)
        while machine.should_run_forward_backward(iterator):
            gradient = 0.0 if zero else gradient
            for _ in range(MICROBATCHES):
                drawn = next(iterator) * (0.9 + 0.2 * torch.rand(()))
                gradient += 2.0 * float(drawn**2)
                losses.append(loss := drawn**2)
                large = partial(torch.lt, torch.tensor(THRESHOLD))
                machine.validate_result(loss, large, "large", fatal=False)
    rejected, again = losses[1], losses[-1]
    return Repeated(float(rejected), float(again), said[-1], gradient)


LEFT_OUT = {
    "nothing": {},
    "to rewind the iterators": {"iterator_class": NoRewind},
    "to put random numbers back": {"puts_back": False},
    "to zero gradients in the loop": {"zero": False},
}


def left_out_table() -> str:
    """The same step four times: each time something else is left out."""
    rows = []
    for name, left_out in LEFT_OUT.items():
        found = repeat(**left_out)
        numbers = f"{found.first:.2f}", f"{found.second:.2f}"
        rows.append([name, *numbers, found.said.partition(":")[0], f"{found.gradient:.1f}"])
    return table(["forgotten", "loss, run 1", "run 2", "verdict", "gradient"], rows)


def doubled_words() -> str:
    """
    >>> doubled_words()
    'twice as large'
    """
    return {2.0: "twice as large"}[repeat(zero=False).gradient / repeat().gradient]


# -- For the problems --


def verdict(first: Sequence[float], second: Sequence[float], tolerance: float = 0.0) -> str:
    """What a rank says of two runs' losses, where one above THRESHOLD is rejected.

    >>> verdict([20.0], [20.0]), verdict([20.0], [21.0])
    ('no transient error', 'transient error')
    """
    with heard() as said:
        judge_step(new_machine(), [first, second], False, lambda loss: loss > THRESHOLD, tolerance)
    return said[-1].partition(":")[0]


def apart(first: float, second: float) -> str:
    """
    >>> apart(20.0, 20.01)
    '0.000500'
    """
    return f"{relative_difference(first, second):.6f}"
