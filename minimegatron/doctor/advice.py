"""A diagnosis for a person who has never seen ranks wait for each other.

Torch-free. Megatron has no counterpart.
"""

import textwrap
from collections.abc import Mapping

from minimegatron.doctor import findings
from minimegatron.doctor.records import RankRecord, ranks_in_words
from minimegatron.doctor.situation import OVER, Situation

MAX_RANKS = 16
"""Ranks shown one by one; of a larger job, those at fault and those next to them."""
WIDTH = 100

ADVICE = {
    findings.CYCLE: (
        "A message is over only when both its ranks are there: a send waits for its receive, and a "
        "receive for its send. Let one rank of the circle do its other call first (stages with even "
        "and odd numbers in opposite order), or exchange both messages in one call, such as "
        "send_forward_recv_backward."
    ),
    findings.ORDER: (
        "A collective waits until every rank of its group is in it. Let all ranks enter their "
        "collectives in the same order."
    ),
    findings.MISSING: (
        "Every send needs one receive on its peer, every receive one send, and a collective needs "
        "every rank of its group. One rank makes a call too many, or another one too few: look at a "
        "loop that ends a turn early or late, at an early return, and at an `if` that asks for the "
        "rank."
    ),
    findings.MISMATCH: (
        "All ranks of a group must enter the same collective, with tensors of the same size and "
        "type. Print the shapes before the call; if they are as they should be, look for a rank "
        "that left out an earlier collective and is one ahead since."
    ),
    findings.WRONG_PEER: (
        "An activation goes to the next stage, a gradient to the previous one. Peers are counted "
        "within the pipeline group, so they are stages and not ranks of the whole job."
    ),
    findings.UNEQUAL: (
        "All stages must agree on the step. Work out its sizes from what every rank has (the "
        "arguments), not from what only some have (their own data)."
    ),
    findings.LEFT: (
        "All ranks must go through the same communication to its end. Look for an early return or "
        "break on that rank, or a loop with fewer turns."
    ),
    findings.SWALLOWED: (
        "Let the exception end the rank: the others cannot know that it leaves something out. "
        "Repair its cause, and remove the `except` that hides it."
    ),
    findings.STOPPED_RANK: (
        "Its process does not run at all. Something sent it SIGSTOP: Ctrl-Z, `kill -STOP`, or a "
        "debugger. `kill -CONT` and the process number would let it go on."
    ),
    findings.STUCK: (
        "The Python stack below shows what it does. If that is only slow (a first batch, a big "
        "file), allow more time with a larger hang time-out; else it is an endless loop, a lock, or "
        "a wait that the doctor cannot see into."
    ),
    findings.NOBODY: "The Python stacks below show what each does. Allow more time, if it is slow.",
    findings.UNKNOWN: "The Python stacks below show where each rank stands.",
}


def render(found: findings.Diagnosis, records: Mapping[int, RankRecord] | None = None) -> str:
    """Cause, advice, and each rank's situation."""
    where = {rank: place(record) for rank, record in (records or {}).items()}
    lines = _block("Why: ", found.cause)
    for detail in found.details:
        lines += _block("     ", detail)
    if found.cycle:
        lines += ["", *_draw_cycle(found)]
    lines += ["", *_block("What to do: ", found.advice), "", "Each rank:"]
    shown = _shown(found)
    for rank in shown:
        mark = "*" if rank in found.ranks else " "
        lines.append(f" {mark} rank {rank}{where.get(rank, '')}")
        lines += _block("       ", found.situations[rank].text)
        lines += _more(found, found.situations[rank])
    if len(shown) < len(found.situations):
        lines.append(f"   ... and {len(found.situations) - len(shown)} more ranks, further behind")
    lines.append(
        "   (* = where to look first; microbatches and #numbers count from 0, layers from 1)"
    )
    return "\n".join(lines)


def headline(found: findings.Diagnosis) -> str:
    """What has been seen, in a line."""
    return f"HANG: for {found.quiet:.1f} s no rank has begun or ended a call."


def render_stacks(stacks: Mapping[int, str]) -> str:
    """The Python stack of each rank; of a large job, of the first few."""
    lines = []
    for rank, stack in sorted(stacks.items())[:MAX_RANKS]:
        lines.append(f"--- Python stack of rank {rank}, innermost call first ---")
        lines.append(stack or "  (none: it does not answer)")
    if len(stacks) > MAX_RANKS:
        lines.append(f"--- and {len(stacks) - MAX_RANKS} more ---")
    return "\n".join(lines)


def place(record: RankRecord) -> str:
    """Where a rank stands in the model: " (stage 1 of 4)".

    >>> place(RankRecord(5, 8, coordinates={"pp": 1, "tp": 1}, sizes={"pp": 4, "tp": 2}))
    ' (stage 1 of 4, tp 1 of 2)'
    """
    parts = []
    if record.sizes.get("pp", len(record.pipeline)) > 1:
        stage = record.coordinates.get("pp")
        if stage is None and record.rank in record.pipeline:
            stage = record.pipeline.index(record.rank)
        parts.append(f"stage {stage} of {record.sizes.get('pp', len(record.pipeline))}")
    for axis in ("tp", "dp", "cp"):
        if record.sizes.get(axis, 1) > 1:
            parts.append(f"{axis} {record.coordinates.get(axis)} of {record.sizes[axis]}")
    return f" ({', '.join(parts)})" if parts else ""


def _block(first: str, text: str) -> list[str]:
    indent = " " * min(len(first), 12)
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent)


def _draw_cycle(found: findings.Diagnosis) -> list[str]:
    """The circle, a rank per line, each with the reason why it waits for the one below."""
    lines = ["  The circle:"]
    for rank in found.cycle:
        text = f"rank {rank} {found.situations[rank].text}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="    +-> ", subsequent_indent="    |   ")
    lines.append(f"    +-- and so back to rank {found.cycle[0]}")
    return lines


def _more(found: findings.Diagnosis, seen: Situation) -> list[str]:
    lines = []
    lacks = [missing for missing in found.missing if missing.waited_for_by == seen.rank]
    for missing in lacks[:3]:
        lines += _block("       ", f"but rank {missing.rank} {missing.text}")
    if len(lacks) > 3:
        lines.append(f"       and likewise {ranks_in_words([lack.rank for lack in lacks[3:]])}")
    if seen.path and seen.kind != OVER:
        lines += _block("       ", f"open calls: {' > '.join(seen.path)}")
    return lines


def _shown(found: findings.Diagnosis) -> list[int]:
    ranks = sorted(found.situations)
    if len(ranks) <= MAX_RANKS:
        return ranks
    near = [rank for rank in found.ranks if rank in found.situations]
    near += [m.waited_for_by for m in found.missing if m.rank in found.ranks]
    return sorted(list(dict.fromkeys([*near, *ranks]))[:MAX_RANKS])
