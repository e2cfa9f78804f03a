"""What is known of a step that is run again: modes, states, verdicts, exit codes; rejected results.

Counterpart: the enumerations of `megatron.core.rerun_state_machine`, its `is_unexpectedly_large`, and
what it does with `result_rejected_tracker_filename`.

    result rejected in the first run
      |  the step runs again, in place
      +-- another result ------ transient error       not fatal: go on    fatal: exit 17
      +-- the same result       not fatal: go on      fatal: checkpoint, exit 16
            |  resumed: the step runs a third time
            +-- on the same device -------------------------------------- exit 16 again
            +-- elsewhere, another result -- persistent error ----------- exit 17
            +-- elsewhere, the same result - correct result ------------- exit 17
"""

import datetime
import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

EXIT_CODE_RESUME_TO_DISAMBIGUATE = 16
"""The run ended after a checkpoint: resume it on another device, and the verdict will be known."""
EXIT_CODE_FAILED_ON_RESULT_VALIDATION = 17
"""The run ended because a result was rejected, and more runs would not tell more."""

MAX_RUNS_ON_SAME_DEVICE = 3
"""After so many resumed runs on the suspected device the machine gives up: exit 17. Megatron asks for
another one for ever."""


class RerunMode(StrEnum):
    """What is done with each result that `validate_result` is given."""

    DISABLED = "disabled"
    """It is judged. A bad one that is fatal raises at once."""
    VALIDATE_RESULTS = "validate_results"
    """It is judged. A bad one has the step run again."""
    REPORT_DETERMINISM_STATS = "report_determinism_stats"
    """It is not judged. Each step runs twice, and differences are printed."""


class RerunState(Enum):
    """Where a step stands in its runs."""

    NOT_RUNNING_YET = 0
    """Before a step, and after one whose results were accepted."""
    INITIAL_RUN = 1
    RERUNNING_IN_PLACE = 2
    """Some rank's result was rejected, and every rank runs the step a second time."""
    WILL_RERUN_FROM_CHECKPOINT = 3
    """The second run gave the same; the run ends, and a resumed one begins here."""
    RERUNNING_FROM_CHECKPOINT = 4
    RERUNNING_AGAIN_FROM_CHECKPOINT = 5
    """The resumed run was on the suspected device again."""


class RerunDiagnostic(StrEnum):
    """What a rejected result turned out to be."""

    CORRECT_RESULT = "correct_result"
    """Another device computes the same: look at data, learning rate or program."""
    TRANSIENT_ERROR = "transient_error"
    """The same device computes something else the second time."""
    PERSISTENT_ERROR = "persistent_error"
    """The same device computes the same, another one does not."""


class RerunValidationStatus(StrEnum):
    """What a line of the tracker file tells."""

    RERUN_DISABLED = "rerun_disabled"
    INITIAL_RUN = "initial_run"
    FIRST_RERUN_NOT_REPRODUCIBLE = "first_rerun_not_reproducible"
    FIRST_RERUN_REPRODUCIBLE = "first_rerun_reproducible"
    SECOND_RERUN_NOT_REPRODUCIBLE = "second_rerun_not_reproducible"
    SECOND_RERUN_REPRODUCIBLE = "second_rerun_reproducible"


class JudgedCall(NamedTuple):
    """One call of `validate_result`: on this rank the `sequence`-th with this message, in a run of a
    step, from 1 on."""

    message: str
    rank: int
    sequence: int


EXITS = {
    RerunState.RERUNNING_IN_PLACE: (False, True, EXIT_CODE_FAILED_ON_RESULT_VALIDATION),
    RerunState.WILL_RERUN_FROM_CHECKPOINT: (True, True, EXIT_CODE_RESUME_TO_DISAMBIGUATE),
    RerunState.RERUNNING_FROM_CHECKPOINT: (False, True, EXIT_CODE_FAILED_ON_RESULT_VALIDATION),
    RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT: (False, True, EXIT_CODE_RESUME_TO_DISAMBIGUATE),
}
"""State after the last run of a step -> (save a checkpoint, end the run, exit code); else go on."""


@dataclass
class _Sample:
    largest: float = 0.0
    count: int = 0


# -- Whether a number is much larger than those seen before it --


