"""What stands around the forwards and backwards of a step, the same for every runner.

Megatron has no such module: there these lines stand in each schedule, as nested functions or
repeated.

In the order of one step:

| moment            | what the frame does                                                           |
|-------------------|-------------------------------------------------------------------------------|
| the step begins   | numbers it; forgets what was deferred and, with `before_step_funcs`, counted  |
|                   | `no_sync_func` holds gradients back                                           |
|                   | gathers parameters of the first two chunks with `param_sync_func`             |
| before a forward  | `param_sync_func` for the chunk whose turn comes soon                         |
| before a backward | lets a chunk's gradients go, if it is the chunk's last                        |
| after a backward  | `grad_sync_func`, where the schedule sets the moment                          |
| the step ends     | waits until messages are out; lets all gradients go                           |
|                   | `grad_sync_func` for what is left; computes deferred weight gradients         |
|                   | `finalize_model_grads_func`                                                   |
|                   | waits until all ranks have come so far                                        |
| the step fails    | tells every rank that may wait for this one                                   |
|                   | puts back buffers, and what `before_step_funcs` know                          |
| either way        | leaves what `around_step_funcs` have entered before all this                  |

A forward-only step launches and finalizes no gradients, and waits for and puts back nothing;
everything else is the same.

Before a failed step is tried again, call `zero_grad_buffer` and make new data iterators: ranks may have
read different numbers of microbatches, and what an iterator has given does not come back.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.core.left_out_record import name_of, without_left_out
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders.work import FORWARD_ONLY_SEND_LIMIT, SEND_LIMIT
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, sends_shapes
from minimegatron.core.pipeline_parallel.steps import ModelChunk, NoFrame
from minimegatron.core.process_groups_config import ProcessGroupCollection, groups_of
from minimegatron.core.tensor_parallel.weight_grad_store import (
    finish_embedding_wgrad_compute,
    forget_owed,
)
from minimegatron.core.tracing import observed_by, traced
from minimegatron.core.utils import config_of_run, get_attr_wrapped_model, unwrap_model

GROUPS_OF_A_STEP = ("tp", "cp", "pp", "dp_cp", "embd", "pos_embd")
"""What collectives inside a step run over; one order on all ranks."""
GROUPS_OF_AN_EVALUATION = ("tp", "cp", "pp")
"""Likewise of a forward-only step: the ranks of one copy of the model."""
GROUPS_OF_EXPERTS = ("ep", "expt_tp", "tp_ep")
"""Both kinds of step use these too: copies of the model that share experts evaluate together."""


class StepFrame(NoFrame):
    """A context manager around one step of one stage. Chunks are added before it is entered.

    Args:
        config: of the run, for all chunks; see `config_of_run`.
        pg_collection: this rank's groups.
        p2p: the pipeline's communicator; None without a pipeline.
        forward_only: no backward.
        forward_order: (microbatch, chunk) of each forward, with interleaving; says which chunk's
            parameters will be needed next. None for one chunk.
        send_limit: see `P2PCommunicator.begin_step`; None for what one chunk per stage needs.
    """

    num_begun = 0
    """How many steps this process has begun, over all its models."""

    def __init__(
        self,
        config: ModelParallelConfig,
        pg_collection: ProcessGroupCollection,
        p2p: P2PCommunicator | None,
        forward_only: bool,
        forward_order: Sequence[tuple[int, int]] | None = None,
        send_limit: int | None = None,
    ):
        self.config, self.pg_collection, self.p2p = config, pg_collection, p2p
        self.forward_only = forward_only
        least = FORWARD_ONLY_SEND_LIMIT if forward_only else SEND_LIMIT
        self._send_limit = send_limit or least
        self.stage = 0 if p2p is None else p2p.pp_group.rank()
        self.num_stages = 1 if p2p is None else p2p.pp_group.size()
        # Somebody else's communicator has Megatron's nine methods, and no more.
        self._knows_steps = isinstance(p2p, P2PCommunicator)
        self.forward_data_store: list = []
        self.chunks: list[ModelChunk] = []
        self._param_sync = ParamSync(config, forward_order or (), self.stage)
        self._num_forwards = 0
        # (chunk, is it the chunk's last) of each backward so far.
        self._backwards: list[tuple[int, bool]] = []
        self._synchronized_chunks: set[int] = set()
        self._groups, self._others = _groups_of_a_step(pg_collection, p2p, forward_only)
        self._is_begun = self._has_failed = False

    def add_chunk(
        self,
        forward_step_func: Callable,
        data_iterator: Iterator | None,
        model: torch.nn.Module,
        num_microbatches: int,
        **options: Any,
    ) -> ModelChunk:
        """The stage's next chunk. `options` as for `ModelChunk`, without what the frame knows."""
        chunk = ModelChunk(
            forward_step_func,
            data_iterator,
            model,
            num_microbatches,
            forward_data_store=self.forward_data_store,
            cp_group_size=self.pg_collection.cp.size(),
            forward_only=self.forward_only,
            config=self.config,
            frame=self,
            **options,
        )
        self.chunks.append(chunk)
        return chunk

    # -- The step begins --

    def _begin(self) -> None:
        StepFrame.num_begun += 1
        collectives.begin_step(self._groups, self._others, self.forward_only)
        self._is_begun = True

    def __enter__(self) -> "StepFrame":
        try:
            if not self._is_begun:
                self._begin()
            if self._knows_steps:
                self.p2p.begin_step(self._send_limit)
            # The chunk that ends in the loss, if it is here, is the last of this list.
            chunks = sorted(self.chunks, key=lambda chunk: chunk.is_last_stage)
            self._embedding_module = clear_embedding_activation_buffer(
                self.config, [chunk.model for chunk in chunks], chunks[-1].is_last_stage
            )
            self._state = StateOfStep(self.config, [chunk.model for chunk in self.chunks])
            self.grad_sync = GradSync(self.config)
            self._param_sync.gather_first([chunk.model for chunk in self.chunks])
        except BaseException as error:
            self._give_up(error)
            raise
        return self

    # -- Around one forward, one backward --

    def before_forward(self, chunk: ModelChunk, microbatch_id: int) -> int:
        """Returns the forward's number among all of this stage's."""
        number = self._num_forwards
        self._num_forwards += 1
        self._param_sync.gather_ahead(number, self.chunks)
        # Torch's DistributedDataParallel decides in a forward whether its backward communicates.
        # Without a pipeline, a forward's backward is the next thing to come.
        if self.num_stages == 1 and chunk.is_in_last_microbatch():
            self._let_go(chunk)
        return number

    def before_backward(self, chunk: ModelChunk) -> None:
        """Lets the chunk's gradients go before its last backward, if that is backward's to do."""
        # With a `grad_sync_func` the schedule launches them, in the time when a stage waits for
        # others. Only stage 0 of plain 1F1B has no such time: it finishes last.
        is_backwards_turn = self.config.grad_sync_func is None or (
            chunk.vp_stage is None and self.stage == 0
        )
        if is_backwards_turn and chunk.num_backwards_left == 1:
            self._let_go(chunk)

    def after_backward(self, chunk: ModelChunk) -> None:
        """Launches the gradients that are due, and holds back those of the other chunks."""
        self._backwards.append((self.chunks.index(chunk), chunk.num_backwards_left == 0))
        if chunk.vp_stage is None:
            return
        # Stage r is r backwards behind the last stage. So all stages launch a chunk together.
        behind = len(self._backwards) - 1 - self.stage
        if self.config.grad_sync_func is not None and behind >= 0:
            chunk_id, was_last = self._backwards[behind]
            if was_last:
                self._let_go(self.chunks[chunk_id])
                self._launch(self.chunks[chunk_id])
        self.grad_sync.disable()

    def _let_go(self, chunk: ModelChunk) -> None:
        self.grad_sync.enable()
        self._synchronized_chunks.add(self.chunks.index(chunk))

    def _launch(self, chunk: ModelChunk) -> None:
        self.grad_sync.launch(chunk.model, chunk.vp_stage)

    # -- The step ends --

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self._finish()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None:
                self._give_up(error)
            for chunk in self.chunks:  # else each would keep the other, and its tensors, alive
                chunk.frame = NoFrame()

    def _finish(self) -> None:
        if self._knows_steps:
            self.p2p.finish()
        self.grad_sync.enable()
        # A bucket that still lacks a deferred gradient waits for it.
        if not self.forward_only:
            for chunk_id, chunk in enumerate(self.chunks):
                if chunk_id not in self._synchronized_chunks:
                    self._launch(chunk)
        if self._embedding_module is not None:
            finish_embedding_wgrad_compute(
                self.config, self._embedding_module, True, self.pg_collection.tp
            )
        finish_step(self.config, self.chunks, self.forward_only, self.pg_collection)
        if not self.forward_only:
            # Through these, each rank has heard from all. Copies whose gradients stay apart may leave.
            is_final = self.config.finalize_model_grads_func is not None
            names = ("tp", "pp", "dp_cp") if is_final else ("tp", "pp")
            collectives.meet(_real([vars(self.pg_collection).get(name) for name in names]))
        collectives.end_step(self._groups + self._others)

    def _give_up(self, error: BaseException) -> None:
        self._has_failed = True
        if self._knows_steps:
            self.p2p.abandon()
        collectives.abandon(self._groups + self._others, _reason_of(error))
        if hasattr(self, "_state") and not self.forward_only:
            with suppress(Exception):  # the first error is the one to be seen
                self._state.put_back()
        if hasattr(self, "grad_sync"):
            with suppress(Exception):
                self.grad_sync.enable()


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


