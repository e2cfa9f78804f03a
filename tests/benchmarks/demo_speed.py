"""Tokens per second of the GPT of `make demo`, beside megatron-core's GPT of the same shape.

Run: python -m tests.benchmarks.demo_speed. Calls: `megatron_like` for the step of either package, the
demo itself (`pretrain_gpt` and what it calls), `turns`.

Four layouts: that of `make demo` (t = 2, p = 2, four ranks, eight microbatches), one process, two that
share eight experts, of which a token chooses two, and one process that also predicts a further token
(`--only further`). On every rank these take turns:

- demo: the step of `make demo`, with its data, its checks and its logging values;
- ours: a bare loop over GPT, DDP, schedule and optimizer of minimegatron.core;
- megatron: the same loop, over megatron-core's, whose groups are over gloo.

The last two begin with the same weights and must have the same losses after three steps, or one. On a
CPU megatron-core has no fused kernels; neither have we, except torch's own attention.
"""

import contextlib
import math
import re
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import minimegatron
from minimegatron import pretrain_gpt
from minimegatron.core.enums import ModelType
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.utils import get_model_config
from minimegatron.launching import launcher
from minimegatron.training import training
from minimegatron.training.arguments import parse_args
from minimegatron.training.initialize import initialize_megatron
from tests.benchmarks import results
from tests.benchmarks.megatron_like import (
    OURS,
    THEIRS,
    Shape,
    Step,
    Training,
    load,
    same_weights,
    surroundings,
)
from tests.benchmarks.peers import PeerMissing
from tests.benchmarks.turns import Times, take_turns

ROOT = Path(__file__).parents[2]
LEAST_RATIO = 1.2
LAYOUTS = {
    "t=2 p=2, 4 ranks": "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "1 process": "",
    "8 experts, e=2, 2 ranks": "--num-experts 8 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --disable-bias-linear",
    "a further token, 1 process": "--mtp-num-layers 1",
}
"""Without biases, where there are experts: their router would have one too."""


