"""What scales a gradient, and what a log adds up: fields set late, steps made final twice, two models.

Rows S3, S4, S8 to S10, S12 to S14 and S22: each was a wrong number without a word.
"""

import copy
import dataclasses
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchDistributedDataParallel,
)
from minimegatron.core.distributed.finalize_model_grads import finalize_model_grads
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from minimegatron.core.pipeline_parallel.schedule_checks import refuse_shared_iterators
from minimegatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_step,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.transformer import mtp_loss
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from minimegatron.core.transformer.moe.router import TopKRouter
from minimegatron.core.transformer.mtp_loss import MTPLossAutoScaler, MTPLossLoggingHelper
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training import evaluation
from minimegatron.training.utils import sum_over_microbatches
from tests.core.transformer.moe.thread_ranks import one_rank
from tests.fake_transport import FakeGroup
from tests.ranks import run_ranks

GROUPS = SimpleNamespace(
    **dict.fromkeys(("tp", "cp", "pp", "dp_cp", "embd", "pos_embd"), FakeGroup())
)
TOKENS, M = 3, 4


def make_config(**options: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    return TransformerConfig(**sizes | options)


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})


class Weighted(MegatronModule):
    """y = w x, and auxiliary losses a^2 and b^2 on it, of experts and of further tokens."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        for name in "wab":
            setattr(self, name, torch.nn.Parameter(torch.ones(())))

    def set_input_tensor(self, tensors: list) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = MoEAuxLossAutoScaler.apply(self.w * x, self.a.square())
        return MTPLossAutoScaler.apply(y, self.b.square())


def step_func(iterator: Any, model: torch.nn.Module) -> tuple:
    loss = lambda y: (y.sum(), torch.tensor(y.numel()), {"loss": y.detach().sum()})  # noqa: E731
    return model(next(iterator)), loss


def step(
    model: torch.nn.Module, groups: Any = GROUPS, forward_step: Any = step_func, **options: Any
) -> list:
    """M microbatches of three ones each."""
    return forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter([torch.ones(TOKENS)] * M),
        model=model,
        num_microbatches=M,
        seq_length=1,
        micro_batch_size=1,
        pg_collection=groups,
        **options,
    )


def gradients(model: torch.nn.Module) -> list[float]:
    return [param.grad.item() for param in (model.w, model.a, model.b)]


# -- S3: fields that are set late --

EXPERTS = {"num_moe_experts": 4, "mtp_num_layers": 1}


def test_s3_the_loss_contract_may_be_set_late():
    made = {late: make_config(**EXPERTS, calculate_per_token_loss=not late) for late in (0, 1)}
    made[1].calculate_per_token_loss = True
    found = []
    for config in made.values():
        model = Weighted(config)
        step(model)
        found.append(gradients(model))
    # Sums of M microbatches; each was a mean over them.
    assert found == [[TOKENS * M, 2.0 * M, 2.0 * M]] * 2
    made[1].calculate_per_token_loss = False
    model = Weighted(made[1])
    step(model)
    assert gradients(model) == [1.0, 2.0, 2.0]


def test_s3_experts_and_further_tokens_may_be_set_late():
    hooks = ("aux_loss_scale_funcs", "before_step_funcs", "after_grads_funcs", "log_funcs")
    late, at_once = make_config(), make_config(**EXPERTS)
    for name, value in EXPERTS.items():
        setattr(late, name, value)
    for name in (*hooks, "around_step_funcs", "moe_ffn_hidden_size"):
        assert getattr(late, name) == getattr(at_once, name), name
    with pytest.raises(ValueError, match="moe_router_topk 2 is more than num_moe_experts 1"):
        late.num_moe_experts = 1
    assert late.num_moe_experts == 4  # as if nothing had been tried
    for name in EXPERTS:
        setattr(late, name, None)
    for name in (*hooks, "around_step_funcs", "moe_ffn_hidden_size"):
        assert getattr(late, name) == getattr(make_config(), name), name


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_dropout", 0.0), ("attention_dropout", 0.5), ("num_moe_experts", None)]
    + [("mtp_num_layers", 2), ("moe_router_topk", 3), ("layernorm_epsilon", 1e-6)],
)
def test_s22_what_a_built_model_has_read_is_not_set(name, value):
    config = make_config(**EXPERTS)
    setattr(config, name, before := getattr(config, name))
    Weighted(config)
    with pytest.raises(ValueError, match=f"{name} is set to .* with this configuration, and with"):
        setattr(config, name, value)
    setattr(config, name, before)  # says nothing new
    others = {} if name != "num_moe_experts" else {"moe_ffn_hidden_size": None}
    assert getattr(dataclasses.replace(config, **{name: value}, **others), name) == value
    for copied in (copy.copy(config), copy.deepcopy(config)):
        setattr(copied, name, value)
        assert getattr(copied, name) == value and getattr(config, name) == before


def test_s3_a_routers_coefficient_may_be_set_late():
    config = make_config(num_moe_experts=4, moe_aux_loss_coeff=0.1)
    router = TopKRouter(config, one_rank())
    config.moe_aux_loss_coeff = 0.0
    x = torch.randn(2, 3, 8)
    router(x)
    assert router.losses == {}
    config.moe_aux_loss_coeff = 0.4
    router(x)
    assert router.get_aux_loss_coeff("aux_loss") == 0.4 and len(router.losses) == 1


# -- S12: the scale outside of a step --


def loops_own(model: Weighted) -> list[float]:
    model.zero_grad()
    model(torch.ones(1)).sum().backward()
    return gradients(model)


def test_s12_a_step_leaves_no_scale_behind():
    model = Weighted(make_config(**EXPERTS))
    wanted = loops_own(model)
    assert wanted == [1.0, 2.0, 2.0]
    model.config.grad_scale_func = lambda loss: loss * 1024.0
    for options in ({}, {"forward_only": True}):
        step(model, **options)
        assert loops_own(model) == wanted
    # Also one that a loop has chosen itself, and after a step that failed.
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(3.0))
    MTPLossAutoScaler.set_loss_scale(torch.tensor(5.0))
    step(model, forward_only=True)
    model.config.finalize_model_grads_func = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step(model)
    assert loops_own(model) == [1.0, 6.0, 10.0]
    # Without a schedule around it, it is what Megatron's is.
    with torch.no_grad():
        data = iter([torch.ones(1)])
        forward_step(step_func, data, model, 2, None, [], model.config, cp_group_size=1)
    assert MoEAuxLossAutoScaler.main_loss_backward_scale.item() == 512.0


# -- S14: two models' logs --


def test_s14_each_model_has_its_own_losses_in_the_log():
    models = [Weighted(make_config(mtp_num_layers=depths)) for depths in (1, 1, 2)]
    for number, model in enumerate(models):
        for _ in range(2):
            mtp_loss.forget_step([model])
            for depth in range(model.config.mtp_num_layers):
                loss = torch.tensor(1.0 + 10 * number + depth)
                MTPLossLoggingHelper.save_loss_to_tracker(loss, depth, model.config.mtp_num_layers)
            mtp_loss.count_step([model], GROUPS)
    lines = [mtp_loss.describe_further_tokens([model], GROUPS) for model in models]
    assert lines == [
        {"mtp_1 loss": 1.0},
        {"mtp_1 loss": 11.0},
        {"mtp_1 loss": 21.0, "mtp_2 loss": 22.0},
    ]
    assert mtp_loss.describe_further_tokens(models[:1], GROUPS) == {}


# -- S22: a step without gradients; S8: iterators --


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_s22_a_training_step_without_gradients_is_refused(off):
    model = Weighted(make_config())
    with off(), pytest.raises(ValueError, match="forward_only is False, but gradients are off"):
        step(model)
    with off():
        assert len(step(model, forward_only=True)) == M


def test_s8_two_chunks_do_not_share_an_iterator():
    shared, other = iter("ab"), iter("ab")
    refuse_shared_iterators([None, shared, None, other])
    refuse_shared_iterators(["no iterator"] * 2)
    words = "chunks 0 and 2 have one data iterator"
    with pytest.raises(ValueError, match=words):
        refuse_shared_iterators([shared, None, shared])
    config = make_config(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="chunks 0 and 1 have one data iterator"):
        forward_backward_pipelining_with_interleaving(
            forward_step_func=step_func,
            data_iterator=[shared, shared],
            model=[Weighted(config), Weighted(config)],
            num_microbatches=2,
            seq_length=1,
            micro_batch_size=1,
            pg_collection=GROUPS,
        )


# -- On real ranks: buffers, optimizers, reports --


def wrapped(config: TransformerConfig, groups: Any, kind: Any = DistributedDataParallel) -> Any:
    return kind(config, DistributedDataParallelConfig(), Weighted(config), pg_collection=groups)


def made_final_once(groups: Any) -> None:
    """S4, S22: a second call of the schedule before `zero_grad_buffer`; a contract changed late."""
    for kind in (DistributedDataParallel, TorchDistributedDataParallel):
        config = make_config(calculate_per_token_loss=True)
        model = wrapped(config, groups, kind)
        config.finalize_model_grads_func = finalize_model_grads
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=groups)
        for _ in range(2):
            model.zero_grad_buffer()
            step(model, groups)
            weight = model.module.w
            grad = weight.main_grad if kind is DistributedDataParallel else weight.grad
            assert grad.item() == pytest.approx(1.0)
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="zero_grad_buffer\\(\\) was not called since"):
            step(model, groups)
        config.calculate_per_token_loss = False
        with pytest.raises(ValueError, match="calculate_per_token_loss is False, but was True"):
            model.zero_grad_buffer()


def scaled_by_its_own(groups: Any) -> None:
    """S13, S22: the loss scale forgotten; that of another model's optimizer."""
    half = OptimizerConfig(lr=0.1, loss_scale=2.0**10, bf16=True)
    config = make_config()
    config.finalize_model_grads_func = finalize_model_grads
    models = [wrapped(config, groups) for _ in range(2)]
    first, second = (get_megatron_optimizer(half, [m], pg_collection=groups) for m in models)
    for owner, is_right in ((None, False), (second, False), (first, True)):
        models[0].zero_grad_buffer()
        config.grad_scale_func = None if owner is None else owner.scale_loss
        if is_right:
            step(models[0], groups)
            assert models[0].module.w.main_grad.item() == pytest.approx(1024.0)
            continue
        with pytest.raises(ValueError, match="divides gradients by its loss scale, 1024, but"):
            step(models[0], groups)


