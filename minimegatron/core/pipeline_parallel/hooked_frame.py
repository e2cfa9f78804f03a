"""A step's frame where the schedule also launches communication, or leaves weight gradients for later.

Megatron has no such module: there these lines stand in each schedule.

| moment            | what it does beside `StepFrame`                                               |
|-------------------|-------------------------------------------------------------------------------|
| the step begins   | forgets weight gradients that a failed step has left                          |
|                   | gathers parameters of the first two chunks with `param_sync_func`             |
| before a forward  | `param_sync_func` for the chunk whose turn comes soon                         |
| before a backward | with `grad_sync_func`, lets gradients go on stage 0 of plain 1F1B only        |
| after a backward  | `grad_sync_func`, where the schedule sets the moment                          |
| the step ends     | `grad_sync_func` for what is left; computes deferred weight gradients         |
"""

from collections.abc import Sequence
from typing import Any

import torch

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.step_frame import StepFrame, of_chunk
from minimegatron.core.pipeline_parallel.steps import ModelChunk
from minimegatron.core.tensor_parallel.weight_grad_store import (
    finish_embedding_wgrad_compute,
    forget_owed,
)
from minimegatron.core.utils import get_attr_wrapped_model


class HookedFrame(StepFrame):
    """`StepFrame`, for a configuration with one of the options above. Arguments as there."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.param_sync = ParamSync(self.config, self.forward_order or (), self.stage)
        # (chunk, is it the chunk's last) of each backward so far.
        self._backwards: list[tuple[int, bool]] = []
        self._synchronized_chunks: set[int] = set()

    def prepare(self) -> None:
        """Before the loop."""
        # The chunk that ends in the loss, if it is here, is the last of this list.
        chunks = sorted(self.chunks, key=lambda chunk: chunk.is_last_stage)
        self._embedding_module = clear_embedding_activation_buffer(
            self.config, [chunk.model for chunk in chunks], chunks[-1].is_last_stage
        )
        super().prepare()
        self.param_sync.gather_first([chunk.model for chunk in self.chunks])

    def before_forward(self, chunk: ModelChunk, microbatch_id: int) -> int:
        """Returns the forward's number among all of this stage's."""
        self.param_sync.gather_ahead(self.num_forwards, self.chunks)
        return super().before_forward(chunk, microbatch_id)

    def before_backward(self, chunk: ModelChunk) -> None:
        """Lets the chunk's gradients go before its last backward, if that is backward's to do."""
        # With a `grad_sync_func` the schedule launches them, in the time when a stage waits for
        # others. Only stage 0 of plain 1F1B has no such time: it finishes last.
        is_backwards_turn = self.config.grad_sync_func is None or (
            chunk.vp_stage is None and self.stage == 0
        )
        if is_backwards_turn:
            super().before_backward(chunk)

    def after_backward(self, chunk: ModelChunk) -> None:
        """Launches the gradients that are due, and holds back those of the other chunks."""
        self._backwards.append((self.chunks.index(chunk), chunk.num_backwards_left == 0))
        # Stage r is r backwards behind the last stage. So all stages launch a chunk together.
        behind = len(self._backwards) - 1 - self.stage
        if chunk.vp_stage is not None and self.config.grad_sync_func is not None and behind >= 0:
            chunk_id, was_last = self._backwards[behind]
            if was_last:
                self.let_go(self.chunks[chunk_id])
                self._launch(chunk_id)
        super().after_backward(chunk)

    def let_go(self, chunk: ModelChunk) -> None:
        """From now on, the chunk's gradients may be sent; `finalize` launches those of the others."""
        super().let_go(chunk)
        self._synchronized_chunks.add(self.chunks.index(chunk))

    def finalize(self) -> None:
        """After the last backward. A bucket that still lacks a deferred gradient waits for it."""
        if not self.forward_only:
            for chunk_id in range(len(self.chunks)):
                if chunk_id not in self._synchronized_chunks:
                    self._launch(chunk_id)
        if self._embedding_module is not None:
            finish_embedding_wgrad_compute(
                self.config, self._embedding_module, True, self.pg_collection.tp
            )
        super().finalize()

    def _launch(self, chunk_id: int) -> None:
        chunk = self.chunks[chunk_id]
        self.grad_sync.launch(chunk.model, chunk.vp_stage)


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
