"""What `_reduce` and `_gather` send: counted in the room, and judged.

Megatron has no counterpart.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from minimegatron.backend import SharedMemoryWork
from minimegatron.core.tracing import Call, observed_by
from minimegatron.exercises.bench.sent_bytes import BY_TORCH, all_sent_counted
from minimegatron.exercises.check import Wrong, installed

WANTED = {"_reduce": "reduce-scatter", "_gather": "all-gather"}
HALVES = "An all-reduce is a reduce-scatter and an all-gather, one after the other. "
SLACK = 1.05
"""A barrier's byte, or a flag beside the data, is not meant."""


def counting(function: Callable, name: str, sent: list[dict]) -> Callable:
    """`function`; what a call of it sends is added to `sent`, as plain data."""

    def counted(group: Any, bucket: Any, *others: Any) -> Any:
        data = bucket.grad_data if name == "_reduce" else bucket.param_data
        with all_sent_counted() as counter, _waits_noted() as waits:
            handle = function(group, bucket, *others)
        calls = [[call.name, call.num_bytes] for call in counter.calls]
        seen = {"words": counter.words(), "waited": bool(waits)}
        sent.append({"by": name, "bucket": data.nbytes, "calls": calls} | seen)
        return handle

    return counted


class _Waits:
    """An observer; notes who waits for one of the package's handles."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def start(self, call: Call) -> None:
        if call.name == "collective-wait":
            self.found.append(call.name)

    def stop(self, call: Call) -> None:
        """A wait is noted when it begins."""


@contextmanager
def _waits_noted() -> Iterator[list[str]]:
    """Notes each wait for a collective inside the block, by whichever way."""
    observer = _Waits()

    def noted(wait: Callable) -> Callable:
        def noted_wait(work: Any, *arguments: Any, **options: Any) -> Any:
            observer.found.append("torch")
            return wait(work, *arguments, **options)

        return noted_wait

    with ExitStack() as stack:
        stack.enter_context(observed_by(observer))
        for handle in (dist.Work, SharedMemoryWork):  # of gloo and NCCL; over shared memory
            path = f"{handle.__module__}.{handle.__name__}.wait"
            stack.enter_context(installed(noted(handle.wait), path))
        yield observer.found


def check_sent(who: str, d: int, sent: Sequence[dict[str, Any]]) -> None:
    """Raises Wrong where more crosses than the step needs, or not while others compute."""
    for one in sent:
        _check_started(who, d, one)
        wanted = WANTED[one["by"]]
        times = _num_crossing(one["calls"], d) / one["bucket"]
        if times <= SLACK:
            continue
        has_both = any("all-reduce" in name for name, _ in one["calls"])
        raise Wrong(
            f"rank {who}: right, but {one['by']} sent {one['words']}, for a bucket of "
            f"{one['bucket']} bytes\n{HALVES if has_both else ''}This way {_times(times)} the bytes of "
            f"{'an' if wanted[0] == 'a' else 'a'} {wanted} cross."
        )


def _check_started(who: str, d: int, one: dict[str, Any]) -> None:
    if one["waited"]:
        raise Wrong(
            f"rank {who}: right, but {one['by']} comes back only when its exchange is over\n"
            "Whoever calls it goes on computing while the bucket travels, and waits later, with the "
            f"handle. What in {one['by']} waits already?"
        )
    if d > 1 and not one["calls"]:
        raise Wrong(
            f"rank {who}: right, but {one['by']} starts nothing: what it returned sends the bucket "
            "when it is waited for\nUntil then the others compute. When must the bucket set out, so "
            "that the wait finds it there?"
        )


def _num_crossing(calls: Sequence[Sequence[Any]], d: int) -> int:
    """Bytes that cross, in bytes of the whole vector of which each rank has 1/d."""
    total = 0
    for name, num_bytes in calls:
        kind = name.removeprefix(BY_TORCH)
        # What is counted is each call's input: of an all-gather that is one rank's part.
        factor = {"all-reduce": 2, "all-gather": d}.get(kind, 1)
        total += 0 if kind.startswith("recv") else factor * num_bytes
    return total


def _times(number: float) -> str:
    return "twice" if abs(number - 2) < 0.05 else f"{number:.3g} times"


def sent_words(sent: Sequence[dict[str, Any]]) -> str:
    """What one rank has sent: "62464 bytes given to 3 reduce-scatters, ..."."""
    totals: dict[str, list[int]] = {}
    for name, num_bytes in (call for one in sent for call in one["calls"]):
        total = totals.setdefault(name, [0, 0])
        total[0], total[1] = total[0] + 1, total[1] + num_bytes
    parts = [
        f"{num_bytes} bytes given to {number} {name}{'s' * (number > 1)}"
        for name, (number, num_bytes) in totals.items()
    ]
    return ", ".join(parts) or "nothing"
