"""A schedule under a memory cap, solved by letting the planner try.

Called by: the check. It takes a few simple orders per stage (1F1B with a shorter warm-up; bursts of
k forwards and k backwards), plans and times every combination, and keeps the shortest. This is not
the best there is: search among all orders, and the step gets shorter still.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product

from minimegatron.exercises.bench.schedule_of_order import shortened_1f1b, with_messages
from minimegatron.planner.actions import Action
from minimegatron.planner.plan import plan
from minimegatron.planner.simulator import simulate
from minimegatron.planner.stage import Stage


def schedule(stage: Stage, caps: list[int]) -> Iterator[Action]:
    """All that stage `stage.pp_rank` does in a step, in order."""
    orders = best_orders(stage.pp_size, stage.num_microbatches, tuple(caps))
    yield from with_messages(stage, orders[stage.pp_rank])


@cache
def best_orders(p: int, M: int, caps: tuple[int, ...]) -> tuple[str, ...]:
    """The shortest combination, one order per stage."""
    best, shortest = (), None
    for orders in product(*(candidates(p - rank - 1, M, caps[rank]) for rank in range(p))):
        try:
            makespan = simulate(plan(lambda stage, o=orders: _of(stage, o), p, M)).makespan
        except ValueError:  # it never finishes: some stages wait for each other
            continue
        if shortest is None or makespan < shortest:
            best, shortest = orders, makespan
    return best


def candidates(num_following: int, M: int, cap: int) -> list[str]:
    """Orders of one stage that never hold more than `cap` microbatches."""
    orders = [shortened_1f1b([w], 0, M) for w in range(min(num_following + 1, cap))]
    for size in range(2, cap + 1):
        bursts = [min(size, M - first) for first in range(0, M, size)]
        orders.append("".join("F" * burst + "B" * burst for burst in bursts))
    return orders


def _of(stage: Stage, orders: tuple[str, ...]) -> Iterator[Action]:
    return with_messages(stage, orders[stage.pp_rank])


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
