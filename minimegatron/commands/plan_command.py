"""`minimegatron plan --pp 4 --microbatches 8`: who does what when, without starting a process.

Torch-free. Exit code 1 means that the schedule was planned but is wrong; then each problem stands
on a line of its own. Megatron has no counterpart.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.models.T5.stack_split import StackSplit
from minimegatron.core.orders.order_check import ScheduleError
from minimegatron.core.orders.orders import (
    COMBINED,
    TAGGED,
    UNTAGGED,
    get_schedule,
    schedule_names,
)
from minimegatron.core.ssm.mamba_hybrid_layer_allocation import Symbols
from minimegatron.core.transformer.enums import LayerType
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.launching.user_file import load_user_function, place_in
from minimegatron.planner.actions import COMMUNICATE
from minimegatron.planner.imagined_transport import BUFFERED, RENDEZVOUS
from minimegatron.planner.layer_costs import LayeredCosts
from minimegatron.planner.layer_plan import LayerCosts
from minimegatron.planner.mtp_costs import (
    Times,
    layer_times,
    message_factors,
    stages_of_layout,
)
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.plan_check import Problem, check
from minimegatron.planner.render import FORMATS, render
from minimegatron.planner.ring_costs import RingCosts
from minimegatron.planner.simulator import Costs, simulate
from minimegatron.planner.ssm_costs import named_layers
from minimegatron.planner.stack_costs import costs_of_split, messages_behind

USAGE = "--pp N --microbatches N [options]"
EXAMPLES = (
    "--pp 4 --microbatches 8",
    "--pp 4 --microbatches 8 --vpp 2 --comm-time 0.1",
    "--pp 4 --microbatches 8 --format svg --output step.svg",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to plan, what it costs, and what to write."""
    _add_plan_arguments(parser.add_argument_group("what to plan"))
    _add_cost_arguments(
        parser.add_argument_group(
            "what it costs",
            "Times are numbers or fractions (0.5, 1/3) of any unit; whole stages share\n"
            "theirs equally among their chunks.",
        )
    )
    add = parser.add_argument_group("what to write").add_argument
    add("--format", choices=FORMATS, default="text", help="default: text")
    add("--output", metavar="FILE", help="write to a file instead of the terminal")
    add("--width", type=int, metavar="N", help="text: columns (default: the terminal's, or 100)")
    add("--no-colour", action="store_true", help="text: none, even on a terminal")
    add("--critical-path", action="store_true", help="svg: outline what makes the step this long")


def _add_plan_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--pp", type=int, required=True, metavar="N", help="stages")
    add("--microbatches", type=int, required=True, metavar="N", help="microbatches in a step")
    add("--vpp", type=int, metavar="N", help="chunks per stage, for interleaving")
    add("--group-size", type=int, metavar="N", help="interleaving: microbatches per chunk's turn")
    add(
        "--schedule",
        type=str.lower,
        metavar="NAME",
        help=f"{', '.join(schedule_names())} (default: what get_forward_backward_func chooses)",
    )
    add(
        "--user-schedule",
        metavar="FILE.py:FUNCTION",
        help="a schedule of your own: an order of work (@register_order), or a function of one "
        "stage that yields its actions",
    )
    add(
        "--wire",
        choices=(TAGGED, UNTAGGED),
        help="add messages to the schedule's order, for a wire that knows payloads apart, or one that "
        "does not (default: the messages that the schedule names or, if none, tagged)",
    )
    add("--forward-only", action="store_true", help="an evaluation step")
    add("--overlap-p2p-comm", action="store_true", help="interleaving: send while computing")
    add(
        "--batch-p2p-comm",
        action=argparse.BooleanOptionalAction,
        help="start the messages of one call as a batch (default: wherever a run can)",
    )
    add("--message-bytes", type=int, default=0, metavar="N", help="size of one message")
    add(
        "--pipeline-model-parallel-split-rank",
        type=int,
        metavar="Q",
        help="T5: the first stage of the decoder; those after it get two messages in place of one",
    )
    add(
        "--encoder-message-bytes",
        type=int,
        metavar="N",
        help="with a split rank: size of the encoder's message (default: --message-bytes)",
    )


