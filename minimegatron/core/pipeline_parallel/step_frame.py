"""What stands around the forwards and backwards of a step, the same for every runner.

Megatron has no such module: there these lines stand in each schedule, as nested functions or
repeated.

In the order of one step:

| moment            | what the frame does                                                           |
|-------------------|-------------------------------------------------------------------------------|
| the step begins   | numbers it; `before_step_funcs` forget what they have counted                 |
|                   | `no_sync_func` holds gradients back                                           |
| before a backward | lets a chunk's gradients go, if it is the chunk's last                        |
| after a backward  | holds gradients back again, where there are several chunks                    |
| the step ends     | waits until messages are out; lets all gradients go                           |
|                   | `finalize_model_grads_func`                                                   |
|                   | waits until all ranks have come so far                                        |
| the step fails    | tells every rank that may wait for this one                                   |
|                   | puts back buffers, and what `before_step_funcs` know                          |
| either way        | leaves what `around_step_funcs` have entered before all this                  |

A forward-only step finalizes no gradients, and waits for and puts back nothing; everything else is the
same. `failed_step.StepOnGroups` is the `with` block: it begins, ends and fails on all ranks together,
and calls `prepare`, `finish` and `let_all_go` below. `hooked_frame` does more, where the configuration
asks for it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders.work import FORWARD_ONLY_SEND_LIMIT, SEND_LIMIT
from minimegatron.core.pipeline_parallel.failed_step import GROUPS_OF_A_STEP, StepOnGroups
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from minimegatron.core.pipeline_parallel.steps import ModelChunk
from minimegatron.core.process_groups_config import ProcessGroupCollection, groups_of
from minimegatron.core.utils import unwrap_model


class StepFrame(StepOnGroups):
    """A context manager around one step of one stage. Chunks are added before it is entered.

    Entered, all ranks begin the step, then come `p2p.begin_step` and `prepare`. Left without an error,
    come `p2p.finish` and `finish`; see `failed_step.StepOnGroups`.

    Args:
        config: of the run, for all chunks; see `config_of_run`.
        pg_collection: this rank's groups.
        p2p: the pipeline's communicator; None without a pipeline.
        forward_only: no backward.
        forward_order: (microbatch, chunk) of each forward, with interleaving. None for one chunk.
        send_limit: see `P2PCommunicator.begin_step`; None for what one chunk per stage needs.
    """

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
        self.forward_order, self.send_limit = forward_order, send_limit or least
        self.stage = 0 if p2p is None else p2p.pp_group.rank()
        self.num_stages = 1 if p2p is None else p2p.pp_group.size()
        self.chunks: list[ModelChunk] = []
        self.forward_data_store: list = []
        self.num_forwards = 0

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

    # -- The step begins; `begin` has numbered it --

    def prepare(self) -> None:
        """Before the loop; `StepOnGroups` calls it when the `with` block is entered."""
        self.grad_sync = GradSync(self.config)

    # -- Around one forward, one backward --

    def before_forward(self, chunk: ModelChunk, microbatch_id: int) -> int:
        """Returns the forward's number among all of this stage's."""
        self.num_forwards += 1
        # Torch's DistributedDataParallel decides in a forward whether its backward communicates.
        # Without a pipeline, a forward's backward is the next thing to come.
        if self.num_stages == 1 and chunk.is_in_last_microbatch():
            self.let_go(chunk)
        return self.num_forwards - 1

    def before_backward(self, chunk: ModelChunk) -> None:
        """Lets the chunk's gradients go before its last backward."""
        if chunk.num_backwards_left == 1:
            self.let_go(chunk)

    def after_backward(self, chunk: ModelChunk) -> None:
        """With several chunks, holds gradients back until the next chunk's last backward."""
        if chunk.vp_stage is not None:
            self.grad_sync.disable()

    def let_go(self, chunk: ModelChunk) -> None:
        """Lets gradients go; until `after_backward` only this chunk has any. See `HookedFrame` too."""
        self.grad_sync.enable()

    # -- The step ends --

    def finish(self) -> None:
        """After the loop; `StepOnGroups` calls it when the `with` block is left without an error."""
        self.grad_sync.enable()
        self.finalize()

    def finalize(self) -> None:
        """After the last backward."""
        finish_step(self.config, self.chunks, self.forward_only, self.pg_collection)

    def let_all_go(self) -> None:
        """When the step has failed; `StepOnGroups` calls it."""
        self.grad_sync.enable()


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
            with contextlib.ExitStack() as held:
                for function in self._functions:
                    held.enter_context(function())
                self._held = held.pop_all()  # left by `enable`; here only where one fails

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


# -- The end of a step --


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


# -- Groups, where the caller gives none --


def groups_of_step(
    model: torch.nn.Module, pg_collection: ProcessGroupCollection | None
) -> ProcessGroupCollection:
    """`pg_collection`; or else the model's own, if it has all of a step; or else see `groups_of`."""
    own = getattr(unwrap_model(model), "pg_collection", None)
    has_all = own is not None and set(GROUPS_OF_A_STEP) <= vars(own).keys()
    return pg_collection or (own if has_all else groups_of(model))
