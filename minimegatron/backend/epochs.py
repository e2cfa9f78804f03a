"""The number that says to which step a message belongs.

Every rank of a group counts for itself, and all must count alike: who is in another epoch than the
sender does not take its message. A program that begins no step stays in epoch 0.

A training step takes the ranks of all groups. A forward-only step takes those of one copy of the
model; other copies may evaluate more often, or not at all. So in a group of several copies a
forward-only step counts as a part of the last training step: the next one brings all ranks to the
same number again, and the times around forward-only steps count as one.

Megatron has no counterpart.
"""

PARTS = 1 << 32
"""Epochs from one training step to the next. An odd one is a step, an even one the time after it."""


def next_step(epoch: int) -> int:
    """The epoch of the next step, whatever came since the last one.

    >>> next_step(0) == next_step(6) == PARTS + 1
    True
    """
    return (epoch // PARTS + 1) * PARTS + 1


def next_part(epoch: int) -> int:
    """The epoch of a forward-only step in a group of several copies of the model."""
    return epoch + 1


def is_in_step(epoch: int) -> bool:
    """Whether the epoch is a step."""
    return epoch % 2 == 1


def belong_together(one: int, other: int) -> bool:
    """Whether a message sent in one epoch is for who waits in the other.

    >>> belong_together(PARTS + 2, PARTS + 4), belong_together(PARTS + 3, PARTS + 5)
    (True, False)
    """
    if one == other:
        return True
    between_steps = not is_in_step(one) and not is_in_step(other)
    return between_steps and one // PARTS == other // PARTS


def describe(epoch: int) -> str:
    """The epoch in words.

    >>> describe(2 * PARTS + 1), describe(2 * PARTS + 5), describe(0)
    ('step 2', 'forward-only step 2 after step 2', 'the time before its first step')
    """
    step, part = divmod(epoch, PARTS)
    if part == 1 and step:
        return f"step {step}"
    if is_in_step(epoch):
        # The step itself is part 1; without one, a forward-only step is.
        return f"forward-only step {(part - 1) // 2 if step else (part + 1) // 2} after step {step}"
    return f"the time after its step {step}" if step else "the time before its first step"