def _add_cost_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--forward-time", type=_time, metavar="T", help="of a stage (default: 1)")
    add("--backward-time", type=_time, metavar="T", help="of a stage (default: 2)")
    add(
        "--encoder-times",
        type=_times,
        metavar="F,B",
        help="with a split rank: forward and backward of an encoder stage (default: as the others)",
    )
    add("--comm-time", type=_time, default=0, metavar="T", help="of a message (default: 0)")
    add("--bandwidth", type=_time, metavar="B", help="bytes per unit of time, with --message-bytes")
    add("--imbalance", type=_times, metavar="X,X,...", help="one factor per stage")
    add(
        "--layout",
        metavar="STRING",
        help="costs from a pipeline layout; the two times are then those of one transformer layer",
    )
    add(
        "--layer-time",
        action="append",
        default=[],
        metavar="NAME=F:B",
        help="with --layout: times of embedding or loss (default: 0), or of mtp (default: a layer's, "
        "and a sixth of it for the projection); the loss is computed once more for each m. Those of M, "
        "* and - are of the layers of --hybrid-override-pattern (default: a layer's)",
    )
    add(
        "--hybrid-override-pattern",
        metavar="LETTERS",
        help="with --layout: a letter for each transformer layer: M Mamba, * attention, - MLP; "
        "write = before a pattern that begins with -",
    )
    add(
        "--layer-nodes",
        type=_times,
        metavar="A,M[,D,C]",
        help="instead of the two times above: of one layer attention and mlp, and of one with experts "
        "dispatch and combine, two all-to-alls; backward, computation takes twice as long",
    )
    add("--context-parallel-size", type=int, metavar="C", help="ranks that share a sequence")
    add(
        "--ring-times",
        type=_times,
        metavar="B,H",
        help="with --context-parallel-size: in a layer's attention each of C blocks of keys and values "
        "takes B, a hop to the next rank H; A of --layer-nodes is the rest of it (default: 0)",
    )
    add("--layers-per-chunk", type=int, metavar="L", help="with --layer-nodes (default: 1)")
    add(
        "--delay-wgrad-compute",
        action="store_true",
        help="with --layer-nodes and --schedule combined: weight gradients as nodes of their own",
    )
    add(
        "--transport",
        choices=(RENDEZVOUS, BUFFERED),
        default=RENDEZVOUS,
        help="does a send wait for its receiver? (default: rendezvous, it does)",
    )


def run(args: argparse.Namespace) -> int:
    """Plans, checks, simulates, writes. Raises ValueError for what cannot be planned."""
    layout = _layout(args)
    function = None
    if args.user_schedule:
        function = load_user_function(args.user_schedule, "--user-schedule", "user_schedule")
    try:
        planned = _plan(args, function, layout)
    except ScheduleError as error:
        return _print(error.problems)
    if _may_be_wrong(planned, function) and (problems := check(planned)):
        return _print(problems)
    simulation = simulate(planned, _costs(args, planned, layout), args.transport)
    is_terminal = args.output is None and sys.stdout.isatty()
    text = render(
        simulation,
        args.format,
        width=_width(args, is_terminal),
        colour=is_terminal and not args.no_colour,
        critical_path=args.critical_path,
    )
    if args.output is None:
        sys.stdout.write(text)
    else:
        write_atomically(args.output, text.encode(), makes_folder=False)
        print(f"wrote {args.output}")
    return 0


def _print(problems: list[Problem]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1


# -- The plan --


def _plan(
    args: argparse.Namespace,
    function: Callable | None,
    layout: PipelineParallelLayerLayout | None,
) -> Plan:
    if function is not None and args.schedule is not None:
        raise ValueError("--schedule and --user-schedule exclude each other; leave one out")
    vpp = args.vpp
    if layout is not None and vpp is None and layout.virtual_pipeline_model_parallel_size > 1:
        vpp = layout.virtual_pipeline_model_parallel_size
    try:
        planned = plan(
            function or args.schedule,
            args.pp,
            args.microbatches,
            vpp,
            args.group_size,
            args.forward_only,
            args.overlap_p2p_comm,
            args.batch_p2p_comm,
            args.message_bytes,
            args.wire,
            None if layout is None else message_factors(stages_of_layout(layout)),
            _message_sizes(args),
        )
    except ScheduleError:
        raise
    except Exception as error:
        where = place_in(error, args.user_schedule)
        if where is None:
            raise
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    if function is not None and args.pp > 1 and _has_only_work(planned):
        raise ValueError(
            f"--user-schedule: {planned.config.schedule} yields work but no messages; yield those "
            "of its stage, or put @register_order(NAME) before an order of work"
        )
    return planned


def _split(args: argparse.Namespace) -> StackSplit | None:
    """Which stages have which of two stacks; None for a model of one."""
    if args.pipeline_model_parallel_split_rank is not None:
        return StackSplit(args.pp, args.pipeline_model_parallel_split_rank)
    for name in ("encoder_message_bytes", "encoder_times"):
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is of a model with two stacks; add "
                "--pipeline-model-parallel-split-rank"
            )
    return None


