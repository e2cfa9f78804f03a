"""Which results are unexpectedly large: the same ones as for megatron-core's own class."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minimegatron.core.rerun_state_machine import RerunStateMachine
from tests.conformance.megatron import megatron_module

theirs = megatron_module("rerun_state_machine")

VALUES = st.sampled_from(
    [0.0, -0.4, 0.5, -0.5, 3.0, 5.0, -5.0, -500.0, float("nan"), -float("inf")]
)
RESULTS = st.lists(st.tuples(st.sampled_from(["loss", "gradient"]), VALUES), max_size=20)


@given(results=RESULTS, threshold=st.sampled_from([1.0, 10.0]), num_samples=st.integers(0, 4))
@example([("loss", -0.5), ("loss", -0.4), ("loss", -500.0)], 10.0, 1)  # the wrong way round once
@example([("loss", float("inf")), ("loss", 0.5), ("loss", 5.0)], 10.0, 1)  # off for ever once
def test_a3_the_same_results_are_unexpectedly_large(results, threshold, num_samples):
    machines = RerunStateMachine(), theirs.RerunStateMachine()
    for context, value in results:
        asked = {"threshold": threshold, "context": context, "num_samples": max(num_samples, 1)}
        ours, megatrons = (
            machine.is_unexpectedly_large(torch.tensor(value), **asked) for machine in machines
        )
        assert ours == megatrons, (context, value)
