"""A schedule of your own: stages have room for few microbatches, fewer than 1F1B holds.

Started by: you, and `minimegatron exercises check`. Stage r has room for the activations of caps[r]
microbatches at a time. Each forward takes one place from its start, and its backward gives it back
at its end. Write the order of work of every stage, so that the step is short. The check plans it,
counts what each stage holds, times it, and runs it on 4 real ranks.

A forward takes time 1, a backward 2, messages nothing; but a message waits until both ends are there.

The easy way to write a schedule is an order of forwards and backwards per stage, as a string; then
messages are put in for you:

    yield from with_messages(stage, "FFBFBB")       # F: the next microbatch's forward, B: backward

The other way is to yield every action yourself: stage.recv_forward(i), stage.forward(i),
stage.send_forward_recv_backward(i, receives=j), ... (see minimegatron/planner/stage.py).

`stage.pp_rank`, `stage.pp_size` and `stage.num_microbatches` say where you are.
"""

import functools
import itertools
from collections.abc import Iterator

from minimegatron.exercises.bench.schedule_of_order import with_messages
from minimegatron.planner.actions import Action
from minimegatron.planner.plan import plan
from minimegatron.planner.simulator import simulate
from minimegatron.planner.stage import Stage


def order_with(warm: int, total: int) -> str:
    return "F" * warm + "FB" * (total - warm) + "B" * warm


def step_time(warms: tuple[int, ...], total: int) -> float:
    def candidate(stage):
        yield from with_messages(stage, order_with(warms[stage.pp_rank], total))

    try:
        return simulate(plan(candidate, len(warms), total)).makespan
    except ValueError:
        return float("inf")


@functools.cache
def find_warmups(room: tuple[int, ...], total: int) -> tuple[int, ...]:
    stages = len(room)
    limits = [min(room[r] - 1, stages - 1 - r, total) for r in range(stages)]
    every_combination = itertools.product(*(range(limit + 1) for limit in limits))
    return min(every_combination, key=lambda warms: step_time(warms, total))


def schedule(stage: Stage, caps: list[int]) -> Iterator[Action]:
    """All that stage `stage.pp_rank` does in a step, in order.

    caps[r] is the room of stage r, at least 1: you may look at all of them. Every stage calls this
    for itself, so what one stage does must fit what the others do.
    """
    warms = find_warmups(tuple(caps), stage.num_microbatches)
    my_order = order_with(warms[stage.pp_rank], stage.num_microbatches)
    yield from with_messages(stage, my_order)


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
