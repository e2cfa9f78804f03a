"""What the page on reinforcement learning shows: rewards, advantages, calls, ratios, the loss."""

import doctest
import importlib
import sys
from functools import partial
from unittest import mock

import pytest

from minimegatron import train_rl
from minimegatron.core.distributed import finalize_model_grads
from minimegatron.core.utils import get_model_config
from minimegatron.rl import grpo_data, rollout
from minimegatron.rl.grpo_data import GrpoData
from minimegatron.rl.rl_arguments import add_rl_arguments
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.model_setup import setup_model_and_optimizer
from minimegatron.training.pipeline_schedule import schedule_of_run
from minimegatron.training.training import train_step
from tests.ranks import run_ranks

policy = importlib.import_module("cases.policy")

FLAGS = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8
    --micro-batch-size 2 --global-batch-size 4 --train-iters 8 --lr 1e-3
    --grpo-prompts-per-step 4 --grpo-group-size 2 --grpo-iterations 2
"""


def calls_of_a_run(num_steps: int) -> list[bool]:
    """Of each call of the schedule from the first rollout on, whether it is forward only."""
    found = []

    def schedule(**given):
        found.append(given.get("forward_only", False))
        return schedule_of_run()(**given)

    sys.argv = ["train_rl", *FLAGS.split()]
    initialize_megatron(add_rl_arguments, train_rl.DEFAULTS)
    rollouts = GrpoData()
    provider = partial(train_rl.model_provider, rollouts)
    model, optimizer, scheduler = setup_model_and_optimizer(provider)
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    with (
        mock.patch.object(rollout, "schedule_of_run", lambda: schedule),
        mock.patch.object(grpo_data, "schedule_of_run", lambda: schedule),
    ):
        for step in range(num_steps):
            rows = rollouts(model, optimizer, step)
            train_step(train_rl.forward_step, rows, model, optimizer, scheduler, config, schedule)
    return found


def test_the_calls_of_the_figure_are_those_of_the_program():
    wanted = policy.calls_of_rollout(policy.TASK.answer_length, batches=2, iterations=2)
    steps = wanted.count("update")
    (found,) = run_ranks(calls_of_a_run, 1, 2 * steps)
    assert found == 2 * [name != "update" for name in wanted]
    assert policy.num_calls(policy.TASK.answer_length, 2, 2) == len(wanted) == 10


def test_a_figure_has_a_block_for_each_forward_and_backward():
    picture = policy.calls_figure(2, 2)
    # Four tokens, scores and reference, two updates: forwards of 2 stages x 2 microbatches each.
    assert picture.count('class="mm-hue-0"') == 8 * 4 + 1  # one in the legend
    assert picture.count('class="mm-hue-1"') == 2 * 4 + 1
    # By hand: 6 calls of M + p - 1 = 3, and 2 of three times that.
    assert policy.forward_share(4, 2, 2) == "50%" and policy.forward_share(100, 2, 2) == "94%"


def test_rewards_and_advantages_of_the_page():
    rewards, advantages = policy.rewards_of(), policy.advantages_of(policy.rewards_of())
    assert rewards == [1.0, 0.375, 0.125, 0.0]
    assert sum(advantages) == pytest.approx(0, abs=1e-12)
    assert sorted(advantages, reverse=True) == advantages and advantages[0] > 1.5
    assert [row.split("|")[3].strip() for row in policy.group_table().splitlines()[2:]] == [
        "+1.62",
        "0",
        "−0.65",
        "−0.97",
    ]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1, 1, -1, -1),
        (1.5, 1, -1.2, 0),
        (0.5, 1, -0.5, -0.5),
        (1.5, -1, 1.5, 1.5),
        (0.5, -1, 0.8, 0),
    ],
)
def test_clipping_acts_where_the_advantage_leads(ratio, advantage, loss, gradient):
    found = policy.token_loss(ratio, advantage)
    assert found[:2] == pytest.approx((loss, gradient), abs=1e-12)
    assert policy.loss_figure().count("<polyline") == 2 * 2 + 2


def test_the_distance_to_the_reference_is_never_below_zero():
    assert policy.k3_words(1) == "0"
    assert all(policy.token_loss(1.0, 1.0, ref=q)[2] > 0 for q in (0.1, 0.5, 2.0, 9.0))


def test_examples():
    result = doctest.testmod(policy)
    assert result.attempted >= 7 and not result.failed
