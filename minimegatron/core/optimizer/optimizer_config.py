"""The knobs of the optimizer.

Read by: `get_megatron_optimizer` and the optimizers it makes. Calls nothing. Counterpart:
`megatron.core.optimizer.OptimizerConfig`, under the same field names.
"""

from dataclasses import dataclass

import torch

OPTIMIZERS = ("adam", "sgd")


@dataclass(frozen=True)
class OptimizerConfig:
    """Update rule, precision, loss scale, clipping."""

    # -- Update rule --
    optimizer: str = "adam"
    """"adam" or "sgd"."""
    lr: float | None = None
    """Learning rate; `OptimizerParamScheduler` overwrites it in the parameter groups."""
    min_lr: float | None = None
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    decoupled_weight_decay: bool = True
    """AdamW (Loshchilov & Hutter 2019); False adds the decay to the gradient."""
    sgd_momentum: float = 0.9

    # -- Precision --
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32

    # -- Loss scale (fp16) --
    loss_scale: float | None = None
    """A constant loss scale; None for a dynamic one with fp16, and for none with bf16."""
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    """Steps without overflow before the scale is doubled."""
    hysteresis: int = 2
    """Overflows since the last doubling before the scale is halved."""

    # -- Distributed optimizer --
    use_distributed_optimizer: bool = False
    """ZeRO-1: each data-parallel rank keeps and updates one shard (Rajbhandari et al. 2020)."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward; must match the DDP's."""

    # -- Gradients --
    clip_grad: float = 1.0
    """Largest allowed norm of the whole model's gradient; 0 for no clipping."""
    log_num_zeros_in_grad: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError, with the numbers and the remedy, for what cannot be."""
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer!r} is unknown; use one of {OPTIMIZERS}")
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both on; choose one")
        for name in ("weight_decay", "adam_eps", "clip_grad"):
            if getattr(self, name) < 0.0:
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more")
        if self.lr is not None and self.lr < 0.0:
            raise ValueError(f"lr is {self.lr}; give 0 or more")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a value in [0, 1)")
        if self.loss_scale is not None and self.loss_scale <= 0.0:
            raise ValueError(f"loss_scale is {self.loss_scale}; give a positive number")
        if self.loss_scale is not None and not (self.fp16 or self.bf16):
            raise ValueError(
                f"loss_scale {self.loss_scale} is for fp16 or bf16; choose one or drop it"
            )
        if not 0.0 < self.min_loss_scale <= self.initial_loss_scale:
            raise ValueError(
                f"need 0 < min_loss_scale <= initial_loss_scale, but they are "
                f"{self.min_loss_scale}, {self.initial_loss_scale}"
            )
        for name in ("loss_scale_window", "hysteresis"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ValueError("overlap_param_gather needs use_distributed_optimizer; turn it on")
