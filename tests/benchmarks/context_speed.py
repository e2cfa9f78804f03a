"""Tokens per second where two ranks share each sequence, beside two copies of the model.

Run: python -m tests.benchmarks.context_speed. Calls: `TinyGPT` and its optimizer, `turns`.

The same GPT and the same global batch on two ranks, for a short and a long sequence. In turns:

- two copies: c = 1, each rank has whole sequences, half of them;
- ring, gather, heads: c = 2, both ranks have half of every sequence, and attention reaches the other
  half by `--cp-comm-type` p2p, all_gather or a2a.

All must find the same norm of the gradient in their first step. With c = 2 a rank has twice as many
microbatches, of half as many tokens each. Two copies attend by torch's fused kernel; a ring multiplies
block by block, and a gather also multiplies what is masked afterwards. megatron-core is not beside
them: without Transformer Engine its attention refuses c > 1.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import minimegatron
from minimegatron.launching import launcher
from minimegatron.training.tiny_gpt import TinyGPT
from tests.benchmarks import results
from tests.benchmarks.turns import Times, timed

NUM_RANKS = 2
WAYS: dict[str, dict[str, Any]] = {
    "two copies": {},
    "two copies'": {},
    "ring": {"context_parallel_size": 2, "cp_comm_type": "p2p"},
    "gather": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "heads": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
}
"""Fields of the configuration, by way."""
STEPS_PER_TURN = 2


@dataclass(frozen=True)
class Case:
    """Of a GPT and its global batch, in sequences of one microbatch each."""

    seq_length: int
    batch: int
    num_layers: int = 4
    hidden_size: int = 96

    @property
    def tokens(self) -> int:
        return self.seq_length * self.batch

    def __str__(self) -> str:
        return f"{self.seq_length} tokens, {self.batch} sequences"


CASES = [Case(128, 16), Case(1024, 4)]
QUICK = Case(16, 2, num_layers=1, hidden_size=16)


# -- On a rank --


def build(case: Case, way: dict[str, Any]) -> Callable[[], float]:
    """A step of the whole global batch; returns the norm of the gradient. Its groups replace others."""
    gpt = TinyGPT(
        seq_length=case.seq_length,
        micro_batch_size=1,
        num_layers=case.num_layers,
        hidden_size=case.hidden_size,
        calculate_per_token_loss=True,
        **way,
    )
    optimizer = gpt.optimizer(clip_grad=1.0)
    num_microbatches = case.batch // gpt.groups.dp.size()
    data = gpt.microbatches(num_microbatches)

    def step() -> float:
        optimizer.zero_grad()
        gpt.step(num_microbatches, data=data)
        return optimizer.step()[1]

    return step


def measure(case: Case, repetitions: int) -> dict[str, Times]:
    """Times by way. Ways take turns; each turn begins with new groups, and a step that is not timed."""
    mine: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    norms, order = {}, list(WAYS)
    for repetition in range(repetitions):
        turn = repetition % len(order)
        for name in order[turn:] + order[:turn]:
            step = build(case, WAYS[name])
            norms[name] = step()
            mine[name] += [timed(step) for _ in range(STEPS_PER_TURN)]
    check_same(norms)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = {}
    for name in WAYS:
        steps = list(zip(*(rank[name] for rank in everyone), strict=True))
        found[name] = Times(
            [max(wall for wall, _ in ranks) for ranks in steps],
            [sum(processor for _, processor in ranks) for ranks in steps],
        )
    return found


def check_same(norms: dict[str, float]) -> None:
    """Raises RuntimeError if a way computed another gradient."""
    first = norms["two copies"]
    if any(abs(norm - first) > 1e-4 * first for norm in norms.values()):
        raise RuntimeError(f"not the same gradient: norms {norms}")


# -- The command --

COLUMNS = {
    "case": ("case", ""),
    "way": ("way", ""),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "median_ms": ("median ms per step", ".1f"),
    "processor_ms": ("processor ms", ".1f"),
    "speed": ("speed / two copies", ".2f"),
    "noise": ("noise", ".1%"),
}


def rows_of(case: Case, times: dict[str, Times]) -> list[dict]:
    """A row per way."""
    base = times["two copies"]
    noise = results.gap(base.wall, times["two copies'"].wall)
    return [
        {
            "case": str(case),
            "way": name,
            "tokens_per_second": case.tokens / found.median,
            "median_ms": found.median * 1e3,
            "processor_ms": found.processor_median * 1e3,
            "speed": base.median / found.median,
            "noise": noise,
        }
        for name, found in times.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--repetitions", type=int, default=10)
    report = results.Report("context_speed", __doc__, arguments, argv)
    cases, repetitions = CASES, report.options.repetitions
    if report.options.quick:
        cases, repetitions = [QUICK], 1
    else:
        launcher.PRELOADED.append("tests.benchmarks.preload")
    rows = []
    for case in cases:
        options = {"backend": "gloo", "device": "cpu"}
        rows += rows_of(
            case, minimegatron.launch(measure, NUM_RANKS, case, repetitions, **options)[0]
        )
    report.table("Tokens per second", COLUMNS, rows, "Noise: the gap between both 'two copies'.")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
