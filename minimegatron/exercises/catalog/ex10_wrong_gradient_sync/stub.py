"""The wrong gradient sync: when may 1F1B's gradients leave for the other replicas?

Started by: you, and `minimegatron exercises check`. A step has many microbatches, and their gradients
add up on each rank. They must be summed over the data-parallel ranks once, when the last microbatch's
is in. So gradient communication is held back from the start, and let go just before a stage's *last*
backward. During that backward each bucket of gradients is sent as soon as it is complete.

Below are three versions of that decision, each in the shape of 1F1B's backwards: one loop for the
steady state, one for the cool-down; `yield` stands for one backward. One version is right. The other
two are right on some stages and wrong on others. The page names a public fix of this bug.

Read them. Write `num_backwards_that_send`, and set RIGHT. The check compares your prediction with what
each version does, and then runs the real 1F1B on 2 stages x 2 replicas with the version you chose.
"""

from collections.abc import Iterator

RIGHT = ""
""""A", "B" or "C"."""


def version_a(num_warmup_microbatches, num_microbatches, grad_sync) -> Iterator[None]:
    """Gradients leave with the last backward of the cool-down."""
    for _ in range(num_warmup_microbatches, num_microbatches):  # steady state
        yield
    for i in range(num_warmup_microbatches):  # cool-down
        if i == num_warmup_microbatches - 1:
            grad_sync.enable()
        yield


def version_b(num_warmup_microbatches, num_microbatches, grad_sync) -> Iterator[None]:
    """Gradients leave with the last backward of the steady state, and of the cool-down."""
    for i in range(num_warmup_microbatches, num_microbatches):  # steady state
        if i == num_microbatches - 1:
            grad_sync.enable()
        yield
    grad_sync.disable()
    for i in range(num_warmup_microbatches):  # cool-down
        if i == num_warmup_microbatches - 1:
            grad_sync.enable()
        yield


def version_c(num_warmup_microbatches, num_microbatches, grad_sync) -> Iterator[None]:
    """Gradients leave with the last backward of the steady state if no cool-down follows."""
    for i in range(num_warmup_microbatches, num_microbatches):  # steady state
        if i == num_microbatches - 1 and num_warmup_microbatches == 0:
            grad_sync.enable()
        yield
    for i in range(num_warmup_microbatches):  # cool-down
        if i == num_warmup_microbatches - 1:
            grad_sync.enable()
        yield


def num_backwards_that_send(version: str, pp_size: int, pp_rank: int, num_microbatches: int) -> int:
    """During how many backwards of stage `pp_rank` gradient communication is let go.

    `version` is "A", "B" or "C". Right is 1 on every stage. Remember that a stage has
    min(pp_size - pp_rank - 1, num_microbatches) warm-up microbatches.
    """
    raise NotImplementedError(
        "Write num_backwards_that_send: count the backwards that run with communication let go"
    )


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
