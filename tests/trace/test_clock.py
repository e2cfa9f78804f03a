"""One clock for all ranks: the bound holds, and clocks that are hours apart come together."""

import time
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import minimegatron
from minimegatron.core import parallel_state
from minimegatron.tracing.clock import (
    Alignment,
    align_clocks,
    machine_clock_id,
    offset_bounds,
    to_rank_0,
)
from tests.ranks import run_ranks
from tests.trace.recordings import run_step

HOUR = 3_600_000_000_000


@given(
    st.integers(-HOUR, HOUR),
    st.lists(st.tuples(*[st.integers(0, 10**6)] * 5), min_size=1, max_size=10),
)
def test_the_true_offset_lies_within_the_bounds(offset, rounds):
    """Whoever enters and leaves when: no one leaves before all have entered."""
    passes_of_0, passes_of_r, now = [], [], 0
    for pause, late_0, late_r, stays_0, stays_r in rounds:
        entered_0, entered_r = now + pause + late_0, now + pause + late_r
        opens = max(entered_0, entered_r)
        left_0, left_r = opens + stays_0, opens + stays_r
        passes_of_0.append((entered_0, left_0))
        passes_of_r.append((entered_r + offset, left_r + offset))
        now = max(left_0, left_r)
    low, high = offset_bounds(passes_of_0, passes_of_r)
    assert low <= offset <= high


def test_drift_is_interpolated():
    begin, end = Alignment(at=1000, offset=100), Alignment(at=3000, offset=300)
    assert [to_rank_0(when, begin, end) for when in (1000, 2000, 3000)] == [900, 1800, 2700]
    assert to_rank_0(2000, begin, None) == 1900


def skewed(rank: int):
    """A clock of this rank's own: hours off, and a little fast."""
    return lambda: rank * HOUR + int(time.perf_counter_ns() * (1 + rank * 1e-6))


def align_skewed():
    rank = dist.get_rank()
    read = skewed(rank)
    alignment = align_clocks(read, clock_id=f"clock {rank}")
    truth = read() - time.perf_counter_ns()
    truth_of_0 = skewed(0)() - time.perf_counter_ns()
    return alignment, truth - truth_of_0


def test_skewed_clocks_are_found_out():
    results = run_ranks(align_skewed, 3)
    for rank, (alignment, truth) in enumerate(results):
        assert alignment.is_shared == (rank == 0)
        # Reading two clocks for the truth takes time as well.
        assert abs(alignment.offset - truth) <= alignment.residual + 2_000_000
        assert alignment.worst_residual == max(found.residual for found, _ in results)
    assert results[0][0].offset == 0 and results[0][0].residual == 0


def record_skewed(p: int):
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=p)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    run_step(p, 3)
    with minimegatron.trace(read_clock=skewed(rank), clock_id=f"clock {rank}") as run:
        run_step(p, 3)
    return run


def test_a_step_recorded_on_skewed_clocks_is_in_order():
    run = run_ranks(record_skewed, 3, 3)[0]
    step, residual = run.step(0), run.clock_residual_us
    assert 0 < residual < 1e6 and "clocks aligned to within" in run.clock_words
    assert [round(rank.clock.offset_us / 3.6e9, 3) for rank in run.ranks] == [0, 1, 2]
    assert len(step.transfers) == 12
    for message in step.transfers:
        assert message.arrived_at >= message.sent_at - 2 * residual
    assert step.makespan < 60e6


def test_ranks_of_one_machine_share_their_clock(plain):
    assert all(rank.clock.is_shared and rank.clock.offset_us == 0 for rank in plain.ranks)
    assert plain.clock_words.startswith("all ranks on one clock; barriers confirm it to within")
    assert plain.clock_residual_us == max(rank.clock.residual_us for rank in plain.ranks) > 0
    with pytest.raises(IndexError):
        plain.ranks[3]


def test_b1_a_clock_whose_name_is_hidden_has_none(monkeypatch):
    def hidden(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", hidden)
    monkeypatch.setattr(Path, "exists", lambda self: True)
    assert machine_clock_id() == ""
