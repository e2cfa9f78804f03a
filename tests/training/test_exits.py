"""Runs that end early, and results that should end them: together, saved, in words."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from minimegatron import pretrain_gpt
from minimegatron.core import parallel_state
from minimegatron.core.dist_checkpointing.core import CheckpointingException
from minimegatron.core.rerun_state_machine import RerunStateMachine, get_rerun_state_machine
from minimegatron.launching import launcher
from minimegatron.training import exit_conditions, failures
from minimegatron.training.checkpoint_folder import complete_iterations
from minimegatron.training.global_vars import destroy_global_vars, get_args, get_train_state
from tests.ranks import run_ranks
from tests.training.short_runs import MODEL, PP2
from tests.training.test_failures import identity_of

# -- Ending early --


class Signalled:
    """`pretrain_gpt.forward_step` during which one rank receives a signal, at iteration 3."""

    def __init__(self, number: int | None):
        self.number = number

    def __call__(self, data_iterator, model):
        if get_args().rank == 1 and get_train_state().iteration == 2 and self.number:
            os.kill(os.getpid(), self.number)
            self.number = None
        return pretrain_gpt.forward_step(data_iterator, model)


def whole_run(folder: str, flags: str, number: int | None = None) -> tuple[int, str | None, bool]:
    """`pretrain`: where it stopped, why, and whether signals mean what they meant before."""
    sys.argv = ["test", *MODEL.split(), *flags.split()]
    sys.argv += f"--save {folder} --load {folder} --eval-iters 1 --log-interval 1".split()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    pretrain_gpt.pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        pretrain_gpt.ModelType.encoder_or_decoder,
        Signalled(number),
    )
    after = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    state = get_train_state()
    destroy_global_vars()
    parallel_state.destroy_model_parallel()
    return state.iteration, state.exit_reason, before == after


def runs_that_end(folder: str) -> list[tuple]:
    results = [
        whole_run(f"{folder}/term", PP2, signal.SIGTERM),
        whole_run(f"{folder}/usr1", PP2, signal.SIGUSR1),
        whole_run(f"{folder}/interval", f"{PP2} --exit-interval 4 --tensorboard-dir {folder}/tb"),
        whole_run(f"{folder}/interval", f"{PP2} --exit-interval 4 --tensorboard-dir {folder}/tb"),
    ]
    # As if only this rank's clock said that the time is over.
    if torch.distributed.get_rank() == 1:
        exit_conditions._start_time = time.monotonic() - 3600
    results.append(whole_run(f"{folder}/duration", f"{PP2} --exit-duration-in-mins 50"))
    exit_conditions._start_time = time.monotonic()
    results.append(whole_run(f"{folder}/end", f"{PP2} --train-iters 5 --exit-interval 5"))
    return results


def test_ranks_end_together_and_save(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is missing")
    expected = [
        ("term", 3, "received SIGTERM"),
        ("usr1", 3, "received SIGUSR1"),
        ("interval", 4, "--exit-interval 4"),
        ("interval", 8, "--exit-interval 4"),
        ("duration", 1, "--exit-duration-in-mins 50"),
        ("end", 5, None),
    ]
    for results in run_ranks(runs_that_end, 2, str(tmp_path), timeout=200):
        for (folder, iteration, reason), result in zip(expected, results, strict=True):
            assert result == (iteration, reason, True)
            assert iteration in complete_iterations(tmp_path / folder)
    check_curves(tmp_path / "tb")


def check_curves(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(folder))
    curves.Reload()
    assert {"lm loss", "lr", "grad norm", "tokens/s"} <= set(curves.Tags()["scalars"])
    points = [(event.step, event.value) for event in curves.Scalars("lm loss")]
    assert [step for step, _ in points] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert points[-1][1] < points[0][1]


def test_a_signalled_process_saves_and_exits_with_0(tmp_path):
    """One real process, as a scheduler would treat it."""
    command = [sys.executable, "-u", "-m", "minimegatron.pretrain_gpt", *MODEL.split()]
    command += f"--train-iters 100000 --log-interval 1 --save {tmp_path}".split()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        for line in run.stdout:
            if line.startswith(" iteration"):
                break
        run.send_signal(signal.SIGTERM)
        out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    (iteration,) = complete_iterations(tmp_path)
    assert f"exiting after iteration {iteration}: received SIGTERM" in out
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(iteration)
    assert out.count("saved checkpoint") == 1  # by the signal, and not again at the end
    assert "validation loss" not in out and "after training is done" not in out


def test_a_failed_checkpoint_ends_in_one_line(monkeypatch):
    endings = []

    def end(self, text, exit_code, linger=0.0):
        endings.append((text, exit_code, linger > 0))
        raise SystemExit

    watch = failures.PeerWatch(identity_of(os.getpid()), [identity_of(os.getpid())])
    monkeypatch.setattr(failures.PeerWatch, "_end", end)
    with pytest.raises(SystemExit):
        watch.end_after(CheckpointingException("cannot save x: No space left on device"))
    monkeypatch.undo()
    watch.stop()
    assert endings == [("", 1, True)]  # identity_of is rank 1; rank 0 speaks


# -- Results that should end it --


class Planted:
    """`pretrain_gpt.forward_step` with something spoilt in microbatch 3 of iteration 2.

    `loss`: the last stage's losses are multiplied by `value`; `gradient`: what the first stage gets
    back is.
    """

    def __init__(self, where: str, value: float):
        self.where, self.value = where, value

    def __call__(self, data_iterator, model):
        machine = get_rerun_state_machine()
        while machine.samples().get("loss", [0, 0])[1] < 100:
            machine.is_unexpectedly_large(torch.tensor(6.5), 10.0, "loss")
        output, loss_func = pretrain_gpt.forward_step(data_iterator, model)
        chunk = model.module
        microbatch = chunk.current_microbatch
        if model.training and (get_train_state().iteration, microbatch) == (1, 3):
            if self.where == "loss" and chunk.post_process:
                output = output * self.value
            if self.where == "gradient" and chunk.pre_process:
                output.register_hook(lambda gradient: gradient * self.value)
        return output, loss_func


def planted_run(where: str, value: float, flags: str = "") -> str:
    """What such a run prints on this rank, if it comes to its end."""
    sys.argv = ["test", *MODEL.split(), *PP2.split(), "--train-iters", "2", *flags.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        pretrain_gpt.pretrain(
            pretrain_gpt.train_valid_test_datasets_provider,
            pretrain_gpt.model_provider,
            pretrain_gpt.ModelType.encoder_or_decoder,
            Planted(where, value),
        )
    return out.getvalue()


FATAL = {
    # what is spoilt, the rank that must be named, what must be said
    ("loss", float("nan")): (
        1,
        r"the loss is NaN in microbatch 3 of iteration 2 \(training sample 7\); look at its "
        r"samples, lower --lr or --clip-grad",
    ),
    ("loss", float("inf")): (
        1,
        r"the loss is Inf in microbatch 3 of iteration 2 \(training sample",
    ),
    ("gradient", float("inf")): (
        0,
        r"rank 0: gradients are not finite in bucket 0, before data-parallel summation: .*"
        r"embedding\.word_embeddings\.weight \(\d+ NaN, \d+ Inf of \d+\).*; look at this rank's "
        r"batch, lower the learning rate",
    ),
}


@pytest.mark.parametrize("planted", FATAL, ids=str)
def test_a_bad_result_is_named(planted):
    rank, words = FATAL[planted]
    with pytest.raises(launcher.RankError) as failure:
        run_ranks(planted_run, 2, *planted, timeout=100)
    assert failure.value.ranks[0] == rank
    assert re.search(rf"rank {rank} .*{words}", str(failure.value), re.DOTALL)


def test_a5_a_spiky_loss_is_told_and_training_goes_on():
    flags = "--check-for-spiky-loss --log-interval 1"
    first, last = run_ranks(planted_run, 2, "loss", 20.0, flags, timeout=100)
    assert re.search(
        r"^rank 1, iteration 2: unexpected result 1\d\d(\.\d*)?: spiky loss on rank 1 \(stage 1/2, "
        r"tp 0, dp 0\) in microbatch 3 of iteration 2 \(training sample 7\), where the first hundred "
        r"were at most 6\.5; look at its samples, or lower --lr$",
        last,
        re.MULTILINE,
    ), last
    assert last.count("spiky loss") == 1 and "spiky" not in first
    assert " iteration 2/2 |" in first


def test_spiky():
    machine = RerunStateMachine()
    spiky = [
        machine.is_unexpectedly_large(torch.tensor(value), 10.0, "loss", num_samples=3)
        for value in (1.0, 4.0, 2.0, 39.0, 41.0, 2.0, float("nan"))
    ]
    assert spiky == [False, False, False, False, True, False, False]
    assert machine.largest("loss") == 4.0
    assert not machine.is_unexpectedly_large(torch.tensor(50.0), 10.0, "loss", 3, resample=True)
    assert machine.validate_result(torch.tensor(1.0), torch.isnan, "bad") is None
    with pytest.raises(RuntimeError, match="bad"):
        machine.validate_result(torch.tensor(1.0), torch.isfinite, "bad")
    with pytest.raises(RuntimeError, match="very bad"):
        machine.validate_result(
            torch.tensor(1.0), torch.isfinite, "bad", describe=lambda: "very bad"
        )


def test_a5_a_result_that_is_not_fatal_is_logged(caplog):
    """As Megatron's `loss_func` asks for it: nobody looks at what comes back."""
    machine = RerunStateMachine()
    machine.begin_step(7)
    assert machine.should_run_forward_backward(None)
    for fatal in (True, False):
        with contextlib.suppress(RuntimeError):
            result = machine.validate_result(
                torch.tensor(-130.5),
                torch.isfinite,
                message="Spiky loss",
                tolerance=0.0,
                fatal=fatal,
            )
    assert result is None and [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == ["rank 0, iteration 7: unexpected result -130.5: Spiky loss"]
