"""Where a part of the check runs, and what a part answers.

Read by: `run_part` and the modules of parts. A part is a function of a `Place` that yields `Finding`s.
It does the same on a GPU and on the CPU, where the tests call it: nothing but the GPU is new there.
"""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

LAUNCH_SECONDS = 60.0
"""For one launch of ranks, unless it says otherwise: of several that hang, each is told."""


@dataclass(frozen=True)
class Place:
    """What the parts may use."""

    device: str
    """"cuda", or "cpu" for a stand-in."""
    num_gpus: int = 0
    is_quick: bool = False
    """Small sizes and few repetitions: the code is tried, its figures say nothing."""
    ends_at: float = float("inf")
    """By `time.monotonic`: ranks that are not done by then are stopped, and say where they stand."""

    @property
    def is_gpu(self) -> bool:
        """Whether figures are of a GPU, and worth judging."""
        return self.device == "cuda"

    def ranks(self, number: int) -> int:
        """How many ranks a part for `number` GPUs starts: two for all of them in a stand-in."""
        return min(number, 2) if self.is_quick else number

    def on_the_cpu(self) -> "Place":
        """The same time, for what is compared with."""
        return Place("cpu", ends_at=self.ends_at)

    def launch(
        self,
        fn: Any,
        num_ranks: int,
        *args: Any,
        shared: bool = False,
        with_gloo: bool = False,
        seconds: float = LAUNCH_SECONDS,
    ) -> list[Any]:
        """`fn` on ranks with a GPU each over NCCL; with `shared`, on one GPU over shared memory.

        With `with_gloo`, tensors on the GPU go over NCCL and those on the CPU over gloo.
        """
        # Only here: what a part that fails early has to say needs no torch.
        from minimegatron.launching.launcher import launch

        backend = "gloo" if shared or not self.is_gpu else "nccl"
        if with_gloo and self.is_gpu:
            backend = "cpu:gloo,cuda:nccl"
        timeout = min(seconds, max(1.0, self.ends_at - time.monotonic()))
        options = {"backend": backend, "device": self.device, "timeout": timeout}
        return launch(fn, num_ranks, *args, **options)


@dataclass(frozen=True)
class Finding:
    """One figure beside what was expected."""

    what: str
    found: str
    expected: str = ""
    holds: bool = True


def error_of(error: Exception) -> Finding:
    """What was raised; its stack goes to the log."""
    traceback.print_exception(error)
    first = (str(error).strip() or "no words").splitlines()[0]
    return Finding("error", f"{type(error).__name__}: {first}", "none", False)


def each(*sections: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What every section finds, whatever becomes of those before it."""
    for section in sections:
        try:
            yield from section()
        except Exception as error:
            yield error_of(error)


def at_most(what: str, found: float, bound: float) -> Finding:
    """
    >>> at_most("difference of the loss", 2e-6, 1e-5)
    Finding(what='difference of the loss', found='2e-06', expected='at most 1e-05', holds=True)
    """
    return Finding(what, f"{found:.3g}", f"at most {bound:.3g}", found <= bound)


def at_least(what: str, found: float, bound: float, is_judged: bool = True) -> Finding:
    """A share or a ratio. Where it is not judged, it is shown: a stand-in has no GPU to be fast on."""
    expected = f"at least {bound:.3g}" if is_judged else "not judged here"
    return Finding(what, f"{found:.3g}", expected, found >= bound or not is_judged)


def is_equal(what: str, found: Any, expected: Any) -> Finding:
    """
    >>> is_equal("backend", "gloo", "nccl").holds
    False
    """
    return Finding(what, str(found), str(expected), found == expected)


def no_problems(what: str, number: int, problems: Iterable[str]) -> Finding:
    """`number` comparisons were made, and these failed."""
    listed = list(problems)
    found = "; ".join(listed[:5]) if listed else f"{number} comparisons, none off"
    return Finding(what, found, "none off", not listed and number > 0)
