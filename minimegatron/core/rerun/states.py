"""Modes, states and verdicts of a step that is run again, and the exit codes that report them.

Torch-free. Counterpart: the enumerations of `megatron.core.rerun_state_machine`.

    result rejected in the first run
      |  the step runs again, in place
      +-- another result ------ transient error       not fatal: go on    fatal: exit 17
      +-- the same result       not fatal: go on      fatal: checkpoint, exit 16
            |  resumed: the step runs a third time
            +-- on the same device -------------------------------------- exit 16 again
            +-- elsewhere, another result -- persistent error ----------- exit 17
            +-- elsewhere, the same result - correct result ------------- exit 17
"""

from enum import Enum, StrEnum
from typing import NamedTuple

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
