"""Records a student's own run, to be judged and to be replayed afterwards.

Megatron has no counterpart.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minimegatron.core.json_text import parse_json
from minimegatron.tracing.rank_trace import RankTrace
from minimegatron.tracing.recorder import trace
from minimegatron.tracing.trace_view import Trace


@contextlib.contextmanager
def recorded() -> Iterator[Callable[[], Any]]:
    """Records what runs inside, on every rank: enter it on all or none.

    Yields a function; called after the block it gives this rank's recording as plain data.
    """
    with trace(gather=False) as run:
        yield lambda: json.dumps(run.ranks[0].to_json())


def run_of(answers: Sequence[dict[str, Any]], key: str = "recording") -> Trace:
    """All ranks' recordings together. Raises ValueError if one is damaged."""
    run = Trace([])
    run.fill([RankTrace.from_json(parse_json(answer[key], "a recording")) for answer in answers])
    return run
