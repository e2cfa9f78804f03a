"""Records the README's pipeline on real ranks and draws its timeline.

Run by: `make timeline`, or `python docs/tools/record.py timeline [--out FILE]`. Calls:
torchrun, `minimegatron.pretrain_gpt --trace --pace-forward-ms ...`, then `minimegatron.tracing`. Two
pictures are written, for light pages and (`-dark` in the name) dark ones.

The ranks, tensors, messages, losses and gradients are real; only the computation is padded, so that
four ranks on two cores show the schedule and not their fight for the cores. Of the recorded steps the
one of median length is drawn: neither the luckiest nor the one that the machine disturbed most.
"""

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

from minimegatron.tracing.trace_view import Trace
from records.recorded_words import launched

NUM_WARMUP_STEPS = 2
MODEL = {
    "--num-layers": 8,
    "--hidden-size": 64,
    "--num-attention-heads": 4,
    "--seq-length": 64,
    "--max-position-embeddings": 64,
    "--micro-batch-size": 1,
    "--lr": 1e-3,
    "--eval-iters": 0,
    "--log-interval": 1,
}


def main() -> None:
    """Records, prints the figures, and draws."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record(args, folder)
        trace = Trace.load(folder)
    number = median_step(trace)
    print(trace.report(number))
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    for theme, path in (("light", out), ("dark", out.with_stem(f"{out.stem}-dark"))):
        trace.plot(path, number, theme=theme)
        print(f"wrote {path}")
    if args.html is not None:
        trace.to_html(args.html, steps=[number])
        print(f"wrote {args.html}")


def parse_args() -> argparse.Namespace:
    """The pipeline's sizes and its pace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pp", type=int, default=4, metavar="N", help="stages (default: 4)")
    add("--microbatches", type=int, default=8, metavar="N", help="default: 8")
    add("--vpp", type=int, metavar="N", help="chunks per stage, for interleaving")
    add("--pace-forward-ms", type=float, default=40.0, metavar="MS", help="default: 40")
    add("--pace-backward-ms", type=float, default=80.0, metavar="MS", help="default: 80")
    add("--steps", type=int, default=5, metavar="N", help="recorded steps (default: 5)")
    add("--out", default="docs/images/timeline.png", metavar="FILE")
    add("--html", metavar="FILE", help="also write the interactive timeline")
    return parser.parse_args()


def record(args: argparse.Namespace, folder: str) -> None:
    """Trains for a few paced steps under torchrun; the last `--steps` are recorded in `folder`."""
    flags = MODEL | {
        "--global-batch-size": args.microbatches,
        "--train-iters": NUM_WARMUP_STEPS + args.steps,
        "--pipeline-model-parallel-size": args.pp,
        "--pace-forward-ms": args.pace_forward_ms,
        "--pace-backward-ms": args.pace_backward_ms,
        "--trace": folder,
        "--trace-first-step": NUM_WARMUP_STEPS,
        "--trace-num-steps": args.steps,
    }
    if args.vpp is not None:
        flags["--num-virtual-stages-per-pipeline-rank"] = args.vpp
    launcher = ["--standalone", "--nproc-per-node", args.pp, "-m", "minimegatron.pretrain_gpt"]
    launched([*launcher, *(word for pair in flags.items() for word in pair)])


def median_step(trace: Trace, numbers: Iterable[int] | None = None) -> int:
    """The number of the step of median length, of these steps or of all."""
    numbers = range(trace.num_steps) if numbers is None else numbers
    lengths = sorted((trace.step(number).makespan, number) for number in numbers)
    return lengths[len(lengths) // 2][1]
