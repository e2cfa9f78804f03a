"""What the three schedules share around their microbatches: where a stage is, and a step's edges.

Called by: `schedules`, `interleaved`, `step_frame`. Calls: the hooks in the config. Counterpart:
`megatron.core.pipeline_parallel.utils` for the predicates; the rest stands in Megatron's
`schedules`, as nested functions or repeated in each schedule.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.pipeline_parallel.model_chunk import ModelChunk
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.layers import drain_embedding_wgrad_compute
from minimegatron.core.tensor_parallel.weight_grad_store import forget_owed
from minimegatron.core.tracing import observed_by, traced
from minimegatron.core.utils import get_attr_wrapped_model, get_model_config


def is_pp_first_stage(pp_group: dist.ProcessGroup) -> bool:
    """True on the stage that reads the data."""
    return pp_group.rank() == 0


def is_pp_last_stage(pp_group: dist.ProcessGroup) -> bool:
    """True on the stage that computes the loss."""
    return pp_group.rank() == pp_group.size() - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """True for a stage's first chunk, and for the only one."""
    return vp_size is None or vp_size == 1 or vp_stage == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """True for a stage's last chunk, and for the only one."""
    return vp_size is None or vp_size == 1 or vp_stage == vp_size - 1


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

    With `variable_seq_lengths` the sizes are sent ahead of each message instead: one empty shape.
    A two-stack model's stages exchange decoder states, of `decoder_seq_length`.
    """
    if config.variable_seq_lengths:
        return [()]
    length = (decoder_seq_length or seq_length) // cp_group.size()
    if config.sequence_parallel:
        length //= tp_group.size()
    return [(length, micro_batch_size, config.hidden_size)]


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
            with contextlib.ExitStack() as held:  # leaves those it has entered, if one raises
                for function in self._functions:
                    held.enter_context(function())
                self._held = held.pop_all()

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


def schedule(function: Callable, name: str | None = None) -> Callable:
    """Marks a `forward_backward_*` function: traced as one link, with `config.timers` watching.

    `name` tells observers which schedule it is, where the function's own name does not.
    """
    named = {} if name is None else {"schedule": name}

    def describe(arguments: dict[str, Any]) -> dict[str, Any]:
        return {"num_microbatches": arguments["num_microbatches"], **named}

    link = traced("forward-backward", describe)(function)

    @functools.wraps(function)
    def run(**arguments: Any) -> list:
        model = arguments["model"]
        first = model[0] if isinstance(model, list) else model
        with observed_by(get_model_config(first).timers):
            return link(**arguments)

    return run


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


def finish_embedding_wgrad_compute(
    config: ModelParallelConfig,
    embedding_module: torch.nn.Module | None,
    is_last_stage: bool,
    tp_group: dist.ProcessGroup,
) -> None:
    """After the last backward: computes the output layer's deferred weight gradients.

    The last stage has the most to compute: it alone scores the vocabulary. What it puts off it
    does while the others drain. Without a pipeline nothing drains, and the result is the same.
    """
    if is_last_stage and config.defer_embedding_wgrad_compute:
        weight = embedding_module.shared_embedding_or_output_weight()
        drain_embedding_wgrad_compute(
            config,
            embedding_module.embedding_activation_buffer,
            embedding_module.grad_output_buffer,
            embedding_module.output_layer.weight if weight is None else weight,
            tp_group,
        )