def scale_only_logged(groups: Any) -> None:
    """T13: the loss scale is asked for, and the loss is not multiplied by it; then it is, by hand."""
    config = make_config()
    config.finalize_model_grads_func = finalize_model_grads
    model = wrapped(config, groups)
    scaled = OptimizerConfig(lr=0.1, loss_scale=2.0**10, bf16=True)
    optimizer = get_megatron_optimizer(scaled, [model], pg_collection=groups)

    def by_hand(iterator: Any, model: torch.nn.Module) -> tuple:
        output, loss = step_func(iterator, model)
        return output * float(optimizer.get_loss_scale()), loss

    for func in (step_func, by_hand):
        model.zero_grad_buffer()
        assert float(optimizer.get_loss_scale()) == 1024.0  # for a log
        if func is by_hand:
            step(model, groups, by_hand)
            assert model.module.w.main_grad.item() == pytest.approx(1024.0)
            continue
        with pytest.raises(
            ValueError, match="loss scale, 1024, but nothing has multiplied the loss"
        ):
            step(model, groups)


def frozen_late(groups: Any) -> None:
    """S22: between `zero_grad_buffer` and the update."""
    config = make_config()
    model = wrapped(config, groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=groups)
    model.zero_grad_buffer()
    step(model, groups)
    finalize_model_grads([model], pg_collection=groups)
    model.module.a.requires_grad_(False)
    before = model.module.w.item()
    with pytest.raises(
        ValueError, match="1 parameters, such as model0.a, do not require a gradient"
    ):
        optimizer.step()
    assert model.module.w.item() == before


