"""Which lines one step of one rank ran, by function; and all its calls in their order.

Torch-free. Megatron has no counterpart.

In a rank's file, under "lines":

```
{"functions": [{"source": "path:first line",                 a key of "sources", which has the text
                "lines": [[line, calls that ran it], ...]}],  counted from 1 within that text
 "calls": [[function, parent, line, event], ...]}             indices; -1 where there is none
```

A call's `line` is that of its parent's text; `event` is the index of the traced call that it is.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

NONE = -1


class LinesCall(NamedTuple):
    """One call of a function."""

    function: int
    """Index into `StepLines.functions`."""
    parent: int = NONE
    """Index of the call that made it."""
    line: int = 0
    """Of the parent's text: where it was made."""
    event: int = NONE
    """Index into `RankTrace.events`, of a traced call."""


@dataclass
class FunctionLines:
    """One function: which of its lines ran, and in how many of its calls."""

    source: str
    """Its key in `RankTrace.sources`."""
    lines: dict[int, int] = field(default_factory=dict)
    """Line, counted from 1 within the text -> number of calls that ran it."""


@dataclass
class StepLines:
    """Of one step: its functions, and its calls in the order in which they began."""

    functions: list[FunctionLines] = field(default_factory=list)
    calls: list[LinesCall] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        functions = [{"source": f.source, "lines": sorted(f.lines.items())} for f in self.functions]
        return {"functions": functions, "calls": [list(call) for call in self.calls]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepLines":
        """The inverse of `to_json`."""
        functions = [FunctionLines(f["source"], dict(f["lines"])) for f in data["functions"]]
        return cls(functions, [LinesCall(*call) for call in data["calls"]])
