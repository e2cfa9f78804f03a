"""A step on all of its groups: watched, begun and ended on them together, or failed, and they are told.

Megatron has no counterpart: there a step that fails on one rank leaves the others waiting.

Before a failed step is tried again, call `zero_grad_buffer` and make new data iterators: ranks may have
read different numbers of microbatches, and what an iterator has given does not come back.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.core.left_out_record import name_of, without_left_out
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tracing import observed_by, traced
from minimegatron.core.utils import config_of_run

GROUPS_OF_A_STEP = ("tp", "cp", "pp", "dp_cp", "embd", "pos_embd")
"""What collectives inside a step run over; one order on all ranks."""
GROUPS_OF_AN_EVALUATION = ("tp", "cp", "pp")
"""Likewise of a forward-only step: the ranks of one copy of the model."""
GROUPS_OF_EXPERTS = ("ep", "expt_tp", "tp_ep")
"""Both kinds of step use these too: copies of the model that share experts evaluate together."""


# -- Before a schedule's first line --


def check_step_of(forward_only: bool = False, num_microbatches: int = 1, **_: Any) -> None:
    """Raises ValueError for a step of nothing, and for a training step that would have no gradients."""
    if not (forward_only or torch.is_grad_enabled()):
        raise ValueError(
            "forward_only is False, but gradients are off (torch.no_grad or inference_mode), so this "
            "step would leave all of them 0; call the schedule outside, or with forward_only=True"
        )
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; a step has at least 1")


def _timers_of(config: ModelParallelConfig) -> Any:
    """`config.timers`, which may be any observer; a `Timers` is told how to begin."""
    tell = getattr(config.timers, "told", None)
    if tell is not None:
        tell(config)
    return config.timers


def schedule(
    function: Callable,
    name: str | None = None,
    describe_more: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    is_framed: bool = False,
) -> Callable:
    """Marks a `forward_backward_*` function: traced as one link, with `config.timers` watching.

    `name` tells observers which schedule it is, where the function's own name does not;
    `describe_more` maps the call's arguments to what else they are told. See `framed_schedule` for
    `is_framed`. Megatron's arguments that are left out are taken as `accept_left_out` does.
    """
    named = {} if name is None else {"schedule": name}

    def describe(arguments: dict[str, Any]) -> dict[str, Any]:
        more = {} if describe_more is None else describe_more(arguments)
        return {"num_microbatches": arguments["num_microbatches"], **named, **more}

    link = traced("forward-backward", describe)(function)
    own = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def run(*unnamed: Any, **arguments: Any) -> list:
        num_begun = StepOnGroups.num_begun
        try:
            if unnamed or not arguments.keys() <= own:
                unnamed, arguments = without_left_out(
                    name_of(function), own, unnamed, arguments, num_bound=0
                )
            check_step_of(**arguments)
            with contextlib.ExitStack() as around:
                if "model" in arguments:  # else the function refuses the call
                    config = config_of_run(arguments["model"])
                    for make in config.around_step_funcs:
                        around.enter_context(make())
                    if (timers := _timers_of(config)) is not None:
                        around.enter_context(observed_by(timers))
                return link(*unnamed, **arguments)
        except BaseException as error:
            if is_framed and StepOnGroups.num_begun == num_begun:
                _fail_before_begun(arguments, error)
            raise

    run.takes_left_out = True
    return run


framed_schedule = functools.partial(schedule, is_framed=True)
"""`schedule`, for a function whose step has a `StepFrame`: a failure before it is one of the step.

A schedule that somebody writes from the communicator's calls alone has no frame, numbers no steps, and
is marked with `schedule`."""


def _fail_before_begun(arguments: dict[str, Any], error: BaseException) -> None:
    """Begins the step here and fails it, because other ranks have begun it."""
    StepOnGroups.num_begun += 1
    with suppress(Exception):  # the first error is the one to be seen
        pg_collection = arguments.get("pg_collection")
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        forward_only = arguments.get("forward_only", False)
        p2p = arguments.get("p2p_communicator")
        groups, others = groups_of_a_step(pg_collection, p2p, forward_only)
        collectives.begin_step(groups, others, forward_only)
        collectives.abandon(groups + others, reason_of(error))


# -- The step --


class NoFrame:
    """The three calls of a frame, which do nothing; see `step_frame.StepFrame`."""

    def before_forward(self, chunk: Any, microbatch_id: int) -> int:
        """Returns the forward's number among all of the stage's."""
        return microbatch_id

    def before_backward(self, chunk: Any) -> None:
        """Called with the microbatch still in flight."""

    def after_backward(self, chunk: Any) -> None:
        """Called with the input's gradient not yet sent."""


