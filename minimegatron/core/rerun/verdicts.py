"""Judges one rank's results over the runs of a step, and says what this rank asks for.

Counterpart: `RerunErrorInjector`, the body of `RerunStateMachine.validate_result` and what that class
saves, all in `megatron.core.rerun_state_machine`.
"""

import logging
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.rerun import differences
from minimegatron.core.rerun.states import (
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    EXITS,
    MAX_RUNS_ON_SAME_DEVICE,
    JudgedCall,
    LargeValues,
    RerunDiagnostic,
    RerunMode,
    RerunState,
    RerunValidationStatus,
    ResultTracker,
    read_iterations_to_skip,
)
from minimegatron.core.utils import get_device

logger = logging.getLogger(__name__)


class RerunErrorInjector:
    """Rejects one of `error_injection_rate` results, at random; none for rate 0.

    `error_injection_type` is the verdict that the runs which follow shall come to. No number is
    changed: only the judgement is.
    """

    def __init__(
        self,
        error_injection_rate: int = 0,
        error_injection_type: RerunDiagnostic = RerunDiagnostic.TRANSIENT_ERROR,
    ):
        self.error_injection_rate = error_injection_rate
        self.error_injection_type = RerunDiagnostic(error_injection_type)
        self.injected_error_type: RerunDiagnostic | None = None
        """What was injected and has no verdict yet."""
        # Its own numbers: those of the run stay as they are without it. Megatron draws from the run's.
        self._random = random.Random(0)

    @property
    def should_inject_errors(self) -> bool:
        """Whether it ever does."""
        return self.error_injection_rate > 0

    def maybe_inject(self, rank: int = 0) -> bool:
        """Whether to reject this result; while one is under examination, False.

        The ranks draw the same numbers and reject at different moments.
        """
        if not self.should_inject_errors or self.injected_error_type is not None:
            return False
        drawn = self._random.randrange(self.error_injection_rate) + rank
        if drawn % self.error_injection_rate:
            return False
        self.injected_error_type = self.error_injection_type
        logger.warning("rank %d: pretending a %s", rank, self.error_injection_type.value)
        return True

    def maybe_miscompare(
        self,
        comparison_func: Callable[[Any, Any], float],
        initial_result: Any,
        result: Any,
        state: RerunState,
    ) -> float:
        """What `comparison_func` says of two results, or what fits the injected error."""
        injected, transient = self.injected_error_type, RerunDiagnostic.TRANSIENT_ERROR
        if injected is None:
            return comparison_func(initial_result, result)
        is_third_run = state is RerunState.RERUNNING_FROM_CHECKPOINT
        shown_here = RerunDiagnostic.PERSISTENT_ERROR if is_third_run else transient
        if is_third_run or injected is transient:
            self.forget()
        return (
            differences.COMPARISON_MISMATCH
            if injected is shown_here
            else differences.COMPARISON_MATCH
        )

    def forget(self) -> None:
        """The injected error is dealt with: another one may come."""
        self.injected_error_type = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to know, as plain numbers and text."""
        injected = self.injected_error_type
        return {
            "error_injection_rate": self.error_injection_rate,
            "error_injection_type": self.error_injection_type.value,
            "injected_error_type": None if injected is None else injected.value,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        injected = state_dict["injected_error_type"]
        self.error_injection_rate = state_dict["error_injection_rate"]
        self.error_injection_type = RerunDiagnostic(state_dict["error_injection_type"])
        self.injected_error_type = None if injected is None else RerunDiagnostic(injected)


Status = RerunValidationStatus


@dataclass
class Wishes:
    """What a rank asks of all ranks. A rank that has nothing to object asks for nothing."""

    rerun: bool = False
    """After the first run: another one, in place."""
    go_on: bool = False
    """After a later one: update the weights with its gradients."""
    checkpoint: bool = False
    """A checkpoint, from which the run is resumed elsewhere."""
    restart: bool = False
    """Another attempt, on another device than this one."""
    end: bool = False
    """The end, with the verdict. It counts more than another rank's `go_on`."""


