"""Which lines one step of one rank ran, by function; and all its calls in their order.

Torch-free. Megatron has no counterpart.

In a rank's file, under "lines":

```
{"functions": [{"source": "path:first line",        a key of "sources", which has the text
                "paths": [[line, line, ...], ...]}], lines that a call ran, counted from 1 in that text
 "calls": [[function, parent, line, event, path], ...]}   indices; -1 where there is none
```

A call's `line` is that of its parent's text; `event` is the index of the traced call that it is; `path`
is one of its function's.
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
    path: int = 0
    """Index into its function's paths: the lines that it ran."""


@dataclass
class FunctionLines:
    """One function: which lines each of its calls ran, counted from 1 within its text."""

    source: str
    """Its key in `RankTrace.sources`."""
    paths: list[tuple[int, ...]] = field(default_factory=list)
    """Each choice of lines that a call ran, once."""

    @property
    def lines(self) -> set[int]:
        """The lines that any of its calls ran."""
        return {line for path in self.paths for line in path}


@dataclass
class StepLines:
    """Of one step: its functions, and its calls in the order in which they began."""

    functions: list[FunctionLines] = field(default_factory=list)
    calls: list[LinesCall] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        functions = [{"source": f.source, "paths": f.paths} for f in self.functions]
        return {"functions": functions, "calls": [list(call) for call in self.calls]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "StepLines":
        """The inverse of `to_json`."""
        functions = [
            FunctionLines(f["source"], [tuple(path) for path in f["paths"]])
            for f in data["functions"]
        ]
        return cls(functions, [LinesCall(*call) for call in data["calls"]])
