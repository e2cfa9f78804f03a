"""The second part: which pairs of tokens a rank computes in a round.

Megatron has no counterpart.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from minimegatron.exercises.catalog.ex22_ring_attention.data import positions
from minimegatron.exercises.check import Case, Result, Wrong


def run_blocks(student: ModuleType, case: Case) -> list[list[Any]]:
    """For every rank and round: numbers of queries, of keys, is_causal."""
    num_tokens, found = 2 * case.chunk, []
    for rank in range(case.cp):
        for step in range(case.cp):
            returned = student.block_of_step(step, rank, case.cp, num_tokens)
            if not isinstance(returned, tuple) or len(returned) != 3:
                kind = type(returned).__name__
                raise Wrong(
                    f"block_of_step returned {kind}; (queries, keys, is_causal) is expected"
                )
            queries, keys, is_causal = returned
            for what, one in (("queries", queries), ("keys", keys)):
                if not isinstance(one, slice):
                    raise Wrong(
                        f"block_of_step(step={step}, rank={rank}, ...): {what} is a "
                        f"{type(one).__name__}; a slice is expected, as slice(0, {num_tokens})"
                    )
            here = range(num_tokens)
            found.append([rank, step, list(here[queries]), list(here[keys]), bool(is_causal)])
    return found


def judge_blocks(case: Case, answers: Sequence[list[list[Any]]]) -> Result:
    """The pairs of each block, by where the tokens are in the sequence."""
    for answer in answers:
        for rank, step, *block in answer:
            _judge_block(case, rank, step, block)
    num_tokens = 2 * case.chunk
    own, others = num_tokens * (num_tokens + 1) // 2, (case.cp - 1) * num_tokens**2 // 2
    return Result({"pairs": f"{own + others} on every rank"})


def _judge_block(case: Case, rank: int, step: int, block: list[Any]) -> None:
    num_tokens, c = 2 * case.chunk, case.cp
    length = num_tokens * c
    source = (rank - step) % c
    mine, theirs = (positions(r, c, length).tolist() for r in (rank, source))
    found, wanted = pairs_of(*block), _right_pairs(mine, theirs)
    if found == wanted:
        return
    where = f"{c} ranks with {num_tokens} tokens each, round {step} on rank {rank}"
    whose = (
        "its own keys" if source == rank else f"the keys of rank {source}"
    ) + f", tokens {_words(theirs)}"
    lines = [f"{where}: {_first_difference(found, wanted, mine, theirs)}"]
    lines.append(f"Its queries are tokens {_words(mine)}; it has {whose}.")
    lines.append(_why(case, rank, step, block, found))
    raise Wrong("\n".join(line for line in lines if line))


def pairs_of(queries: list[int], keys: list[int], is_causal: bool) -> set[tuple[int, int]]:
    """(query, key), by their numbers on their ranks."""
    return {
        (q, k) for i, q in enumerate(queries) for j, k in enumerate(keys) if not is_causal or j <= i
    }


def _right_pairs(mine: list[int], theirs: list[int]) -> set[tuple[int, int]]:
    return {
        (q, k) for q, here in enumerate(mine) for k, there in enumerate(theirs) if there <= here
    }


def _first_difference(
    found: set[tuple[int, int]], wanted: set[tuple[int, int]], mine: list[int], theirs: list[int]
) -> str:
    if added := sorted(found - wanted):
        q, k = added[0]
        return f"token {mine[q]} sees token {theirs[k]}, which comes later"
    q, k = min(wanted - found)
    return f"token {mine[q]} does not see token {theirs[k]}"


def _words(tokens: list[int]) -> str:
    """Two runs of tokens: "0-3 and 12-15"."""
    half = len(tokens) // 2
    runs = [tokens[:half], tokens[half:]]
    if runs[0][-1] + 1 == runs[1][0]:
        runs = [tokens]
    return " and ".join(f"{run[0]}-{run[-1]}" for run in runs)


def _why(case: Case, rank: int, step: int, block: list[Any], found: set) -> str:
    """What usual mistakes mean."""
    num_tokens, c = 2 * case.chunk, case.cp
    length = num_tokens * c
    source = (rank - step) % c
    mine, other = (positions(r, c, length).tolist() for r in (rank, (rank + step) % c))
    if found == _right_pairs(mine, other):
        return (
            f"The block is that of rank {(rank + step) % c}'s keys. Keys go to the next rank, so in "
            "each round they come from one rank further back."
        )
    everything = list(range(num_tokens))
    half = num_tokens // 2
    if source == rank:
        first = "" if block[2] else "is_causal is False, and in round 0 it must be True. "
        return f"{first}Of its own keys a query sees those up to itself, in the order of this rank."
    if block[2]:
        return "is_causal is for own keys only: another rank's piece lies all before or all after."
    if source < rank and block[:2] == [everything, everything[half:]]:
        return "That is the second half of the keys. Which piece of the sequence is that?"
    if source > rank and block[:2] == [everything[:half], everything]:
        return "That is the first half of the queries. Which piece of the sequence is that?"
    if not found and source > rank:
        return (
            "With one piece of the sequence on each rank, keys of later ranks would all come later. "
            "Here every rank has a piece from the back, too."
        )
    if block[:2] == [everything, everything]:
        return (
            "With one piece of the sequence on each rank, it would see all keys of earlier ranks. Here "
            "every rank has a piece from the back, too."
        )
    return (
        "Draw the pieces of both ranks, first half and second half, in the order of the sequence."
    )
