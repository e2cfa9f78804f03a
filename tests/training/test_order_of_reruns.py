"""What a training step does around its runs, and what it puts back: one process, one chunk."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.rerun_state_machine import (
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from minimegatron.training import training
from minimegatron.training.reruns import keep_state_for_reruns


class Chunk(torch.nn.Module):
    """A gradient, and a count of the tokens that it has seen."""

    def __init__(self, calls: list[str]):
        super().__init__()
        self.calls, self.gradient = calls, 0.0
        self.register_buffer("num_tokens", torch.zeros(()))

    def zero_grad_buffer(self) -> None:
        self.calls.append("zero")
        self.gradient = 0.0


class Step:
    """`training.train_step` with that chunk; the loss of its n-th run is `losses[n]`."""

    def __init__(self, *losses: float, fatal: bool):
        self.calls: list[str] = []
        self.chunk, self.losses, self.fatal = Chunk(self.calls), iter(losses), fatal

    def schedule(self, **given: object) -> list:
        self.calls.append("schedule")
        loss = torch.tensor(next(self.losses))
        self.chunk.gradient += float(loss)
        self.chunk.num_tokens += 1
        get_rerun_state_machine().validate_result(
            loss, lambda value: value > 10, "large", fatal=self.fatal
        )
        return []

    def update(self) -> tuple:
        self.calls.append(f"update by {self.chunk.gradient}")
        return True, self.chunk.gradient, None

    def run(self) -> tuple:
        args = SimpleNamespace(log_num_zeros_in_grad=False)
        args.seq_length = args.micro_batch_size = args.decoder_seq_length = 1
        nothing = SimpleNamespace(zero_grad=lambda: None, step=lambda **_: None)
        optimizer = SimpleNamespace(zero_grad=lambda: None, step=self.update)
        stand_ins = {
            "get_args": lambda: args,
            "get_train_state": lambda: SimpleNamespace(iteration=1),
            "get_num_microbatches": lambda: 1,
            "get_current_global_batch_size": lambda: 1,
            "logical_and_across_model_parallel_group": bool,
            "reduce_max_stat_across_model_parallel_group": float,
            "sum_over_microbatches": dict,
        }
        config = ModelParallelConfig()
        keep_state_for_reruns(config, [self.chunk])
        with mock.patch.multiple(training, **stand_ins):
            return training.train_step(
                print, None, [self.chunk], optimizer, nothing, config, self.schedule
            )


@pytest.fixture(autouse=True)
def machine():
    initialize_rerun_state_machine(mode="validate_results")
    get_rerun_state_machine().first_iteration_complete = True
    yield
    destroy_rerun_state_machine()


def test_a_step_begins_again_from_zero():
    step = Step(99.0, 2.0, fatal=False)
    assert step.run()[2:5] == (False, False, 0)
    assert step.calls == ["zero", "schedule", "zero", "schedule", "update by 2.0"]


def test_what_a_repeated_step_counts_is_counted_once():
    step = Step(99.0, 2.0, fatal=False)
    step.run()
    assert step.chunk.num_tokens.item() == 1


@pytest.mark.parametrize(("second", "exits"), [(2.0, (False, True, 17)), (99.0, (True, True, 16))])
def test_no_update_where_the_run_ends(second, exits):
    """And buffers are as they were before the step, for the checkpoint."""
    step = Step(99.0, second, fatal=True)
    assert step.run()[2:5] == exits
    assert step.calls == ["zero", "schedule", "zero", "schedule"]
    assert step.chunk.num_tokens.item() == 0
