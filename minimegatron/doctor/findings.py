"""What a diagnosis is: its kind, and what is said of the ranks.

Torch-free. Megatron has no counterpart.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from minimegatron.doctor.situation import Situation

CYCLE = "cycle"
"""Ranks that wait for each other's messages."""
ORDER = "order"
"""Ranks that wait for each other in different collectives."""
MISSING = "missing partner"
"""A message or collective whose other side has gone on without it."""
MISMATCH = "mismatch"
"""The same collective, entered with different operations, sizes or types."""
WRONG_PEER = "wrong peer"
UNEQUAL = "unequal steps"
"""Stages of one pipeline that run different numbers of microbatches, or different schedules."""
LEFT = "left early"
SWALLOWED = "exception swallowed"
STOPPED_RANK = "stopped"
STUCK = "stuck"
"""A rank that others wait for does something else: computes, or sleeps."""
NOBODY = "nobody waits"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Missing:
    """What a waiting rank lacks, and from whom."""

    rank: int
    """Who has not come."""
    waited_for_by: int
    text: str
    """What that rank has not done."""


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a hang, for people (`text`) and for programs (the other fields)."""

    kind: str
    """One of the constants above."""
    cause: str
    advice: str
    ranks: tuple[int, ...]
    """Who is at fault, or in the circle."""
    cycle: tuple[int, ...] = ()
    """Each waits for the one after it, the last for the first."""
    missing: tuple[Missing, ...] = ()
    details: tuple[str, ...] = ()
    """Further sentences on the cause."""
    situations: Mapping[int, Situation] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    quiet: float = 0.0
    """Seconds since any rank moved."""
    text: str = ""
    """All of this for a person, without the stacks."""

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists and dicts, for `json.dumps`."""
        return asdict(self)
