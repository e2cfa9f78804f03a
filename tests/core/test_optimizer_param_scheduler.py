"""Learning-rate and weight-decay curves against their closed forms, at the ends and between."""

import math
from types import SimpleNamespace

import pytest

from minimegatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)

INIT, MAX, MIN, WARMUP, END = 1e-6, 1e-3, 1e-5, 10, 110


def build(style="linear", **kwargs):
    optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}])
    arguments = {
        "init_lr": INIT,
        "max_lr": MAX,
        "min_lr": MIN,
        "lr_warmup_steps": WARMUP,
        "lr_decay_steps": END,
        "lr_decay_style": style,
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 100,
        "wd_incr_style": "constant",
    }
    return optimizer, OptimizerParamScheduler(optimizer, **{**arguments, **kwargs})


def closed_form(style, n):
    """The curve as its formula has it, written apart from the code under test."""
    if n <= WARMUP:
        return INIT + (MAX - INIT) * n / WARMUP
    r = (n - WARMUP) / (END - WARMUP)
    if style == "constant":
        return MAX
    if n > END:
        return MIN
    if style == "linear":
        return MAX - (MAX - MIN) * r
    if style == "cosine":
        return MIN + (MAX - MIN) * (1 + math.cos(math.pi * r)) / 2
    return max(MIN, MAX * WARMUP**0.5 / n**0.5)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
def test_lr_equals_the_closed_form(style):
    optimizer, scheduler = build(style)
    for n in range(END + 20):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(closed_form(style, n), rel=1e-12)
        scheduler.step(increment=1)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_endpoints_are_exact(style):
    optimizer, scheduler = build(style)
    assert optimizer.param_groups[0]["lr"] == INIT
    scheduler.step(WARMUP)
    assert optimizer.param_groups[0]["lr"] == MAX
    scheduler.step(END - WARMUP)
    assert optimizer.param_groups[0]["lr"] == MIN
    scheduler.step(1_000_000)
    assert optimizer.param_groups[0]["lr"] == MIN


