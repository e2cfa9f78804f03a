"""Combined 1F1B on one stage, as a loop: each forward beside a backward.

Torch-free. Counterpart: `megatron.core.pipeline_parallel.combined_1f1b`.
"""

from collections.abc import Callable


def one_stage_in_pairs(step: Callable[[int | None, bool], None], num_microbatches: int) -> None:
    """Combined 1F1B without a pipeline: each forward beside the backward of the microbatch before.

    `step` does a forward, if it gets a microbatch, and a backward, if its second argument says so.
    """
    step(0, False)
    for i in range(1, num_microbatches):
        step(i, True)
    step(None, True)
