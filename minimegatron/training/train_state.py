"""What changes while a run goes on, and what a checkpoint must bring back.

In Megatron these are mutable fields of `args`; here arguments are frozen, and progress has a place
of its own.
"""

from dataclasses import dataclass


@dataclass
class TrainState:
    """Progress of the run. Counts are over all model copies."""

    iteration: int = 0
    """Steps done, skipped ones included."""
    consumed_train_samples: int = 0
    """Sequences trained on; the position in the training data."""
    consumed_valid_samples: int = 0
    """Sequences evaluated; the position in the validation data."""
    skipped_train_samples: int = 0
    """Of the consumed ones, those whose step was skipped (overflow in fp16)."""
    saved_iteration: int | None = None
    """The one whose checkpoint in `--save` is known to be complete."""
    exit_reason: str | None = None
    """Why training ended before its last step, if it did."""
    exit_code: int = 0
    """With which the process then ends."""
    rerun_folder: str | None = None
    """The checkpoint whose next step is examined, if one is; see `reruns`."""
    iterations_to_skip: frozenset[int] = frozenset()
    """Counted from 1, as log lines count."""
    do_train: bool = False
    do_valid: bool = False
    do_test: bool = False
    """Whether there is data, and a reason, for each."""
