"""A handful of what `python -m tests.faults.kill --runs 50` does."""

import sys

import pytest

from tests.faults.kill import kill_runs

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks for ranks in /proc")


@linux_only
def test_killed_runs_end_as_undisturbed_ones(tmp_path):
    outcomes = kill_runs(3, "ranks", num_ranks=2, seed=4, folder=tmp_path)
    assert [outcome.problems for outcome in outcomes] == [[]] * 3


@linux_only
@pytest.mark.timeout(900)  # two starts of torchrun: seconds on a quiet machine
def test_torchrun_starts_killed_runs_again(tmp_path):
    (outcome,) = kill_runs(1, "torchrun", num_ranks=2, seed=5, folder=tmp_path)
    assert outcome.problems == []
    log = next(tmp_path.glob("run-*.log")).read_text()
    assert "because a rank is gone" in log
    assert log.count("training ...") == 2
    if outcome.newest:
        assert "loaded checkpoint of iteration" in log