class ResultJudge:
    """Of this rank. Between steps it forgets everything but its device.

    Megatron's keeps the rejected call of an earlier step: a later step that runs again for another
    rank's sake is compared with it there, and may be accepted for that.
    """

    def __init__(self, injector: RerunErrorInjector, tracker: ResultTracker):
        self.injector, self.tracker = injector, tracker
        self.device_of_rank: Callable[[], tuple[str, str]] = name_of_device
        """Names this rank's (node, device). Another function stands in for another device."""
        self.iteration = 0
        self.suspicious_device: tuple[str, str] | None = None
        self.num_on_same_device = 0
        self.forget_step()

    def forget_step(self) -> None:
        """Nothing was rejected yet."""
        self.wishes = Wishes()
        self.failed_call: JudgedCall | None = None
        self.initial_result: Any = None

    # -- The first run --

    def judge_first(
        self,
        call: JudgedCall,
        result: Any,
        rejection_func: Callable[[Any], bool | torch.Tensor],
        describe: Callable[[], str],
        is_judged: bool,
    ) -> None:
        """Asks for another run if the result is bad. Not `is_judged`: it is logged, and that is all."""
        if self.wishes.rerun:
            return  # one is enough: what follows from a bad result is bad too
        injected = is_judged and self.injector.maybe_inject(rank())
        if not (injected or bool(rejection_func(result))):
            return
        text = "it is rejected on purpose" if injected else describe()
        text = f"unexpected result {shown(result)}: {text}"
        if not is_judged:
            self.say(f"{text}; the first step of a process is not judged", is_fatal=False)
            return
        self.failed_call, self.initial_result = call, kept(result)
        self.wishes.rerun = True
        self.track(Status.INITIAL_RUN, result, call.message)
        self.say(f"{text}; the step runs again")

    # -- The second and the third --

    def judge_again(
        self,
        call: JudgedCall,
        result: Any,
        differs: Callable[[Any, Any], float],
        tolerance: float,
        fatal: bool,
        state: RerunState,
    ) -> None:
        """The verdict on the rejected result, once the same call has come again."""
        if call != self.failed_call:
            return
        first, message = self.initial_result, call.message
        # Written so that a difference which is NaN is none within the tolerance.
        is_other = not self.injector.maybe_miscompare(differs, first, result, state) <= tolerance
        pair = f"first {shown(first)}, then {shown(result)}"
        self.wishes.go_on, self.wishes.end = not fatal, False
        if state is RerunState.RERUNNING_IN_PLACE:
            self._judge_in_place(result, message, pair, is_other, fatal)
        elif self.device_of_rank() == self.suspicious_device:
            self._ask_for_another_device()
        else:
            self._judge_elsewhere(result, message, pair, is_other, fatal)

    def _judge_in_place(
        self, result: Any, message: str, pair: str, is_other: bool, fatal: bool
    ) -> None:
        if is_other:
            self.wishes.end = fatal
            self.track(Status.FIRST_RERUN_NOT_REPRODUCIBLE, result, message)
            self.say(f"transient error: the same device computes another result ({pair})", fatal)
            return
        self.wishes.checkpoint = fatal
        self.suspicious_device, self.num_on_same_device = self.device_of_rank(), 0
        self.track(Status.FIRST_RERUN_REPRODUCIBLE, result, message)
        self.say(f"no transient error: the same device computes the same ({pair})", fatal)

    def _ask_for_another_device(self) -> None:
        self.num_on_same_device += 1
        self.wishes.go_on = False
        if self.num_on_same_device < MAX_RUNS_ON_SAME_DEVICE:
            self.wishes.restart = True
            self.say("this is the suspected device again; resume the run on another one")
        else:
            self.wishes.end = True
            self.say(
                f"no verdict: all {self.num_on_same_device} resumed runs were on the suspected device"
            )

    def _judge_elsewhere(
        self, result: Any, message: str, pair: str, is_other: bool, fatal: bool
    ) -> None:
        self.wishes.end = fatal
        if is_other:
            self.track(Status.SECOND_RERUN_NOT_REPRODUCIBLE, result, message)
            node, device = self.suspicious_device or ("?", "?")
            text = f"persistent error of {node}, {device}: this device computes another result"
        else:
            self.track(Status.SECOND_RERUN_REPRODUCIBLE, result, message)
            text = "correct result: this device computes the same, so look at data and program"
        self.say(f"{text} ({pair})", fatal)

    # -- What it tells --

    def tell_at_once(
        self, result: Any, message: str, describe: Callable[[], str], fatal: bool
    ) -> None:
        """A rejected result where no step runs again: RuntimeError, or a warning."""
        self.track(Status.RERUN_DISABLED, result, message)
        if fatal:
            raise RuntimeError(describe())
        where = f"rank {rank()}, iteration {self.iteration}"
        logger.warning("%s: unexpected result %s: %s", where, shown(result), describe())

    def track(self, status: Status, result: Any, message: str) -> None:
        """A line in the tracker's file."""
        where = (rank(), self.device_of_rank(), self.iteration)
        self.tracker.note(status, *where, shown(result), message)

    def say(self, text: str, is_fatal: bool = True) -> None:
        """A line in the log."""
        where = f"rank {rank()} ({', '.join(self.device_of_rank())}), iteration {self.iteration}"
        logger.log(logging.ERROR if is_fatal else logging.WARNING, "%s: %s", where, text)

    # -- For a resumed run --

    def state_dict(self) -> dict[str, Any]:
        """What the third run needs: plain numbers and text."""
        failed = self.failed_call
        return {
            "failed": None if failed is None else [*failed],
            "initial_result": None if failed is None else differences.as_plain(self.initial_result),
            "suspicious_device": self.suspicious_device,
            "num_on_same_device": self.num_on_same_device,
            "error_injector": self.injector.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        self.forget_step()
        if state_dict["failed"] is not None:
            self.failed_call = JudgedCall(*state_dict["failed"])
            self.initial_result = differences.from_plain(state_dict["initial_result"])
        device = state_dict["suspicious_device"]
        self.suspicious_device = None if device is None else tuple(device)
        self.num_on_same_device = state_dict["num_on_same_device"]
        self.injector.load_state_dict(state_dict["error_injector"])


def rank() -> int:
    """This process's, 0 without process groups."""
    return dist.get_rank() if dist.is_initialized() else 0


def name_of_device() -> tuple[str, str]:
    """This rank's (node, device), which tell a suspected device from another."""
    device = get_device()
    number = f"cuda:{torch.cuda.current_device()}" if device.type == "cuda" else device.type
    return socket.gethostname(), number


def kept(result: Any) -> Any:
    """A copy: a later microbatch may be written over it."""
    return result.detach().clone() if isinstance(result, torch.Tensor) else result


def shown(result: Any) -> Any:
    """A tensor's numbers, or what else it is."""
    return result.tolist() if isinstance(result, torch.Tensor) else result


class MachineState(LargeValues):
    """The part of `RerunStateMachine` that checkpoints have."""

    mode: RerunMode
    state: RerunState
    judge: ResultJudge

    def state_dict(self) -> dict[str, Any] | None:
        """What this rank must know to run the step from a checkpoint; plain numbers and text.

        None where no step is to be run again. Megatron's also takes iterators, whose microbatches it
        does not use; here a resumed run reads them where the checkpoint says.
        """
        if EXITS.get(self.state, (False, False, 0))[2] != EXIT_CODE_RESUME_TO_DISAMBIGUATE:
            return None
        return {"mode": self.mode.value, "samples": self.samples(), **self.judge.state_dict()}

    def validate_state_dict(self, state_dict: dict[str, Any] | None) -> bool:
        """Whether a step is to be run again, by what a checkpoint says."""
        return state_dict is not None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next step is the third run of one whose result was rejected. Not in mode `disabled`."""
        if self.mode is RerunMode.DISABLED:
            return
        self.mode = RerunMode(state_dict["mode"])
        self.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
        self.take_samples(state_dict["samples"])
        self.judge.load_state_dict(state_dict)

    @staticmethod
    def get_skipped_iterations_from_tracker_file(tracker_file_name: str) -> list[int]:
        """Iterations that failed twice on one rank; see `core.rerun.states`."""
        return read_iterations_to_skip(tracker_file_name)
