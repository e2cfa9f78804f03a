"""Events, gaps and numbers in the words that every output uses.

Torch-free. Megatron has no counterpart.
"""

from collections import Counter
from collections.abc import Sequence

from minimegatron.core.orders.work import RING_HOP
from minimegatron.planner.actions import (
    COMMUNICATE,
    KINDS,
    SEND,
    Action,
    Event,
    Message,
)
from minimegatron.planner.plan_report import NAMES
from minimegatron.planner.stage import PlanConfig
from minimegatron.tracing.step import Step, TracedGap


def milliseconds(us: float) -> str:
    """A time with three significant digits, but never more than a microsecond's.

    >>> milliseconds(1320456.1), milliseconds(40012.3), milliseconds(3.2), milliseconds(0)
    ('1320 ms', '40.0 ms', '0.003 ms', '0 ms')
    """
    ms = us / 1e3
    if round(ms, 3) == 0:
        return "0 ms"
    if abs(ms) >= 100:
        return f"{ms:.0f} ms"
    return f"{ms:.1f} ms" if abs(ms) >= 10 else f"{ms:.2f} ms" if abs(ms) >= 1 else f"{ms:.3f} ms"


def percent(value: float) -> str:
    """
    >>> percent(0.27272)
    '27.3 %'
    """
    return f"{100 * float(value):.1f} %"


def size(num_bytes: int) -> str:
    """
    >>> size(480), size(16384), size(3_000_000)
    ('480 B', '16 KiB', '2.9 MiB')
    """
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value == int(value) or value >= 100 else f"{value:.1f} {unit}"


def unit_name(kind: str, microbatch: int | None, chunk: int | None, num_chunks: int) -> str:
    """The short name of one piece of work.

    >>> unit_name("forward", 3, 0, 1), unit_name("backward-weight", 3, 1, 2)
    ('F3', 'W3 of chunk 1')
    """
    name = f"{KINDS[kind].letter}{'?' if microbatch is None else microbatch}"
    return f"{name} of chunk {chunk}" if num_chunks > 1 else name


def action_name(action: Action, num_chunks: int = 1) -> str:
    """`F3`, `B0 of chunk 1`, `F3 & B0`, or the name of the communicator's method."""
    if action.parts:
        return " & ".join(action_name(part, num_chunks) for part in action.parts)
    if action.kind in KINDS:
        return unit_name(action.kind, action.microbatch, action.chunk, num_chunks)
    return action.call or action.kind


def message_words(message: Message, num_chunks: int = 1) -> str:
    """One message of a call, as an arrow.

    >>> message_words(Message(SEND, "activation", 2, 3, 0, 4096))
    'activation of microbatch 3 -> stage 2, 4 KiB'
    """
    arrow = "->" if message.direction == SEND else "<-"
    chunk = f", chunk {message.chunk}" if num_chunks > 1 else ""
    what = f"{message.payload} of microbatch {message.microbatch}{chunk}"
    return f"{what} {arrow} stage {message.peer}, {size(message.num_bytes)}"


def event_title(event: Event, num_chunks: int = 1) -> str:
    """What an event is, in a few words: the call's own name, and what it works on."""
    action = event.action
    if action.kind in KINDS:
        name = action_name(action, num_chunks)
        return f"{function_name(event)}  {name}"
    if action.kind == COMMUNICATE:
        return action.call
    return function_name(event)


def function_name(event: Event) -> str:
    """The last parts of the symbol: `GPTModel.forward`, `train_step`."""
    parts = (event.symbol or event.name or "").split(".")
    if len(parts) > 1 and parts[-2][:1].isupper():  # a private class would fill the bar
        return ".".join(parts[-2:])
    return parts[-1]


def names_of(dotted: Sequence[str]) -> list[str]:
    """The names by which a reader knows functions; with their file where two have the same.

    >>> names_of(["a.steps.forward_step", "a.pretrain_gpt.forward_step", "a.steps.Chunk.run"])
    ['steps.forward_step', 'pretrain_gpt.forward_step', 'Chunk.run']
    """
    names = [short_name(name) for name in dotted]
    counts = Counter(names)
    return [
        f"{module_of(whole)}.{name}" if counts[name] > 1 else name
        for whole, name in zip(dotted, names, strict=True)
    ]


def short_name(name: str) -> str:
    """A function's name without its module; of one that is defined inside another, both.

    >>> short_name("minimegatron.core.pipeline_parallel.steps.ModelChunk.forward_step")
    'ModelChunk.forward_step'
    >>> short_name("package.module.outer.<locals>.inner")
    'inner, defined in outer'
    """
    outer, _, inner = name.rpartition(".<locals>.")
    if outer:
        return f"{inner}, defined in {short_name(outer)}"
    return ".".join(_own_parts(inner))


def module_of(name: str) -> str:
    """The last part of the module that a function is in.

    >>> module_of("minimegatron.core.pipeline_parallel.steps.ModelChunk.forward_step")
    'steps'
    """
    whole = name.partition(".<locals>")[0]
    return ".".join(whole.split(".")[: -len(_own_parts(whole))]).rpartition(".")[2]


def _own_parts(name: str) -> list[str]:
    """A function's name; of a method, its class's before it."""
    parts = name.split(".")
    is_method = len(parts) > 1 and parts[-2].lstrip("_")[:1].isupper()
    return parts[-2:] if is_method else parts[-1:]


