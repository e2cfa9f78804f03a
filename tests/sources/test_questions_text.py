"""The programs in the questions and answers about `forward_backward_func`.

* The loss function of a GPT that has each result judged, and the forward step that binds it.
* A forward step as reinforcement learning has it: it computes the loss itself, and binds what is
  logged. Given to the schedule, without `pretrain`.
* The loss function of a unit test, which returns the rank's number.

Written for this test.
"""

import re
import sys
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minimegatron import pretrain_gpt
from minimegatron.core import parallel_state
from minimegatron.core.enums import ModelType
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel import get_forward_backward_func
from minimegatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.rerun_state_machine import get_rerun_state_machine
from minimegatron.core.utils import get_attr_wrapped_model
from minimegatron.training import get_args, get_timers
from minimegatron.training.global_vars import destroy_global_vars
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.model_setup import get_model
from minimegatron.training.utils import sum_over_microbatches
from tests.fake_transport import FakeGroup
from tests.ranks import run_ranks
from tests.sources import programs
from tests.sources.programs import LAYOUTS

VOCABULARY = "--padded-vocab-size 512"
"""The same for each t: rows of padding count in the softmax."""

# -- A loss that is judged --


def loss_func(loss_mask, output_tensor, model=None):
    args = get_args()
    losses, loss_mask = output_tensor.reshape(-1).float(), loss_mask.reshape(-1).float()
    loss = (losses * loss_mask).sum()
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejects, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=loss,
                rejection_func=rejects,
                message=f"the text's loss is {what}",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=10, context="loss"),
            message="a jump",
            tolerance=0.0,
            fatal=False,
        )
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(data_iterator, model, return_schedule_plan=False):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = pretrain_gpt.get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    tokens, labels, loss_mask, attention_mask, position_ids = batch
    timers("batch-generator").stop()
    assert not return_schedule_plan
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask, model=model)


def of_nan(loss_mask, output_tensor, model=None):
    return loss_func(loss_mask, output_tensor * torch.nan, model)


def of_four_values(loss_mask, output_tensor, model=None):
    return (*loss_func(loss_mask, output_tensor, model), {})


def step_with(function, data_iterator, model):
    output, bound = forward_step(data_iterator, model)
    return output, partial(function, *bound.args, **bound.keywords)


def train(layouts, step=forward_step, flags=f"{VOCABULARY} --check-for-spiky-loss"):
    """In a rank: what the steps of each layout report."""
    return {
        layout: programs.run(
            f"{LAYOUTS.get(layout, '')} {flags}",
            pretrain_gpt.train_valid_test_datasets_provider,
            pretrain_gpt.model_provider,
            ModelType.encoder_or_decoder,
            step,
        )
        for layout in layouts
    }


def test_the_judged_loss_trains_alike_in_each_layout():
    (alone,) = run_ranks(train, 1, ["alone"], timeout=120)
    *_, last = run_ranks(train, 2, list(LAYOUTS), timeout=200)
    first, second = alone["alone"]
    assert second["lm loss"] < first["lm loss"]
    for layout, found in last.items():
        for here, there in zip(found, alone["alone"], strict=True):
            assert here == pytest.approx(there, rel=2e-5), layout


@pytest.mark.parametrize(
    ("function", "words"),
    [(of_nan, "the text's loss is NaN"), (of_four_values, "the loss function returned 4 values")],
)
def test_a_loss_that_cannot_be_is_one_sentence(function, words):
    with pytest.raises(Exception, match=words):
        run_ranks(train, 1, ["alone"], partial(step_with, function))


# -- A step of reinforcement learning --

LENGTH, NUM_ROWS, LOW, HIGH, KL = 16, 4, 0.2, 0.28, 0.05


def rows():
    """Microbatches of one row: tokens, advantages, old log-probabilities, mask, positions, reference's,
    and nothing from another engine."""
    generator = torch.Generator().manual_seed(5)
    for number in range(NUM_ROWS):
        tokens = torch.randint(0, 256, (1, LENGTH), generator=generator)
        old = -5.5 - 0.3 * torch.rand(1, LENGTH - 1, generator=generator)
        reference = -5.5 - 0.3 * torch.rand(1, LENGTH - 1, generator=generator)
        mask = (torch.arange(LENGTH) >= 3 + number).float().view(1, -1)
        yield (
            *(tokens, torch.tensor([1.0 - number]), old, mask),
            *(torch.arange(LENGTH).view(1, -1), reference, None),
        )


