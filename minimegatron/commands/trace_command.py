"""`minimegatron trace show|diff|export|unroll DIR`: what a run recorded with `--trace DIR` did.

Torch-free. Exit code 1 of `show` and `diff` means that the run did not do what the plan, or the
other run, says. Megatron has no counterpart.
"""

import argparse
import json
from pathlib import Path
from shutil import get_terminal_size

from minimegatron.commands.help_text import with_examples
from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.output import fitted
from minimegatron.planner.actions import timeline_to_json
from minimegatron.planner.plan import plan_config_to_json
from minimegatron.tracing.compare import compare_with_plan, wrong_messages
from minimegatron.tracing.diff import diff_report, divergences
from minimegatron.tracing.render_lanes import LEAST_WIDTH, render_lanes
from minimegatron.tracing.step import Step
from minimegatron.tracing.step_report import heading, step_report
from minimegatron.tracing.trace_view import Trace
from minimegatron.tracing.trace_words import pace_words

SUFFIXES = {"chrome": ".chrome.json", "html": ".html", "png": ".png", "json": ".json"}
PLAN = "plan"
EXAMPLES_OF = {
    "show": ("runs/trace", "runs/trace --step 3 --lanes", "runs/trace --rank 1 --microbatch 0"),
    "diff": ("runs/trace plan", "runs/before runs/after", "runs/trace runs/trace --other-step 4"),
    "unroll": ("runs/trace --rank 1", "runs/trace --rank 1 --microbatch 2 --depth 3"),
    "export": ("runs/trace --format html", "runs/trace --format png --plan --output step.png"),
}
EXAMPLES = tuple(f"{action} {words[0]}" for action, words in EXAMPLES_OF.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be done with a recording."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="show|diff|unroll|export")
    for name, add_to, words in (
        ("show", _add_show, "figures of a step, its lanes, or one rank's calls"),
        ("diff", _add_diff, "a run beside its plan, or beside another run"),
        ("unroll", _add_unroll, "the lines that one step ran, call for call"),
        ("export", _add_export, "write a file for a viewer"),
    ):
        examples = with_examples(f"minimegatron trace {name}", EXAMPLES_OF[name])
        add_to(actions.add_parser(name, help=words, **examples))


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_recording(parser)
    add = parser.add_argument
    add("--lanes", action="store_true", help="draw what each rank and communicator did, as text")
    add("--width", type=int, metavar="N", help="with --lanes: columns (default: the terminal's)")
    add("--rank", type=int, metavar="R", help="print this global rank's calls as a tree")
    add("--microbatch", type=int, metavar="M", help="with --rank: only what works on this one")
    add("--chunk", type=int, metavar="C", help="with --rank: only what works on this chunk")
    add("--depth", type=int, metavar="N", help="with --rank: levels of nesting to show")
    add("--all", action="store_true", help="with --rank: everything recorded, not one step")


def _add_diff(parser: argparse.ArgumentParser) -> None:
    _add_recording(parser)
    parser.add_argument("other", metavar="DIR|plan", help="another recording, or the word plan")
    parser.add_argument(
        "--other-step",
        type=int,
        metavar="N",
        help="step of the other recording (default: the same)",
    )


def _add_unroll(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", metavar="DIR", help="the folder that --trace wrote, with --trace-lines")
    add("--rank", type=int, default=0, metavar="R", help="a global rank (default: 0)")
    add("--microbatch", type=int, metavar="M", help="only what works on this one")
    depth = "levels of calls to show with their lines; 0: who calls whom (default: all)"
    add("--depth", type=int, metavar="N", help=depth)
    add("--html", metavar="FILE", help="write one page with all ranks instead, to be read offline")


def _add_export(parser: argparse.ArgumentParser) -> None:
    _add_recording(parser)
    add = parser.add_argument
    add(
        "--format",
        choices=tuple(SUFFIXES),
        required=True,
        help="chrome: Perfetto; json: the schema",
    )
    add("--output", metavar="FILE", help="default: DIR/timeline with the format's ending")
    add("--plan", action="store_true", help="png: draw the plan too")
    add("--theme", choices=("light", "dark"), default="light", help="png (default: light)")


def _add_recording(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("directory", metavar="DIR", help="the folder that --trace wrote")
    add("--step", type=int, default=0, metavar="N", help="which schedule run (default: 0)")
    for axis in ("tp", "dp", "cp"):
        add(f"--{axis}", type=int, default=0, metavar="N", help=f"{axis} coordinate (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Does it. Raises ValueError for a folder without a recording, and for a step it does not have."""
    trace = Trace.load(args.directory)
    if trace.missing_ranks:
        print(f"note: no recording of rank {', '.join(map(str, trace.missing_ranks))}")
    actions = {"show": _show, "diff": _diff, "export": _export, "unroll": _unroll}
    return actions[args.action](args, trace)


def _step(args: argparse.Namespace, trace: Trace, number: int) -> Step:
    return trace.step(number, tp=args.tp, dp=args.dp, cp=args.cp)


def _show(args: argparse.Namespace, trace: Trace) -> int:
    if args.width is not None and not args.lanes:
        raise ValueError(f"--width {args.width} is of a picture; add --lanes")
    if args.lanes and args.rank is not None:
        raise ValueError(f"--lanes draws all ranks of a pipeline; leave out --rank {args.rank}")
    if args.rank is None:
        for name in ("microbatch", "chunk", "depth"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} chooses calls of one rank; add --rank")
        step = _step(args, trace, args.step)
        return _print_lanes(args, step, trace) if args.lanes else _print_report(step, trace)
    recording = trace.rank(args.rank)
    place = ", ".join(f"{axis} {value}" for axis, value in recording.coordinates.items())
    print(f"rank {recording.rank} of {recording.world_size} ({place}), {trace.clock_words}")
    if recording.pace is not None:
        print(f"{pace_words(recording.pace)}; lengths of computation mean nothing else")
    if recording.is_cut:
        print("note: the recording was full before the run ended; later calls are missing")
    filters = {"microbatch": args.microbatch, "chunk": args.chunk, "depth": args.depth}
    print(trace.tree(args.rank, None if args.all else args.step, **filters))
    return 0


def _print_lanes(args: argparse.Namespace, step: Step, trace: Trace) -> int:
    width = args.width
    if width is None:
        width = max(get_terminal_size((100, 24)).columns, LEAST_WIDTH)
    for line in (*heading(step, trace.clock_words), "", *render_lanes(step, width)):
        print(line)
    return 0


def _print_report(step: Step, trace: Trace) -> int:
    for line in step_report(step, trace.clock_words):
        print(fitted(line))
    return int(bool(compare_with_plan(step) or wrong_messages(step)))


def _diff(args: argparse.Namespace, trace: Trace) -> int:
    step = _step(args, trace, args.step)
    if args.other == PLAN:
        return _print_report(step, trace)
    other = Trace.load(args.other)
    number = args.step if args.other_step is None else args.other_step
    other_step = _step(args, other, number)
    for line in diff_report(step, other_step):
        print(fitted(line))
    return int(bool(divergences(step, other_step)))


def _export(args: argparse.Namespace, trace: Trace) -> int:
    default = Path(args.directory) / f"timeline{SUFFIXES[args.format]}"
    path = Path(args.output) if args.output is not None else default
    if args.format == "chrome":
        trace.to_chrome(path)
    elif args.format == "html":
        trace.to_html(path)
    elif args.format == "png":
        step = _step(args, trace, args.step)
        trace.plot(
            path, step.number, tp=args.tp, dp=args.dp, cp=args.cp, plan=args.plan, theme=args.theme
        )
    else:
        text = json.dumps(step_json(_step(args, trace, args.step))) + "\n"
        write_atomically(path, text.encode(), makes_folder=False)
    print(f"wrote {path}")
    return 0


def _unroll(args: argparse.Namespace, trace: Trace) -> int:
    if args.depth is not None and args.depth < 0:
        raise ValueError(f"--depth {args.depth} is below 0; 0 shows who calls whom, without lines")
    if args.html is None:
        print(trace.unrolled(args.rank, args.microbatch, args.depth))
        return 0
    for name in ("microbatch", "depth"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is chosen on the page that --html writes; leave it out")
    trace.to_unrolled_html(args.html, args.rank)
    print(f"wrote {args.html}")
    return 0


def step_json(step: Step) -> dict:
    """One step of all stages in the planner's schema, waiting and transfer told apart."""
    ranks = ([events[index] for index in sorted(events)] for events in step.events)
    config = plan_config_to_json(step.config)
    data = timeline_to_json(ranks, "run", config, "us")
    if step.pace is not None:
        data["pace"] = step.pace
    return data
