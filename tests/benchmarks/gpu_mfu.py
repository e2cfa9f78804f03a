"""Model FLOP utilisation of a GPT on one GPU, beside plain PyTorch and megatron-core.

Run: python -m tests.benchmarks.gpu_mfu. Calls: `megatron_like` for the step of either package. Without
a GPU it says so and ends. Read by: tests/gpu/speed.py.

All train the same shape in bf16 with Adam, and take turns in one process:

- ours, megatron: GPT, DDP and optimizer of the package; bf16 weights, float32 copies and gradients;
- plain: blocks of torch's own modules, float32 weights under autocast, fused AdamW;
- ours, compiled; plain, compiled: the same, each layer through `torch.compile`.

Utilisation is the work that the model needs (three times the forward's multiplications and additions,
causal attention counted half; nothing for recomputation) over time and the GPU's peak: the data
sheet's for dense bf16 where it is known here, and what a large matrix product reaches in this run.
"""

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minimegatron.core.utils import set_device, unwrap_model
from tests.benchmarks import results
from tests.benchmarks.megatron_like import OURS, THEIRS, Shape, Training, load
from tests.benchmarks.peers import PeerMissing
from tests.benchmarks.stages import Block
from tests.benchmarks.turns import Times, take_turns

# Dense bf16 FLOP/s of the data sheets, by what the device's name contains; the first that fits.
PEAKS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "L4": 121e12,
    "4090": 165e12,
}

LARGE = Shape(12, 2048, 16, 1024, 8, 2, 50304, bf16=True)
SMALL = Shape(12, 1024, 16, 1024, 4, 2, 50304, bf16=True)
LARGE_NEEDS_BYTES = 70e9
GPT2_124M = Shape(12, 768, 12, 1024, 16, 2, 50304, bf16=True, positions="learned_absolute")
"""GPT-2's smallest; its 50,257 tokens are padded to a multiple of 128."""


# -- Arithmetic --


def forward_flops(shape: Shape) -> float:
    """Of one microbatch through the GPT, one multiplication and one addition counting two.

    Per token and layer: 2 x (4 h^2 for queries, keys, values and projection + 8 h^2 for the MLP),
    and 2 x 2 s h for the attention, of which causal attention needs half; then 2 h V for the logits.

    >>> forward_flops(Shape(1, 4, 1, 2, 1, 1, 10)) == 2 * (24 * 16 + 2 * 2 * 4 + 2 * 4 * 10)
    True
    """
    h, s = shape.hidden_size, shape.seq_length
    per_layer = 24 * h * h + 2 * s * h
    per_token = shape.num_layers * per_layer + 2 * h * shape.vocab_size
    return float(shape.micro_batch_size * s * per_token)


def step_flops(shape: Shape) -> float:
    """Forward, and a backward that costs twice as much, of every microbatch."""
    return 3 * shape.num_microbatches * forward_flops(shape)


def peak_of(device_name: str) -> float | None:
    """
    >>> peak_of("NVIDIA H100 80GB HBM3") == 989e12, peak_of("GeForce GTX 970") is None
    (True, True)
    """
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)


def measured_peak(device: str, size: int = 8192, repetitions: int = 10) -> float:
    """FLOP/s of a bf16 matrix product, the best of some."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(repetitions + 3):
        _synchronize(device)
        begun = time.perf_counter()
        a @ a
        _synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


# -- Plain PyTorch --


class PlainGPT(nn.Module):
    """What one writes without a framework: [b, s] tokens in, the mean loss out."""

    def __init__(self, shape: Shape):
        super().__init__()
        h = shape.hidden_size
        self.embedding = nn.Embedding(shape.vocab_size, h)
        self.position = nn.Embedding(shape.seq_length, h)
        self.blocks = nn.Sequential(
            *(Block(h, shape.num_attention_heads) for _ in range(shape.num_layers))
        )
        self.norm = nn.LayerNorm(h)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens.t()) + self.position.weight[: tokens.size(1)].unsqueeze(1)
        x = self.norm(self.blocks(x))
        logits = F.linear(x, self.embedding.weight).transpose(0, 1)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build_plain(
    shape: Shape, batches: list[dict], device: str, compile_with: str | None = None
) -> Callable[[], None]:
    """One step over all microbatches. `compile_with`: the backend of `torch.compile` for each block."""
    model = PlainGPT(shape).to(device)
    if compile_with is not None:
        for block in model.blocks:
            block.compile(backend=compile_with)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        for batch in batches:
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=shape.bf16):
                loss = model(batch["tokens"], batch["labels"])
            (loss / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def build_ours(shape: Shape, device: str, compile_with: str | None = None) -> Training:
    """This package's; `compile_with` as for `build_plain`."""
    training = Training(load(OURS), shape, device)
    if compile_with is not None:
        for layer in unwrap_model(training.model).decoder.layers:
            layer.compile(backend=compile_with)
    return training


# -- The run --