class ParamSync:
    """Gathers parameters ahead of their forward, with interleaving, where the config says how.

    `config.param_sync_func` is one function, or a list with one per chunk. Without interleaving, each
    layer's forward gathers what it needs.
    """

    def __init__(
        self, config: ModelParallelConfig, forward_order: Sequence[tuple[int, int]], stage: int
    ):
        self._functions = config.param_sync_func if forward_order else None
        self._order, self._stage = forward_order, stage

    def gather_first(self, models: list[torch.nn.Module]) -> None:
        """Before the step: the first two chunks."""
        for chunk_id in range(min(2, len(models))):
            self._gather(models, chunk_id)

    def gather_ahead(self, number: int, chunks: list[ModelChunk]) -> None:
        """Before forward `number`: the chunk after one that begins soon."""
        # All stages launch a chunk's gathering at the same time: stage r looks r forwards ahead.
        ahead = number + self._stage
        if self._functions is None or ahead >= len(self._order):
            return
        microbatch, chunk_id = self._order[ahead]
        if microbatch == 0 and 1 < chunk_id + 1 < len(chunks):
            self._gather([chunk.model for chunk in chunks], chunk_id + 1)

    def _gather(self, models: list[torch.nn.Module], chunk_id: int) -> None:
        if self._functions is not None:
            of_chunk(self._functions, chunk_id)(models[chunk_id].parameters())


