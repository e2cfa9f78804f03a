"""Time and memory of a state-space scan and of attention, as the sequence grows.

Run: python -m tests.benchmarks.scan_speed. Calls: both forms of the package's scan, and attention.

One layer's scan or attention, forward and backward, in one process, fp32, one sequence, without
projections. The layer's width is h = 64. Its mixer has two heads of 64 with a state of 128 columns, and
segments of 128 tokens; its attention has one head of 64, causal.

- token after token: the recurrence as it is defined;
- in segments: the same in matrix products; this is what trains;
- attention, fused: torch's kernel, which computes scores again in backward;
- attention with its scores: all of them in memory.

"Kept" is what autograd keeps between forward and backward, each storage once.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from minimegatron.core.ssm.ops.ssd_combined import mamba_chunk_scan_combined, mamba_recurrence
from tests.benchmarks import results

LOOP, CHUNKS = "token after token", "in segments"
FUSED, SCORES = "attention, fused", "attention with its scores"
WAYS = (SCORES, CHUNKS, LOOP, FUSED)
LENGTHS = (128, 256, 512, 1024, 2048)
HEADS, HEAD_DIM, STATE_DIM, CHUNK_SIZE = 2, 64, 128, 128
AT, LEAST_RATIO = 512, 5.0


# -- One layer --


def computing(way: str, s: int) -> Callable[[], torch.Tensor]:
    """The scan or attention over s tokens; its inputs have gradients."""
    torch.manual_seed(0)
    if way in (FUSED, SCORES):
        query, key, value = (torch.randn(1, 1, s, HEAD_DIM).requires_grad_() for _ in range(3))
        if way == SCORES:
            return lambda: with_scores(query, key, value)
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = torch.randn(1, s, HEADS, HEAD_DIM)
    dt, A = torch.rand(1, s, HEADS) * 0.1, -torch.rand(HEADS) * 15 - 1
    B, C = (torch.randn(1, s, 1, STATE_DIM) for _ in range(2))
    inputs = [each.requires_grad_() for each in (x, dt, A, B, C)]
    if way == LOOP:
        return lambda: mamba_recurrence(*inputs)
    return lambda: mamba_chunk_scan_combined(*inputs, CHUNK_SIZE)


def with_scores(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention, [b, heads, s, d], with all scores in memory."""
    scores = query @ key.transpose(-1, -2) * query.size(-1) ** -0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, -torch.inf).softmax(-1) @ value


# -- Measuring --


def kept_bytes(compute: Callable[[], torch.Tensor]) -> int:
    """What autograd keeps while this runs."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = compute()
    num_bytes = sum(storage.nbytes() for storage in kept.values())
    del output  # what it keeps must live until it is counted
    return num_bytes


def seconds(compute: Callable[[], torch.Tensor]) -> float:
    """Of one forward and backward."""
    begun = time.perf_counter()
    compute().sum().backward()
    return time.perf_counter() - begun


# -- The command --

COLUMNS = {
    "way": ("way", ""),
    "tokens": ("tokens", ",d"),
    "median_ms": ("median ms", ".2f"),
    "kept_bytes": ("kept, bytes", ",d"),
}


def rows_of(lengths: tuple[int, ...], repetitions: int) -> list[dict]:
    """A row per way and length. All take turns; the first turn is not counted."""
    cases = {(way, s): computing(way, s) for way in WAYS for s in lengths}
    found: dict[tuple, list[float]] = {case: [] for case in cases}
    for repetition in range(repetitions + 1):
        for case, compute in cases.items():
            taken = seconds(compute)
            if repetition:
                found[case].append(taken)
    return [
        {
            "way": way,
            "tokens": s,
            "median_ms": statistics.median(found[way, s]) * 1e3,
            "kept_bytes": kept_bytes(compute),
        }
        for (way, s), compute in cases.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--repetitions", type=int, default=7)
    report = results.Report("scan_speed", __doc__, arguments, argv)
    torch.set_num_threads(1)
    is_quick = report.options.quick
    rows = rows_of((16, 32) if is_quick else LENGTHS, 1 if is_quick else report.options.repetitions)
    report.table("Forward and backward", COLUMNS, rows, "One thread.")
    if not is_quick:
        times = {(row["way"], row["tokens"]): row["median_ms"] for row in rows}
        ratio = times[LOOP, AT] / times[CHUNKS, AT]
        text = (
            f"segments are at least {LEAST_RATIO:g} times as fast as token after token, at "
            f"{AT} tokens"
        )
        report.claim(text, f"{ratio:.1f}", ratio >= LEAST_RATIO)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
