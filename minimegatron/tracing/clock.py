"""One clock for all ranks: how far each rank's clock is from rank 0's, and how surely that is known.

Megatron has no counterpart; its timers compare lengths of time only.

The method needs nothing but barriers. No rank leaves a barrier before every rank has entered it, so
rank r's entry comes before rank 0's exit, and rank 0's entry before rank r's exit. With d the
offset of rank r's clock from rank 0's, each round gives

    entered_r - left_0  <=  d  <=  left_r - entered_0

Every round narrows the interval. Its middle is the estimate, half its width the residual: not a
guess of the error but a bound on it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from minimegatron.core.utils import barrier, get_device

NUM_ROUNDS = 10


@dataclass(frozen=True)
class Alignment:
    """What to subtract from one rank's clock to get rank 0's. Nanoseconds.

    The true offset is within `residual` of the middle of what the barriers allow; `offset` is that
    middle, or 0 where both ranks read the very same clock (`is_shared`).
    """

    at: int = 0
    """When it was measured, on the rank's own clock."""
    at_rank_0: int = 0
    """The same, on rank 0's."""
    offset: int = 0
    residual: int = 0
    worst_residual: int = 0
    """The largest residual of any rank."""
    is_shared: bool = True


def align_clocks(
    read_clock: Callable[[], int] = time.perf_counter_ns,
    num_rounds: int = NUM_ROUNDS,
    clock_id: str | None = None,
) -> Alignment:
    """Compares this rank's clock with rank 0's. Every rank of the job must call it.

    `clock_id` names the clock that `read_clock` reads, so that ranks which share one can say so;
    None for the machine's own. Without `torch.distributed` there is one rank and nothing to do.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        now = read_clock()
        return Alignment(at=now, at_rank_0=now)
    passes = []
    barrier()  # the first one waits for the slowest rank, and would tell nothing
    for _ in range(num_rounds):
        entered = read_clock()
        barrier()
        if get_device().type == "cuda":
            torch.cuda.synchronize()
        passes.append((entered, read_clock()))
    gathered: list = [None] * dist.get_world_size()
    mine = (machine_clock_id() if clock_id is None else clock_id, passes)
    dist.all_gather_object(gathered, mine)
    clock_ids, all_passes = zip(*gathered, strict=True)
    bounds = [offset_bounds(all_passes[0], passes_of_r) for passes_of_r in all_passes]
    residuals = [0, *(max(0, (high - low + 1) // 2) for low, high in bounds[1:])]
    rank = dist.get_rank()
    low, high = bounds[rank]
    is_shared = rank == 0 or (clock_ids[0] == clock_ids[rank] != "" and low <= 0 <= high)
    return Alignment(
        at=passes[-1][1],
        at_rank_0=all_passes[0][-1][1],
        offset=0 if is_shared else (low + high) // 2,
        residual=residuals[rank],
        worst_residual=max(residuals),
        is_shared=is_shared,
    )


def offset_bounds(
    passes_of_0: Sequence[tuple[int, int]], passes_of_r: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """The smallest and largest offset of rank r's clock that all barriers allow.

    A pass is when a rank entered a barrier and when it left, on its own clock.

    >>> offset_bounds([(0, 10), (20, 24)], [(1003, 1010), (1021, 1025)])
    (997, 1005)
    """
    lows = [mine[0] - zero[1] for zero, mine in zip(passes_of_0, passes_of_r, strict=True)]
    highs = [mine[1] - zero[0] for zero, mine in zip(passes_of_0, passes_of_r, strict=True)]
    return max(lows), min(highs)


def machine_clock_id() -> str:
    """A name for this machine's clock: one per boot. Empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def to_rank_0(when: int, begin: Alignment, end: Alignment | None) -> int:
    """A time on a rank's clock as rank 0's clock shows it.

    With a second alignment at the end of the recording, the offset is interpolated: clocks drift.

    >>> to_rank_0(1500, Alignment(1000, offset=100), Alignment(2000, offset=200))
    1350
    """
    if end is None or end.at <= begin.at:
        return when - begin.offset
    drift = (end.offset - begin.offset) * (when - begin.at) // (end.at - begin.at)
    return when - begin.offset - drift