def reports_of_copies(groups: Any) -> None:
    """S9, S10, S22b: other orders of keys, other keys, vectors, bare numbers."""
    rank = torch.distributed.get_rank()
    # Copies 0 and 1 report in another order; plain numbers are means over copies too.
    report = {
        "a": torch.tensor([4.0, 2.0]),
        "b": torch.tensor([30.0, 3.0 - 2 * rank]),
        "c": 1.0 + rank,
    }
    if rank:
        report = dict(reversed(report.items()))
    summed = sum_over_microbatches([report, dict(reversed(report.items()))])
    found = {key: pair.tolist() for key, pair in summed.items()}
    assert found == {"a": [16.0, 8.0], "b": [120.0, 8.0], "c": [6.0, 4.0]}
    assert list(summed) == list(report)
    two = torch.ones(2)
    for reports, words in (
        ([{"a": two}, {"a": two, "b": two}], r"'a' \(2 numbers\) in microbatch 0, 'a' .*'b'"),
        ([{"a": two, "b": two}, {"a": two}], "in microbatch 1; report the same keys in each"),
        ([{"a": two}, {"a": 1.0}], r"'a' \(1 number\) in microbatch 1"),
        ([{"a": torch.ones(3)}], r"'a' \(3 numbers\)"),
        ([{"a": two} if rank else {"b": two}], "and other keys or sizes on another copy"),
        ([{"a": two} if rank else {"a": 1.0}], f"copy {rank} of 2 of the model"),
        ([{"a": two} if rank else {}], "and other keys or sizes on another copy"),
    ):
        with pytest.raises(ValueError, match=words):
            sum_over_microbatches(reports)


