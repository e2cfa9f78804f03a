"""Is what was done what was planned? And where do two runs part?

Torch-free. Megatron has no counterpart.

The comparison is exact: every piece of work and call of the communicator, in order, with its phase
and with each message's direction, payload, peer, microbatch, chunk and bytes; a pair counts as its two
parts, because a run does one after the other. Then every message itself: it must reach the rank, and be
used for the chunk, that the placement says, and for the microbatch that made it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minimegatron.core.orders.placement import Placement
from minimegatron.planner.actions import ACTIVATION, Action, parts_of
from minimegatron.tracing.step import Step, Transfer, plan_of


@dataclass(frozen=True)
class Divergence:
    """Where one rank first does something else than expected."""

    rank: int
    index: int
    """Actions before this one agree."""
    expected: Action | None
    """None if nothing more was expected."""
    found: Action | None

    def __str__(self) -> str:
        return (
            f"rank {self.rank}, action {self.index}: expected {_words(self.expected)}, "
            f"found {_words(self.found)}"
        )


def _words(action: Action | None) -> str:
    if action is None:
        return "nothing more"
    return f"{action} ({action.phase})" if action.phase else str(action)


def first_divergences(
    expected: Sequence[Sequence[Action]], found: Sequence[Sequence[Action]]
) -> list[Divergence]:
    """The first divergence of each rank that has one; none if all ranks did the same.

    >>> from minimegatron.planner.plan import plan
    >>> two, three = plan("1f1b", 2, 2).ranks, plan("1f1b", 2, 3).ranks
    >>> first_divergences(two, two)
    []
    >>> print(first_divergences(two, three)[1])
    rank 1, action 8: expected send_backward(send gradient of microbatch 1, chunk 0 to rank 0) \
(steady), found send_backward_recv_forward(send gradient of microbatch 1, chunk 0 to rank 0; \
receive activation of microbatch 2, chunk 0 from rank 0) (steady)
    """
    if len(expected) != len(found):
        raise ValueError(f"{len(expected)} stages cannot be compared with {len(found)}")
    divergences = []
    for rank, (wanted, done) in enumerate(zip(expected, found, strict=True)):
        for index in range(max(len(wanted), len(done))):
            pair = (_at(wanted, index), _at(done, index))
            if pair[0] != pair[1]:
                divergences.append(Divergence(rank, index, *pair))
                break
    return divergences


def _at(actions: Sequence[Action], index: int) -> Action | None:
    return actions[index] if index < len(actions) else None


def compare_with_plan(step: Step) -> list[Divergence]:
    """Where each stage of a recorded step leaves the step's plan. Empty: it did exactly that.

    Raises ValueError for a schedule that nobody registered.
    """
    # For a schedule that nobody registered, the second is what raises.
    plan = step.plan if step.has_plan else plan_of(step.config)
    has_phases = any(action.phase for actions in plan.ranks for action in actions)
    found = [step.actions(rank) for rank in range(len(step.stages))]
    if not any(action.phase for actions in found for action in actions):
        has_phases = False  # a schedule of the user's own: only its function knows its phases
    return first_divergences(
        _comparable(plan.ranks, has_phases, step.config.message_bytes > 0),
        _comparable(found, has_phases, step.config.message_bytes > 0),
    )


def _comparable(
    ranks: Sequence[Sequence[Action]], has_phases: bool, has_bytes: bool
) -> list[list[Action]]:
    return [
        [_without(part, has_phases, has_bytes) for action in actions for part in parts_of(action)]
        for actions in ranks
    ]


def _without(action: Action, has_phases: bool, has_bytes: bool) -> Action:
    if not has_phases:
        action = action._replace(phase=None)
    if not has_bytes and action.messages:  # their sizes are not known ahead
        messages = tuple(message._replace(num_bytes=0) for message in action.messages)
        action = action._replace(messages=messages)
    return action


def wrong_messages(step: Step) -> list[str]:
    """Messages that were never received, or were used for something else than they were made by."""
    problems = []
    for message in step.transfers:
        what = (
            f"{message.payload} of microbatch {message.sent_unit[0]}, chunk {message.sent_unit[1]} "
            f"from rank {message.sender} to rank {message.receiver}"
        )
        rank, unit = _destination(message, step.config.placement)
        if message.received_unit is None:
            problems.append(f"the {what} was never received")
        elif message.received_unit != unit:
            problems.append(
                f"the {what} was used for microbatch {message.received_unit[0]}, "
                f"chunk {message.received_unit[1]}"
            )
        elif rank not in (None, message.receiver):
            problems.append(f"the {what} was meant for rank {rank}")
    return problems


def _destination(message: Transfer, placement: Placement) -> tuple[int | None, tuple | None]:
    """(rank, (microbatch, chunk)) that need the message; no unit if it leads out of the model."""
    microbatch, chunk = message.sent_unit
    if chunk is None:
        return None, (None, None)
    if not 0 <= chunk < placement.num_model_chunks:
        return None, None
    after = placement.next_of if message.payload == ACTIVATION else placement.previous_of
    place = after(message.sender, chunk)
    return (None, None) if place is None else (place.rank, (microbatch, place.chunk))