def log_probabilities(logits, tokens):
    found = logits[:, :-1].float().log_softmax(dim=-1)
    return found.gather(-1, tokens[:, 1:, None]).squeeze(-1), found


def policy_loss(logits, tokens, advantages, old, reference):
    """[b, s - 1] each: the loss, and what is logged of it."""
    current, all_of_them = log_probabilities(logits, tokens)
    ratios = (current - old).exp()
    gains = torch.minimum(
        ratios * advantages[:, None], ratios.clamp(1 - LOW, 1 + HIGH) * advantages[:, None]
    )
    difference = reference - current
    kl_term = difference.exp() - difference - 1
    entropy = -(all_of_them.exp() * all_of_them).sum(-1)
    return KL * kl_term - gains, kl_term, ratios, entropy


def policy_report(loss_mask, kl_term, ratios, entropy, output_tensor):
    """The text's loss function: the loss is there, what it is bound to is for the log."""
    count = loss_mask.sum()
    loss = (output_tensor * loss_mask).sum()
    parts = {"policy loss": output_tensor, "kl": kl_term, "ratio": ratios, "entropy": entropy}
    return (
        loss,
        count.detach().to(torch.int),
        {name: (part * loss_mask).sum().detach() for name, part in parts.items()},
    )


def policy_step(data_iterator, model):
    """As the text's program has it: right while one stage has the whole model."""
    tokens, advantages, old, loss_mask, position_ids, reference, _ = next(data_iterator)
    logits = model(tokens, position_ids, None, runtime_gather_output=True)
    loss, *logged = policy_loss(logits, tokens, advantages, old, reference)
    return loss, partial(policy_report, loss_mask[:, 1:].contiguous(), *logged)


def policy_step_of_stages(data_iterator, model):
    """What several stages need: the loss is computed where the logits are, so in the loss function."""
    tokens, advantages, old, loss_mask, position_ids, reference, _ = next(data_iterator)

    def from_logits(logits):
        loss, *logged = policy_loss(logits, tokens, advantages, old, reference)
        return policy_report(loss_mask[:, 1:].contiguous(), *logged, loss)

    return model(tokens, position_ids, None, runtime_gather_output=True), from_logits


def run_schedule(layouts):
    """In a rank: the reports of one step, and the gradient of the last layer norm, by layout."""
    return {layout: _run_schedule(f"{VOCABULARY} {LAYOUTS.get(layout, '')}") for layout in layouts}


def _run_schedule(flags):
    sys.argv = ["program", *programs.MODEL.split(), *flags.split()]
    try:
        initialize_megatron(get_embedding_ranks=pretrain_gpt.get_embedding_ranks)
        model = get_model(pretrain_gpt.model_provider, wrap_with_ddp=False)
        copies = parallel_state.get_data_parallel_world_size()
        mine = list(rows())[parallel_state.get_data_parallel_rank() :: copies]
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        reports = get_forward_backward_func()(
            forward_step_func=policy_step if stages == 1 else policy_step_of_stages,
            data_iterator=[iter(mine) for _ in model] if len(model) > 1 else iter(mine),
            model=model if len(model) > 1 else model[0],
            num_microbatches=len(mine),
            seq_length=LENGTH,
            micro_batch_size=1,
        )
        norms = [p for name, p in model[-1].named_parameters() if "final_layernorm.weight" in name]
        found = [{key: float(value) for key, value in report.items()} for report in reports]
        return found, norms[0].grad if norms else None
    finally:
        destroy_global_vars()
        parallel_state.destroy_model_parallel()


