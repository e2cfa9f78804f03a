"""Which run of a step follows which, and what is put back between them; decided by all ranks together.

Counterpart: the states of `RerunStateMachine.should_run_forward_backward` in
`megatron.core.rerun_state_machine`.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.core.rerun import random_numbers
from minimegatron.core.rerun.data_iterator import RerunDataIterator
from minimegatron.core.rerun.states import RerunState
from minimegatron.core.rerun.verdicts import ResultJudge
from minimegatron.core.utils import get_device


class StepRuns:
    """Of the step under way.

    Args:
        judge: of this rank's results.
        keep: called before the first run; what it returns puts back what a run changes.
    """

    def __init__(self, judge: ResultJudge, keep: Callable[[], Callable[[], None]]):
        self.judge, self._keep = judge, keep
        self._undo: tuple[Callable[[], None], ...] = ()

    def next_state(
        self, state: RerunState, iterators: list[RerunDataIterator], is_statistics: bool
    ) -> RerunState:
        """From the state in which the loop asks whether to run, to the one in which it goes on.

        `is_statistics`: each step runs twice, and no result is judged.
        """
        match state:
            case RerunState.NOT_RUNNING_YET:
                return self._begin(iterators)
            case RerunState.INITIAL_RUN:
                return self._after_initial_run(iterators)
            case RerunState.RERUNNING_IN_PLACE if is_statistics:
                return self._accept(iterators)
            case RerunState.RERUNNING_IN_PLACE:
                return self._after_rerun_in_place(iterators)
            case RerunState.WILL_RERUN_FROM_CHECKPOINT:
                for iterator in iterators:
                    iterator.advance()
                return RerunState.RERUNNING_FROM_CHECKPOINT
            case RerunState.RERUNNING_FROM_CHECKPOINT:
                return self._after_run_from_checkpoint(iterators)
        raise RuntimeError(f"the run was to end in state {state.name}, and went on")

    def _begin(self, iterators: list[RerunDataIterator]) -> RerunState:
        self.judge.forget_step()
        # Put back in this order: last the generators, which the rest may draw from.
        self._undo = self._keep(), random_numbers.keep_random_numbers()
        for iterator in iterators:
            iterator.advance()
        return RerunState.INITIAL_RUN

    def _after_initial_run(self, iterators: list[RerunDataIterator]) -> RerunState:
        (again,) = of_any_rank(self.judge.wishes.rerun)
        if not again:
            return self._accept(iterators)
        self._put_back(iterators)
        return RerunState.RERUNNING_IN_PLACE

    def _after_rerun_in_place(self, iterators: list[RerunDataIterator]) -> RerunState:
        wishes = self.judge.wishes
        checkpoint, end, go_on = of_any_rank(wishes.checkpoint, wishes.end, wishes.go_on)
        if go_on and not (checkpoint or end):
            return self._accept(iterators)
        # As if the step had not been: a checkpoint that is saved now is of the moment before it.
        self._put_back(iterators)
        ends = RerunState.RERUNNING_IN_PLACE
        return RerunState.WILL_RERUN_FROM_CHECKPOINT if checkpoint else ends

    def _after_run_from_checkpoint(self, iterators: list[RerunDataIterator]) -> RerunState:
        wishes = self.judge.wishes
        restart, end, go_on = of_any_rank(wishes.restart, wishes.end, wishes.go_on)
        if restart and not end:
            return RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT
        return (
            self._accept(iterators) if go_on and not end else RerunState.RERUNNING_FROM_CHECKPOINT
        )

    def _accept(self, iterators: list[RerunDataIterator]) -> RerunState:
        self._undo = ()
        for iterator in iterators:
            iterator.advance()
        self.judge.injector.forget()
        return RerunState.NOT_RUNNING_YET

    def _put_back(self, iterators: list[RerunDataIterator]) -> None:
        for undo in self._undo:
            undo()
        for iterator in iterators:
            iterator.rewind()


def is_run(before: RerunState, after: RerunState) -> bool:
    """Whether going from one state to the next means: run the step."""
    runs = (
        RerunState.INITIAL_RUN,
        RerunState.RERUNNING_IN_PLACE,
        RerunState.RERUNNING_FROM_CHECKPOINT,
    )
    return after in runs and after is not before


def of_any_rank(*wishes: bool) -> tuple[bool, ...]:
    """Each wish, if a rank has it. Every rank must call it."""
    if not dist.is_initialized():
        return wishes
    told = torch.tensor(wishes, dtype=torch.int32, device=get_device())
    collectives.all_reduce(told, dist.group.WORLD, op=collectives.ReduceOp.MAX)
    return tuple(bool(wish) for wish in told.tolist())
