"""Orders with a split backward, written down as published, and random ones: for tests to register.

A word is a piece of work: F forward, A backward, B input gradient, W weight gradient; a small
letter is that of the second chunk; [X&Y] is a pair.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

from minimegatron.core.orders.orders import OrderFunction, register_order, unregister
from minimegatron.core.orders.placement import BOTH, LINE, Placement, PlacementRule, V
from minimegatron.core.orders.work import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Work,
    pair,
)

LETTERS = {"F": FORWARD, "A": BACKWARD, "B": BACKWARD_INPUT, "W": BACKWARD_WEIGHT}


@contextmanager
def registered(order: OrderFunction, placement: PlacementRule = LINE) -> Iterator[str]:
    """The name under which the order is known meanwhile."""
    register_order("of-a-test", placement)(order)
    try:
        yield "of-a-test"
    finally:
        unregister("of-a-test")


@contextmanager
def registered_lists(orders: list[list[Work]], placement: Placement) -> Iterator[str]:
    """Likewise, for the work of each rank as lists."""

    def listed(rank):
        return list(orders[rank.pp_rank])

    with registered(listed, lambda p, v: placement) as name:
        yield name


def work_of(words: str) -> Iterator[Work]:
    """The work that the words name."""
    for word in words.split():
        parts = [
            Work(LETTERS[part[0].upper()], int(part[1:]), int(part[0].islower()))
            for part in word.strip("[]").split("&")
        ]
        yield pair(*parts) if len(parts) > 1 else parts[0]


# -- One chunk per rank --


def split_1f1b(rank, lag: int = 0) -> Iterator[Work]:
    """1F1B whose weight gradients follow `lag` turns after their input gradients."""
    M = rank.num_microbatches
    num_warmup = min(rank.pp_size - 1 - rank.pp_rank, M)
    for i in range(num_warmup):
        yield rank.forward(i)
    for i in range(M):
        if num_warmup + i < M:
            yield rank.forward(num_warmup + i)
        yield rank.backward_input(i)
        if i >= lag:
            yield rank.backward_weight(i - lag)
    for i in range(max(M - lag, 0), M):
        yield rank.backward_weight(i)


def zb_h1(rank) -> Iterator[Work]:
    """Qi et al. 2023 (arXiv:2401.10241): rank r owes up to r weight gradients."""
    yield from split_1f1b(rank, lag=rank.pp_rank)


# -- Two chunks per rank --

ZB_V = """
F0 F1 F2 F3 F4 F5 F6 f0 b0 w0 f1 b1 w1 f2 b2 w2 f3 b3 w3 B0 W0 f4 b4 w4 B1 W1 f5 b5 w5 B2 W2 f6 b6 \
w6 B3 W3 B4 W4 B5 W5 B6 W6
F0 F1 F2 F3 F4 f0 F5 f1 b0 w0 f2 b1 w1 f3 b2 w2 F6 B0 W0 f4 b3 w3 B1 W1 f5 b4 w4 B2 W2 f6 b5 w5 B3 \
b6 B4 W3 B5 W4 B6 W5 w6 W6
F0 F1 F2 f0 F3 f1 F4 f2 b0 w0 f3 b1 w1 F5 B0 W0 f4 b2 w2 F6 B1 W1 f5 b3 w3 B2 W2 f6 b4 w4 B3 b5 B4 \
b6 B5 W3 B6 W4 w5 w6 W5 W6
F0 f0 F1 f1 F2 f2 F3 f3 b0 w0 F4 B0 W0 f4 b1 w1 F5 B1 W1 f5 b2 w2 F6 B2 W2 f6 b3 w3 B3 b4 B4 b5 B5 \
b6 B6 W3 w4 w5 w6 W4 W5 W6
""".strip().split("\n")
"""ZB-V of 4 ranks and 7 microbatches. Source: Qi et al. 2024 (arXiv:2405.15362)."""


def zb_v(rank) -> Iterator[Work]:
    return work_of(ZB_V[rank.pp_rank])


DUALPIPE_V_RANK_1 = (
    "F0 F1 F2 F3 F4 f0 F5 f1 b0 w0 f2 b1 w1 f3 [F6&a2] [f4&A0] [F7&a3] [f5&A1] a4 [f6&A2] a5 "
    "[f7&A3] a6 A4 b7 B5 w7 B6 W5 B7 W6 W7"
)
"""Rank 1 of 4, 8 microbatches."""


def dualpipe_v_words(p: int, M: int, r: int) -> str:
    """Rank r of p. Source: deepseek-ai/DualPipe, "DualPipeV"."""
    made = dict.fromkeys("FfAaBbWw", 0)
    owed: list[str] = []
    words: list[str] = []

    def number(letter: str) -> str:
        # A microbatch has one backward, fused or split.
        counter = {"B": "A", "b": "a"}.get(letter, letter)
        made[counter] += 1
        return f"{letter}{made[counter] - 1}"

    def split(letter: str) -> str:
        word = number(letter)
        owed.append(("W" if letter == "B" else "w") + word[1:])
        return word

    def both(first: str, second: str) -> str:
        return f"[{number(first)}&{number(second)}]"

    words += [number("F") for _ in range(2 * (p - r - 1))]
    words += [number(letter) for _ in range(r + 1) for letter in "Ff"]
    for _ in range(p - r - 1):
        words += [split("b"), owed.pop(0), number("f")]
    for i in range(M - 2 * p + r + 1):
        is_apart = i == 0 and r == p - 1
        words += [number("F"), number("a")] if is_apart else [both("F", "a")]
        words.append(both("f", "A"))
    for _ in range(p - r - 1):
        words += [number("a"), both("f", "A")]
    middle = (r + 1) // 2
    for i in range(r + 1):
        words.append(split("b") if i > middle or (i == middle and r % 2) else number("a"))
        words.append(split("B") if i >= middle else number("A"))
    for _ in range(p - r - 1):
        words += [owed.pop(0), split("B")]
    words += [owed.pop(0) for _ in range(r + 1)]
    return " ".join(words)


def dualpipe_v(rank) -> Iterator[Work]:
    return work_of(dualpipe_v_words(rank.pp_size, rank.num_microbatches, rank.pp_rank))


def dualpipe(rank) -> Iterator[Work]:
    """Two copies of the model: the ranks of the second half see the two directions swapped."""
    p, M, r = rank.pp_size, rank.num_microbatches, rank.pp_rank
    is_swapped = r >= p // 2

    def placed(work: Work) -> Work:
        chunk = 1 - work.chunk if is_swapped else work.chunk
        return work._replace(microbatch=work.microbatch + chunk * M // 2, chunk=chunk)

    for work in work_of(dualpipe_v_words(p // 2, M // 2, min(r, p - 1 - r))):
        yield pair(*map(placed, work.parts)) if work.parts else placed(work)


PUBLISHED = {
    "1f1b-split": (split_1f1b, LINE, 4, 8),
    "zb-h1": (zb_h1, LINE, 4, 8),
    "zb-v": (zb_v, V, 4, 7),
    "dualpipe-v": (dualpipe_v, V, 4, 8),
    "dualpipe": (dualpipe, BOTH, 4, 8),
}
"""Name -> order, placement, p, M."""


# -- Random ones --


def random_orders(
    placement: Placement, num_microbatches: int, rng: random.Random
) -> list[list[Work]]:
    """An order of each rank that can be done: what comes next is drawn from what is possible."""
    last = placement.num_stages - 1
    todo = [
        (FORWARD, microbatch, rank, chunk)
        for rank in range(placement.pp_size)
        for chunk in range(placement.num_model_chunks)
        for microbatch in range(num_microbatches)
        if placement.has(microbatch, chunk, num_microbatches)
    ]
    outputs: set[tuple[int, int]] = set()  # (microbatch, stage)
    gradients: set[tuple[int, int]] = set()

    def is_possible(one: tuple[str, int, int, int]) -> bool:
        kind, microbatch, rank, chunk = one
        stage = placement.stages[rank][chunk]
        if kind == FORWARD:
            return stage == 0 or (microbatch, stage - 1) in outputs
        if kind == BACKWARD_WEIGHT:
            return True
        return stage == last or (microbatch, stage + 1) in gradients

    orders: list[list[Work]] = [[] for _ in placement.stages]
    while todo:
        possible = [one for one in todo if is_possible(one)]
        chosen = [rng.choice(possible)]
        others = [
            one for one in possible if one[2] == chosen[0][2] and one[1::2] != chosen[0][1::2]
        ]
        if others and rng.random() < 0.3:
            chosen.append(rng.choice(others))
        work = [Work(kind, microbatch, chunk) for kind, microbatch, _, chunk in chosen]
        orders[chosen[0][2]].append(pair(*work) if len(work) > 1 else work[0])
        for kind, microbatch, rank, chunk in chosen:
            todo.remove((kind, microbatch, rank, chunk))
            stage = placement.stages[rank][chunk]
            if kind == FORWARD:
                outputs.add((microbatch, stage))
                todo.append((rng.choice([BACKWARD, BACKWARD_INPUT]), microbatch, rank, chunk))
            elif kind != BACKWARD_WEIGHT:
                gradients.add((microbatch, stage))
            if kind == BACKWARD_INPUT:
                todo.append((BACKWARD_WEIGHT, microbatch, rank, chunk))
    return orders


def step_length(orders: list[list[Work]], placement: Placement, times: dict[str, int]) -> int:
    """How long the orders take where messages are free: rank by rank, again until nothing changes.

    `times` has the length of each kind of work; `times["pair"]` is a function of two lengths.
    """
    last = placement.num_stages - 1
    ready: dict[tuple, int] = {}
    while True:
        before, longest = dict(ready), 0
        for rank, order in enumerate(orders):
            clock = 0
            for work in order:
                parts = work.parts or (work,)
                for part in parts:
                    stage = placement.stages[rank][part.chunk]
                    if part.kind == FORWARD and stage > 0:
                        clock = max(clock, ready.get((FORWARD, part.microbatch, stage - 1), 0))
                    if part.kind in (BACKWARD, BACKWARD_INPUT) and stage < last:
                        clock = max(clock, ready.get((BACKWARD, part.microbatch, stage + 1), 0))
                lengths = [times[part.kind] for part in parts]
                clock += times["pair"](*lengths) if work.parts else lengths[0]
                for part in parts:
                    stage = placement.stages[rank][part.chunk]
                    made = FORWARD if part.kind == FORWARD else BACKWARD
                    if part.kind != BACKWARD_WEIGHT:
                        ready[made, part.microbatch, stage] = clock
            longest = max(longest, clock)
        if ready == before:
            return longest
