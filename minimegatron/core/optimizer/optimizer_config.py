"""The knobs of the optimizer.

Counterpart: `megatron.core.optimizer.OptimizerConfig`, under the same field names.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from minimegatron.core import knobs
from minimegatron.core.optimizer.optimizer_checks import check_config
from minimegatron.exports import all_of

__getattr__, __dir__ = all_of(__name__, "minimegatron.core.optimizer.update_rule_configs")

knob = partial(knobs.knob, section="optimization")
loss_scale_knob = partial(knobs.knob, section="precision")
gradient_knob = partial(knobs.knob, section="gradients")


@dataclass(frozen=True)
class OptimizerConfig:
    """Update rule, precision, loss scale, clipping."""

    # -- Update rule --
    optimizer: Literal["adam", "sgd"] = knob("adam")
    """Update rule; adam decouples its weight decay (AdamW)."""
    lr: float | None = knob(required=True, above=0.0)
    """Highest learning rate.

    `OptimizerParamScheduler` overwrites it in the parameter groups."""
    min_lr: float | None = knobs.knob(section="scheduler", given=0.0, minimum=0.0)
    """Lowest learning rate."""
    weight_decay: float = knob(0.01, minimum=0.0)
    """Weight decay of matrices; vectors have none."""
    adam_beta1: float = knob(0.9, minimum=0.0, below=1.0)
    """Decay of the first moment."""
    adam_beta2: float = knob(0.999, minimum=0.0, below=1.0)
    """Decay of the second moment."""
    adam_eps: float = knob(1e-8, above=0.0)
    """Added to the root of the second moment."""
    decoupled_weight_decay: bool = True
    """AdamW (Loshchilov & Hutter 2019); False adds the decay to the gradient."""
    sgd_momentum: float = knob(0.9, minimum=0.0, below=1.0)
    """Momentum of sgd."""

    # -- Precision --
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32

    # -- Loss scale (fp16) --
    loss_scale: float | None = loss_scale_knob(above=0.0)
    """fp16: a constant loss scale; by default a dynamic one.

    bf16 has none by default."""
    initial_loss_scale: float = loss_scale_knob(2.0**32, above=0.0)
    """fp16: where the dynamic loss scale begins."""
    min_loss_scale: float = loss_scale_knob(1.0, above=0.0)
    """fp16: where it stops falling."""
    loss_scale_window: int = loss_scale_knob(1000, minimum=1)
    """fp16: good steps before it doubles."""
    hysteresis: int = loss_scale_knob(2, minimum=1)
    """fp16: the bad step at which it halves, and at each after.

    Counted since the last doubling."""

    # -- Distributed optimizer --
    use_distributed_optimizer: bool = gradient_knob(False)
    """Shard the optimizer's state over data-parallel ranks (ZeRO-1).

    Each rank keeps and updates one shard (Rajbhandari et al. 2020)."""
    overlap_param_gather: bool = gradient_knob(False)
    """ZeRO-1: gather updated parameters while the next forward goes on.

    Must match the DDP's."""

    # -- Gradients --
    clip_grad: float = knob(1.0, minimum=0.0)
    """Largest global gradient norm; 0 for no clipping."""
    log_num_zeros_in_grad: bool = gradient_knob(False)
    """Count and log the zeros of the gradient."""

    def __post_init__(self) -> None:
        """Raises ValueError, with the numbers and the remedy, for what cannot be."""
        knobs.check_values(self)
        check_config(self)
