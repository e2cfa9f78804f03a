"""A step whose first run comes out wrong on rank 0, so that all ranks run it again, for `gpt_step`.

Megatron has no counterpart.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from minimegatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from minimegatron.exercises.bench.family_steps import Batch

USUAL, ERROR = 100.0, 1000.0
"""A loss is smaller than the one, and comes out as so many times too large."""


def run_until_accepted(
    run: Callable[[list[Iterator[Batch]]], Any], data: list[Batch], num_chunks: int
) -> Any:
    """As the loop of `train_step`: what the last `run` of the step returned, given its iterators."""
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    machine, reports = get_rerun_state_machine(), None
    machine.first_iteration_complete = True  # else nothing would be judged
    iterators = [RerunDataIterator(data) for _ in range(num_chunks)]
    machine.begin_step()
    while machine.should_run_forward_backward(iterators):
        reports = run(iterators)
    destroy_rerun_state_machine()
    return reports


def judged(forward_step: Callable, rank: int) -> Callable:
    """`forward_step`, whose losses are judged, and in the first run on rank 0 too large."""

    def step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple:
        output, loss_func = forward_step(data_iterator, model)

        def judge(output: torch.Tensor) -> tuple:
            machine = get_rerun_state_machine()
            loss, *others, report = loss_func(output)
            if rank == 0 and machine.num_runs == 1:
                loss, report = loss * ERROR, {"loss": report["loss"] * ERROR}
            machine.validate_result(
                report["loss"], lambda value: value > USUAL, "loss", fatal=False
            )
            return loss, *others, report

        return output, judge

    return step
