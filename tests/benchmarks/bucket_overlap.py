"""How much of the gradients' summation is hidden behind the backward pass, by bucket size.

Run: python -m tests.benchmarks.bucket_overlap. Calls: `DistributedDataParallel` of minimegatron.core
and of megatron-core, `turns`.

Eight layers of 1,000,000 float32 weights, copied on d = 2, 3, 4 ranks. A layer's forward and backward
sleep, as a layer on its own device would leave the processor free; their gradients are real and are
summed by gloo. Two microbatches; only the second sends. In turns on the same ranks:

- compute only: nothing is sent;
- off: everything is sent after the last backward (overlap_grad_reduce off);
- k layers: overlap_grad_reduce, with buckets of k layers.

Hidden is (off - on) / (off - compute only): 100 % means that communication costs no time. The first
layer's bucket, the last to be filled, can never be hidden.
"""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import minimegatron
from minimegatron.launching import launcher
from tests.benchmarks import results
from tests.benchmarks.megatron_like import OURS, THEIRS, load, surroundings
from tests.benchmarks.peers import PeerMissing
from tests.benchmarks.turns import Times, take_turns

NUM_MICROBATCHES = 2
FORWARD_SECONDS, BACKWARD_SECONDS = 0.004, 0.012
THEIR_BUCKET_LAYERS = 1


@dataclass(frozen=True)
class Size:
    """Of the model, and which buckets are tried."""

    num_layers: int = 8
    weights_per_layer: int = 1_000_000
    bucket_layers: tuple[int, ...] = (1, 2, 4, 8)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        time.sleep(FORWARD_SECONDS)
        ctx.layer = layer
        return x + weight[0]

    @staticmethod
    def backward(ctx, grad):
        time.sleep(BACKWARD_SECONDS)
        return grad, ctx.layer.gradient, None


class SlowLayer(nn.Module):
    """Takes its time, and has a gradient of some size."""

    def __init__(self, num_weights: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_weights))
        self.gradient = torch.full((num_weights,), float(dist.get_rank() + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(x, self.weight, self)


def build(core: SimpleNamespace, size: Size, bucket_layers: int | None) -> Callable:
    """One step; `bucket_layers` None for no overlap, 0 for no communication at all."""
    torch.manual_seed(1)
    config = core.TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    overlap = bool(bucket_layers)
    ddp_config = core.DistributedDataParallelConfig(
        overlap_grad_reduce=overlap,
        bucket_size=bucket_layers * size.weights_per_layer if overlap else None,
    )
    layers = nn.Sequential(*(SlowLayer(size.weights_per_layer) for _ in range(size.num_layers)))
    model = core.DistributedDataParallel(config, ddp_config, layers)
    x = torch.zeros(1, requires_grad=True)

    def step() -> None:
        with surroundings(core):
            model.zero_grad_buffer()
            for microbatch in range(NUM_MICROBATCHES):
                is_last = microbatch == NUM_MICROBATCHES - 1
                with nullcontext() if is_last and bucket_layers != 0 else model.no_sync():
                    model(x).backward()
            if bucket_layers != 0:
                model.finish_grad_sync()

    step.model = model
    return step


def check(step: Callable, num_ranks: int) -> None:
    """Every rank must have the mean of all ranks' gradients, over all microbatches."""
    mean = NUM_MICROBATCHES * (num_ranks + 1) / 2
    for param in step.model.parameters():
        if not torch.allclose(param.main_grad, torch.tensor(mean)):
            raise RuntimeError(f"gradient is {param.main_grad[0].item()}, expected {mean}")


def _layers(number: int) -> str:
    return "1 layer" if number == 1 else f"{number} layers"


SAME = f"ours: {_layers(THEIR_BUCKET_LAYERS)}"
"""Ours with the buckets that megatron-core's is tried with."""


def measure(size: Size, repetitions: int) -> dict[str, Times]:
    """Times by way, on each rank."""
    ways: dict[str, Callable] = {}
    for package, name in ((OURS, "ours"), (THEIRS, "megatron")):
        try:
            core = load(package)
        except PeerMissing:
            continue
        with surroundings(core):
            core.parallel_state.initialize_model_parallel()
            tried = size.bucket_layers if package == OURS else (THEIR_BUCKET_LAYERS,)
            if package == OURS:
                ways["compute only"] = build(core, size, 0)
            ways[f"{name}: off"] = build(core, size, None)
            for bucket_layers in tried:
                ways[f"{name}: {_layers(bucket_layers)}"] = build(core, size, bucket_layers)
    ways[SAME + "'"] = ways[SAME]
    for name, step in ways.items():
        # Twice, because megatron-core learns in its first step which gradients will come.
        step()
        step()
        if name != "compute only":
            check(step, dist.get_world_size())
    return take_turns(ways, repetitions)


# -- The command --

COLUMNS = {
    "d": ("d", "d"),
    "way": ("way", ""),
    "median_ms": ("median ms", ".1f"),
    "to_off": ("/ ours: off", ".3f"),
    "hidden": ("hidden", ".0%"),
    "noise": ("noise", ".1%"),
    "ours": ("ours against it", ""),
}


def rows_of(num_ranks: int, times: dict[str, Times]) -> list[dict]:
    """A row per way; megatron's overlap is judged against ours with the same buckets."""
    noise = results.gap(times[SAME].wall, times[SAME + "'"].wall)
    off = {name.partition(":")[0]: t.median for name, t in times.items() if name.endswith(": off")}
    least = times["compute only"].median
    rows = []
    for name, measured in times.items():
        row = {
            "d": num_ranks,
            "way": name,
            "median_ms": measured.median * 1e3,
            "to_off": measured.median / off["ours"],
            "repetitions": len(measured.wall),
            "noise": noise,
        }
        if "layer" in name:
            own_off = off[name.partition(":")[0]]
            row["hidden"] = (own_off - measured.median) / (own_off - least)
        if name.startswith("megatron"):
            rival = "ours: off" if name.endswith("off") else SAME
            row["ours"] = results.verdict(times[rival].median, measured.median, noise)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--repetitions", type=int, default=9)
    report = results.Report("bucket_overlap", __doc__, arguments, argv)
    num_ranks, size, repetitions = (2, 3, 4), Size(), report.options.repetitions
    if report.options.quick:
        num_ranks, size, repetitions = (2,), Size(2, 1000, (1,)), 1
    else:
        launcher.PRELOADED.append("tests.benchmarks.preload")
    rows = []
    for d in num_ranks:
        options = {"backend": "gloo", "device": "cpu"}
        rows += rows_of(d, minimegatron.launch(measure, d, size, repetitions, **options)[0])
    report.table("Step with and without overlap", COLUMNS, rows, NOTE)
    for d in num_ranks:
        ours = [r for r in rows if r["d"] == d and r["way"].startswith("ours:")]
        overlapping = [r for r in ours if "layer" in r["way"] and not r["way"].endswith("'")]
        best = min(overlapping, key=lambda row: row["median_ms"])
        found = f"{best['to_off']:.3f} of the time, buckets of {best['way'][6:]}"
        report.claim(f"d={d}: overlap saves time", found, best["to_off"] < 1 - best["noise"])
    return report.finish()


NOTE = "Noise: the gap between one way under two names (1 layer, 1 layer')."

if __name__ == "__main__":
    sys.exit(main())
