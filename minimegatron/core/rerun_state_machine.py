"""Runs a step again where a result is bad, to tell a fault of the machine from one of the data.

Counterpart: `megatron.core.rerun_state_machine`. Its parts are in `core.rerun`, where `states` draws
which run follows which. A NaN from a broken chip and a NaN from bad data look alike; but the data give
it again, also on another device.

    while machine.should_run_forward_backward(data_iterator):     # all ranks decide together
        ...                                                       # gradients to zero, the schedule
    should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()

By default the mode is `disabled`: a step runs once, and a bad result raises where it arises. Megatron's
default is `validate_results`.
"""

from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch

from minimegatron.core.rerun import data_iterator as replay
from minimegatron.core.rerun import differences, step_runs, two_runs
from minimegatron.core.rerun.current import get_rerun_state_machine, set_rerun_state_machine  # noqa: F401
from minimegatron.core.rerun.states import (  # noqa: F401  Megatron has them here
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    EXITS,
    JudgedCall,
    RerunDiagnostic,
    RerunMode,
    RerunState,
    RerunValidationStatus,
    ResultTracker,
)
from minimegatron.core.rerun.verdicts import MachineState, RerunErrorInjector, ResultJudge, rank
from minimegatron.exports import lazily

_REPLAY = "minimegatron.core.rerun.data_iterator"
__getattr__, __dir__ = lazily(__name__, {"RerunDataIterator": f"{_REPLAY}:RerunDataIterator"})