class GradSync:
    """Holds back gradient communication, from the first backward until just before the last.

    `config.no_sync_func` makes a context manager, or is a list of such, one per chunk. A schedule
    enters it in one place and leaves it in another, so it cannot be a `with` block. Communication is
    held back from the start.
    """

    def __init__(self, config: ModelParallelConfig):
        no_sync = config.no_sync_func
        functions = no_sync if isinstance(no_sync, list) else [no_sync]
        self._functions = [function for function in functions if function is not None]
        self._grad_sync_func = config.grad_sync_func
        self._held: contextlib.ExitStack | None = None
        self.disable()

    def disable(self) -> None:
        """From now on, gradients stay on their rank."""
        if self._held is None:
            held = contextlib.ExitStack()
            try:
                for function in self._functions:
                    held.enter_context(function())
            except BaseException:
                held.close()
                raise
            self._held = held

    def enable(self) -> None:
        """From now on, a gradient that is complete may be sent."""
        if self._held is not None:
            held, self._held = self._held, None
            held.close()

    def launch(self, model: torch.nn.Module, chunk_id: int | None = None) -> None:
        """Sends a model's gradients now, if that moment is the schedule's to choose."""
        if self._grad_sync_func is not None:
            of_chunk(self._grad_sync_func, chunk_id or 0)(model.parameters())


def of_chunk(hook: Callable | list[Callable], chunk_id: int) -> Callable:
    """A hook of the config: one function for all chunks, or a list with one for each."""
    return hook[chunk_id] if isinstance(hook, list) else hook


# -- Groups and sizes, where the caller gives none --


