"""For every test: one torch thread, the same random examples, the mark `processes` where it starts
some, the mark `full` where left_to_full.toml names it; at the end, the figures they took.
"""

import gc
import os
import re
import signal
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.figures import figures_of

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
gc.disable()  # until all tests are known: a fifth of the time of importing torch, for one

# What a script starts in the background ignores Ctrl-C's signal, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.browser", "tests.process_mark"]

# A test that fails on one machine only, or once, tells nobody what to mend. To hunt: another seed,
# `pytest --hypothesis-profile default --hypothesis-seed N`.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")


LONGEST = (
    "docs/test_browser",
    "notebooks/test_notebooks",
    "exercises/test_catalog",
    "test_mutations",
    "notebooks/test_live_ranks",
    "test_parity",
    "test_parity_experts",
    "docs/test_unrolled_pages",
    "docs/test_kept_page",
    "docs/test_costs_page",
    "gpu/test_parts",
    "conformance/test_rosetta",
    "core/transformer/moe/test_unusual_runs",
    "core/pipeline_parallel/test_order",
    "backend/test_faults",
    "exercises/test_grading",
    "conformance/test_call_order",
    "test_parity_context",
    "exercises/test_engine",
    "training/test_checkpointing",
    "trace/test_exchange",
    "test_seam",
    "test_parity_t5",
    "docs/test_player",
    "core/pipeline_parallel/test_message_limits",
    "training/test_pretrain_gpt",
    "exercises/test_labs",
    "docs/test_why",
    "docs/test_chinese_pages",
    "backend/test_for_anybody",
    "test_failed_step",
    "training/test_bad_configs",
    "training/test_training",
    "test_house",
    "training/test_reruns",
    "training/test_failures",
    "doctor/test_planted_hangs",
    "faults/test_leftovers",
    "benchmarks/test_benchmarks",
    "core/models/test_schedule_plan",
    "conformance/test_multi_token",
    "planner/test_closed_forms",
    "docs/test_player_timing",
    "test_launcher",
    "exercises/test_rooms",
    "rl/test_train_rl",
    "core/pipeline_parallel/test_step_frame",
    "test_parity_bert",
    "trace/test_lines_of_runs",
    "test_plain_runs",
    "docs/test_replay",
    "test_parity_mamba",
    "test_toy_expert",
    "core/test_collectives",
    "core/datasets/test_masked_datasets",
    "docs/test_search",
    "doctor/test_session",
    "docs/test_replay_links",
    "test_parity_mtp",
    "exercises/test_archives",
    "backend/test_handles",
    "faults/test_kill",
    "training/test_pretrain_t5",
    "core/pipeline_parallel/test_combined_1f1b",
    "training/test_pretrain_bert",
    "test_stress",
    "training/test_mamba_runs",
    "exercises/test_torchrun",
)
"""Files that take more than seven seconds each, the longest first. The others take as long together."""


LEFT_TO_FULL = tomllib.loads((Path(__file__).parent / "left_to_full.toml").read_text())
"""By file: which of its tests only `make test-full` runs, and what `make test` has instead."""


files_met: set[str] = set()
patterns_met: set[tuple[str, str]] = set()
"""In this run: files of that table, and patterns of them that a test of the file matches."""


def matches(pattern: str, name: str) -> bool:
    """A star stands for anything, all else for itself."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: at the end, no worker waits for one that began late."""
    for item in items:
        file, _, name = item.nodeid.removeprefix("tests/").partition("::")
        files_met.add(file)
        for pattern in LEFT_TO_FULL.get(file, {"tests": ()})["tests"]:
            if matches(pattern, name):
                patterns_met.add((file, pattern))
                item.add_marker("full")
    places = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.split("::")[0], len(places)))


@pytest.fixture(autouse=True)
def forget_users_schedules() -> Iterator[None]:
    """What a user's file has registered is gone after the test, whichever test comes next."""
    yield
    orders = sys.modules.get("minimegatron.core.orders.orders")
    if orders is None:  # a test that needs no torch
        return
    for name in orders.schedule_names():
        known = orders.get_schedule(name)
        if (known.order or known.messages).__module__ == "user_schedule":
            orders.unregister(name)


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """A test that turns the collector off, or imports what does, turns it on again."""
    yield
    was_enabled = gc.isenabled()
    gc.enable()  # only the test whose fault it is fails
    assert was_enabled, "garbage collection is off after this test"


def pytest_collection_finish() -> None:
    """Half a million objects of torch and of the tests, which will never be garbage. Python looks
    seldom for what tests leave: as often as usual, that took a quarter of this process's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind]
    figures = figures_of(reports)
    if figures:
        terminalreporter.section("figures")
        for test, lines in figures.items():
            for line in lines:
                terminalreporter.write_line(f"{test.split('/')[-1]}: {line}")
