"""What a machine that runs steps again keeps for a resumed run.

Megatron has this in `RerunStateMachine` of `megatron.core.rerun_state_machine`.
"""

from typing import Any

from minimegatron.core.rerun.large_values import LargeValues
from minimegatron.core.rerun.states import (
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    EXITS,
    RerunMode,
    RerunState,
)
from minimegatron.core.rerun.tracker import read_iterations_to_skip
from minimegatron.core.rerun.verdicts import ResultJudge


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
        """Iterations that failed twice on one rank; see `core.rerun.tracker`."""
        return read_iterations_to_skip(tracker_file_name)