def test_the_policys_step_is_computed_alike_in_each_layout():
    (alone,) = run_ranks(run_schedule, 1, ["alone"])
    (wanted, gradient) = alone["alone"]
    assert len(wanted) == NUM_ROWS and wanted[0]["policy loss"] != wanted[1]["policy loss"]
    per_rank = run_ranks(run_schedule, 2, list(LAYOUTS), timeout=120)
    for layout in LAYOUTS:
        first, last = (found[layout] for found in per_rank)
        if layout == "d=2":
            found = [report for pair in zip(first[0], last[0], strict=True) for report in pair]
            grad = (first[1] + last[1]) / 2
        else:
            found, grad = last
        for here, there in zip(found, wanted, strict=True):
            assert here == pytest.approx(there, rel=2e-5), layout
        torch.testing.assert_close(grad, gradient, rtol=1e-4, atol=1e-6, msg=layout)


# -- A unit test's loss function --


def numbers_of_ranks():
    """In a rank: a schedule of forwards, whose loss is the rank's number."""
    parallel_state.initialize_model_parallel()
    model = torch.nn.Linear(4, 1)
    model.config = ModelParallelConfig()
    model.set_input_tensor = lambda tensor: None

    def step(data_iterator, model):
        rank = dist.get_rank()
        return model(torch.ones(1, 4)), lambda output_tensor: (rank, {"loss_reduced": rank})

    try:
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(range(100)),
            model=[model],
            num_microbatches=4,
            seq_length=None,
            micro_batch_size=None,
            forward_only=True,
        )
    finally:
        parallel_state.destroy_model_parallel()


def test_a_loss_may_be_a_plain_number():
    for rank, reports in enumerate(run_ranks(numbers_of_ranks, 2)):
        assert reports == [{"loss_reduced": rank}] * 4


# -- What the two functions return --


def output_alone(returned, data_iterator, model):
    return returned


def loss_of(returned, output_tensor):
    return returned(output_tensor) if callable(returned) else returned


class OneWeight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.config = ModelParallelConfig()

    def set_input_tensor(self, tensor):
        pass

    def forward(self):
        return 3 * self.weight


def one_step(forward_step, num_microbatches=1):
    groups = ProcessGroupCollection(tp=FakeGroup(), cp=FakeGroup(), pp=FakeGroup())
    model = OneWeight()
    with mock.patch.object(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 1):
        reports = forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=1,
            micro_batch_size=1,
            pg_collection=groups,
        )
    return model, reports


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "the forward step returned None; return two values"),
        (torch.ones(2, 3), "the forward step returned a Tensor of shape (2, 3); return two values"),
        ((1, 2, 3), "the forward step returned a tuple; return two values"),
        (
            (loss_func, torch.ones(2)),
            "second value is a Tensor of shape (2,), which cannot be called",
        ),
    ],
)
def test_a_forward_step_returns_two_values(returned, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        one_step(partial(output_alone, returned))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "the loss function returned None; return (loss, report)"),
        (torch.sum, "the loss function returned a Tensor of shape (); return (loss, report)"),
        (lambda x: {"loss": x.sum(), "n": 2}, "the loss function returned a dict; return"),
        (
            lambda x: (x.sum(), {"lm loss": x.sum()}, 2),
            "a dictionary as number of tokens; return (sum",
        ),
        (lambda x: (x, {}), "the loss, which has shape (2,); return one number"),
    ],
)
def test_a_loss_function_returns_two_or_three_values(returned, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        one_step(lambda _, model: (model(), partial(loss_of, returned)))


def test_a_loss_without_a_gradient_is_told_once_a_process():
    with pytest.warns(UserWarning, match="the loss has no gradient: all weights are frozen, or"):
        model, reports = one_step(
            lambda _, model: (model(), lambda x: (x.sum().detach(), {"a": 1}))
        )
    assert model.weight.grad is None and reports == [{"a": 1}]


@pytest.mark.parametrize("number", [0, -1])
def test_a_step_has_a_microbatch(number):
    with pytest.raises(ValueError, match=f"num_microbatches is {number}; a step has at least 1"):
        one_step(lambda _, model: (model(), lambda x: (x.sum(), {})), number)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (torch.ones(2), "the loss function reported a Tensor; its last value is a dictionary"),
        ({"a": "b"}, "the loss function reported a str under 'a'; report one number, or a pair"),
    ],
)
def test_a_report_is_numbers_by_name(report, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        sum_over_microbatches([report])
