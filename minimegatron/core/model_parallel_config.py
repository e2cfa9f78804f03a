"""How a model is cut over ranks, and the hooks through which the schedule reaches the rest.

Counterpart: `megatron.core.model_parallel_config.ModelParallelConfig`, under the same field names.

The sizes are fixed once built. The `*_func` hooks are not: `training.train` fills them in after the
model and the optimizer exist, which is why this dataclass is not frozen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from minimegatron.core import knobs
from minimegatron.core.subject_fields import SubjectFields, check_sizes

knob = partial(knobs.knob, section="parallel")


@dataclass
class ModelParallelConfig(SubjectFields):
    """Sizes of every parallel dimension, precision, and schedule hooks.

    Fields of single subjects, all off by default, are those of its bases: see `SubjectFields`. `knob`
    makes a field a flag of the command line, too; `given` is the flag's default where it is another.
    The text below a field begins with its flag's words, as `--help` prints them; what follows after an
    empty line is of the field alone.
    """

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
    sequence_parallel: bool = knob(False)
    """Split what lies between the tensor-parallel layers along the sequence."""
    context_parallel_size: int = knob(1, minimum=1)
    """Ranks that share each sequence."""
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
    # -- Loss --
    calculate_per_token_loss: bool = knob(False, section="training")
    """Divide by the number of tokens of the whole global batch, instead of each microbatch's.

    Once, after the last backward."""
    # -- Communication between stages --
    overlap_p2p_comm: bool = knob(False, name="--overlap-p2p-communication", given=None)
    """Send between stages while computing; on by default where chunks interleave, and only there.

    Off by default here. Excludes `batch_p2p_comm`."""
    batch_p2p_comm: bool = True
    """Give the transport one batch of sends and receives, instead of an even/odd order."""
    variable_seq_lengths: bool = knob(False)
    """Send the shape ahead of every message between stages.

    Three int64 sizes; without it one fixed shape is assumed."""
    deallocate_pipeline_outputs: bool = knob(False)
    """Free a stage's output once it is sent.

    Only its `grad_fn` is still needed."""
    microbatch_group_size_per_vp_stage: int | None = knob(
        name="--microbatch-group-size-per-virtual-pipeline-stage", minimum=1
    )
    """Interleaving: microbatches per turn of a chunk; by default as many as stages."""

    def __post_init__(self) -> None:
        """Fills in what follows from other fields. Raises ValueError for sizes that cannot work."""
        knobs.check_values(self)
        if self.pipeline_model_parallel_size > 1 and self.pipeline_dtype is None:
            self.pipeline_dtype = self.params_dtype
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        is_interleaved = self.virtual_pipeline_model_parallel_size is not None
        if is_interleaved and self.microbatch_group_size_per_vp_stage is None:
            self.microbatch_group_size_per_vp_stage = self.pipeline_model_parallel_size
        check_sizes(self)
