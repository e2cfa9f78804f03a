"""What one rank recorded, and its file: a timeline of the planner's schema with a few keys more.

Torch-free. Megatron has no counterpart.

`rank-00002.json` is the timeline of `planner.actions`, with one list of events in `ranks`, unit
"us" (0 is when the recording began, on rank 0's clock), and beside it:

```
"rank":    {"rank", "world_size", "coordinates": {"pp", "tp", "dp", "cp"}, "sizes": {the same},
            "device", "clock": {"offset_us", "residual_us", "worst_residual_us", "is_shared"},
            "pace": {...} or null, "is_cut": whether calls after the most that are kept are missing}
"sources": {"path:first line": {"name", "text"}}     the functions that events and stacks name
"stacks":  [[["path:first line", line], ...], ...]   outermost first
"lines":   of one step, where they were recorded: see `step_lines`
```

An event's `attributes`, each only where it applies:

| key | meaning |
|---|---|
| `step` | how many schedule runs of this rank came before the one it belongs to |
| `config` | of a schedule run: the `PlanConfig` that its plan has |
| `stack` | index into `stacks`: the lines between the parent's function and this call |
| `bytes`, `shape`, `dtype`, `group_size` | of what a message or collective moves |
| `doing`, `payload`, `peer`, `ordinal` | below the communicator: which message is started or awaited |
| `hop`, `layer`, `direction`, `payload` | of a hop of attention's ring: which, and what moves |
| `transfer` | of the wait for a message, what is left after `wait` |
| `host_start`, `host_end` | on a GPU, when the program made the call; `start` and `end` are the GPU's |
| `communicator` | on a GPU, of what is sent, received or summed over NCCL: whose work it is |
| `device_start`, `device_end` | when it did it; see `communicator_clock` |
| `unfinished` | the call had not returned when the recording ended |

`ordinal` counts a step's messages of one direction and payload to or from one peer.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.json_text import read_json
from minimegatron.planner.actions import (
    FORWARD,
    KINDS,
    SCHEMA_VERSION,
    Event,
    timeline_from_json,
    timeline_to_json,
)
from minimegatron.tracing.recording_shape import check_recording
from minimegatron.tracing.step_lines import StepLines

WRAPS = ("@functools.wraps(", "@wraps(")
AXES = ("pp", "tp", "dp", "cp")
VERSIONS = range(1, SCHEMA_VERSION + 1)


def paced_ms(pace: Mapping[str, float], kind: str) -> float:
    """How long a piece of work takes in a paced run, at least.

    A backward that computes one gradient takes half of one that computes both, unless told otherwise.

    >>> pace = {"forward_ms": 10.0, "backward_ms": 20.0, "backward_weight_ms": 8.0}
    >>> [paced_ms(pace, kind) for kind in ("forward", "backward-input", "backward-weight")]
    [10.0, 10.0, 8.0]
    """
    own = pace.get(f"{KINDS[kind].cost}_ms")
    if own is not None or kind == FORWARD:
        return own
    return pace["backward_ms"] * len(KINDS[kind].computes) / 2


@dataclass(frozen=True)
class ClockFigures:
    """How this rank's clock was brought to rank 0's. Microseconds."""

    offset_us: float = 0.0
    residual_us: float = 0.0
    """The offset is known to be within this."""
    worst_residual_us: float = 0.0
    """The same of the rank whose clock is known least."""
    is_shared: bool = True
    """Both read the same clock, so nothing had to be subtracted."""


@dataclass(frozen=True)
class Source:
    """A function's own text."""

    name: str
    text: str