def groups_of_step(
    model: torch.nn.Module, pg_collection: ProcessGroupCollection | None
) -> ProcessGroupCollection:
    """`pg_collection`; or else the model's own, if it has all of a step; or else see `groups_of`."""
    if pg_collection is not None:
        return pg_collection
    own = getattr(unwrap_model(model), "pg_collection", None)
    if own is not None and set(GROUPS_OF_A_STEP) <= vars(own).keys():
        return own
    return groups_of(model)


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: ModelParallelConfig,
    tp_group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup,
) -> list[tuple[int, ...]]:
    """Shapes of what travels between two stages: one, [s/c/t, b, h]; /t with sequence parallelism.

    With `variable_seq_lengths` the sizes are sent ahead of each message instead: one empty shape. So
    they are where messages are (1 + K) s long, behind a stage of their own for further tokens.
    A two-stack model's stages exchange decoder states, of `decoder_seq_length`.
    """
    if sends_shapes(config):
        return [torch.Size()]  # one shape, where () would be a list of none
    length = (decoder_seq_length or seq_length) // cp_group.size()
    if config.sequence_parallel:
        length //= tp_group.size()
    return [(length, micro_batch_size, config.hidden_size)]


# -- Around the last backward --


def finish_step(
    config: ModelParallelConfig,
    chunks: list[ModelChunk],
    forward_only: bool,
    pg_collection: ProcessGroupCollection,
) -> None:
    """After the last backward: makes gradients whole over all ranks, with `finalize_model_grads`."""
    if config.finalize_model_grads_func is not None and not forward_only:
        total_num_tokens = torch.stack([chunk.num_tokens for chunk in chunks]).sum()
        config.finalize_model_grads_func(
            [chunk.model for chunk in chunks],
            total_num_tokens if config.calculate_per_token_loss else None,
            pg_collection=pg_collection,
        )


def clear_embedding_activation_buffer(
    config: ModelParallelConfig, model: torch.nn.Module | list, is_last_stage: bool
) -> torch.nn.Module | None:
    """Before a step: forgets the weight gradients that a failed step still owed.

    With `defer_embedding_wgrad_compute`, returns the last stage's model that owns the output layer;
    None on every other stage, and with the option off.
    """
    if config.defer_embedding_wgrad_compute or config.delay_wgrad_compute:
        for chunk in model if isinstance(model, list) else [model]:
            forget_owed(chunk.parameters())
    if not (is_last_stage and config.defer_embedding_wgrad_compute):
        return None
    last_chunk = model[-1] if isinstance(model, list) else model
    embedding_module = get_attr_wrapped_model(last_chunk, "post_process", return_model_obj=True)
    embedding_module.embedding_activation_buffer.clear()
    embedding_module.grad_output_buffer.clear()
    return embedding_module


# -- What a schedule refuses, and is marked with --


def check_step_of(forward_only: bool = False, num_microbatches: int = 1, **_: Any) -> None:
    """Raises ValueError for a step of nothing, and for a training step that would have no gradients."""
    if not (forward_only or torch.is_grad_enabled()):
        raise ValueError(
            "forward_only is False, but gradients are off (torch.no_grad or inference_mode), so this "
            "step would leave all of them 0; call the schedule outside, or with forward_only=True"
        )
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches is {num_microbatches}; a step has at least 1")


def refuse_shared_iterators(data_iterators: list) -> None:
    """Raises ValueError where two chunks would take microbatches from each other.

    None, for a chunk that reads nothing, may be there several times; so may what is no iterator.
    """
    chunk_of: dict[int, int] = {}
    for chunk_id, iterator in enumerate(data_iterators):
        if hasattr(iterator, "__next__") and chunk_of.setdefault(id(iterator), chunk_id) < chunk_id:
            raise ValueError(
                f"chunks {chunk_of[id(iterator)]} and {chunk_id} have one data iterator between them: "
                "what one reads, the other never sees; give each an iterator of its own, over the same "
                "microbatches, or None to a chunk that reads nothing"
            )


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
        num_begun = StepFrame.num_begun
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
            if is_framed and StepFrame.num_begun == num_begun:
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
    StepFrame.num_begun += 1
    with suppress(Exception):  # the first error is the one to be seen
        pg_collection = arguments.get("pg_collection")
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        forward_only = arguments.get("forward_only", False)
        p2p = arguments.get("p2p_communicator")
        groups, others = _groups_of_a_step(pg_collection, p2p, forward_only)
        collectives.begin_step(groups, others, forward_only)
        collectives.abandon(groups + others, _reason_of(error))


def _reason_of(error: BaseException) -> str:
    """The line that other ranks are told about an error here."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the error's own text cannot be made
        return type(error).__name__


def _groups_of_a_step(
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