class RerunStateMachine(MachineState):
    """One per process; see `initialize_rerun_state_machine`.

    Args:
        state_save_func, state_restore_func: what else than random numbers a run of a step changes, and
            how to put it back; the second is called with what the first returned.
        error_injector: None pretends nothing.
        result_rejected_tracker_filename: gets a line for each rejected result.
        job_id: the scheduler's number of this job, for those lines.
    """

    REPORTING_INTERVAL_ITERATIONS = 2

    def __init__(
        self,
        state_save_func: Callable[[], Any] | None = None,
        state_restore_func: Callable[[Any], None] | None = None,
        mode: RerunMode = RerunMode.DISABLED,
        error_injector: RerunErrorInjector | None = None,
        result_rejected_tracker_filename: str | None = None,
        *,
        job_id: str = "N/A",
    ) -> None:
        super().__init__()
        self.state_save_func, self.state_restore_func = state_save_func, state_restore_func
        self.mode, self.state = RerunMode(mode), RerunState.NOT_RUNNING_YET
        self.error_injector = error_injector or RerunErrorInjector()
        tracker = ResultTracker(result_rejected_tracker_filename, job_id)
        self.judge = ResultJudge(self.error_injector, tracker)
        self.first_iteration_complete = False
        self.num_runs = 0
        """Of the step under way, those that have begun; 0 between steps."""
        self.validation_counts: Counter[str] = Counter()

    @cached_property
    def two_runs(self) -> "two_runs.TwoRuns":
        """How far results of two runs lie apart; where the mode asks for it."""
        return two_runs.TwoRuns()

    @cached_property
    def _runs(self) -> "step_runs.StepRuns":
        return step_runs.StepRuns(self.judge, self._keep_more)

    @property
    def current_iteration(self) -> int:
        """The step under way, from 1 on; between steps the last one."""
        return self.judge.iteration

    def set_mode(self, mode: RerunMode) -> None:
        """From now on; between steps."""
        self.mode = RerunMode(mode)

    def get_mode(self) -> RerunMode:
        """What is done with results now."""
        return self.mode

    # -- The loop around a step --

    def begin_step(self, iteration: int | None = None) -> None:
        """Called before the loop of each training step, also after one that raised.

        `iteration` is its number, from 1 on, for messages; None counts on.
        """
        if self.state in (RerunState.INITIAL_RUN, RerunState.RERUNNING_IN_PLACE):
            self.state = RerunState.NOT_RUNNING_YET
        self.num_runs = 0
        self.judge.iteration = self.judge.iteration if iteration is None else iteration - 1

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        """Whether to run (again) all forwards and backwards of this training step.

        `train_step` asks before each run, with the iterators of the chunks: one, a list, or None. All
        ranks must ask, and get the same answer. The gradients of the last run count. Raises ValueError
        where the mode is not `disabled` and an iterator is no `RerunDataIterator`.
        """
        self.validation_counts.clear()
        if self.mode is RerunMode.DISABLED:
            runs = self.state is RerunState.NOT_RUNNING_YET
            self.state = RerunState.INITIAL_RUN if runs else RerunState.NOT_RUNNING_YET
        else:
            is_statistics = self.mode is RerunMode.REPORT_DETERMINISM_STATS
            before, iterators = self.state, replay.iterators_of(data_iterator)
            self.state = self._runs.next_state(before, iterators, is_statistics)
            runs = step_runs.is_run(before, self.state)
            if is_statistics and not runs:
                self.two_runs.report(self.current_iteration, self.REPORTING_INTERVAL_ITERATIONS)
        self.judge.iteration += runs and self.num_runs == 0
        self.num_runs = self.num_runs + 1 if runs else 0
        return runs

    def _keep_more(self) -> Callable[[], None]:
        kept = None if self.state_save_func is None else self.state_save_func()
        restore = self.state_restore_func
        return (lambda: None) if restore is None else partial(restore, kept)

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """After the loop, before the update: (save a checkpoint, end the run, its exit code).

        The same on all ranks. Where the run ends, the weights must not be updated.
        """
        self.first_iteration_complete = True
        return EXITS.get(self.state, (False, False, 0))

    # -- Within a run --

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], bool | torch.Tensor],
        message: str,
        comparison_func: Callable[[Any, Any], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
        *,
        describe: Callable[[], str] | None = None,
    ) -> None:
        """Judges `result`, a scalar tensor or what else the two functions take.

        Args:
            rejection_func: true for a bad result.
            message: names the check. Calls with one message are counted in each run, and the n-th is
                compared with the n-th.
            comparison_func: the relative difference of two results; None for that of two numbers.
            tolerance: a larger difference makes the second result another one.
            fatal: whether the run ends with the verdict, or goes on with the last run of the step.
            describe: more words for a rejected result; called for one.

        In mode `disabled`, and outside of a step, a rejected result raises RuntimeError, or is logged
        where it is not fatal. Otherwise the step goes on, and at its end all ranks run it again. In
        the first step of a process a rejected result is logged, and nothing else.
        """
        describe = describe or (lambda: message)
        if self.mode is RerunMode.DISABLED or self.state is RerunState.NOT_RUNNING_YET:
            if bool(rejection_func(result)):
                self.judge.tell_at_once(result, message, describe, fatal)
            return
        self.validation_counts[message] += 1
        call = JudgedCall(message, rank(), self.validation_counts[message])
        differs = comparison_func or differences.relative_difference
        if self.mode is RerunMode.REPORT_DETERMINISM_STATS:
            self.judge.wishes.rerun = True
            self.two_runs.look(call, result, differs, self.state)
        elif self.state is RerunState.INITIAL_RUN:
            is_judged = self.first_iteration_complete
            self.judge.judge_first(call, result, rejection_func, describe, is_judged)
        else:
            self.judge.judge_again(call, result, differs, tolerance, fatal, self.state)


# -- The machine of this process --


def initialize_rerun_state_machine(**kwargs: Any) -> None:
    """Makes this process's machine, with the arguments of `RerunStateMachine`."""
    set_rerun_state_machine(RerunStateMachine(**kwargs))


def destroy_rerun_state_machine() -> None:
    """Forgets what was learned, so that another run may begin in this process."""
    set_rerun_state_machine(RerunStateMachine())


destroy_rerun_state_machine()