def _message_sizes(args: argparse.Namespace) -> Sequence[Sequence[int]] | None:
    split, encoder_bytes = _split(args), args.encoder_message_bytes
    if split is None:
        return None
    if args.layout is not None or args.imbalance is not None:
        raise ValueError(
            "--pipeline-model-parallel-split-rank gives each stage a stack; leave --layout and "
            "--imbalance out, and give --encoder-times"
        )
    if args.vpp is not None:
        raise ValueError(
            f"--pipeline-model-parallel-split-rank with --vpp {args.vpp}: two stacks run by plain 1F1B "
            "only; leave --vpp out"
        )
    size = args.message_bytes
    return messages_behind(split, size if encoder_bytes is None else encoder_bytes, size)


def _has_only_work(planned: Plan) -> bool:
    kinds = {action.kind for actions in planned.ranks for action in actions}
    return bool(kinds) and COMMUNICATE not in kinds


def _may_be_wrong(planned: Plan, function: Callable | None) -> bool:
    """Tests hold the built-in schedules right, but for messages that two ranks may swap."""
    if function is not None or planned.config.pp_size == 2:
        return True
    order = get_schedule(planned.config.schedule).order
    return order is None or not order.__module__.startswith("minimegatron.")


# -- Costs --


def _time(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write 2, 0.5 or 1/3") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative; give 0 or more")
    return value


def _times(text: str) -> list[Fraction]:
    return [_time(part) for part in text.split(",")]


def _layout(args: argparse.Namespace) -> PipelineParallelLayerLayout | None:
    if args.layout is None:
        if args.layer_time:
            raise ValueError("--layer-time gives times of a layout's layers; add --layout")
        if args.hybrid_override_pattern is not None:
            raise ValueError(
                "--hybrid-override-pattern gives the kind of each layer of a layout; add --layout"
            )
        return None
    if args.imbalance is not None:
        raise ValueError("--layout and --imbalance exclude each other; leave one out")
    layout = PipelineParallelLayerLayout.from_str(args.layout, args.pp)
    chunks = layout.virtual_pipeline_model_parallel_size
    if args.vpp is not None and args.vpp != chunks:
        raise ValueError(
            f"the layout has {chunks} chunk{'s' * (chunks > 1)} per stage, but --vpp is "
            f"{args.vpp}; leave --vpp out"
        )
    return layout


def _costs(
    args: argparse.Namespace, planned: Plan, layout: PipelineParallelLayerLayout | None
) -> Costs:
    if args.bandwidth is not None and not args.message_bytes:
        raise ValueError("--bandwidth needs the size of a message; add --message-bytes")
    forward = 1 if args.forward_time is None else args.forward_time
    backward, latency = 2 if args.backward_time is None else args.backward_time, args.comm_time
    if layers := _layers(args, planned, layout):
        return LayeredCosts.of_layers(layers, latency, args.bandwidth, args.delay_wgrad_compute)
    if (split := _split(args)) is not None:
        of_encoder = args.encoder_times or [forward, backward]
        if len(of_encoder) != 2:
            raise ValueError("--encoder-times are two: of a forward and of a backward")
        decoder_times = (forward, backward)
        return costs_of_split(split, tuple(of_encoder), decoder_times, latency, args.bandwidth)
    if layout is None:
        if args.imbalance is not None and len(args.imbalance) != args.pp:
            raise ValueError(
                f"--imbalance has {len(args.imbalance)} factors for {args.pp} stages; give one each"
            )
        # Chunks of one copy of the model: with two copies each stage is there twice.
        v = planned.config.num_virtual_stages // args.pp
        return Costs.of_stages(forward, backward, v, args.imbalance, latency, args.bandwidth)
    times = _times_of_layers(args, layout, (forward, backward))
    layers: Any = layout
    if args.hybrid_override_pattern is not None:
        layers = named_layers(layout, args.hybrid_override_pattern)
    return Costs.from_layout(layers, times, latency, args.bandwidth)