COLUMNS = {
    "implementation": ("implementation", ""),
    "median_ms": ("median ms per step", ".1f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "mfu": ("MFU, data sheet", ".1%"),
    "mfu_measured": ("MFU, measured peak", ".1%"),
    "noise": ("noise", ".1%"),
    "ours": ("ours against it", ""),
}


MAY_FAIL = ("megatron", "ours, compiled", "plain, compiled")
"""Left out, with the reason, where they do not work."""


def build_all(
    shape: Shape, device: str, peers: Sequence[str] = ("megatron",), compile_with: str = "inductor"
) -> tuple[dict[str, Callable], dict[str, str]]:
    """Steps by implementation: ours, plain PyTorch, `peers`; and why one of these is left out."""
    load(OURS).parallel_state.initialize_model_parallel()
    ours = build_ours(shape, device)
    steps = {"ours": ours.step, "ours'": ours.step}
    steps["plain"] = build_plain(shape, ours.batches, device)
    builders = {
        "megatron": lambda: _build_theirs(shape, device),
        "ours, compiled": lambda: build_ours(shape, device, compile_with).step,
        "plain, compiled": lambda: build_plain(shape, ours.batches, device, compile_with),
    }
    missing = {}
    for name in peers:
        try:
            steps[name] = builders[name]()
        except PeerMissing as reason:
            missing[name] = str(reason)
        except Exception as error:  # a peer that does not work here is told, and left out
            missing[name] = _in_a_line(error)
    return steps, missing


def _build_theirs(shape: Shape, device: str) -> Callable[[], None]:
    core = load(THEIRS)
    core.parallel_state.initialize_model_parallel()
    return Training(core, shape, device).step


def _in_a_line(error: Exception) -> str:
    traceback.print_exception(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no words"]
    # A compiler's error says in its last line what was wrong, and in its first who says so.
    words = " ... ".join(dict.fromkeys([lines[0], lines[-1]]))
    return f"{type(error).__name__}: {words[:300]}"


def measure(
    shape: Shape,
    device: str,
    repetitions: int,
    peers: Sequence[str] = ("megatron",),
    compile_with: str = "inductor",
) -> tuple[dict[str, Times], dict[str, str]]:
    """Times by implementation, on the device; and why one of `peers` has none."""
    steps, missing = build_all(shape, device, peers, compile_with)

    def until_done(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            step()
            _synchronize(device)

        return run

    steps = {name: until_done(step) for name, step in steps.items()}
    for name, step in list(steps.items()):
        try:
            for _ in range(3):
                step()
        except Exception as error:
            if name not in MAY_FAIL:
                raise
            missing[name] = _in_a_line(error)
            del steps[name]
    return take_turns(steps, repetitions), missing


def rows_of(shape: Shape, times: dict[str, Times], peaks: tuple[float | None, float]) -> list[dict]:
    """A row per implementation."""
    noise = results.gap(times["ours"].wall, times["ours'"].wall)
    rows = []
    for name, measured in times.items():
        rate = step_flops(shape) / measured.median
        row = {
            "implementation": name,
            "median_ms": measured.median * 1e3,
            "tokens_per_second": shape.tokens_per_step / measured.median,
            "mfu": None if peaks[0] is None else rate / peaks[0],
            "mfu_measured": rate / peaks[1],
            "noise": noise,
            "repetitions": len(measured.wall),
        }
        if not name.startswith("ours"):
            row["ours"] = results.verdict(times["ours"].median, measured.median, noise)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--repetitions", type=int, default=20)
    report = results.Report("gpu_mfu", __doc__, arguments, argv)
    if not torch.cuda.is_available():
        print("gpu_mfu: there is no GPU here, so nothing is measured")
        return report.finish()
    device = str(set_device("cuda"))
    device_name = torch.cuda.get_device_name()
    report.machine["GPU"] = device_name
    has_room = torch.cuda.get_device_properties(0).total_memory >= LARGE_NEEDS_BYTES
    shape, repetitions = LARGE if has_room else SMALL, report.options.repetitions
    if report.options.quick:
        shape, repetitions = replace(SMALL, num_layers=2, hidden_size=256, seq_length=128), 2
    # gloo beside nccl: the clock that starts a repetition is on the CPU.
    backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    peaks = peak_of(device_name), measured_peak(device)
    times, missing = measure(shape, device, repetitions)
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}")
    rows = rows_of(shape, times, peaks)
    sheet = "unknown" if peaks[0] is None else f"{peaks[0] / 1e12:.0f}"
    title = (
        f"{shape.num_layers} layers, h={shape.hidden_size}, s={shape.seq_length}, "
        f"{shape.num_microbatches} microbatches of {shape.micro_batch_size}"
    )
    note = f"Peak in TFLOP/s: data sheet {sheet}, measured {peaks[1] / 1e12:.0f}."
    report.table(title, COLUMNS, rows, note)
    lost = [row["implementation"] for row in rows if row.get("ours") == results.LOST]
    report.claim("no peer is faster, beyond the noise", ", ".join(lost) or "none is", not lost)
    dist.destroy_process_group()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