@pytest.mark.parametrize(
    ("style", "half"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", math.sqrt(2) - 1),
        ("minus_sqrt", 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_is_stable_then_falls(style, half):
    optimizer, scheduler = build("WSD", wsd_decay_steps=20, lr_wsd_decay_style=style)
    group = optimizer.param_groups[0]
    for _ in range(END - 20):
        scheduler.step(1)
        if scheduler.num_steps >= WARMUP:
            assert group["lr"] == MAX
    scheduler.step(10)
    assert group["lr"] == pytest.approx(MIN + half * (MAX - MIN))
    scheduler.step(10)
    assert group["lr"] == pytest.approx(MIN)


def test_no_warmup_starts_at_the_top():
    optimizer, _ = build("cosine", lr_warmup_steps=0)
    assert optimizer.param_groups[0]["lr"] == MAX


def test_increment_counts_samples():
    a, scheduler = build("cosine")
    scheduler.step(7)
    scheduler.step(16)
    b, other = build("cosine")
    for _ in range(23):
        other.step(1)
    assert a.param_groups == b.param_groups


@pytest.mark.parametrize(
    ("style", "at"),
    [("linear", lambda r: r), ("cosine", lambda r: (1 - math.cos(math.pi * r)) / 2)],
)
def test_weight_decay_grows(style, at):
    optimizer, scheduler = build(start_wd=0.1, end_wd=0.5, wd_incr_style=style)
    for n in range(101):
        expected = 0.1 + 0.4 * at(n / 100)
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(expected, rel=1e-12)
        assert optimizer.param_groups[1]["weight_decay"] == 0.0
        scheduler.step(1)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_group_settings_win():
    optimizer = SimpleNamespace(param_groups=[{"max_lr": 1e-2, "min_lr": 1e-2}, {"lr_mult": 0.5}])
    scheduler = OptimizerParamScheduler(
        optimizer, INIT, MAX, MIN, 0, 10, "linear", 0.0, 0.0, 1, "constant"
    )
    scheduler.step(5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)
    assert optimizer.param_groups[1]["lr"] == pytest.approx((MAX + MIN) / 4)


def test_a_group_has_its_own_weight_decay():
    optimizer, scheduler = build(start_wd=0.1, end_wd=0.5, wd_incr_style="linear")
    optimizer.param_groups[1] = {"start_wd": 0.0, "end_wd": 0.2, "wd_mult": 2.0}
    scheduler.step(50)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == pytest.approx([0.3, 0.2])
    assert scheduler.get_wd() == pytest.approx(0.3)


def test_the_logged_learning_rate_is_one_that_nothing_overrides():
    own, usual = {"max_lr": 1e-2}, {"params": [], "default_config": True}
    optimizer = SimpleNamespace(param_groups=[own, usual])
    assert get_canonical_lr_for_logging([own, usual]) is None
    OptimizerParamScheduler(optimizer, MAX, MAX, MIN, 0, 10, "linear", 0.0, 0.0, 1, "constant")
    assert get_canonical_lr_for_logging(optimizer.param_groups) == MAX
    assert get_canonical_lr_for_logging([own]) is None


def test_load_takes_the_checkpoints_schedule_by_default():
    optimizer, scheduler = build("cosine")
    scheduler.step(37)
    saved = scheduler.state_dict()
    again, other = build("linear", max_lr=5e-4)
    other.load_state_dict(saved)
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert other.state_dict() == saved


def test_load_takes_a_state_without_the_last_phase():
    """Megatron saves no `wsd_decay_steps` and no `lr_wsd_decay_style`."""
    _, scheduler = build("WSD", wsd_decay_steps=20, lr_wsd_decay_style="cosine")
    scheduler.step(37)
    saved = scheduler.state_dict()
    expected = dict(saved)
    del saved["wsd_decay_steps"], saved["lr_wsd_decay_style"]
    _, other = build("WSD", wsd_decay_steps=20, lr_wsd_decay_style="cosine")
    other.load_state_dict(saved)
    assert other.state_dict() == expected
    del saved["max_lr"]
    with pytest.raises(KeyError, match="max_lr"):
        other.load_state_dict(saved)


def test_load_may_override_or_insist():
    _, scheduler = build("cosine")
    scheduler.step(37)
    saved = scheduler.state_dict()
    flags = {"use_checkpoint_opt_param_scheduler": False}
    optimizer, other = build("linear", override_opt_param_scheduler=True, **flags)
    other.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(closed_form("linear", 37))
    _, strict = build("linear", **flags)
    with pytest.raises(ValueError, match=r"lr_decay_style is linear here but cosine"):
        strict.load_state_dict(saved)
    _, same = build("cosine", **flags)
    same.load_state_dict(saved)
    assert same.num_steps == 37


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_lr": 1.0}, "min_lr <= max_lr"),
        ({"min_lr": -1.0}, "min_lr <= max_lr"),
        ({"init_lr": 1.0}, "init_lr <= max_lr"),
        ({"lr_warmup_steps": 110}, "lr_warmup_steps 110"),
        ({"lr_warmup_steps": -1}, "lr_warmup_steps -1"),
        ({"lr_decay_style": "exp"}, "'exp' is unknown"),
        ({"lr_decay_style": "WSD"}, "wsd_decay_steps in 1..100"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 101}, "not 101"),
        (
            {"lr_decay_style": "WSD", "wsd_decay_steps": 9, "lr_wsd_decay_style": "x"},
            "'x' is unknown",
        ),
        ({"start_wd": 0.2}, "start_wd <= end_wd"),
        ({"start_wd": -0.2}, "start_wd <= end_wd"),
        ({"end_wd": 0.2}, "make them equal"),
        ({"wd_incr_style": "up"}, "'up' is unknown"),
        ({"wd_incr_style": "linear", "wd_incr_steps": 0}, "wd_incr_steps is 0"),
        ({"override_opt_param_scheduler": True}, "both on"),
    ],
)
def test_bad_schedules_are_refused(changes, words):
    with pytest.raises(ValueError) as error:
        build(**{"style": changes.pop("lr_decay_style", "linear"), **changes})
    assert words in str(error.value)
