"""What a rank's recording must look like, so that nothing that reads one stumbles over it later.

Torch-free. Megatron has no counterpart.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Union

from minimegatron.core.orders.work import RING_HOP
from minimegatron.planner.actions import BACKWARD, COMMUNICATE, FORWARD, PAIR
from minimegatron.planner.links import LAYER_NODE
from minimegatron.planner.plan import plan_config_from_json

NUMBER = (int, float)
LARGEST = 1e15
"""Of any number; in microseconds, thirty years."""
MOST_NESTED = 200
"""Traced calls within each other; a step has about twenty."""
MOST_LINES = 1_000_000
"""Of a function."""
MOST_RANKS = 1_000_000
"""Ranks of a job: more than anybody has. Stages of a model likewise."""


@dataclass(frozen=True)
class Keys:
    """A JSON object: keys that must be there, keys that may be; others are not looked at."""

    required: dict[str, "Shape"]
    optional: dict[str, "Shape"]


@dataclass(frozen=True)
class Each:
    """A JSON object with any keys, whose values all look the same."""

    value: "Shape"


Shape = Union[type, tuple, list, Keys, Each]  # noqa: UP007 - it names itself
"""A type, a choice of types, a list of one shape (any number of them), or an object."""

NOTHING = type(None)
AXES = dict.fromkeys(("pp", "tp", "dp", "cp"), int)
MESSAGE = Keys(
    {"direction": str, "payload": str, "peer": int, "microbatch": int, "chunk": int},
    {"num_bytes": int},
)
CONFIG = Keys(
    {"schedule": str, "pp_size": int, "num_microbatches": int},
    {
        "num_model_chunks": int,
        "microbatch_group_size_per_vp_stage": (int, NOTHING),
        "forward_only": bool,
        "overlap_p2p_comm": bool,
        "batch_p2p_comm": bool,
        "message_bytes": int,
        "placement": (dict, NOTHING),
        "wire": (str, NOTHING),
        "message_factors": [int],
        "message_sizes": [[int]],
    },
)
PLACEMENT = Keys({"name": str, "stages": [[int]]}, {})
ATTRIBUTES = Keys(
    {},
    {
        "step": int,
        "config": CONFIG,
        "stack": int,
        "bytes": int,
        "shape": [int],
        "dtype": str,
        "group_size": int,
        "bytes_sent": int,
        "input_splits": [int],
        "output_splits": [int],
        "begun": int,
        "node": str,
        "direction": str,
        "layer": int,
        "hop": int,
        "lane": str,
        "doing": str,
        "payload": str,
        "peer": int,
        "ordinal": int,
        "transfer": NUMBER,
        "host_start": NUMBER,
        "host_end": NUMBER,
        "communicator": str,
        "device_start": NUMBER,
        "device_end": NUMBER,
        "unfinished": bool,
    },
)
PART = Keys(
    {"kind": str, "rank": int},
    {"phase": (str, NOTHING), "microbatch": (int, NOTHING), "chunk": (int, NOTHING)},
)
EVENT = Keys(
    {
        "kind": str,
        "rank": int,
        "start": NUMBER,
        "end": NUMBER,
        "name": str,
        "file": str,
        "line": int,
    },
    {
        "phase": (str, NOTHING),
        "microbatch": (int, NOTHING),
        "chunk": (int, NOTHING),
        "call": (str, NOTHING),
        "messages": [MESSAGE],
        "overlap": bool,
        "wait": NUMBER,
        "waits_for": [int],
        "symbol": str,
        "parent": int,
        "attributes": ATTRIBUTES,
        "parts": [PART],
    },
)
TOGETHER = (
    {"doing", "payload", "peer", "ordinal"},
    {"shape", "dtype"},
    {"communicator", "device_start", "device_end"},
)
"""Attributes that say something only with each other."""
OF_HOP = {"payload", "hop", "layer", "direction", "bytes_sent", "group_size"}
"""Attributes of a hop of attention's ring; its payload is no message's."""
CLOCK = Keys(
    {},
    {"offset_us": NUMBER, "residual_us": NUMBER, "worst_residual_us": NUMBER, "is_shared": bool},
)
PACE = Keys(
    {"forward_ms": NUMBER, "backward_ms": NUMBER},
    {
        "backward_input_ms": NUMBER,
        "backward_weight_ms": NUMBER,
        "attention_ms": NUMBER,
        "mlp_ms": NUMBER,
        "all_to_all_ms": NUMBER,
        "ring_block_ms": NUMBER,
        "ring_hop_ms": NUMBER,
    },
)
ABOUT = Keys(
    {"rank": int, "world_size": int, "coordinates": Keys(AXES, {}), "sizes": Keys(AXES, {})},
    {"device": str, "clock": CLOCK, "is_cut": bool},
)
LINES = Keys({"functions": [Keys({"source": str, "paths": [[int]]}, {})], "calls": [[int]]}, {})
RECORDING = Keys(
    {"rank": ABOUT, "ranks": [[EVENT]]},
    {
        "sources": Each(Keys({"name": str, "text": str}, {})),
        "stacks": [[list]],
        "lines": LINES,
    },
)


def check_recording(data: Any) -> None:
    """Raises ValueError, naming the first place that is not as `RankTrace.to_json` writes it."""
    _check(data, RECORDING, "the recording")
    sizes = {"world_size": data["rank"]["world_size"]}
    sizes |= {f"sizes.{axis}": size for axis, size in data["rank"]["sizes"].items()}
    for name, size in sizes.items():
        if not 1 <= size <= MOST_RANKS:
            raise ValueError(f"rank.{name} is {size}; from 1 to {MOST_RANKS} are read")
    if data["rank"].get("pace") is not None:
        _check(data["rank"]["pace"], PACE, "rank.pace")
    if len(data["ranks"]) != 1:
        raise ValueError(f"ranks has {len(data['ranks'])} lists of events; a rank's file has one")
    stacks = data.get("stacks", [])
    for number, stack in enumerate(stacks):
        for frame in stack:
            if [type(part) for part in frame] != [str, int]:
                raise ValueError(f"stacks.{number} holds {frame!r:.60}, not a source and a line")
    steps: set[int] = set()
    levels: list[int] = []
    for number, event in enumerate(data["ranks"][0]):
        where = f"ranks.0.{number}"
        attributes = event.get("attributes", {})
        _check_index(event.get("parent"), number, f"{where}.parent")
        levels.append(_level(event.get("parent"), levels, where))
        _check_index(attributes.get("stack"), len(stacks), f"{where}.attributes.stack")
        _check_index(attributes.get("begun"), number, f"{where}.attributes.begun")
        if len(event.get("waits_for", (0, 0))) != 2:
            raise ValueError(f"{where}.waits_for is no pair of a rank and an index")
        if event["kind"] == COMMUNICATE and event.get("call") is None:
            raise ValueError(f"{where} is a communication without a call")
        kinds = [part["kind"] for part in event.get("parts", ())]
        if kinds != ([FORWARD, BACKWARD] if event["kind"] == PAIR else []):
            raise ValueError(
                f"{where} is a {event['kind']} of parts {kinds}; a recording's pairs are of a forward "
                "and a backward, and nothing else has parts"
            )
        if event["name"] == LAYER_NODE and not {"node", "direction", "lane"} <= attributes.keys():
            raise ValueError(f"{where} is a node of a layer, and does not say which")
        _check_together(event, attributes, where)
        if attributes.get("step") not in {None, *steps}:
            steps.add(attributes["step"])
            if "config" not in attributes:
                raise ValueError(f"{where}.attributes begins a step and has no config")
        if "config" in attributes:
            num_events, num_stages = len(data["ranks"][0]), data["rank"]["sizes"]["pp"]
            config = attributes["config"]
            _check_config(config, num_stages, num_events, f"{where}.attributes.config")
    if "lines" in data:
        _check_lines(data["lines"], data.get("sources", {}), len(data["ranks"][0]))


def _check_lines(lines: dict[str, Any], sources: dict[str, Any], num_events: int) -> None:
    for number, function in enumerate(lines["functions"]):
        where = f"lines.functions.{number}"
        if function["source"] not in sources:
            raise ValueError(
                f"{where}.source is {function['source']!r:.60}, of which no text is kept"
            )
        # A line may be beyond the text's end: a file that was edited during the run has another text.
        for path in function["paths"]:
            if not all(1 <= line <= MOST_LINES for line in path):
                raise ValueError(
                    f"{where}.paths holds {path!r:.60}; lines from 1 to {MOST_LINES:,} are read"
                )
    levels: list[int] = []
    for number, call in enumerate(lines["calls"]):
        where = f"lines.calls.{number}"
        if len(call) != 5:
            raise ValueError(
                f"{where} has {len(call)} numbers, not function, parent, line, event, path"
            )
        function, parent, _, event, path = call
        _check_index(function, len(lines["functions"]), f"{where}'s function")
        _check_index(path, len(lines["functions"][function]["paths"]), f"{where}'s path")
        # -1 is none; the first call alone has no parent, since all others are made within it.
        _check_index(None if number == 0 and parent == -1 else parent, number, f"{where}'s parent")
        _check_index(None if event == -1 else event, num_events, f"{where}'s event")
        levels.append(_level(parent if number else None, levels, where))


def _level(parent: int | None, levels: list[int], where: str) -> int:
    """How many calls are around a call, itself included."""
    level = 1 if parent is None else levels[parent] + 1
    if level > MOST_NESTED:
        raise ValueError(
            f"{where} is a call within {level - 1} others; at most {MOST_NESTED} levels are read"
        )
    return level


def _check_together(event: dict[str, Any], attributes: dict[str, Any], where: str) -> None:
    told = attributes.keys()
    if event["name"] == RING_HOP:
        if missing := OF_HOP - told:
            raise ValueError(f"{where}.attributes lacks {min(missing)!r}")
        told = told - {"payload"}
    for names in TOGETHER:
        found = names & told
        missing = names - found
        if "ordinal" in missing and str(attributes.get("payload")).endswith(" shape"):
            missing = missing - {"ordinal"}  # messages of sizes are not counted
        if found and missing:
            raise ValueError(f"{where}.attributes lacks {min(missing)!r}")
    if event["name"] == "p2p-wait" and "payload" not in attributes:
        raise ValueError(f"{where}.attributes lacks the payload that was waited for")
    if "group_size" in attributes and "bytes" not in attributes:
        raise ValueError(f"{where}.attributes lacks the bytes of a collective")


def _check_config(config: dict[str, Any], num_stages: int, num_events: int, where: str) -> None:
    """A plan is made of it; so it must not ask for more than was recorded."""
    if config.get("placement") is not None:
        _check(config["placement"], PLACEMENT, f"{where}.placement")
    # Sizes come first: the config itself makes a table of all stages.
    p, v = config["pp_size"], config.get("num_model_chunks", 1)
    if p != num_stages:
        raise ValueError(f"{where} has {p} stages, but the rank's pp is {num_stages}")
    if config["num_microbatches"] * v > num_events:
        raise ValueError(f"{where} has more microbatches than there are {num_events} events")
    if p * v > MOST_RANKS:
        raise ValueError(f"{where} has {p * v} stages and chunks; up to {MOST_RANKS} are read")
    try:
        of_plan = plan_config_from_json(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is no plan's: {error}") from None
    placed = (of_plan.placement.pp_size, of_plan.placement.num_model_chunks)
    if placed != (p, v):
        raise ValueError(
            f"{where}.placement has {placed[0]} ranks of {placed[1]} chunks, but pp_size is {p} and "
            f"num_model_chunks is {v}"
        )


def _check(value: Any, shape: Shape, where: str) -> None:
    if isinstance(shape, list):
        _check_type(value, (list,), where)
        _check_all(enumerate(value), shape[0], where)
    elif isinstance(shape, Each):
        _check_type(value, (dict,), where)
        _check_all(value.items(), shape.value, where)
    elif isinstance(shape, Keys):
        _check_type(value, (dict,), where)
        missing = [key for key in shape.required if key not in value]
        if missing:
            raise ValueError(f"{where} has no {missing[0]!r}")
        for key, wanted in (shape.required | shape.optional).items():
            if key in value:
                _check(value[key], wanted, f"{where}.{key}")
    else:
        _check_type(value, shape if isinstance(shape, tuple) else (shape,), where)


def _check_all(items: Iterable[tuple[Any, Any]], shape: Shape, where: str) -> None:
    for key, item in items:
        _check(item, shape, f"{where}.{key}")


def _check_type(value: Any, wanted: tuple[type, ...], where: str) -> None:
    # True is an int to Python, but not to a reader.
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        names = " or ".join("null" if kind is NOTHING else kind.__name__ for kind in wanted)
        raise ValueError(f"{where} is {value!r:.60}, not {names}")
    # Python reads NaN, 1e999 and numbers of any length; a browser, and arithmetic, do not.
    if isinstance(value, int | float) and not abs(value) < LARGEST:
        shown = value if isinstance(value, float) else "an integer"
        raise ValueError(f"{where} is {shown}, not within {LARGEST:.0e}; no clock goes so far")


def _check_index(value: int | None, size: int, where: str) -> None:
    if value is not None and not 0 <= value < size:
        raise ValueError(f"{where} is {value}; there are {size}")
