"""What `--trace`, `--pace-forward-ms` and `--log-straggler` ask for, around training and evaluation.

Megatron has no counterpart.
"""

import contextlib
from collections.abc import Iterator

from minimegatron import tracing
from minimegatron.core.straggler_detector import StragglerDetector
from minimegatron.training.failures import identify
from minimegatron.training.global_vars import get_args
from minimegatron.training.utils import print_rank_0

OF_LAYERS = ("attention_ms", "mlp_ms", "all_to_all_ms", "ring_block_ms", "ring_hop_ms")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Records, paces and times what runs inside, as far as the arguments say so; else does nothing."""
    args = get_args()
    with contextlib.ExitStack() as stack:
        if args.pace_forward_ms is not None:
            layers = {name: getattr(args, f"pace_{name}") for name in OF_LAYERS}
            stack.enter_context(
                tracing.pace.pace(args.pace_forward_ms, args.pace_backward_ms, **layers)
            )
            print_rank_0(
                f"> paced: every forward takes {args.pace_forward_ms:g} ms and every backward "
                f"{args.pace_backward_ms:g} ms, or longer; times mean nothing else"
            )
        if args.log_straggler:
            stack.enter_context(stragglers_timed())
        if args.trace is not None:
            run = stack.enter_context(
                tracing.recorder.trace(
                    args.trace,
                    first_step=args.trace_first_step,
                    num_steps=args.trace_num_steps,
                    lines_of_step=args.trace_lines,
                )
            )
        yield
    if args.trace is not None:
        print_rank_0(f"> recorded in {args.trace} ({run.clock_words}); see it with:")
        print_rank_0(f">   minimegatron trace show {args.trace}")
        if args.trace_lines is not None:
            print_rank_0(f">   minimegatron trace unroll {args.trace} --rank 0")


@contextlib.contextmanager
def stragglers_timed() -> Iterator[None]:
    """The `stimer` of every program is on, unless the arguments leave that to the program."""
    args, me, stimer = get_args(), identify(), StragglerDetector()
    axes = {"stage": me.stage, "tp": me.tp, "dp": me.dp, "cp": me.cp}
    stimer.configure(
        args.world_size,
        args.rank,
        mmcnt=args.straggler_minmax_count,
        enabled=not args.disable_straggler_on_startup,
        coordinates={axis: place for axis, place in axes.items() if place is not None},
    )
    try:
        yield
    finally:
        stimer.configure(args.world_size, args.rank)
