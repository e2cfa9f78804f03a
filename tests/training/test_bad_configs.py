"""Every row of `bad_configs`: one clear line, exit code 2, no traceback, nothing started, quickly."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from minimegatron.training import initialize, process_group
from minimegatron.training.arguments import parse_args
from tests.figures import figure
from tests.training.bad_configs import BAD_CONFIGS, GOOD, BadConfig

LIMIT_SECONDS = 10.0


def launcher_environment(rank: int, world_size: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


def run_main(
    monkeypatch, argv: list[str], rank: int, world_size: int, program: str = "pretrain_gpt"
) -> int:
    """The program's `main()` as a process of a job would call it; returns its exit code."""
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *argv])
    for name, value in launcher_environment(rank, world_size).items():
        monkeypatch.setenv(name, value)
    # Were the row not refused, the run would begin; this ends it here.
    monkeypatch.setattr(initialize, "set_global_variables", lambda _: pytest.fail("not refused"))
    with pytest.raises(SystemExit) as ending:
        importlib.import_module(f"minimegatron.{program}").main()
    return ending.value.code


def check_answer(row: BadConfig, stderr: str) -> None:
    lines = stderr.splitlines()
    assert len(lines) == row.lines, stderr
    assert lines[0].startswith("minimegatron: ")
    assert "Traceback" not in stderr
    for word in row.words:
        assert word in stderr, f"{word!r} is missing in: {stderr}"


def test_there_are_enough():
    assert len(BAD_CONFIGS) >= 45
    assert len({str(row) for row in BAD_CONFIGS}) == len(BAD_CONFIGS)


@pytest.mark.parametrize("row", BAD_CONFIGS, ids=str)
def test_refused(row, monkeypatch, capfd, tmp_path):
    begin = time.monotonic()
    argv = row.argv(str(tmp_path))
    assert run_main(monkeypatch, argv, 0, row.world_size, row.program) == 2
    assert time.monotonic() - begin < LIMIT_SECONDS
    out, err = capfd.readouterr()
    assert out == ""
    check_answer(row, err)
    assert not dist.is_initialized()


def test_only_rank_0_speaks(monkeypatch, capfd):
    slept = []
    monkeypatch.setattr(process_group.time, "sleep", slept.append)
    monkeypatch.setattr(process_group.signal, "signal", lambda *_: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run of torchrun's")
    assert run_main(monkeypatch, ["--num-layers", "-1"], rank=1, world_size=2) == 2
    assert capfd.readouterr() == ("", "")
    assert slept == [30]  # long enough for rank 0 to be the first to leave


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_good_is_good(world_size):
    argv = [word for pair in GOOD.items() for word in pair]
    args = parse_args(argv=argv, environ=launcher_environment(0, world_size))
    assert args.data_parallel_size == world_size
    assert args.training.global_batch_size == args.global_batch_size == 16


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [("WORLD_SIZE", "many", "many"), ("RANK", "-1", "-1"), ("RANK", "2", "WORLD_SIZE is 2")],
)
def test_broken_launcher_environment(name, value, word):
    environ = launcher_environment(0, 2) | {name: value}
    argv = [part for pair in GOOD.items() for part in pair]
    with pytest.raises(ValueError, match=re.escape(word)):
        parse_args(argv=argv, environ=environ)


def test_args_defaults_of_unknown_name():
    with pytest.raises(ValueError, match="no_such_argument"):
        parse_args(args_defaults={"no_such_argument": 1}, argv=[], environ={})


# -- As real processes: one of each kind, since each process costs an import of torch --


def test_refused_as_a_process(tmp_path):
    (row,) = (row for row in BAD_CONFIGS if row.flags == "--split none")
    command = [sys.executable, "-m", f"minimegatron.{row.program}", *row.argv(str(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert done.stdout == ""
    check_answer(row, done.stderr)


UNDER_TORCHRUN = BadConfig(
    "--pipeline-model-parallel-size 2 --num-layers 5",
    ("--num-layers 5", "--pipeline-model-parallel-size 2"),
    world_size=2,
)


def test_refused_under_torchrun(tmp_path):
    """The launcher prints a report of its own; what the ranks print is looked at by itself."""
    row, logs = UNDER_TORCHRUN, tmp_path / "logs"
    command = [
        Path(sys.executable).with_name("torchrun"),
        *("--nproc-per-node", str(row.world_size), "--standalone"),
        *("--log-dir", str(logs), "--redirects", "3"),
        *("-m", f"minimegatron.{row.program}", *row.argv(str(tmp_path))),
    ]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ)
    seconds = time.monotonic() - begin
    assert done.returncode != 0
    cause = done.stderr.partition("Root Cause")[2]
    assert re.findall(r"exitcode\s*: (-?\d+)", cause) == ["2"], done.stderr
    # A rank that is still importing torch when rank 0 has refused ends by the launcher's signal.
    exit_codes = set(re.findall(r"exitcode\s*: (-?\d+)", done.stderr))
    assert exit_codes <= {"2", str(-signal.SIGTERM)}, done.stderr
    for rank in range(row.world_size):
        (stderr,) = (path.read_text() for path in logs.glob(f"*/attempt_0/{rank}/stderr.log"))
        if rank == 0:
            check_answer(row, stderr)
        else:
            assert stderr == ""
    figure(f"{row}: refused under torchrun after {seconds:.1f} s")
