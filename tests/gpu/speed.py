"""Parts on one GPU that measure time: tokens per second beside others, and what tracing costs.

Called by: `run_part`. Calls: the benchmark `gpu_mfu`, whose implementations take turns in one process.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from minimegatron import trace
from minimegatron.core import parallel_state
from tests.benchmarks import gpu_mfu
from tests.benchmarks.megatron_like import Shape
from tests.gpu.place import LAUNCH_SECONDS, Finding, Place, at_least, at_most, each

SMALLEST = Shape(2, 64, 2, 32, 2, 2, 512, bf16=True)
TRACING_BOUND = 1.03
MFU_BOUND, PRODUCT_BOUND = 0.15, 0.5


def measure_speed(
    shape: Shape, device: str, is_quick: bool, peers: tuple[str, ...], compile_with: str
) -> dict[str, Any]:
    """In a rank: the peak, and each implementation's tokens per second and share of the peak."""
    peak = gpu_mfu.measured_peak(device, 64 if is_quick else 8192, 2 if is_quick else 10)
    times, missing = gpu_mfu.measure(shape, device, 1 if is_quick else 10, peers, compile_with)
    sheet = gpu_mfu.peak_of(torch.cuda.get_device_name() if device == "cuda" else "")
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    rows = gpu_mfu.rows_of(shape, times, (sheet, peak))
    return {"peak": peak, "sheet": sheet, "rows": rows, "missing": missing, "memory": memory}


def gpt2(place: Place) -> Iterator[Finding]:
    """GPT-2 124M in bf16, two microbatches of 16 x 1,024 tokens: ours beside plain PyTorch.

    Then the same with the layers of each compiled, in another launch: compilers may take long. A
    stand-in does not wait for a compiler of machine code.
    """
    shape = replace(SMALLEST, positions="learned_absolute") if place.is_quick else gpu_mfu.GPT2_124M
    compiled = ("plain, compiled", "ours, compiled")
    yield from each(
        partial(_beside, place, shape, ()),
        partial(_beside, place, shape, compiled, seconds=100.0),
    )


def peers(place: Place) -> Iterator[Finding]:
    """A wider model with rotary positions, beside megatron-core too."""
    yield from _beside(place, SMALLEST if place.is_quick else gpu_mfu.SMALL, ("megatron",))


def _beside(
    place: Place, shape: Shape, others: tuple[str, ...], seconds: float = LAUNCH_SECONDS
) -> Iterator[Finding]:
    judged = place.is_gpu and not place.is_quick
    compile_with = "inductor" if place.is_gpu else "eager"
    options = (place.device, place.is_quick, others, compile_with)
    # The turns of what is compared begin together by a clock on the CPU, which is sent over gloo.
    (found,) = place.launch(measure_speed, 1, shape, *options, with_gloo=True, seconds=seconds)
    yield _product(found, judged)
    for row in found["rows"]:
        yield _speed_of(row, judged)
    ours, plain = (_row(found, name)["median_ms"] for name in ("ours", "plain"))
    yield Finding("tokens/s of ours / those of plain", f"{plain / ours:.2f}", "more is better")
    yield Finding("memory of all together", f"{found['memory'] / 2**30:.1f} GiB")
    for name, reason in found["missing"].items():
        yield Finding(f"left out: {name}", reason)


def _row(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in found["rows"] if row["implementation"] == name)


def _product(found: dict[str, Any], is_judged: bool) -> Finding:
    """What a large product reaches of the data sheet's peak. Far below, something else is wrong."""
    what = "bf16 product, FLOP/s"
    if found["sheet"] is None or not is_judged:
        return Finding(what, f"{found['peak']:.3g}", "no data sheet is known here")
    return at_least(what, found["peak"], PRODUCT_BOUND * found["sheet"])


def _speed_of(row: dict[str, Any], is_judged: bool) -> Finding:
    """Tokens per second of one implementation, and its utilisation by both peaks."""
    sheet = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
    measured = row["mfu_measured"]
    found = (
        f"{row['tokens_per_second']:,.0f} tokens/s, {row['median_ms']:.1f} ms a step; "
        f"MFU {sheet} of the data sheet, {measured:.1%} of the product above"
    )
    must_hold = is_judged and row["implementation"] == "ours"
    expected = f"at least {MFU_BOUND:.0%} of the product" if must_hold else ""
    return Finding(row["implementation"], found, expected, measured >= MFU_BOUND or not must_hold)


# -- Tracing --


def tracing_ratio(shape: Shape, device: str, num_pairs: int) -> float:
    """In a rank: a traced step over one that is not, the median of pairs."""
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    step, ratios = gpu_mfu.build_ours(shape, device).step, []

    def seconds() -> float:
        begun = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def traced() -> float:
        with trace():
            return seconds()

    for number in range(num_pairs):
        # Each comes first as often as the other, and after a step that nobody times: what `trace` does
        # at its end leaves a GPU idle.
        pair = {}
        for way in (seconds, traced) if number % 2 else (traced, seconds):
            seconds()
            pair[way] = way()
        ratios.append(pair[traced] / pair[seconds])
    return statistics.median(ratios)


def tracing(place: Place) -> Iterator[Finding]:
    """A step of GPT-2 124M, recorded, over one that is not."""
    judged = place.is_gpu and not place.is_quick
    shape, num_pairs = (SMALLEST, 3) if place.is_quick else (gpu_mfu.GPT2_124M, 15)
    (ratio,) = place.launch(tracing_ratio, 1, shape, place.device, num_pairs)
    yield at_most("traced step / plain step", ratio, TRACING_BOUND if judged else 100.0)
