"""What is wrong with a table of the interleaved schedule: which rule, at which row.

No message holds the right table: it could be copied.
"""

from typing import Any

from minimegatron.core.pipeline_parallel.schedule_table import get_schedule_table
from minimegatron.exercises.bench.feedback import num_of
from minimegatron.exercises.check import Wrong

MOST_SHOWN = 300
"""Characters of the student's own table."""
PAIRS = "a list of tuples (microbatch, chunk)"


def check_table(table: Any, M: int, v: int, G: int) -> None:
    """Raises Wrong unless the table has each microbatch on each chunk, in the right order."""
    call = f"get_schedule_table({M}, {v}, {G})"
    if not isinstance(table, list):
        name = table["type"]
        what = "None (was `return` forgotten?)" if name == "NoneType" else f"a {name}"
        raise Wrong(f"{call} returned {what}; return {PAIRS}")
    fault = _fault(table, M, v, G)
    if not fault:
        return
    yours = repr(table)
    if len(yours) > MOST_SHOWN:
        yours = f"{yours[:MOST_SHOWN]}... ({num_of(len(table), 'row')})"
    lines = [
        f"{call}, {num_of(M, 'microbatch', 'microbatches')}, {num_of(v, 'chunk')}, groups of {G}: "
        f"{fault}",
        f"  yours: {yours}",
        _pattern(table, M, v),
    ]
    raise Wrong("\n".join(line for line in lines if line))


def _fault(table: list[Any], M: int, v: int, G: int) -> str:
    """The first row that breaks a rule, and which; "" if none does."""
    for k, row in enumerate(table):
        if type(row) is not tuple or [type(x) for x in row] != [int, int]:
            kind = f"a {type(row).__name__}, " if type(row) is not tuple else ""
            return f"row {k} is {kind}{row!r}; return {PAIRS}, two ints"
    right = get_schedule_table(M, v, G)
    if table != right and table == [(chunk, microbatch) for microbatch, chunk in right]:
        return "rows are (microbatch, chunk), in this order; yours are the other way round"
    places: dict[tuple[int, int], int] = {}
    for k, row in enumerate(table):
        words = _out_of_range(row, M, v, G)
        if not words and row in places:
            words = f"row {places[row]} is the same. A microbatch visits each chunk once."
        if not words and row != right[k]:
            words = _broken_rule(row, right[k], G, M)
        if words:
            return f"row {k} is {row}: {words}"
        places[row] = k
    if len(table) < M * v:
        return (
            f"it has {num_of(len(table), 'row')}, but each of {M} microbatches visits each of {v} "
            f"chunks: "
            f"{M * v} rows are needed"
        )
    return ""


def _out_of_range(row: tuple[int, int], M: int, v: int, G: int) -> str:
    microbatch, chunk = row
    if microbatch >= M:
        return (
            f"There is no microbatch {microbatch}: the last group has "
            f"{num_of(M % G or G, 'microbatch', 'microbatches')}."
        )
    if microbatch < 0:
        return "Microbatches are counted from 0."
    return "" if 0 <= chunk < v else f"Chunks are 0 to {v - 1}."


def _broken_rule(row: tuple[int, int], right: tuple[int, int], G: int, M: int) -> str:
    """All rows before it are right, so it can only be too early: why?"""
    (microbatch, chunk), group = row, right[0] // G
    members = f"group {group} (microbatches {group * G} to {min(M, group * G + G) - 1})"
    if G == 1 or group * G == M - 1:
        members = f"group {group} (microbatch {group * G})"
    if microbatch // G > group:
        return f"too early. All of {members} must visit all chunks before the next group begins."
    if chunk > right[1]:
        return f"too early. All of {members} must visit chunk {chunk - 1} first."
    return "too early. On each chunk, the microbatches of a group come in rising order."


def _pattern(table: list[Any], M: int, v: int) -> str:
    """What the order as a whole would mean, where it is a likely one."""
    if table == [(m, c) for m in range(M) for c in range(v)]:
        return (
            "Here each microbatch visits all chunks before the next one starts: the stage would "
            "wait for it to come round the ring each time. A whole group goes first."
        )
    if table == [(m, c) for c in range(v) for m in range(M)]:
        return (
            "Here all microbatches visit chunk 0 before any visits chunk 1, as if there were one "
            f"group: with M={M} in flight the memory of all is needed."
        )
    return ""
