"""Two stacks in the planner: messages of two tensors, two kinds of stages, what a decoder holds."""

import pytest

from minimegatron.core.models.T5.stack_split import StackSplit
from minimegatron.planner.actions import SEND
from minimegatron.planner.formulas import message_formula
from minimegatron.planner.memory import message_bytes, peak_activation_bytes
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_check import check
from minimegatron.planner.simulator import Costs, simulate
from minimegatron.planner.stack_costs import (
    activation_bytes_of_split,
    costs_of_split,
    messages_behind,
    messages_of_model,
)

SPLITS = [(p, q) for p in (2, 3, 4, 5) for q in range(1, p)]
ENCODER, DECODER = 12, 8


def planned(p: int, q: int, M: int, **options) -> Plan:
    sizes = messages_behind(StackSplit(p, q), ENCODER, DECODER)
    return plan("1f1b", p, M, message_sizes=sizes, **options)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("p, q", SPLITS)
def test_every_link_carries_what_its_stage_makes(p, q, batched, forward_only):
    for M in (1, 2, 7):
        step = planned(p, q, M, batch_p2p_comm=batched, forward_only=forward_only)
        assert check(step) == []
        assert Plan.from_json(step.to_json()) == step
        assert step.message_counts()["activation"] == message_formula(step.config).value
        for rank in range(p - 1):
            ahead = [
                (message.microbatch, message.num_bytes)
                for action in step.ranks[rank]
                for message in action.messages
                if message.direction == SEND and message.peer == rank + 1
            ]
            sizes = [ENCODER] if rank < q else [DECODER, ENCODER]
            assert ahead == [(i, size) for i in range(M) for size in sizes]


@pytest.mark.parametrize("numbers", [(2, 1), (1, 2, 1), (2, 3, 1)])
def test_the_number_of_messages_of_a_model_of_ones_own(numbers):
    step = plan("1f1b", len(numbers), 3, message_sizes=[[1] * number for number in numbers])
    assert message_formula(step.config).value == step.message_counts()["activation"]


def test_a_tensor_that_is_not_received_is_missed():
    step = planned(3, 1, 2)
    actions = [
        action._replace(messages=action.messages[:1]) if action.call == "recv_forward" else action
        for action in step.ranks[2]
    ]
    assert check(Plan(step.config, [*step.ranks[:2], actions])) != []


def test_sizes_are_for_every_stage_and_for_messages_that_a_schedule_names():
    with pytest.raises(ValueError, match="are for 2 virtual stages; .* each of the 3"):
        plan("1f1b", 3, 4, message_sizes=[[1], [1, 1]])
    with pytest.raises(ValueError, match="one or more sizes"):
        plan("1f1b", 2, 4, message_sizes=[[1], []])
    with pytest.raises(ValueError, match="lowered for a wire that is tagged; use 1f1b"):
        plan("1f1b", 2, 4, message_sizes=[[1], [1]], wire="tagged")


def test_two_kinds_of_stages_take_their_own_times():
    costs = costs_of_split(StackSplit(3, 1), (2, 4), (1, 2))
    assert (costs.forward, costs.backward) == ([2, 1, 1], [4, 2, 2])
    step = planned(3, 1, 4)
    assert simulate(step, costs).makespan > simulate(step, Costs(1, 2)).makespan


def test_a_decoder_stage_holds_the_encoders_output_for_each_microbatch_in_flight():
    p, q, M, layers = 4, 2, 8, 100
    encoder_message = message_bytes(seq_length=512, micro_batch_size=2, hidden_size=64)
    assert encoder_message == 512 * 2 * 64 * 2
    step = planned(p, q, M)
    held = activation_bytes_of_split(StackSplit(p, q), layers, layers, encoder_message)
    peaks = [peak_activation_bytes(step, rank, held) for rank in range(p)]
    in_flight = [4, 3, 2, 1]
    assert peaks == [
        in_flight[rank] * (layers + encoder_message * (rank >= q)) for rank in range(p)
    ]


def test_a_model_of_one_stack_says_nothing():
    assert messages_of_model(object()) is None
