"""Orders of work as a user may write them: for `--pipeline-schedule` in tests.

Used by: `test_arguments`, `test_bad_configs`, `test_checkpointing`, each through the file's path, as
a user names it.
"""

from minimegatron.core.orders.orders import register_order
from minimegatron.core.orders.placement import BOTH, Placement, V


def one_at_a_time(rank):
    """Not registered."""
    for i in range(rank.num_microbatches):
        for chunk in range(rank.num_model_chunks):
            yield rank.forward(i, chunk)
        for chunk in reversed(range(rank.num_model_chunks)):
            yield rank.backward(i, chunk)


@register_order("down-and-up", placement=V, smallest=lambda p: 2 * p)
def down_and_up(rank):
    """A V that wants two microbatches for each rank."""
    yield from one_at_a_time(rank)


@register_order("fold", placement=V)
def fold(rank):
    """A V, for any number of microbatches."""
    yield from one_at_a_time(rank)


@register_order("both-ways", placement=BOTH)
def both_ways(rank):
    """Two copies of the model."""
    yield from one_at_a_time(rank)


@register_order("too-short", placement=lambda p, v: Placement("too short", ((0,), (1,))))
def too_short(rank):
    """Two ranks, however many are asked for."""
    yield from one_at_a_time(rank)


@register_order("forgetful", placement=V)
def forgetful(rank):
    """Rank 1 leaves out one backward."""
    for work in one_at_a_time(rank):
        if (rank.pp_rank, str(work)) != (1, "B1 of chunk 1"):
            yield work


@register_order("backwards-first", placement=V)
def backwards_first(rank):
    """The second chunk's forward waits for the first chunk's backward, and the other way round."""
    for i in range(rank.num_microbatches):
        for chunk in reversed(range(2)):
            yield rank.forward(i, chunk)
        for chunk in reversed(range(2)):
            yield rank.backward(i, chunk)


@register_order("split")
def split(rank):
    """The two gradients apart."""
    for i in range(rank.num_microbatches):
        yield rank.forward(i)
        yield rank.backward_input(i)
        yield rank.backward_weight(i)


@register_order("fails")
def fails(rank):
    """Raises."""
    yield rank.forward([0][1])


@register_order("for-ever")
def for_ever(rank):
    """Does not end."""
    while True:
        yield rank.forward(0)


@register_order("even")
def even(rank):
    """Wants an even number of microbatches, and does not say so."""
    if rank.num_microbatches % 2:
        raise RuntimeError("M is odd")
    yield from one_at_a_time(rank)