def demo_arguments(layout: str) -> list[str]:
    """The flags that `make demo` gives a GPT, read from the Makefile."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    size, steps = (
        re.search(rf"^{name} +:= (.*)$", text, re.MULTILINE)[1] for name in ("SIZE_gpt", "STEPS")
    )
    program = re.escape("minimegatron.pretrain_$(MODEL)")
    flags = re.search(rf"^DEMO_of_text = .* -m {program} (.*)$", text, re.MULTILINE)[1]
    flags = flags.replace("$(or $(STEPS_$(MODEL)),$(STEPS))", steps)
    return shlex.split(flags.replace("$(SIZE_$(MODEL))", size).replace("$(LAYOUT)", layout))


def shape_of(argv: list[str]) -> Shape:
    """The same GPT, batch and optimizer, for `Training`."""
    world = _world_size(argv)
    args = parse_args(argv=argv, environ={"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)})
    return Shape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        num_microbatches=args.global_batch_size
        // (args.micro_batch_size * args.data_parallel_size),
        vocab_size=args.padded_vocab_size,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        dp=args.data_parallel_size,
        ep=args.expert_model_parallel_size,
        experts=_experts_of(args),
        further=args.mtp_num_layers,
        optimizer={
            "lr": args.lr,
            "min_lr": args.min_lr,
            "weight_decay": args.weight_decay,
            "adam_beta2": args.adam_beta2,
            "clip_grad": args.clip_grad,
        },
    )


def _world_size(argv: list[str]) -> int:
    """t x p, or e: one copy of the model, or of its experts."""
    sizes = [int(argv[i + 1]) for i, word in enumerate(argv) if word.endswith("-parallel-size")]
    return math.prod(sizes)


def _experts_of(args: Any) -> dict[str, Any]:
    if args.num_experts is None:
        return {}
    names = ("moe_router_topk", "moe_token_dispatcher_type", "add_bias_linear")
    (coeff,) = args.moe_aux_loss_coeff
    found = {"num_moe_experts": args.num_experts, "moe_aux_loss_coeff": coeff}
    return found | {name: getattr(args, name) for name in names}


# -- On a rank --


def build_demo(argv: list[str]) -> Step:
    """`make demo` up to its first step; returns what `train` repeats."""
    sys.argv = ["pretrain_gpt.py", *argv]
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        initialize_megatron()
        model, optimizer, scheduler = training.setup_model_and_optimizer(
            pretrain_gpt.model_provider, ModelType.encoder_or_decoder
        )
        iterator, _, _ = training.build_train_valid_test_data_iterators(
            pretrain_gpt.train_valid_test_datasets_provider
        )
    config = get_model_config(model[0])
    training._connect_schedule(config, model, optimizer)
    schedule = get_forward_backward_func()

    def step() -> None:
        training.train_step(
            pretrain_gpt.forward_step, iterator, model, optimizer, scheduler, config, schedule
        )

    return step


def check_same(ours: Training, theirs: Training) -> None:
    """Same weights, three steps: the losses and the gradient's norm must be the same.

    One step with experts: after it, round-off in the weights decides between experts of like scores.
    """
    same_weights(ours, theirs)
    theirs.optimizer.reload_model_params()
    for _ in range(1 if ours.shape.experts else 3):
        ours.step()
        theirs.step()
    mine, other = [*ours.losses, ours.grad_norm], [*theirs.losses, theirs.grad_norm]
    for a, b in zip(mine, other, strict=True):
        if abs(a - b) > 1e-3 * abs(b):
            raise RuntimeError(f"minimegatron computed {mine}, megatron-core {other}")


def measure(argv: list[str], shape: Shape, repetitions: int) -> tuple[dict[str, Times], str]:
    """Times by implementation; and why megatron-core is missing, if it is."""
    torch.manual_seed(1)
    demo = build_demo(argv)
    ours, missing = Training(load(OURS), shape), ""
    steps = {"demo": demo, "demo'": demo, "ours": ours.step}
    try:
        core = load(THEIRS)
        with surroundings(core):
            core.parallel_state.initialize_model_parallel(
                shape.tp, shape.pp, expert_model_parallel_size=shape.ep
            )
        theirs = Training(core, shape)
        check_same(ours, theirs)
        steps["megatron"] = theirs.step
    except PeerMissing as reason:
        missing = str(reason)
    for step in steps.values():
        step()
    times = take_turns(steps, repetitions)
    dist.barrier()
    return times, missing


# -- The command --
CLAIMANTS = {
    False: ("demo", "the demo's tokens/s"),
    True: ("ours", "tokens/s on the same text"),
}
"""By whether there are experts: how even their load is, and so how fast a step is, the text decides."""

COLUMNS = {
    "layout": ("layout", ""),
    "implementation": ("implementation", ""),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "median_ms": ("median ms per step", ".1f"),
    "processor_ms": ("processor ms", ".1f"),
    "speed_to_megatron": ("speed / megatron", ".2f"),
    "paired": ("in pairs", ".2f"),
    "noise": ("noise", ".1%"),
    "ours": ("against megatron", ""),
}


def rows_of(layout: str, shape: Shape, times: dict[str, Times]) -> list[dict]:
    """A row per implementation; tokens are those of the whole global batch."""
    noise = results.gap(times["demo"].wall, times["demo'"].wall)
    base = times.get("megatron")
    rows = []
    for name, measured in times.items():
        row = {
            "layout": layout,
            "implementation": name,
            "tokens_per_second": shape.tokens_per_step / measured.median,
            "median_ms": measured.median * 1e3,
            "processor_ms": measured.processor_median * 1e3,
            "repetitions": len(measured.wall),
            "noise": noise,
        }
        if base is not None:
            row["speed_to_megatron"] = base.median / measured.median
            pairs = zip(base.wall, measured.wall, strict=True)
            row["paired"] = statistics.median(theirs / mine for theirs, mine in pairs)
        if base is not None and name in ("demo", "ours"):
            row["ours"] = results.verdict(measured.median, base.median, noise)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    arguments = results.parser(__doc__)
    arguments.add_argument("--repetitions", type=int, default=25)
    arguments.add_argument("--only", default="", help="layouts whose name contains this text")
    report = results.Report("demo_speed", __doc__, arguments, argv)
    layouts = {name: flags for name, flags in LAYOUTS.items() if report.options.only in name}
    repetitions = report.options.repetitions
    if report.options.quick:
        layouts, repetitions = {"1 process": ""}, 1
    else:
        launcher.PRELOADED.append("tests.benchmarks.preload")
    rows = []
    for layout, flags in layouts.items():
        demo = demo_arguments(flags)
        shape = shape_of(demo)
        options = {"backend": "gloo", "device": "cpu"}
        found = minimegatron.launch(
            measure, shape.tp * shape.pp * shape.dp, demo, shape, repetitions, **options
        )
        times, missing = found[0]
        rows += rows_of(layout, shape, times)
        if missing:
            print(f"megatron-core is left out: {missing}")
    note = (
        "Noise: the gap between demo and demo'. In pairs: the median of the ratios of one "
        "repetition each."
    )
    report.table("Tokens per second", COLUMNS, rows, note)
    for row in rows:
        claimant, words = CLAIMANTS["experts" in row["layout"]]
        if row["implementation"] == claimant and "speed_to_megatron" in row:
            speed = row["speed_to_megatron"]
            text = f"{row['layout']}: {words} are at least {LEAST_RATIO} x megatron-core's"
            report.claim(text, f"{speed:.2f} x", speed >= LEAST_RATIO)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
