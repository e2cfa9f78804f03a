"""Fields of a configuration that a plain step never reads, and what is refused of one.

Counterpart: `megatron.core.model_parallel_config`. A subject beside the plain step (experts, further
tokens, other orders of work, weight gradients that come later) is switched on here, and enters what it
does in the hooks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from minimegatron.core import knobs

knob = partial(knobs.knob, section="parallel")

schedule_checks: list[Callable[[Any], None]] = []
"""Called with each configuration that names a `pipeline_schedule`; they raise ValueError.

Sizes are known here, schedules are not: `schedule_of_config` enters what it refuses."""


def enter_hooks(
    config: Any, is_wanted: bool, hooks: Callable[[], dict[str, tuple[Callable, ...]]]
) -> None:
    """Enters a subject's functions in the hooks of `config`, if it is wanted.

    `hooks` gives, by field, the function to enter, then those that it excludes. All of them are taken
    out first: a configuration made of another (`dataclasses.replace`) brings that one's. It is asked
    where there is something to do; so a run without the subject does not load the functions.
    """
    if not is_wanted and not any(getattr(config, name) for name in HOOKS):
        return
    for name, ours in hooks().items():
        others = tuple(func for func in getattr(config, name) if func not in ours)
        setattr(config, name, (*others, *ours[:1]) if is_wanted else others)


@dataclass(kw_only=True)
class SubjectFields:
    """The fields of `ModelParallelConfig` for these; each as there."""

    pipeline_schedule: str | None = knob()
    """Order of work by name, such as gpipe, 1f1b or breadth-first, or FILE.py:FUNCTION that registers
    one; by default Megatron's choice for these sizes (no Megatron flag).

    Here a name that is registered, see `orders`. Its placement decides which layers each rank
    builds."""
    expert_model_parallel_size: int = knob(1, minimum=1)
    """Ranks that share the experts of a mixture-of-experts layer."""
    expert_tensor_parallel_size: int | None = knob(minimum=1)
    """Ranks that share each expert; by default the tensor-parallel size."""

    # -- Hooks --
    aux_loss_scale_funcs: tuple[Callable[[torch.Tensor, int, int], None], ...] = ()
    """Called at the end of each forward, on every stage, with the loss scale (a tensor of one element),
    the number of microbatches M and of context-parallel ranks c. Each sets the scale of the losses that
    it knows: scale / M for a mean over the microbatch, scale * c / M for a rank's share of one, and
    with `calculate_per_token_loss` the scale alone for a sum."""
    before_step_funcs: tuple[Callable[[list], Callable[[], None] | None], ...] = ()
    """Called when a step begins, with the model chunks, to forget what the last one has left. What one
    returns is called if a training step fails on any rank: to put back what it has changed, beside
    buffers. `tensor_parallel.recompute.keep_rng_states` is one, for random numbers."""
    around_step_funcs: tuple[Callable[[], AbstractContextManager], ...] = ()
    """What each returns is entered before a step, forward-only or not, and left when it has ended or
    failed: for what no step may leave behind, such as the scale of auxiliary losses."""
    after_grads_funcs: tuple[Callable[[list, Any], None], ...] = ()
    """Called by `finalize_model_grads` when all gradients are final, before the optimizer, with the
    model chunks and the `ProcessGroupCollection`."""
    log_funcs: tuple[Callable[[list, Any], dict[str, float]], ...] = ()
    """Called on all ranks when a line of the log is due, with the model chunks and the
    `ProcessGroupCollection`: numbers to add to it, the same on all ranks."""
    schedule_plan_builders: tuple[Callable[[Any, Any], Callable[[], None] | None], ...] = ()
    """For orders of work by name: asked before each piece of work, or pair, for another way to do it.
    See `planned_schedule.PlannedRun`."""

    # -- Loss --
    mean_loss_has_factor: bool = False
    """For a loss function that returns two values with `calculate_per_token_loss`: it divides by the
    d * c ranks that have a loss, because their gradients are summed then. So nobody warns of that."""

    # -- Between stages, and in them --
    mtp_standalone: bool = False
    """Further tokens are predicted on another stage than the loss, so that messages after it are
    longer. A layout decides it; then shapes are sent ahead too."""
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    """Of the microbatches in flight, how many keep (some of) their activations."""

    overlap_moe_expert_parallel_comm: bool = knob(False)
    """Send tokens to and from experts while another microbatch computes.

    A forward and a backward run side by side, layer by layer; see `combined_1f1b`."""

    # -- Weight gradients after the input's gradient --
    delay_wgrad_compute: bool = knob(False)
    """Compute the layers' weight gradients after the backward of their microbatch, not in it.

    In `backward_dw`; a schedule may then put other work between the two."""
    defer_embedding_wgrad_compute: bool = knob(False)
    """Compute the output layer's weight gradients after the last backward."""
    wgrad_deferral_limit: int = knob(0, minimum=0)
    """How many microbatches --defer-embedding-wgrad-compute may put off; 0 for all.

    Where further tokens are predicted, it counts each use of the output layer: 1 + K a microbatch."""


def check_sizes(config: Any) -> None:
    """Raises ValueError, with the numbers and the remedy, for a configuration that cannot work."""
    if config.fp16 and config.bf16:
        raise ValueError("fp16 and bf16 are both on; choose one")
    if config.overlap_p2p_comm and config.batch_p2p_comm:
        raise ValueError(
            "overlap_p2p_comm needs separate sends and receives; set batch_p2p_comm=False"
        )
    if config.sequence_parallel and config.tensor_model_parallel_size == 1:
        raise ValueError(
            "sequence_parallel with tensor_model_parallel_size=1 splits nothing; "
            "use 2 or more tensor-parallel ranks or turn it off"
        )
    halves = {torch.float16, torch.bfloat16}
    if {config.pipeline_dtype, config.params_dtype} == halves:
        raise ValueError(
            f"pipeline_dtype is {config.pipeline_dtype} but params_dtype is {config.params_dtype}: a "
            "stage would read the other's bytes as other numbers; set both alike"
        )
    if config.virtual_pipeline_model_parallel_size is not None:
        _check_interleaving(config)
    if config.pipeline_schedule is not None:
        for check in schedule_checks:
            check(config)


def _check_interleaving(config: Any) -> None:
    p = config.pipeline_model_parallel_size
    v = config.virtual_pipeline_model_parallel_size
    if p == 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={v} needs a pipeline, but "
            "pipeline_model_parallel_size is 1; use 2 or more stages"
        )
    if config.microbatch_group_size_per_vp_stage < p:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage={config.microbatch_group_size_per_vp_stage} is "
            f"less than pipeline_model_parallel_size={p}; give {p} or more"
        )


HOOKS = tuple(field.name for field in fields(SubjectFields) if field.name.endswith("_funcs"))
"""The fields that hold functions which a step calls."""
