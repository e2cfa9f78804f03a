"""Records a student's own run, to be replayed afterwards.

Called by: an exercise's check, around the step it runs. Calls: `tracing.recorder`. Megatron has no
counterpart.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from minimegatron.tracing.recorder import trace
from minimegatron.tracing.trace_view import Trace

_folder: list[Path] = []


def set_folder(folder: str | Path | None) -> None:
    """Where this rank's recordings go from now on; None if they are not kept."""
    _folder[:] = [] if folder is None else [Path(folder)]


@contextlib.contextmanager
def recorded() -> Iterator[Trace]:
    """Records what runs inside, on every rank: enter it on all or none.

    The `Trace` has all ranks' recordings once the block has ended (`t.step(0)`). The engine makes
    the replay page from the last recording of a check that passes.
    """
    with trace(_folder[0] if _folder else None, gather=True) as run:
        yield run