class LargeValues:
    """What was learned of each kind of number."""

    def __init__(self) -> None:
        self._samples: dict[str, _Sample] = {}

    def is_unexpectedly_large(
        self,
        result: Any,
        threshold: float,
        context: str,
        num_samples: int = 100,
        resample: bool = False,
    ) -> bool:
        """True if `result` is at least `threshold` times the largest of the first `num_samples`.

        All are compared without their sign. While those are being seen it is False, and for a result
        that is NaN or Inf, which is none of them. `context` names what is compared with what;
        `resample` begins anew.
        """
        value = abs(float(result.detach() if isinstance(result, torch.Tensor) else result))
        if not math.isfinite(value):
            return False
        if resample or context not in self._samples:
            self._samples[context] = _Sample()
        sample = self._samples[context]
        if sample.count < num_samples:
            sample.count += 1
            sample.largest = max(sample.largest, value)
            return False
        return value >= threshold * sample.largest

    def largest(self, context: str) -> float:
        """The largest of the samples seen under this name, without its sign."""
        return self._samples[context].largest

    def samples(self) -> dict[str, list[float]]:
        """Name -> [largest, how many were seen], for a checkpoint."""
        return {name: [sample.largest, sample.count] for name, sample in self._samples.items()}

    def take_samples(self, samples: dict[str, list[float]]) -> None:
        """Goes on from what `samples` returned."""
        self._samples = {name: _Sample(*pair) for name, pair in samples.items()}


# -- A file of rejected results, which outlives the run; and the iterations that it says to skip --


LINE = re.compile(
    r"ts=.+ node=.+ device=.+ jobID=(?P<job>.+) rank=(?P<rank>\d+) iteration=(?P<iteration>\d+) "
    r"status=(?P<status>\S+) result=.+ message=.+"
)
COUNTED = {
    RerunValidationStatus.RERUN_DISABLED,
    RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE,
    RerunValidationStatus.SECOND_RERUN_REPRODUCIBLE,
}
"""Only a result that comes again may be skipped; a fault that passes is no reason to."""


class ResultTracker:
    """Appends a line for each rejected result; without a file name, does nothing.

    Raises ValueError where nothing can be appended to the file.
    """

    def __init__(self, filename: str | os.PathLike | None, job_id: str = "N/A"):
        self.filename, self.job_id = filename, job_id
        if filename is not None:
            try:
                with open(filename, "a"):
                    pass
            except OSError as error:
                raise ValueError(
                    f"--result-rejected-tracker-filename {filename}: {error.strerror}; give a file "
                    "that this run may append to, in a folder that exists"
                ) from None

    def note(
        self,
        status: RerunValidationStatus,
        rank: int,
        device: tuple[str, str],
        iteration: int | None,
        result: Any,
        message: str,
    ) -> None:
        """One line. `device` is (node, device of it). A full disk does not end the run."""
        if self.filename is None:
            return
        node, number = device
        message = " ".join(message.split())
        line = (
            f"ts={datetime.datetime.now()} node={node} device={number} jobID={self.job_id} "
            f"rank={rank} iteration={iteration} status={status.value} result={result} "
            f"message='{message}'\n"
        )
        try:
            # In one write: ranks append to one file.
            with open(self.filename, "a") as file:
                file.write(line)
        except OSError as error:
            logger.error("rank %d: cannot append to %s: %s", rank, self.filename, error.strerror)


def iterations_to_skip(lines: Iterable[str]) -> list[int]:
    """Iterations, counted from 1, that failed twice on one rank; but none that failed on several ranks
    of one job, where the fault is not that of one rank's data.

    >>> line = "ts=1 node=n device=0 jobID=7 rank={} iteration={} status={} result=nan message='m'"
    >>> twice = [line.format(0, 5, "rerun_disabled")] * 2
    >>> iterations_to_skip(twice), iterations_to_skip(twice[:1])
    ([5], [])
    >>> iterations_to_skip([*twice, line.format(1, 5, "rerun_disabled")])
    []
    """
    found = [match for match in map(LINE.search, lines) if match is not None]
    counted = [
        (match["job"], int(match["rank"]), int(match["iteration"]))
        for match in found
        if match["status"].rpartition(".")[2].lower() in COUNTED
    ]
    times: dict[tuple[int, int], int] = defaultdict(int)
    ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
    for job, rank, iteration in counted:
        times[rank, iteration] += 1
        ranks[job, iteration].add(rank)
    on_several = {iteration for (_, iteration), failed in ranks.items() if len(failed) > 1}
    return sorted({iteration for (_, iteration), n in times.items() if n > 1} - on_several)


def read_iterations_to_skip(filename: str | os.PathLike) -> list[int]:
    """`iterations_to_skip` of a file; none where there is no such file yet."""
    path = Path(filename)
    return (
        iterations_to_skip(path.read_text(errors="replace").splitlines()) if path.is_file() else []
    )
