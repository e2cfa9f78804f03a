"""Is what was done what was planned? And where do two runs part?

Called by: `minimegatron trace diff`, tests, exercises. Calls: `step` (which knows its plan).
Torch-free. Megatron has no counterpart.

The comparison is exact: every forward, backward and call of the communicator, in order, with its
phase and with each message's direction, payload, peer, microbatch, chunk and bytes. Then every
message itself: the microbatch and chunk that made it must be those that its receiver used it for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minimegatron.planner.actions import ACTIVATION, Action
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
    if has_phases and has_bytes:
        return [list(actions) for actions in ranks]
    return [[_without(action, has_phases, has_bytes) for action in actions] for actions in ranks]


def _without(action: Action, has_phases: bool, has_bytes: bool) -> Action:
    if not has_phases:
        action = action._replace(phase=None)
    if not has_bytes:  # their sizes are not known ahead
        messages = tuple(message._replace(num_bytes=0) for message in action.messages)
        action = action._replace(messages=messages)
    return action


def wrong_messages(step: Step) -> list[str]:
    """Messages that were never received, or were used for something else than they were made by."""
    problems = []
    p = step.config.pp_size
    for message in step.transfers:
        what = (
            f"{message.payload} of microbatch {message.sent_unit[0]}, chunk {message.sent_unit[1]} "
            f"from rank {message.sender} to rank {message.receiver}"
        )
        if message.received_unit is None:
            problems.append(f"the {what} was never received")
        elif message.received_unit != _destination(message, p):
            problems.append(
                f"the {what} was used for microbatch {message.received_unit[0]}, "
                f"chunk {message.received_unit[1]}"
            )
    return problems


def _destination(message: Transfer, p: int) -> tuple[int | None, int | None]:
    microbatch, chunk = message.sent_unit
    if chunk is None:
        return (None, None)
    virtual_stage = chunk * p + message.sender + (1 if message.payload == ACTIVATION else -1)
    return microbatch, virtual_stage // p
