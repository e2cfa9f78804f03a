"""How a model is cut over ranks, and the hooks through which the schedule reaches the rest.

Counterpart: `megatron.core.model_parallel_config.ModelParallelConfig`, under the same field names.

The sizes are fixed once built. The `*_func` hooks are not: `training.train` fills them in after the
model and the optimizer exist, which is why this dataclass is not frozen.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minimegatron.core import knobs

knob = partial(knobs.knob, section="parallel")

schedule_checks: list[Callable[[Any], None]] = []
"""Called with each configuration that names a `pipeline_schedule`; they raise ValueError.

Sizes are known here, schedules are not: `schedule_of_config` enters what it refuses."""


def enter_hooks(config: Any, is_wanted: bool, hooks: dict[str, tuple[Callable, ...]]) -> None:
    """Enters a subject's functions in the hooks of `config`, if it is wanted.

    `hooks`: by field, the function to enter, then those that it excludes. All of them are taken out
    first: a configuration made of another (`dataclasses.replace`) brings that one's.
    """
    for name, ours in hooks.items():
        others = tuple(func for func in getattr(config, name) if func not in ours)
        setattr(config, name, (*others, *ours[:1]) if is_wanted else others)


@dataclass
class ModelParallelConfig:
    """Sizes of every parallel dimension, precision, and schedule hooks."""

    # -- Sizes --
    tensor_model_parallel_size: int = knob(1, minimum=1)
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = knob(1, minimum=1)
    """Stages.

    Ranks that each hold some of the layers."""
    virtual_pipeline_model_parallel_size: int | None = knob(
        is_derived=True, name="--num-virtual-stages-per-pipeline-rank", minimum=1
    )
    """Chunks per stage; None without interleaving."""
    pipeline_schedule: str | None = knob()
    """Order of work by name, such as gpipe, 1f1b or breadth-first, or FILE.py:FUNCTION that registers
    one; by default Megatron's choice for these sizes (no Megatron flag).

    Here a name that is registered, see `orders`. Its placement decides which layers each rank
    builds."""
    sequence_parallel: bool = knob(False)
    """Split what lies between the tensor-parallel layers along the sequence."""
    context_parallel_size: int = knob(1, minimum=1)
    """Ranks that share each sequence."""
    expert_model_parallel_size: int = knob(1, minimum=1)
    """Ranks that share the experts of a mixture-of-experts layer."""
    expert_tensor_parallel_size: int | None = knob(minimum=1)
    """Ranks that share each expert; by default the tensor-parallel size."""

    use_cpu_initialization: bool = True
    """Has no effect: weights are always drawn whole on the CPU, then cut
    (`tensor_parallel.initial_weights`). Accepted because Megatron's first example sets it."""

    # -- Precision --
    bf16: bool = knob(False, section="precision")
    """Weights and activations in bfloat16, with float32 main weights in the optimizer."""
    fp16: bool = knob(False, section="precision")
    """Weights and activations in float16, likewise, with loss scaling."""
    params_dtype: torch.dtype = torch.float32
    """dtype of the model's weights."""
    pipeline_dtype: torch.dtype | None = None
    """dtype of activations and gradients sent between stages; needed when there is a pipeline."""
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None

    # -- Hooks, filled in by `training.train` or by hand --
    timers: Any = None
    """A `Timers`; it watches every `@traced` call made during a schedule."""
    barrier_with_L1_time: bool = knob(
        True,
        section="logger",
        name="--no-barrier-with-level-1-timing",
        given=False,
        help="Parts of a step are timed from where this rank begins, not from where all ranks are.",
    )
    """Before it times a part of a step (level 1), `timers` waits for all ranks of the job. So what one
    rank waits for another does not count; each rank of the job must run the schedule."""
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Multiplies the loss by the loss scale, just before backward."""
    no_sync_func: Callable[[], Any] | list[Callable[[], Any]] | None = None
    """Context manager that holds back gradient communication; one per chunk with interleaving."""
    grad_sync_func: Callable | list[Callable] | None = None
    """Launches gradient communication at the schedule's moment, not backward's."""
    param_sync_func: Callable | list[Callable] | None = None
    """Launches the gathering of parameters before a chunk's first forward."""
    finalize_model_grads_func: Callable | None = None
    """Called once, after the last backward, with the model chunks."""
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
    calculate_per_token_loss: bool = knob(False, section="training")
    """Divide by the number of tokens of the whole global batch, instead of each microbatch's.

    Once, after the last backward."""
    mean_loss_has_factor: bool = False
    """For a loss function that returns two values with `calculate_per_token_loss`: it divides by the
    d * c ranks that have a loss, because their gradients are summed then. So nobody warns of that."""

    # -- Communication between stages --
    overlap_p2p_comm: bool = knob(False, name="--overlap-p2p-communication", given=None)
    """Send between stages while computing; on by default where chunks interleave, and only there.

    Off by default here. Excludes `batch_p2p_comm`."""
    batch_p2p_comm: bool = True
    """Give the transport one batch of sends and receives, instead of an even/odd order."""
    variable_seq_lengths: bool = knob(False)
    """Send the shape ahead of every message between stages.

    Three int64 sizes; without it one fixed shape is assumed."""
    mtp_standalone: bool = False
    """Further tokens are predicted on another stage than the loss, so that messages behind it are
    longer. A layout decides it; then shapes are sent ahead too."""
    deallocate_pipeline_outputs: bool = knob(False)
    """Free a stage's output once it is sent.

    Only its `grad_fn` is still needed."""
    microbatch_group_size_per_vp_stage: int | None = knob(
        name="--microbatch-group-size-per-virtual-pipeline-stage", minimum=1
    )
    """Interleaving: microbatches per turn of a chunk; by default as many as stages."""
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

    def __post_init__(self) -> None:
        """Raises ValueError, with the numbers and the remedy, for sizes that cannot work."""
        knobs.check_values(self)
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both on; choose one")
        if self.overlap_p2p_comm and self.batch_p2p_comm:
            raise ValueError(
                "overlap_p2p_comm needs separate sends and receives; set batch_p2p_comm=False"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel with tensor_model_parallel_size=1 splits nothing; "
                "use 2 or more tensor-parallel ranks or turn it off"
            )
        if self.pipeline_model_parallel_size > 1 and self.pipeline_dtype is None:
            self.pipeline_dtype = self.params_dtype
        halves = {torch.float16, torch.bfloat16}
        if {self.pipeline_dtype, self.params_dtype} == halves:
            raise ValueError(
                f"pipeline_dtype is {self.pipeline_dtype} but params_dtype is {self.params_dtype}: a "
                "stage would read the other's bytes as other numbers; set both alike"
            )
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        if self.virtual_pipeline_model_parallel_size is not None:
            self._check_interleaving()
        if self.pipeline_schedule is not None:
            for check in schedule_checks:
                check(self)

    def _check_interleaving(self) -> None:
        p = self.pipeline_model_parallel_size
        v = self.virtual_pipeline_model_parallel_size
        if p == 1:
            raise ValueError(
                f"virtual_pipeline_model_parallel_size={v} needs a pipeline, but "
                "pipeline_model_parallel_size is 1; use 2 or more stages"
            )
        if self.microbatch_group_size_per_vp_stage is None:
            self.microbatch_group_size_per_vp_stage = p
        if self.microbatch_group_size_per_vp_stage < p:
            raise ValueError(
                f"microbatch_group_size_per_vp_stage={self.microbatch_group_size_per_vp_stage} is "
                f"less than pipeline_model_parallel_size={p}; give {p} or more"
            )
