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

Your schedule may ask the planner first how long a step takes. This tries one order for each stage:

    from minimegatron.planner.plan import plan
    from minimegatron.planner.simulator import simulate

    simulate(plan(lambda stage: with_messages(stage, orders[stage.pp_rank]), p, M)).makespan

It raises ValueError for orders that never finish.

`stage.pp_rank`, `stage.pp_size` and `stage.num_microbatches` say where you are.
"""

from collections.abc import Iterator

from minimegatron.exercises.bench.schedule_of_order import with_messages  # noqa: F401
from minimegatron.planner.actions import Action
from minimegatron.planner.stage import Stage


def schedule(stage: Stage, caps: list[int]) -> Iterator[Action]:
    """All that stage `stage.pp_rank` does in a step, in order.

    caps[r] is the room of stage r, at least 1: you may look at all of them. Every stage calls this
    for itself, so what one stage does must fit what the others do.
    """
    raise NotImplementedError(
        'Write schedule: for each stage an order such as "FFBFBB", with at most caps[rank] '
        "microbatches between their F and their B"
    )


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
