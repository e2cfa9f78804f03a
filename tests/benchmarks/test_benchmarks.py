"""The benchmarks run, in their smallest form; what they work out from the times is right."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minimegatron.core import parallel_state
from tests.benchmarks import gpu_mfu, measure, results, summary
from tests.benchmarks.__main__ import NAMES
from tests.benchmarks.demo_speed import demo_arguments, shape_of
from tests.benchmarks.megatron_like import Shape
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
TINY = Shape(2, 32, 4, 16, 2, 2, 64)


SLOW = {"demo_speed"}
"""Starts runs of the whole demo; `make test-full` has it."""


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in NAMES]
)
def test_runs(name: str, tmp_path, capsys):
    path = tmp_path / f"{name}.json"
    module = importlib.import_module(f"tests.benchmarks.{name}")
    assert module.main(["--quick", "--json", str(path)]) == 0
    kept = json.loads(path.read_text())
    assert kept["command"] in capsys.readouterr().out
    assert kept["title"] and kept["machine"]["torch"]
    assert bool(kept["tables"]) or (name == "gpu_mfu" and not torch.cuda.is_available())
    for table in kept["tables"]:
        assert table["rows"]
        for row in table["rows"]:
            for value, (_, form) in ((row.get(k), c) for k, c in table["columns"].items()):
                results.written(value, form)
    assert all((tmp_path / picture).stat().st_size > 1000 for picture in kept["pictures"])


# -- A GPU's benchmark without one --


def train_on_cpu(bf16: bool) -> dict[str, float]:
    shape = replace(TINY, bf16=bf16)
    times, missing = gpu_mfu.measure(shape, "cpu", 1)
    rows = gpu_mfu.rows_of(shape, times, (1e12, 1e12))
    parallel_state.destroy_model_parallel()
    return {row["implementation"]: row["mfu"] for row in rows} | dict.fromkeys(missing, 1.0)


def test_gpu_steps_run_on_a_cpu_too():
    (utilisation,) = run_ranks(train_on_cpu, 1, True)
    assert set(utilisation) == {"ours", "ours'", "plain", "megatron"}
    assert all(0 < value <= 1 for value in utilisation.values())


def test_flops_are_those_that_torch_counts():
    model = gpu_mfu.PlainGPT(TINY)
    tokens = torch.zeros(TINY.micro_batch_size, TINY.seq_length, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    # Torch counts all of causal attention, of which half is needed.
    h, s = TINY.hidden_size, TINY.seq_length
    masked = TINY.micro_batch_size * TINY.num_layers * 2 * s * s * h
    assert counter.get_total_flops() == gpu_mfu.step_flops(replace(TINY, num_microbatches=1)) + (
        3 * masked
    )


# -- Who won --


def row(name: str, median: float, excess: float) -> dict:
    return {"case": "c", "implementation": name, "median_ms": median, "excess": excess}


def test_a_gap_within_the_noise_is_a_tie():
    rows = [row("ours", 100, 0.02), row("ours'", 103, 0.05), row("megatron", 102, 0.04)]
    rows += [row("torch", 110, 0.1), row("minimal", 90, 0.0)]
    measure.judge([rows])
    verdicts = {r["implementation"]: r.get("ours") for r in rows}
    assert verdicts == {
        "ours": None,
        "ours'": None,
        "megatron": "tied",
        "torch": "won",
        "minimal": "lost",
    }
    assert measure.score(rows) == {"won": 1, "tied": 1, "lost": 1}


def test_excess_is_compared_with_the_best_of_megatron():
    rows = [row("ours", 9, 0.5), row("ours-overlap", 5, 0.03), row("megatron", 6, 0.3)]
    assert measure.excess_ratio(rows) == pytest.approx(0.1)
    rows.append(row("megatron-flush", 4, 0.06))
    assert measure.excess_ratio(rows) == pytest.approx(0.5)
    rows[1]["excess"] = -0.2
    assert measure.excess_ratio(rows) == pytest.approx(measure.LEAST_EXCESS / 0.06)
    assert measure.excess_ratio([row("ours", 9, 0.5)]) is None


def test_summary_takes_all_cases_together(tmp_path):
    rows = [
        {**row(name, 1.0, excess), "case": case, "ours": "won"}
        for case, ours, theirs in (("a", 0.1, 0.2), ("b", 0.1, 0.8))
        for name, excess in (("ours", ours), ("megatron", theirs))
    ]
    for name in summary.PIPELINES:
        kept = {"tables": [{"rows": rows}], "claims": [], "seconds": 1.0}
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    (claim,) = summary.summarise(tmp_path)
    assert (claim["found"], claim["is_kept"]) == ("0.250", True)
    kept = json.loads((tmp_path / "summary.json").read_text())
    assert [r["benchmark"] for r in kept["rows"]] == ["paced", "step_time"]


def test_the_demo_that_is_timed_is_that_of_the_makefile():
    argv = demo_arguments("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    shape = shape_of(argv)
    assert (shape.tp, shape.pp, shape.num_microbatches) == (2, 2, 8)
    assert (shape.num_layers, shape.hidden_size, shape.seq_length) == (4, 96, 64)


def test_page_shows_commands_tables_and_claims(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "tools")
    page = importlib.import_module("pages.benchmarks_page")
    assert set(page.TITLES) == set(NAMES)
    assert "make bench" in page.benchmarks_page(tmp_path)
    argv = ["--json", str(tmp_path / "paced.json")]
    report = results.Report("paced", "Title.\n\nRun: x.\n\nTold.", results.parser("Title."), argv)
    report.table(
        "T", {"way": ("way", ""), "ratio": ("ratio", ".2f")}, [{"way": "a|b", "ratio": 0.5}]
    )
    report.claim("ours is first", "0.5", True)
    report.claim("nobody lost", "1", False)
    assert report.finish() == 1
    summary.summarise(tmp_path)
    text = page.benchmarks_page(tmp_path)
    assert f"$ {report.command}" in text and "Told." in text and "Run: x." not in text
    assert "| a\\|b | 0.50 |" in text
    assert "| ours is first | 0.5 | holds |" in text
    assert "| nobody lost | 1 | **does not hold** |" in text
