"""The training loop over real ranks: every layout trains the same model on the same data.

One launch per world size; within it, configuration after configuration.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from minimegatron import pretrain_gpt
from minimegatron.core import parallel_state
from minimegatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    update_num_microbatches,
)
from minimegatron.core.rerun_state_machine import (
    RerunStateMachine,
    destroy_rerun_state_machine,
    set_rerun_state_machine,
)
from minimegatron.core.timers import Timers
from minimegatron.core.utils import get_model_config
from minimegatron.training import evaluation, progress, training
from minimegatron.training.arguments import parse_args
from minimegatron.training.evaluation import evaluate
from minimegatron.training.global_vars import destroy_global_vars, get_train_state
from minimegatron.training.initialize import initialize_megatron
from minimegatron.training.pipeline_schedule import schedule_of_run
from minimegatron.training.progress import broadcast_from_last_stage
from minimegatron.training.text_generation import generate
from tests.ranks import run_ranks
from tests.training.bad_configs import USER_ORDERS

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 "
    "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 "
    "--lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --eval-iters 1 "
    "--eval-interval 1000 --padded-vocab-size 512"
)
"""The padding is given, since by default it grows with the tensor-parallel size, and every padded
token takes a little of the probability."""
TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
VP2 = "--num-virtual-stages-per-pipeline-rank 2"


def train_and_evaluate(flags: str, steps: int = 3) -> dict:
    """A short run on this rank; what it saw, which should not depend on the rank or the layout."""
    sys.argv = ["test", *MODEL.split(), *flags.split()]
    initialize_megatron()
    model, optimizer, scheduler = training.setup_model_and_optimizer(pretrain_gpt.model_provider)
    train_iterator, valid_iterator, _ = training._iterators_of_all_chunks(
        pretrain_gpt.train_valid_test_datasets_provider, len(model)
    )
    config, state = get_model_config(model[0]), get_train_state()
    training._connect_schedule(config, model, optimizer)
    losses, norms = [], []
    while state.iteration < steps:
        update_num_microbatches(state.consumed_train_samples)
        loss, skipped, *_, norm, _ = training.train_step(
            pretrain_gpt.forward_step,
            train_iterator,
            model,
            optimizer,
            scheduler,
            config,
            schedule_of_run(),
        )
        assert skipped == 0
        state.iteration += 1
        state.consumed_train_samples += get_current_global_batch_size()
        means = {key: float(value) for key, value in loss.items()}
        losses.append(broadcast_from_last_stage(means)["lm loss"])
        norms.append(norm)
    result = {"losses": losses, "norms": norms, "consumed": state.consumed_train_samples}
    evaluated, _ = evaluate(pretrain_gpt.forward_step, valid_iterator, model, None, config)
    result["valid"] = evaluated["lm loss"]
    result["text"] = generate(model, "def ", num_tokens=2)
    destroy_global_vars()
    parallel_state.destroy_model_parallel()
    return result


def run_all(all_flags: list[str], steps: int = 3) -> list[dict]:
    return [train_and_evaluate(flags, steps) for flags in all_flags]


DROPOUT = "--hidden-dropout 0.1"


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    """The same run in one process, without dropout and with it; and a longer one."""
    return run_ranks(run_alone, 1, timeout=120)[0]


def run_alone() -> dict[str, dict]:
    without, with_dropout = run_all(["", DROPOUT], steps=2)
    return {"": without, DROPOUT: with_dropout, "longer": run_all([""])[0]}


LAYOUTS = [
    f"{TP2} {PP2}",
    f"{PP2} {VP2}",
    f"{PP4} --deallocate-pipeline-outputs",
    f"{TP2} --sequence-parallel --overlap-grad-reduce --ddp-bucket-size 2000",
    f"{TP2} --use-distributed-optimizer --micro-batch-size 2",
    f"{TP4} --calculate-per-token-loss --recompute-granularity selective",
    "--DDP-impl torch",
    f"{PP2} {TP2} --pipeline-model-parallel-layout Et|tttL",
    f"{TP4} {DROPOUT}",
    f"{PP2} {TP2} --pipeline-schedule {USER_ORDERS}:down_and_up --sequence-parallel",
    f"{PP2} {TP2} {VP2} --pipeline-schedule breadth-first --sequence-parallel",
    f"{PP4} --pipeline-schedule gpipe",
]


def test_every_layout_trains_the_same_model(alone):
    results = run_ranks(run_all, 4, LAYOUTS, 2, timeout=240)
    for number, flags in enumerate(LAYOUTS):
        for rank in range(4):
            result = results[rank][number]
            expected = alone[DROPOUT if DROPOUT in flags else ""]
            assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5), (flags, rank)
            assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4), (flags, rank)
            assert result["valid"] == pytest.approx(expected["valid"], rel=1e-5), (flags, rank)
            assert result["consumed"] == 8
            assert result["text"] == results[0][number]["text"]


def test_losses_fall(alone):
    losses = alone["longer"]["losses"]
    assert losses[2] < losses[0] and losses[:2] == alone[""]["losses"]
    assert alone[DROPOUT]["losses"] != losses[:2]
    assert losses[0] == pytest.approx(6.2, abs=0.3)  # ln of the padded vocabulary
    assert alone[""]["text"].startswith("def ")


def test_other_kinds_of_step():
    """What changes the numbers, so that it cannot be compared; but it must run."""
    kinds = [
        "--bf16 --untie-embeddings-and-output-weights",
        "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear",
        "--group-query-attention --num-query-groups 2 --log-num-zeros-in-grad --optimizer sgd",
        "--global-batch-size 8 --rampup-batch-size 4 4 8 --hidden-dropout 0.1 --eod-mask-loss "
        "--dataloader-type cyclic",
    ]
    for flags, result in zip(kinds, run_ranks(run_all, 1, kinds, timeout=120)[0], strict=True):
        assert all(0 < loss < 7 for loss in result["losses"]), flags
    assert result["consumed"] == 4 + 4 + 8


class Rewound:
    """The microbatches of one step; it can begin anew."""

    def __init__(self, batches: list):
        self.batches, self.position = batches, 0

    def __next__(self):
        self.position += 1
        return self.batches[self.position - 1]


class TwiceEachStep(RerunStateMachine):
    """Runs all forwards and backwards of a step again, from the same microbatches."""

    def should_run_forward_backward(self, data_iterator) -> bool:
        self.num_runs += 1
        if data_iterator is not None:
            data_iterator.position = 0
        return self.num_runs <= 2


def train_through_hooks(hooked: bool) -> dict:
    """Three steps by `train`; how often each hook was called, and the sum of all weights after it."""
    sys.argv = ["test", *MODEL.split(), *PP2.split(), "--train-iters", "3"]
    initialize_megatron()
    model, optimizer, scheduler = training.setup_model_and_optimizer(pretrain_gpt.model_provider)
    iterator, _, _ = training._iterators_of_all_chunks(
        pretrain_gpt.train_valid_test_datasets_provider, len(model)
    )
    steps = [[next(iterator) for _ in range(4)] for _ in range(3)] if iterator else [None] * 3
    calls = {"wrapped": 0, "steps": [], "asked for data": [], "read by skipping": []}

    def wrap(function):
        calls["wrapped"] += 1
        return lambda **given: calls["steps"].append(given["num_microbatches"]) or function(**given)

    def data(model, optimizer, iteration):
        calls["asked for data"].append(iteration)
        return Rewound(steps[iteration]) if iterator else None

    if hooked:
        set_rerun_state_machine(TwiceEachStep())
    # Where each step has data of its own, an iteration that is skipped reads none of an earlier step's.
    skip = mock.patch.object(
        training,
        "skip_iteration",
        lambda given: calls["read by skipping"].append(given is not None) and False,
    )
    with skip:
        training.train(
            pretrain_gpt.forward_step,
            model,
            optimizer,
            scheduler,
            iter(sum(steps, [])) if iterator else None,
            None,
            None,
            get_model_config(model[0]),
            wrap_forward_backward_func=wrap if hooked else None,
            data_iterator_func=data if hooked else None,
        )
    weights = sum(float(param.detach().double().sum()) for param in model[0].parameters())
    destroy_rerun_state_machine()
    destroy_global_vars()
    parallel_state.destroy_model_parallel()
    return calls | {"weights": weights}


def train_with_and_without_hooks() -> list[dict]:
    return [train_through_hooks(False), train_through_hooks(True)]


def test_a_line_counts_skipped_steps_whatever_lies_between(monkeypatch):
    args = SimpleNamespace(seq_length=8, log_interval=3, train_iters=6, timing_log_level=1)
    divided_by = []
    timers = SimpleNamespace(log=lambda rank, normalizer: divided_by.append(normalizer))
    state = SimpleNamespace(consumed_train_samples=0)
    printed, totals = [], {}
    for name, value in {
        "get_args": lambda: args,
        "get_train_state": lambda: state,
        "get_timers": lambda: timers,
        "get_current_global_batch_size": lambda: 4,
        "write_curves": lambda *unused: None,
        "broadcast_from_last_stage": dict,
        "print_rank_0": printed.append,
        "dist": SimpleNamespace(get_rank=lambda: 1),
    }.items():
        monkeypatch.setattr(progress, name, value)
    with progress.Progress(6, 0) as bar:
        for iteration, skipped in enumerate((0, 1, 0, 0, 0, 0), 1):
            loss = {} if skipped else {"lm loss": torch.tensor(2.0)}
            progress.training_log(loss, totals, 0.1, iteration, 1.0, skipped, None, None, bar)
            bar.restart()  # as after an evaluation
    assert [("skipped" in line, "skipped 1" in line) for line in printed] == [
        (True, True),
        (False, False),
    ]
    assert all("lm loss 2.0000" in line for line in printed) and totals == {}
    assert divided_by == [3, 3]  # f2: the timers ran on


def test_v1_an_evaluation_is_not_in_the_times_of_steps(monkeypatch):
    timers = Timers(2)
    config = SimpleNamespace(timers=timers)
    watched = []

    def schedule(**unused) -> list:
        watched.append(config.timers)
        with_time(timers("batch-generator", log_level=2), 0.02)
        with_time(timers("of evaluation alone"), 0.02)
        return []

    def with_time(timer, seconds: float) -> None:
        timer.start()
        time.sleep(seconds)
        timer.stop()

    sizes = "global_batch_size micro_batch_size data_parallel_size eval_iters seq_length"
    args = SimpleNamespace(**dict.fromkeys(sizes.split(), 1), decoder_seq_length=None)
    for name, value in {
        "get_args": lambda: args,
        "get_train_state": lambda: SimpleNamespace(consumed_valid_samples=0),
        "schedule_of_run": lambda: schedule,
        "broadcast_from_last_stage": dict,
        "dist": SimpleNamespace(get_rank=lambda: 1),
    }.items():
        monkeypatch.setattr(evaluation, name, value)
    with_time(timers("batch-generator", log_level=2), 0.01)
    of_training = timers("batch-generator").elapsed(reset=False)
    evaluate(pretrain_gpt.forward_step, None, [torch.nn.Identity()], None, config)
    assert watched == [None] and config.timers is timers
    assert timers("batch-generator").elapsed(reset=False) == of_training
    assert timers("batch-generator").active_time() >= of_training + 0.02
    assert "of evaluation alone" not in timers.get_all_timers_string()


def test_hooks_of_the_loop_change_no_number():
    """A wrapped schedule, every step run twice, and data made for each step: the same weights."""
    for plain, hooked in run_ranks(train_with_and_without_hooks, 2, timeout=120):
        assert plain["wrapped"] == 0 and hooked["wrapped"] == 1
        assert hooked["steps"] == [4] * 6 and hooked["asked for data"] == [0, 1, 2]
        assert hooked["weights"] == plain["weights"]
        assert hooked["read by skipping"] == [False] * 3


def test_torn_checkpoint_is_refused_before_the_start(tmp_path):
    Path(tmp_path, "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ValueError, match="names iteration 7"):
        parse_args(argv=["--load", str(tmp_path), *MODEL.split()], environ={})
