"""A signal that asks the run to end is kept until the ranks can end together.

Counterpart: `megatron.training.dist_signal_handler`.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGUSR1)
"""What a scheduler sends before it kills: SIGTERM, or with `sbatch --signal=USR1@300` SIGUSR1. torchrun
passes SIGTERM on to the ranks, and SIGUSR1 only with `--signals-to-handle`."""

_received: int = 0


def _remember(number: int, frame: FrameType | None) -> None:
    global _received
    _received = number


@contextlib.contextmanager
def signals_remembered() -> Iterator[None]:
    """Within it, SIGTERM and SIGUSR1 end nothing; `signal_received` tells of them.

    Where this is not the main thread (a notebook's), signals cannot be caught, and it does nothing.
    """
    global _received
    _received = 0
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _remember) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_received() -> int:
    """The number of the signal that this rank has received; 0 for none."""
    return _received
