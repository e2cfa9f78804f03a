"""A file of rejected results, which outlives the run; and the iterations that it says to skip.

Torch-free. Counterpart: what `megatron.core.rerun_state_machine` does with
`result_rejected_tracker_filename`; a line is read there as it is here.
"""

import datetime
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minimegatron.core.rerun.states import RerunValidationStatus

logger = logging.getLogger(__name__)

LINE = re.compile(
    r"ts=.+ node=.+ device=.+ jobID=(?P<job>.+) rank=(?P<rank>\d+) iteration=(?P<iteration>\d+) "
    r"status=(?P<status>\S+) result=.+ message=.+"
)
COUNTED = {
    RerunValidationStatus.RERUN_DISABLED,
    RerunValidationStatus.FIRST_RERUN_REPRODUCIBLE,
    RerunValidationStatus.SECOND_RERUN_REPRODUCIBLE,
}
"""Only what comes again by itself may be skipped: a fault that passes is no reason."""


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