class StepOnGroups(NoFrame):
    """A context manager around one step of one stage; `StepFrame` is one.

    Entered, it begins the step on this rank's groups, keeps what is to be put back, and calls
    `prepare`. Left, it calls `finish`, and ends the step; but if the step has failed, it tells every
    rank that may wait for this one, and puts back what the step has changed beside gradients.
    """

    num_begun = 0
    """How many steps this process has begun, over all its models."""

    # What `StepFrame` is made of.
    config: ModelParallelConfig
    pg_collection: ProcessGroupCollection
    p2p: Any
    forward_only: bool
    send_limit: int
    chunks: list

    _is_begun = _has_failed = False

    @property
    def _knows_steps(self) -> bool:
        # Somebody else's communicator has Megatron's nine methods, and no more.
        return isinstance(self.p2p, P2PCommunicator)

    def begin(self) -> None:
        """On all groups; once, also if it was begun before it is entered."""
        if not self._is_begun:
            sizes = (self.pg_collection, self.p2p, self.forward_only)
            self._groups, self._others = groups_of_a_step(*sizes)
            StepOnGroups.num_begun += 1
            collectives.begin_step(self._groups, self._others, self.forward_only)
            self._is_begun = True

    def prepare(self) -> None:
        """Before the loop."""

    def finish(self) -> None:
        """After the loop."""

    def let_all_go(self) -> None:
        """Whatever held gradients back is left, before the step ends or when it has failed."""

    def __enter__(self) -> "StepOnGroups":
        try:
            self.begin()
            if self._knows_steps:
                self.p2p.begin_step(self.send_limit)
            self._state = StateOfStep(self.config, [chunk.model for chunk in self.chunks])
            self.prepare()
        except BaseException as error:
            self.give_up(error)
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                if self._knows_steps:
                    self.p2p.finish()
                self.finish()
                self._end()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None:
                self.give_up(error)
            for chunk in self.chunks:  # else each would keep the other, and its tensors, alive
                chunk.frame = NoFrame()

    def _end(self) -> None:
        if not self.forward_only:
            # Through these, each rank has heard from all. Copies whose gradients stay apart may leave.
            is_final = self.config.finalize_model_grads_func is not None
            names = ("tp", "pp", "dp_cp") if is_final else ("tp", "pp")
            collectives.meet(_real([vars(self.pg_collection).get(name) for name in names]))
        collectives.end_step(self._groups + self._others)

    def give_up(self, error: BaseException) -> None:
        """The step has failed here, for this reason."""
        self._has_failed = True
        if self._knows_steps:
            self.p2p.abandon()
        collectives.abandon(self._groups + self._others, reason_of(error))
        if hasattr(self, "_state") and not self.forward_only:
            with suppress(Exception):  # the first error is the one to be seen
                self._state.put_back()
        with suppress(Exception):
            self.let_all_go()


class StateOfStep:
    """What a step changes beside gradients, as it is when the step begins.

    Without gradients: `zero_grad_buffer` comes before each step. `before_step_funcs` are called here.
    """

    def __init__(self, config: ModelParallelConfig, models: list[torch.nn.Module]):
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for model in models
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._undo = [begin(models) for begin in config.before_step_funcs]

    @torch.no_grad()
    def put_back(self) -> None:
        """All of it is as it was."""
        for module, name, buffer, before in self._buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)
            setattr(module, name, buffer)
        for undo in self._undo:
            if undo is not None:
                undo()


def groups_of_a_step(
    pg_collection: ProcessGroupCollection, p2p: Any, forward_only: bool
) -> tuple[list[dist.ProcessGroup], list[dist.ProcessGroup]]:
    """The groups over which ranks wait for each other in a step; and those that it may use too.

    A hook or a loss function may reduce over any group of the collection. The communicator's group may
    be another one than the collection's.
    """
    names = GROUPS_OF_AN_EVALUATION if forward_only else (*GROUPS_OF_A_STEP, "expt_dp")
    known = vars(pg_collection)
    used = [known.get(name) for name in (*names, *GROUPS_OF_EXPERTS)]
    groups = _real([*used, getattr(p2p, "pp_group", None)])
    others, world = _real(known.values()), dist.group.WORLD
    if world is not None and world.size() in [group.size() for group in groups]:
        others.append(world)
    return groups, [group for group in dict.fromkeys(others) if group not in groups]


def _real(groups: Iterable[Any]) -> list[dist.ProcessGroup]:
    """Those that connect several ranks, each once; not what stands in for a group."""
    # `isinstance` would ask functions of torch's, once for each of some twenty groups.
    real = [group for group in groups if issubclass(type(group), dist.ProcessGroup)]
    return [group for group in dict.fromkeys(real) if group.size() > 1]


def reason_of(error: BaseException) -> str:
    """The line that other ranks are told about an error here."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the error's own text cannot be made
        return type(error).__name__
