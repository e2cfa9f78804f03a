"""Times several steps in the same ranks, taking turns.

Called by: `measure`, `demo_speed`, `bucket_overlap`, on every rank at once. Each repetition runs every
step once, starting with another one each time, so that what else the machine does meets all alike.
All ranks start a step at an agreed instant, and it ends when its last rank is done.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

_HEAD_START_SECONDS = 0.005


@dataclass(frozen=True)
class Times:
    """One step, repeated: seconds to its last rank's end, and processor seconds of all ranks."""

    wall: list[float]
    processor: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.wall)

    @property
    def processor_median(self) -> float:
        return statistics.median(self.processor)


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """(wall, processor) seconds from the agreed start to this rank's end."""
    start = torch.tensor([time.perf_counter() + _HEAD_START_SECONDS], dtype=torch.float64)
    dist.broadcast(start, 0)
    dist.barrier()
    time.sleep(max(0.0, start.item() - time.perf_counter()))
    processor = time.process_time()
    step()
    wall, processor = time.perf_counter() - start.item(), time.process_time() - processor
    time.sleep(_HEAD_START_SECONDS)  # or our own work would take a core from ranks that go on
    return wall, processor


def take_turns(
    steps: Mapping[str, Callable[[], object]],
    repetitions: int,
    before: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """The same on every rank. `before` runs before each step, outside of its time."""
    gc.collect()
    gc.freeze()
    order = list(steps)
    mine: dict[str, list[tuple[float, float]]] = {name: [] for name in order}
    for repetition in range(repetitions):
        turn = repetition % len(order)
        for name in order[turn:] + order[:turn]:
            before()
            mine[name].append(timed(steps[name]))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = {}
    for name in order:
        by_repetition = list(zip(*(rank[name] for rank in everyone), strict=True))
        found[name] = Times(
            [max(wall for wall, _ in ranks) for ranks in by_repetition],
            [sum(processor for _, processor in ranks) for ranks in by_repetition],
        )
    return found