def _times_of_layers(
    args: argparse.Namespace, layout: PipelineParallelLayerLayout, decoder: Times
) -> dict[str, Times]:
    times = layer_times(decoder)
    if args.hybrid_override_pattern is not None:
        times |= dict.fromkeys(Symbols.VALID, decoder)
    for text in args.layer_time:
        name, _, pair = text.partition("=")
        parts = pair.split(":")
        if name not in times or len(parts) != 2:
            raise ValueError(
                f"--layer-time {text!r}: write NAME=FORWARD:BACKWARD, NAME one of {', '.join(times)}"
            )
        try:
            times[name] = (_time(parts[0]), _time(parts[1]))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--layer-time {text!r}: {error}") from None
    num_depths = sum(stage.count(LayerType.mtp) for stage in stages_of_layout(layout))
    times["loss"] = layer_times(times["decoder"], times["loss"], num_depths)["loss"]
    return times


def _layers(
    args: argparse.Namespace, planned: Plan, layout: PipelineParallelLayerLayout | None
) -> list[list[LayerCosts]]:
    """Of each virtual stage its layers; empty where no times of nodes are given."""
    ring = _ring(args)
    if args.layer_nodes is None and ring is None:
        if args.layers_per_chunk is not None or args.delay_wgrad_compute:
            raise ValueError(
                "--layers-per-chunk and --delay-wgrad-compute are of layers; add --layer-nodes"
            )
        return []
    nodes = [0, 0] if args.layer_nodes is None else args.layer_nodes
    if len(nodes) not in (2, 4):
        raise ValueError(
            f"--layer-nodes has {len(nodes)} times; give four: attention, mlp, dispatch and combine; "
            "or the first two, for a layer without experts"
        )
    for name in ("forward_time", "backward_time", "imbalance"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            given = "--ring-times" if args.layer_nodes is None else "--layer-nodes"
            raise ValueError(f"{given} and {flag} exclude each other; leave one out")
    if args.delay_wgrad_compute and planned.config.schedule != COMBINED:
        raise ValueError(
            f"--delay-wgrad-compute is for --schedule combined, but this is "
            f"{planned.config.schedule}; leave it out"
        )
    layer, placement = LayerCosts(*nodes, ring=ring), planned.config.placement
    if layout is None:
        number = 1 if args.layers_per_chunk is None else args.layers_per_chunk
        if number < 1:
            raise ValueError(f"--layers-per-chunk is {number}; give 1 or more")
        return [[layer] * number] * placement.num_stages
    if args.layers_per_chunk is not None:
        raise ValueError("--layout says how many layers a chunk has; leave --layers-per-chunk out")
    kinds = (LayerType.decoder, LayerType.mtp)
    return [[layer] * sum(map(names.count, kinds)) for names in stages_of_layout(layout)]


def _ring(args: argparse.Namespace) -> RingCosts | None:
    """What the attention of each layer costs over the ranks that share a sequence."""
    size, times = args.context_parallel_size, args.ring_times
    if size is not None and size < 1:
        raise ValueError(f"--context-parallel-size is {size}; give 1 or more")
    if times is None:
        if size is not None:
            raise ValueError(
                f"--context-parallel-size {size} needs the times of a block and of a hop; add "
                "--ring-times"
            )
        return None
    if len(times) != 2:
        raise ValueError(f"--ring-times has {len(times)} times; give two: a block and a hop")
    if size is None:
        raise ValueError("--ring-times needs the number of ranks; add --context-parallel-size")
    return RingCosts(size, *times)


def _width(args: argparse.Namespace, is_terminal: bool) -> int:
    if args.width is not None:
        if args.width < 40:
            raise ValueError(f"--width is {args.width}; give 40 or more")
        return args.width
    return max(os.get_terminal_size().columns, 40) if is_terminal else 100
