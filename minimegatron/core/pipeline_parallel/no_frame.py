"""What is around a chunk's work where nothing is.

Torch-free. Megatron has no counterpart.
"""

from typing import Any


class NoFrame:
    """The three calls of a frame, which do nothing; see `step_frame.StepFrame`."""

    def before_forward(self, chunk: Any, microbatch_id: int) -> int:
        """Returns the forward's number among all of the stage's."""
        return microbatch_id

    def before_backward(self, chunk: Any) -> None:
        """Called with the microbatch still in flight."""

    def after_backward(self, chunk: Any) -> None:
        """Called with the input's gradient not yet sent."""