def wait_words(event: Event) -> str:
    """How a communication's time is made up; empty if it did not wait.

    >>> wait_words(Event(Action("call", 0), 0, 500, wait=300, attributes={"transfer": 150}))
    'waited 0.300 ms, transfer 0.150 ms'
    """
    transfer = event.attributes.get("transfer", 0.0)
    if event.wait + transfer < 0.5:
        return ""
    return f"waited {milliseconds(event.wait)}, transfer {milliseconds(transfer)}"


def moved_words(event: Event) -> str:
    """What a collective, or a call below the communicator, moves; empty for other events."""
    attributes = event.attributes
    if event.name == RING_HOP:
        return hop_words(event)
    if "payload" in attributes:
        to_or_from = "to" if attributes["doing"] == "sending" else "from"
        words = f"{attributes['doing']} {attributes['payload']}"
        if event.action.microbatch is not None:
            words += f" of microbatch {event.action.microbatch}"
        return f"{words} {to_or_from} stage {attributes['peer']}"
    if "group_size" in attributes:
        return f"{size(attributes['bytes'])} over {attributes['group_size']} ranks"
    return ""


CARRIED = {"kv": "keys and values", "dkv": "gradients of keys and values"}
"""What a hop's payload is."""


def hop_words(event: Event) -> str:
    """What a hop of attention's ring carries.

    >>> hop = {"payload": "dkv", "hop": 1, "layer": 3, "direction": "backward", "bytes_sent": 2048}
    >>> hop_words(Event(Action("call", 0), 0, 1, attributes=hop | {"group_size": 4}))
    'gradients of keys and values, hop 1 of layer 3, backward, 2 KiB to the next of 4 ranks'
    """
    told = event.attributes
    carried = CARRIED.get(told["payload"], told["payload"])
    return (
        f"{carried}, hop {told['hop']} of layer {told['layer']}, {told['direction']}, "
        f"{size(told['bytes_sent'])} to the next of {told['group_size']} ranks"
    )


def communicator_words(event: Event) -> str:
    """Which NCCL communicator worked for an event, and how long; empty where none is known."""
    attributes = event.attributes
    if "communicator" not in attributes:
        return ""
    length = attributes["device_end"] - attributes["device_start"]
    return f"{milliseconds(length)} on {attributes['communicator']}"


def shape_words(event: Event) -> str:
    """Sizes and type of the tensor that an event moves; empty if it moves none."""
    if "shape" not in event.attributes:
        return ""
    shape = " x ".join(map(str, event.attributes["shape"]))
    return f"[{shape}] {event.attributes['dtype']}"


def step_title(config: PlanConfig, run: int = 1) -> str:
    """
    >>> step_title(PlanConfig("1f1b", 4, 8)), step_title(PlanConfig("1f1b", 1, 2), run=2)
    ('1F1B, 4 stages, 8 microbatches', '1F1B, 1 stage, 2 microbatches, run 2 of its training step')
    """
    parts = [NAMES.get(config.schedule, config.schedule)]
    parts.append(f"{config.pp_size} stage{'s' * (config.pp_size != 1)}")
    if config.num_model_chunks > 1:
        parts.append(f"{config.num_model_chunks} chunks per stage")
    parts.append(f"{config.num_microbatches} microbatch{'es' * (config.num_microbatches != 1)}")
    if config.forward_only:
        parts.append("forward only")
    if config.overlap_p2p_comm:
        parts.append("messages overlapped")
    if run > 1:
        parts.append(f"run {run} of its training step")
    return ", ".join(parts)


def pace_words(pace: dict[str, float] | None) -> str:
    """The label that every output of a paced run carries; empty for others.

    >>> pace_words({"forward_ms": 40.0, "backward_ms": 80.0})
    'paced: forward 40 ms, backward 80 ms'
    """
    if pace is None:
        return ""
    words = {f"{kind.cost}_ms": kind.words for kind in KINDS.values()}
    of_layers = ("attention", "mlp", "all_to_all", "ring_block", "ring_hop")
    words |= {f"{name}_ms": name.replace("_", "-") for name in of_layers}
    lengths = [f"{words[name]} {pace[name]:g} ms" for name in words if name in pace]
    return f"paced: {', '.join(lengths)}"


def late_words(step: Step) -> str:
    """How many computations of a paced run overran its pace; empty if none did.

    With any, the machine was too busy, or the pace too fast, for the times to be the pace's alone.
    """
    if step.num_late == 0:
        return ""
    total = sum(len(step.work(rank)) for rank in range(len(step.stages)))
    return f"{step.num_late} of {total} computations overran the pace"


def lines_words(step: Step) -> str:
    """That times are longer than usual, where the step's lines were recorded; else empty."""
    for stage, indices in zip(step.stages, step.indices, strict=True):
        root = stage.lines.calls[0].event if stage.lines is not None and stage.lines.calls else None
        if root is not None and root in (indices[0], stage.events[indices[0]].parent):
            return "recorded line by line, which takes up to three times as long"
    return ""


def gap_words(step: Step, gap: TracedGap) -> str:
    """Why the stage computed nothing."""
    num_chunks = step.config.num_model_chunks
    if gap.before is None:
        return f"{milliseconds(gap.length)} at the end, its work done"
    ends = action_name(step.events[gap.rank][gap.before].action, num_chunks)
    parts = f"{milliseconds(gap.waiting)} waiting"
    if gap.waits_for is not None:
        maker = step.event(gap.waits_for).action
        parts += f" for {action_name(maker, num_chunks)} of stage {gap.waits_for[0]}"
    return (
        f"{milliseconds(gap.length)} before {ends}: {parts}, "
        f"{milliseconds(gap.transfer)} transfer, {milliseconds(gap.other)} own work"
    )