@dataclass
class RankTrace:
    """The calls of one rank, in the order of starting, and where they stand in the source."""

    rank: int = 0
    world_size: int = 1
    coordinates: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 0))
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    device: str = "cpu"
    clock: ClockFigures = ClockFigures()
    pace: dict[str, float] | None = None
    """Where computation was padded to fixed lengths: those of `pace.Pace`, for `paced_ms`."""
    is_cut: bool = False
    events: list[Event] = field(default_factory=list)
    stacks: list[list[tuple[str, int]]] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)
    lines: StepLines | None = None
    """Which lines one step ran, where that was recorded."""

    def stack(self, event: Event) -> list[tuple[str, int]]:
        """(source, line) from the outermost traced call down to the line that made this call.

        Without the lines of decorators, which only hand a call on.
        """
        frames: list[tuple[str, int]] = []
        at: Event | None = event
        while at is not None:
            index = at.attributes.get("stack")
            frames = (self.stacks[index] if index is not None else []) + frames
            at = self.events[at.parent] if at.parent is not None else None
        return [frame for frame in frames if not self.hands_on(frame[0])]

    def hands_on(self, key: str) -> bool:
        """Whether a source is the function inside a decorator, which calls the decorated one."""
        source = self.sources.get(key)
        return source is not None and source.text.lstrip().startswith(WRAPS)

    @cached_property
    def steps(self) -> dict[int, list[int]]:
        """Number of a step -> indices of its events, first that of the schedule's own call."""
        steps: dict[int, list[int]] = {}
        for index, event in enumerate(self.events):
            if "step" in event.attributes:
                steps.setdefault(event.attributes["step"], []).append(index)
        return steps

    def run_of(self, step: int) -> int:
        """Which run of its training step this is, from 1 on: a rejected result has one run again."""
        root = self.steps[step][0]
        around = self.events[root].parent
        if around is None or self.events[around].name != "train-step":
            return 1
        runs = [indices[0] for indices in self.steps.values()]
        return sum(self.events[run].parent == around and run <= root for run in runs)

    def below(self, root: int) -> dict[int, Event]:
        """An event and all that is nested in it, by index."""
        inside = {root: self.events[root]}
        for index in range(root + 1, len(self.events)):
            if self.events[index].parent in inside:
                inside[index] = self.events[index]
        return inside

    # -- JSON --

    def to_json(self) -> dict[str, Any]:
        """The whole as a dict for `json.dumps`; the module's docstring shows its shape."""
        configs = (event.attributes.get("config") for event in self.events)
        first_config = next((config for config in configs if config), {})
        data = timeline_to_json([self.events], "run", first_config, "us")
        data["rank"] = {
            "rank": self.rank,
            "world_size": self.world_size,
            "coordinates": self.coordinates,
            "sizes": self.sizes,
            "device": self.device,
            "clock": asdict(self.clock),
            "pace": self.pace,
            "is_cut": self.is_cut,
        }
        data["sources"] = {key: asdict(source) for key, source in self.sources.items()}
        data["stacks"] = self.stacks
        if self.lines is not None:
            data["lines"] = self.lines.to_json()
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RankTrace":
        """The inverse of `to_json`. Raises ValueError for anything else."""
        (events,) = timeline_from_json(data)
        if "rank" not in data:
            raise ValueError("this timeline is no rank's recording: it has no key 'rank'")
        about = dict(data["rank"])
        clock = ClockFigures(**about.pop("clock"))
        known = {key: about[key] for key in about if key in cls.__dataclass_fields__}
        return cls(
            **known,
            clock=clock,
            events=events,
            stacks=[[tuple(frame) for frame in stack] for stack in data.get("stacks", [])],
            sources={key: Source(**value) for key, value in data.get("sources", {}).items()},
            lines=StepLines.from_json(data["lines"]) if "lines" in data else None,
        )


# -- Files --


def file_name(rank: int) -> str:
    """A rank's file within a trace's folder.

    >>> file_name(2)
    'rank-00002.json'
    """
    return f"rank-{rank:05d}.json"


def save_rank(trace: RankTrace, directory: str | os.PathLike) -> Path:
    """Writes one rank's file, whole or not at all; makes the folder. Returns the file's path.

    Raises CannotWrite, an OSError that names the file.
    """
    path = Path(directory) / file_name(trace.rank)
    write_atomically(path, json.dumps(trace.to_json(), separators=(",", ":")).encode())
    return path


def load_ranks(directory: str | os.PathLike) -> list[RankTrace]:
    """All ranks of a trace's folder, in order.

    Raises ValueError, saying what to do, for a folder without a trace, for a file that is none, and
    for ranks of different jobs in one folder.
    """
    folder = Path(directory)
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        what = "has no rank-*.json" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder} {what}; give the folder that --trace wrote")
    ranks = [_load_rank(path) for path in paths]
    sizes = sorted({rank.world_size for rank in ranks})
    if len(sizes) > 1:
        raise ValueError(
            f"{folder} holds ranks of jobs of different sizes ({_listed(sizes)}); record each job "
            "into a folder of its own"
        )
    return ranks


def _load_rank(path: Path) -> RankTrace:
    data = read_json(path)
    try:
        is_readable = isinstance(data, dict) and data.get("version") in VERSIONS
        if is_readable and "rank" in data:
            check_recording(data)
        return RankTrace.from_json(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def missing_ranks(ranks: Sequence[RankTrace]) -> list[int]:
    """Ranks of the job whose recording is not among these."""
    there = {rank.rank for rank in ranks}
    return [rank for rank in range(ranks[0].world_size) if rank not in there] if ranks else []


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
