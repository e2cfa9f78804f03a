"""One microbatch on one stage: the loss contract, freed outputs, what backward returns."""

import warnings
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from minimegatron import pretrain_gpt
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel import steps
from minimegatron.core.pipeline_parallel.schedules import (
    backward_step,
    check_first_val_step,
    custom_backward,
    deallocate_output_tensor,
    forward_backward_no_pipelining,
    forward_step,
    forward_step_calc_loss,
    set_current_microbatch,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.utils import or_one
from tests.fake_transport import FakeGroup
from tests.groups import PretendGroup


class Doubler(torch.nn.Module):
    """y = w x, as a stage."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.input_tensor = None

    def set_input_tensor(self, tensors):
        self.input_tensor = tensors[0]

    def forward(self, x):
        return self.weight * x


def calc_loss(config, output, loss_func, num_microbatches=4, cp=1, **keywords):
    store = []
    loss, num_tokens = forward_step_calc_loss(
        None, output, loss_func, config, None, False, num_microbatches, store, cp, True, **keywords
    )
    return loss, num_tokens, store


def test_three_values_are_averaged_over_tokens_and_microbatches():
    output = torch.tensor([1.0, 3.0, 8.0])
    loss_func = lambda out: (out.sum(), torch.tensor(3), {"sum": out.sum()})  # noqa: E731
    loss, num_tokens, store = calc_loss(ModelParallelConfig(), output, loss_func, cp=2)
    assert loss.item() == pytest.approx(12.0 / 3 / 4)
    assert num_tokens.item() == 3
    assert store[0]["sum"].item() == 12.0


def test_per_token_loss_stays_a_sum():
    config = ModelParallelConfig()
    config.calculate_per_token_loss = True
    loss_func = lambda out: (out.sum(), torch.tensor(3), {})  # noqa: E731
    loss, num_tokens, _ = calc_loss(config, torch.tensor([1.0, 3.0, 8.0]), loss_func)
    assert (loss.item(), num_tokens.item()) == (12.0, 3)


@pytest.mark.parametrize("per_token", [False, True])
def test_a7_tokens_with_weights_give_the_weighted_mean(per_token):
    """From the loss mask to the gradient, over two microbatches: nothing counts a weight as a token."""
    config = ModelParallelConfig(calculate_per_token_loss=per_token)
    counted = []
    config.finalize_model_grads_func = lambda model, num_tokens, **_: counted.append(num_tokens)
    model = Doubler(config)
    batches = [
        (torch.tensor([1.0, 2.0, 8.0]), torch.tensor([0.3, 1.0, 0.5])),
        (torch.tensor([4.0, 6.0, 7.0]), torch.tensor([1.0, 0.0, 0.7])),
    ]

    def step(data_iterator, model):
        x, loss_mask = next(data_iterator)
        return model(x), partial(pretrain_gpt.loss_func, loss_mask, model=model)

    with mock.patch.object(pretrain_gpt, "check_loss"):
        reports = forward_backward_no_pipelining(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=2,
            seq_length=3,
            micro_batch_size=1,
            pg_collection=ProcessGroupCollection(cp=FakeGroup(), tp=FakeGroup()),
        )
    sums, weights = [6.3, 8.9], [1.8, 1.7]  # of the losses by w, which is 2, half of each
    assert [r["lm loss"].tolist() for r in reports] == [
        pytest.approx([2 * total, weight]) for total, weight in zip(sums, weights, strict=True)
    ]
    if per_token:
        assert model.weight.grad.item() == pytest.approx(sum(sums))
        assert counted[0].item() == pytest.approx(3.5)
    else:
        mean = sum(total / weight for total, weight in zip(sums, weights, strict=True)) / 2
        assert model.weight.grad.item() == pytest.approx(mean)


def test_s16_weights_that_add_up_to_less_than_1_give_their_mean():
    """Was: divided by 1, so that a microbatch of small weights counted for less."""
    losses, weights = torch.tensor([1.0, 3.0]), torch.tensor([0.1, 0.3])
    for factor in (1.0, 2.0**-20):
        mask = weights * factor
        loss_func = lambda out: ((out * mask).sum(), mask.sum(), {})  # noqa: B023, E731
        assert calc_loss(ModelParallelConfig(), losses, loss_func)[0].item() == pytest.approx(
            2.5 / 4
        )


@pytest.mark.parametrize("dtype", [torch.int, torch.int64, torch.float32, torch.float64])
def test_s16_a_count_is_divided_by_as_megatron_does(dtype):
    counts = torch.tensor([0, 1, 2, 7], dtype=dtype)
    assert torch.equal(or_one(counts), counts.clamp(min=1))
    assert or_one(counts).dtype == dtype


def test_two_values_are_scaled_by_context_ranks_and_microbatches():
    loss_func = lambda out: (out.mean(), {})  # noqa: E731
    loss, num_tokens, _ = calc_loss(
        ModelParallelConfig(), torch.tensor([2.0, 4.0]), loss_func, cp=2
    )
    assert loss.item() == pytest.approx(3.0 * 2 / 4)
    assert num_tokens.item() == 0


def test_a_fully_masked_microbatch_has_no_loss_and_no_nan():
    output = torch.tensor([1.0, 3.0], requires_grad=True)
    loss_func = lambda out: ((out * 0).sum(), torch.tensor(0), {})  # noqa: E731
    loss, _, _ = calc_loss(ModelParallelConfig(), output, loss_func)
    loss.backward()
    assert loss.item() == 0.0
    assert output.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("num_tokens", [(), (torch.tensor(2),)], ids=["2 values", "3 values"])
def test_a_report_that_shares_storage_with_the_loss_is_not_changed(num_tokens):
    def loss_func(out):
        loss = out.sum()
        return loss, *num_tokens, {"loss": loss.detach()}

    _, _, store = calc_loss(ModelParallelConfig(), torch.tensor([2.0, 4.0]), loss_func)
    assert store[0]["loss"].item() == 6.0


def test_without_a_loss_function_the_output_itself_is_stored():
    """As frameworks ask for log-probabilities; a dictionary may be the output."""
    for output in (torch.tensor([2.0, 4.0]), {"log_probs": torch.ones(2)}):
        loss, num_tokens, store = calc_loss(ModelParallelConfig(), output, None, cp=2)
        assert store[0] is loss is output and num_tokens.item() == 0


@pytest.mark.parametrize("ends_here", [False, True])
@pytest.mark.parametrize("given_by", ["left out", "None"])
def test_a4_a_stage_that_is_not_told_where_it_is_asks(monkeypatch, ends_here, given_by):
    """By default the loss was left out without a word, and nothing was stored."""
    asked, store, factors = [], [], []
    config = ModelParallelConfig()
    config.aux_loss_scale_funcs = [lambda scale, m, c: factors.append(c)]
    monkeypatch.setattr(steps.parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(
        steps.parallel_state,
        "is_pipeline_last_stage",
        lambda ignore_virtual, vp_stage: asked.append((ignore_virtual, vp_stage)) or ends_here,
    )
    output = torch.tensor([2.0, 4.0])
    places = (None, None) if given_by == "None" else ()
    loss_func = lambda out: (out.mean(), {"loss": out.mean()})  # noqa: E731
    loss, _ = forward_step_calc_loss(None, output, loss_func, config, 1, False, 4, store, *places)
    assert asked == [(False, 1)] and factors == [2]
    if ends_here:
        assert loss.item() == pytest.approx(3.0 * 2 / 4) and store == [{"loss": 3.0}]
    else:
        assert loss is output and store == []


def test_f8_the_keyword_of_a_collecting_loss_function_is_documented():
    """Nothing but a TypeError said that there is one."""
    called = []
    forward_step_calc_loss(
        *(None, torch.ones(1), lambda *output, **more: called.append(more)),
        *(ModelParallelConfig(), None, True, 1, [], 1, True),
    )
    assert called == [{"non_loss_data": True}]
    for text in (forward_step.__doc__, forward_step_calc_loss.__doc__):
        assert "loss_func(output, non_loss_data=True)" in text


def test_four_values_are_refused():
    with pytest.raises(ValueError, match="returned 4 values"):
        calc_loss(ModelParallelConfig(), torch.tensor(1.0), lambda out: (out, 1, 2, 3))


def test_anything_is_collected_when_asked_for():
    store = []
    output = torch.tensor([1.0, 2.0])
    forward_step_calc_loss(
        None,
        output,
        lambda out, non_loss_data: {"tokens": out, "asked": non_loss_data},
        ModelParallelConfig(),
        None,
        True,
        4,
        store,
        1,
        True,
    )
    assert store == [{"tokens": output, "asked": True}]


def test_middle_stages_do_not_call_the_loss_function():
    def fails(out):
        raise AssertionError("called")

    store = []
    output = torch.tensor([1.0])
    result, _ = forward_step_calc_loss(
        None, output, fails, ModelParallelConfig(), None, False, 4, store, 1, False
    )
    assert result is output
    assert store == []


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("scale", [None, 8.0])
def test_auxiliary_losses_are_told_the_scale_of_the_main_loss(per_token, scale):
    told = []

    def balance(scale, num_microbatches, cp_size):
        told.append(("balance", scale.item(), num_microbatches, cp_size))

    def more_tokens(*numbers):
        told.append(("more tokens", *numbers))

    config = ModelParallelConfig(aux_loss_scale_funcs=(balance, more_tokens))
    config.calculate_per_token_loss = per_token
    if scale is not None:
        config.grad_scale_func = lambda loss: loss * scale
    calc_loss(config, torch.tensor([2.0]), lambda out: (out.sum(), torch.tensor(1), {}), cp=2)
    # Whether M and c divide or multiply is each function's to say.
    assert told == [("balance", scale or 1.0, 4, 2), ("more tokens", scale or 1.0, 4, 2)]


def test_a_mean_beside_sums_is_told():
    """Auxiliary losses are then as many times too large as the step has tokens, as in Megatron."""
    config = ModelParallelConfig(calculate_per_token_loss=True)
    config.aux_loss_scale_funcs = (lambda *numbers: None,)
    mean = [config, torch.tensor([2.0]), lambda out: (out.mean(), {})]
    with pytest.warns(UserWarning, match="returned 2 values, a mean, but .* return .summed loss"):
        calc_loss(*mean)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            calc_loss(*mean)
        for name, value in (("calculate_per_token_loss", False), ("aux_loss_scale_funcs", ())):
            calc_loss(replace(config, **{name: value}), *mean[1:])


class Wrapped:
    """What the warning looks at in a wrapper for data parallelism."""

    def __init__(self, rank: int, size: int, tp_rank: int = 0):
        self.dp_cp_group = PretendGroup(rank, size)
        self.pg_collection = ProcessGroupCollection(tp=PretendGroup(tp_rank, 2))


def test_a8_a_mean_with_gradients_that_are_summed_is_told_with_the_factor():
    """Also of a dense model: was only told beside auxiliary losses."""
    config = ModelParallelConfig(calculate_per_token_loss=True)

    def run(config, model, grad_enabled=True, values=(1.0, {})):
        loss = [torch.tensor(values[0]), *values[1:]]
        with torch.set_grad_enabled(grad_enabled):
            forward_step_calc_loss(
                model, loss[0], lambda _: tuple(loss), config, None, False, 4, [], 1, True
            )

    with pytest.warns(UserWarning, match="d \\* c = 6 .* 6 times too large; .* factor of 1/6 alr"):
        run(config, Wrapped(0, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(replace(config, mean_loss_has_factor=True), Wrapped(0, 6))
        run(replace(config, calculate_per_token_loss=False), Wrapped(0, 6))
        for one_of_many in (Wrapped(1, 6), Wrapped(0, 6, tp_rank=1)):
            run(config, one_of_many)
        run(config, Wrapped(0, 1))
        run(config, None)
        run(config, Wrapped(0, 6), grad_enabled=False)
        run(config, Wrapped(0, 6), values=(1.0, torch.tensor(3), {}))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            run(config, Wrapped(0, 7))
    assert len(told) == 1


def test_the_loss_scale_enters_on_the_last_stage_only():
    config = ModelParallelConfig(grad_scale_func=lambda loss: loss * 16.0)
    x = torch.tensor(3.0, requires_grad=True)
    grad = backward_step(x, x * 2, None, None, config)
    assert grad.item() == 32.0
    y = torch.tensor([3.0], requires_grad=True)
    assert backward_step(y, y * 2, torch.ones(1), None, config).item() == 2.0


def test_a2_backward_of_an_output_without_gradient_gives_zeros_to_send():
    """Was: None, which a stage in the middle cannot send; the one before waits for a gradient."""
    x, config = torch.tensor([1.0], requires_grad=True), ModelParallelConfig()
    assert backward_step(x, torch.tensor([5.0]), torch.ones(1), None, config).item() == 0.0
    assert backward_step(None, torch.tensor([5.0]), torch.ones(1), None, config) is None


def test_lists_in_lists_out():
    x = torch.tensor([1.0], requires_grad=True)
    grads = backward_step([x], [x * 3], [torch.ones(1)], None, ModelParallelConfig())
    assert isinstance(grads, list)
    assert grads[0].item() == 3.0
    assert backward_step([None], [x * 3], [torch.ones(1)], None, ModelParallelConfig()) == [None]


def test_a_freed_output_still_carries_its_gradient():
    x = torch.randn(4, 8, requires_grad=True)
    output = x.exp() + x
    expected = torch.autograd.grad(output, x, torch.ones_like(output), retain_graph=True)[0]
    grad = torch.ones_like(output)
    deallocate_output_tensor(output, True)
    assert output.numel() == 1
    with pytest.raises(RuntimeError, match="[Mm]ismatch in shape"):
        torch.autograd.backward(output, grad)
    custom_backward(output, grad)
    assert torch.allclose(x.grad, expected)


def test_freeing_is_off_by_default_and_refuses_views():
    out = torch.randn(4, 2)
    deallocate_output_tensor(out)
    deallocate_output_tensor(None, True)
    assert out.numel() == 8
    with pytest.raises(ValueError, match=r"\(2, 4\) is a view"):
        deallocate_output_tensor(out.view(2, 4), True)


def test_custom_backward_without_gradient_needs_a_scalar():
    with pytest.raises(ValueError, match=r"scalar, not shape \(2,\)"):
        custom_backward(torch.ones(2, requires_grad=True) * 1, None)


def test_first_validation_step():
    assert [check_first_val_step(*a) for a in ((None, True, True), (None, False, False))] == [
        True,
        False,
    ]
    assert not check_first_val_step(False, True, True)
    assert check_first_val_step(True, True, True)
    assert check_first_val_step(False, False, True)


def test_the_chunk_under_its_wrappers_is_told_the_microbatch():
    chunk, wrapper = torch.nn.Identity(), torch.nn.Identity()
    wrapper.module = chunk
    set_current_microbatch(wrapper, 7)
    assert chunk.current_microbatch == 7 and not hasattr(wrapper, "current_microbatch")


def test_forward_step_hands_on_input_flags_and_lists():
    config = ModelParallelConfig()
    model = Doubler(config)
    model.firsts = []
    model.set_is_first_microbatch = lambda: model.firsts.append(True)
    seen = {}

    def step(iterator, model, checkpoint):
        seen["checkpoint"] = checkpoint
        return model(model.input_tensor), None

    x = torch.tensor(3.0)
    output, num_tokens = forward_step(
        step,
        None,
        model,
        4,
        [x],
        [],
        config,
        1,
        checkpoint_activations_microbatch=True,
        is_first_microbatch=True,
        current_microbatch=0,
        is_last_stage=False,
    )
    assert isinstance(output, list)
    assert output[0].item() == 6.0
    assert (num_tokens.item(), seen, model.firsts) == (0, {"checkpoint": True}, [True])


def test_no_pipelining_syncs_gradients_in_the_last_microbatch_only():
    events = []

    class Hold:
        def __enter__(self):
            events.append("hold")

        def __exit__(self, *unused):
            events.append("release")

    finalized = []
    config = ModelParallelConfig(no_sync_func=Hold)
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = lambda models, tokens, pg_collection: finalized.append(
        tokens.item()
    )
    model = Doubler(config)

    def step(iterator, model):
        x = next(iterator)
        events.append(f"forward {x:g}")
        return model(x), lambda out: (out, torch.tensor(2), {"loss": out.item()})

    reports = forward_backward_no_pipelining(
        forward_step_func=step,
        data_iterator=iter([1.0, 2.0, 3.0]),
        model=[model],
        num_microbatches=3,
        seq_length=1,
        micro_batch_size=1,
        pg_collection=ProcessGroupCollection(cp=FakeGroup(), tp=FakeGroup()),
    )
    assert events == ["hold", "forward 1", "forward 2", "release", "forward 3"]
    assert reports == [{"loss": 2.0}, {"loss": 4.0}, {"loss": 6.0}]
    assert model.weight.grad.item() == 6.0
    assert finalized == [6]


def test_a_list_of_chunks_needs_interleaving():
    models = [Doubler(ModelParallelConfig()) for _ in range(2)]
    with pytest.raises(ValueError, match="model is a list of 2"):
        forward_backward_no_pipelining(
            forward_step_func=None,
            data_iterator=None,
            model=models,
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
            pg_collection=ProcessGroupCollection(cp=FakeGroup(), tp=FakeGroup()),
        )


# -- T14: what a loss function may call a number of tokens --


@pytest.mark.parametrize("count", [4, 4.0, torch.tensor([4]), torch.tensor([[4.0]])])
@pytest.mark.parametrize("per_token", [False, True])
def test_t14_a_number_of_tokens_may_be_a_number_or_a_tensor_of_one(count, per_token):
    config = ModelParallelConfig(calculate_per_token_loss=per_token)
    chunk = steps.ModelChunk(
        lambda data, model: (model(next(data)), lambda out: (out.sum(), count, {})),
        iter([torch.tensor([1.0, 3.0])]),
        Doubler(config),
        1,
        forward_data_store=[],
        cp_group_size=1,
    )
    loss = chunk.forward_step(0, None)
    assert loss.shape == () and loss.item() == (8.0 if per_token else 2.0)
    assert chunk.num_tokens.shape == () and chunk.num_tokens.item() == 4


def test_t14_tokens_that_require_a_gradient_lose_it_only_where_the_division_comes_later():
    """d (sum / n) of sum = 6 w, n = 2 w is 0: n's gradient is a part of it."""
    weight = torch.tensor(1.0, requires_grad=True)
    loss_func = lambda out: (6 * weight, 2 * weight, {})  # noqa: E731
    loss, num_tokens, _ = calc_loss(ModelParallelConfig(), None, loss_func, num_microbatches=1)
    loss.backward()
    assert weight.grad.item() == 0 and not num_tokens.requires_grad
    with pytest.raises(ValueError, match="requires a gradient.*return num_tokens.detach"):
        calc_loss(ModelParallelConfig(calculate_per_token_loss=True), None, loss_func)


def test_t14_more_than_one_number_of_tokens_is_refused():
    loss_func = lambda out: (out.sum(), torch.tensor([2, 3]), {})  # noqa: E731
    with pytest.raises(ValueError, match=r"shape \(2,\); return one number"):
        calc_loss(ModelParallelConfig(), torch.ones(5), loss_func)


# -- T5: an output of another shape than the next stage receives --


@pytest.mark.parametrize(
    "output, announced",
    [
        (torch.ones(4, 4, 8), (8, 2, 8)),
        ([torch.ones(4, 4, 8)], [(8, 2, 8)]),
        ([torch.ones(2, 8, 8)], [torch.Size((8, 2, 8))]),
        ([torch.ones(8, 2, 8)], [(8, 2, 8), (8, 2, 8)]),
    ],
)
def test_t5_an_output_of_another_shape_is_refused(output, announced):
    with pytest.raises(ValueError, match=r"has shape .* receives \(8, 2, 8\).*micro_batch_size"):
        steps.check_output(output, announced, None)


@pytest.mark.parametrize(
    "output, announced",
    [
        (torch.ones(8, 2, 8), (8, 2, 8)),
        ([torch.ones(8, 2, 8)], [[8, 2, 8]]),
        ([torch.ones(3, 2, 8)], [()]),
        (torch.ones(3, 2, 8), ()),
    ],
)
def test_t5_an_announced_shape_and_one_that_goes_ahead_are_taken(output, announced):
    steps.check_output(output, announced, torch.float32)


def test_t5_an_output_of_another_dtype_is_refused():
    """Of as many bytes: a message alone would not tell."""
    output = torch.ones(8, 2, 8, dtype=torch.float16)
    steps.check_output(output, (8, 2, 8), torch.float16)
    with pytest.raises(ValueError, match="of torch.float16, .* receives torch.bfloat16; set pipe"):
        steps.check_output(output, (8, 2, 8), torch.bfloat16)


@pytest.mark.parametrize("shape", [(2, 4, 8), (8,), (8, 4)])
def test_a_kept_output_refuses_a_gradient_of_another_shape(shape):
    """The engine alone would add up what broadcasts, and say nothing."""
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="gradient of"):
        backward_step(x, x * 2, torch.ones(shape), None, ModelParallelConfig())
    assert x.grad is None