def evaluated(monkeypatch: Any) -> dict[str, float]:
    """What `evaluate` says of bare numbers: the same on all ranks."""
    args = {"global_batch_size": 2, "micro_batch_size": 1, "data_parallel_size": 2, "eval_iters": 2}
    args |= {"seq_length": 1, "decoder_seq_length": None}
    state = SimpleNamespace(consumed_valid_samples=0)
    monkeypatch.setattr(evaluation, "get_args", lambda: SimpleNamespace(**args))
    monkeypatch.setattr(evaluation, "get_train_state", lambda: state)
    rank = torch.distributed.get_rank()
    reports = lambda **_: [{"loss": torch.tensor(1.0 + 2 * rank)}]  # noqa: E731
    monkeypatch.setattr(evaluation, "schedule_of_run", lambda: reports)
    model = Weighted(make_config())
    means, _ = evaluation.evaluate(None, None, [model], None, model.config)
    return means


CHECKS = (made_final_once, scaled_by_its_own, scale_only_logged, frozen_late, reports_of_copies)


def on_two_ranks() -> dict[str, Any]:
    """What each check has raised, as text, and what an evaluation says."""
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    groups, found = ProcessGroupCollection.use_mpu_process_groups(), {}
    for check in CHECKS:
        try:
            check(groups)
            found[check.__name__] = ""
        except BaseException:
            found[check.__name__] = traceback.format_exc()
    with pytest.MonkeyPatch.context() as monkeypatch:
        found["evaluated"] = evaluated(monkeypatch)
    return found


@pytest.fixture(scope="module")
def seen():
    return run_ranks(on_two_ranks, 2)


def test_s4_gradients_are_made_final_once(seen):
    assert [found["made_final_once"] for found in seen] == ["", ""]


def test_s13_s22_a_loss_that_its_own_optimizer_did_not_scale_is_refused(seen):
    assert [found["scaled_by_its_own"] for found in seen] == ["", ""]


def test_t13_a_loss_scale_that_is_only_logged_scales_nothing(seen):
    """Was: who asked for it was taken for one who multiplies, and gradients were divided by it."""
    assert [found["scale_only_logged"] for found in seen] == ["", ""]


def test_s22_a_weight_that_was_frozen_late_does_not_move(seen):
    assert [found["frozen_late"] for found in seen] == ["", ""]


def test_s9_s10_reports_are_added_up_by_their_keys(seen):
    assert [found["reports_of_copies"] for found in seen] == ["", ""]


def test_s22_an_evaluation_says_the_same_on_all_copies(seen):
    assert [found["evaluated"] for found in seen] == [{"loss": 2.0}] * 2


@pytest.mark.parametrize(("params", "messages"), [("float16", "bfloat16"), ("bfloat16", "float16")])
def test_t6_messages_of_the_other_sixteen_bits_are_refused(params, messages):
    """Was: a stage read the other's bytes as other numbers."""
    with pytest.raises(ValueError, match=f"pipeline_dtype is torch.{messages} but params_dtype"):
        make_config(
            pipeline_model_parallel_size=2,
            params_dtype=getattr(torch, params),
            pipeline_dtype=getattr(torch, messages),
        )
