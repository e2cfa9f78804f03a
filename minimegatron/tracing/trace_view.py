"""What `trace()` yields: a run, and every way of looking at it as a method.

Torch-free. Megatron has no counterpart.
"""

import os
from typing import Any

from minimegatron.tracing.call_tree import call_tree
from minimegatron.tracing.chrome import write_chrome
from minimegatron.tracing.compare import Divergence, compare_with_plan
from minimegatron.tracing.html import write_html
from minimegatron.tracing.plot import plot_step
from minimegatron.tracing.render_lanes import render_lanes
from minimegatron.tracing.run import Run
from minimegatron.tracing.step_report import step_report
from minimegatron.tracing.unrolled import unroll
from minimegatron.tracing.unrolled_page import write_unrolled_html
from minimegatron.tracing.unrolled_text import heading, unrolled_text


class Trace(Run):
    """The recordings of all ranks; empty until the `with` block of `trace()` has ended.

    Where several pipelines were recorded, `tp=`, `dp=` and `cp=` choose one; the first otherwise.
    """

    def report(self, step: int = 0, **pipeline: int) -> str:
        """The figures of one step: bubble beside formula, plan beside run, blame for each gap."""
        return "\n".join(step_report(self.step(step, **pipeline), self.clock_words))

    def lanes(self, step: int = 0, width: int = 100, **pipeline: int) -> str:
        """One step as text: a line per compute stream and per communicator, `width` columns at most."""
        return "\n".join(render_lanes(self.step(step, **pipeline), width))

    def compare_with_plan(self, step: int = 0, **pipeline: int) -> list[Divergence]:
        """Where each stage first departs from the plan; empty if none did."""
        return compare_with_plan(self.step(step, **pipeline))

    def tree(self, rank: int = 0, step: int | None = None, **filters: Any) -> str:
        """The calls of one global rank as a tree; `filters` as those of `call_tree`.

        With a `step`, only that schedule run and the training step around it; where the whole
        pipeline was recorded, waiting and transfer are told apart.
        """
        recording = self.rank(rank)
        events = dict(enumerate(recording.events))
        if step is not None:
            pipeline = {axis: recording.coordinates[axis] for axis in ("tp", "dp", "cp")}
            number = self.step_number(step)
            root = recording.steps[number][0]
            parent = recording.events[root].parent
            events = recording.below(root if parent is None else parent)
            if self.is_whole(**pipeline):
                events |= self.step(number, **pipeline).events[recording.coordinates["pp"]]
        return "\n".join(call_tree(recording, dict(sorted(events.items())), **filters))

    def unrolled(
        self, rank: int = 0, microbatch: int | None = None, depth: int | None = None
    ) -> str:
        """The lines that one step ran on a global rank, call for call: see `unrolled_text`.

        Raises ValueError if no lines of that rank were recorded.
        """
        found = unroll(self)
        if rank not in found:
            there = ", ".join(map(str, found))
            raise ValueError(f"there are no recorded lines of rank {rank}; there are: {there}")
        lines = unrolled_text(found[rank], microbatch, depth)
        return "\n".join([heading(found[rank]), "", *lines])

    def to_unrolled_html(self, path: str | os.PathLike, rank: int = 0) -> None:
        """Writes one page with these lines, of all ranks; it opens with `rank` and needs no network."""
        write_unrolled_html(self, path, rank)

    def plot(self, path: str | os.PathLike | None = None, step: int = 0, **options: Any) -> Any:
        """One step as a matplotlib figure, saved to `path` if given.

        `options` are those of `plot.plot_step` (`plan=True`, `theme="dark"`, ...), and a pipeline's
        coordinates.
        """
        pipeline = {axis: options.pop(axis) for axis in ("tp", "dp", "cp") if axis in options}
        return plot_step(self.step(step, **pipeline), path, **options)

    def to_chrome(self, path: str | os.PathLike) -> None:
        """Writes a file for Perfetto (ui.perfetto.dev) and chrome://tracing."""
        write_chrome(self, path)

    def to_html(self, path: str | os.PathLike, **options: Any) -> None:
        """Writes one page with an interactive timeline; it needs no network."""
        write_html(self, path, **options)
