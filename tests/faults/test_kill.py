"""A handful of what `python -m tests.faults.kill --runs 50` does."""

import re
import sys

import pytest

from tests.faults.kill import kill_runs, undisturbed

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks for ranks in /proc")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), num_ranks=2)


@linux_only
def test_killed_runs_end_as_undisturbed_ones(tmp_path, expected):
    outcomes = kill_runs(3, "ranks", num_ranks=2, seed=4, folder=tmp_path, expected=expected)
    assert [outcome.problems for outcome in outcomes] == [[]] * 3


@linux_only
@pytest.mark.timeout(900)  # two starts of torchrun: seconds on a quiet machine
def test_torchrun_starts_killed_runs_again(tmp_path, expected):
    (outcome,) = kill_runs(1, "torchrun", num_ranks=2, seed=5, folder=tmp_path, expected=expected)
    assert outcome.problems == []
    log = next(tmp_path.glob("run-*.log")).read_text()
    place = rf"rank {outcome.victim} \(stage {outcome.victim}/2, tp 0, dp 0\)"
    assert re.search(rf"stops, because a rank is gone: {place}, process \d+", log)
    assert log.count("training ...") == 2
    if outcome.newest:
        assert "loaded checkpoint of iteration" in log
