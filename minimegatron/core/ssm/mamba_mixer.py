"""A Mamba-2 mixer: what stands in place of attention, cut over tensor-parallel ranks by heads.

Counterpart: `megatron.core.ssm.mamba_mixer`.

    x [s, b, h] -> in_proj -> z, x, B, C, dt -> convolution of x, B, C -> scan -> norm -> out_proj

With e = n P features in n heads, in G groups of heads with a state of N columns: z and x have e
features, B and C have G N, dt has n (Dao and Gu 2024, https://arxiv.org/abs/2405.21060). Each of the
five is cut by itself: a rank gets n/t heads with all that belongs to them, and the scan exchanges
nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core.parameter_marks import note_marks
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.ssm.mamba_config import check_mamba, sizes_of_mamba
from minimegatron.core.ssm.ops.causal_conv1d import causal_conv1d
from minimegatron.core.ssm.ops.ssd_combined import mamba_chunk_scan_combined, mamba_recurrence
from minimegatron.core.tensor_parallel.initial_weights import new_weight
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.spec_utils import ModuleSpec, build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig

LONGEST_RECURRENCE = 32
"""Tokens; a longer sequence is scanned in chunks."""


@dataclass
class MambaMixerSubmodules:
    """The specs of the projections into the mixer and out of it."""

    in_proj: ModuleSpec | type | None = None
    out_proj: ModuleSpec | type | None = None


# -- Initial values, drawn for all heads at once, as any weight is --


def draw_a_log(weight: torch.Tensor) -> torch.Tensor:
    """log A', with A' uniform from 1 to 16: A = -exp(A_log) is the decay per unit of time."""
    return weight.uniform_(1.0, 16.0).log_()


def draw_dt_bias(weight: torch.Tensor) -> torch.Tensor:
    """softplus(dt_bias) is the first time step: its logarithm is uniform, from 1e-3 to 1e-1."""
    step = weight.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
    return step.add_(torch.log(-torch.expm1(-step)))  # the inverse of softplus


def draw_conv(width: int, weight: torch.Tensor) -> torch.Tensor:
    """As `torch.nn.Conv1d` with one input channel per output."""
    return weight.uniform_(-(width**-0.5), width**-0.5)


class CausalConv1d(torch.nn.Module):
    """The weights of `causal_conv1d`, for the channels of this rank."""

    def __init__(self, sizes: list[int], width: int, dtype: torch.dtype, tp_group: Any):
        super().__init__()
        draw = partial(draw_conv, width)
        options = {"partition_dim": 0, "tp_group": tp_group, "partition_sizes": sizes}
        self.weight = new_weight((sum(sizes), 1, width), dtype, draw, **options)
        self.bias = new_weight((sum(sizes),), dtype, draw, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, channels/t] -> the same, then SiLU."""
        return F.silu(causal_conv1d(x, self.weight, self.bias))


class RMSNormGated(torch.nn.Module):
    """RMSNorm of y SiLU(z), of each group's features by themselves; a rank has whole groups.

    The gate comes before the norm. Computed in float32, at least.
    """

    def __init__(self, size: int, num_groups: int, eps: float, dtype: torch.dtype, tp_group: Any):
        super().__init__()
        self.num_groups, self.eps = num_groups, eps
        self.weight = new_weight((size,), dtype, torch.nn.init.ones_, 0, tp_group)

    def forward(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """[s, b, e/t], both -> the same, in the weight's dtype."""
        dtype = torch.promote_types(y.dtype, torch.float32)
        gated = y.to(dtype) * F.silu(z.to(dtype))
        groups = gated.unflatten(-1, (self.num_groups, -1))
        normed = F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2)
        return (normed * self.weight.to(dtype)).to(self.weight.dtype)


class MambaMixer(MegatronModule):
    """A Mamba-2 mixer. A rank has n/t heads and G/t groups.

    `A_log`, `D` and `dt_bias`, one number per head, stay float32 in a 16-bit model: the decay
    exp(-dt exp(A_log)) is applied at every token, so that errors of `A_log` add up.

    Args:
        submodules: the two projections.
        d_model: h.
        d_conv: tokens that the convolution sees.
        chunk_size: tokens per chunk of the scan; None for the recurrence, token after token, which is
            for sequences of at most 32.
        layer_number: within the whole model, from 1.
        pg_collection: tp is used; None for `parallel_state`'s.

    Raises:
        ValueError: sizes that do not fit, or that t cannot cut; see `check_mamba`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        d_conv: int = 4,
        *,
        chunk_size: int | None = 128,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config)
        check_mamba(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp"])
        group = pg_collection.tp
        self.layer_number = layer_number
        self.chunk_size = chunk_size
        n, P, G, N = sizes_of_mamba(config)
        whole = [n * P, n * P, G * N, G * N, n]
        t = group.size()
        # What this rank has of z, x, B, C and dt. The sections of a stack are cut one by one: a rank
        # with the first rows of the whole stack would have z of all heads, and x of none.
        self.sections = [size // t for size in whole]
        self.head_dim, self.num_groups, self.state_dim = P, G // t, N
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            sum(whole),
            config=config,
            init_method=config.init_method,
            bias=False,
            partition_sizes=self.sections,
            tp_group=group,
        )
        self.conv1d = CausalConv1d(self.sections[1:4], d_conv, config.params_dtype, group)
        dtype = torch.promote_types(config.params_dtype, torch.float32)
        options = {"partition_dim": 0, "tp_group": group}
        self.A_log = new_weight((n // t,), dtype, draw_a_log, **options)
        self.D = new_weight((n // t,), dtype, torch.nn.init.ones_, **options)
        self.dt_bias = new_weight((n // t,), dtype, draw_dt_bias, **options)
        self.norm = RMSNormGated(
            n * P // t, G // t, config.layernorm_epsilon, config.params_dtype, group
        )
        self.out_proj = build_module(
            submodules.out_proj,
            n * P,
            d_model,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=group,
        )
        note_marks(self)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[s, b, h] -> ([s, b, h], no bias); [s/t, b, h] each with sequence parallelism.

        `in_proj` gathers the sequence then: the scan needs all of it.
        """
        projected, _ = self.in_proj(hidden_states)
        z, xBC, dt = projected.split(
            [self.sections[0], sum(self.sections[1:4]), self.sections[4]], -1
        )
        x, B, C = self.conv1d(xBC).split(self.sections[1:4], dim=-1)
        y = self.scan(x, B, C, dt)
        return self.out_proj(self.norm(y, z))

    def scan(
        self, x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, dt: torch.Tensor
    ) -> torch.Tensor:
        """The scan, and D x; x [s, b, e/t], B and C [s, b, G N/t], dt [s, b, n/t] -> [s, b, e/t].

        Computed in float32, at least.
        """
        wide = self.A_log.dtype
        x, B, C, dt = (each.to(wide).transpose(0, 1) for each in (x, B, C, dt))
        x = x.unflatten(-1, (-1, self.head_dim))
        B, C = (each.unflatten(-1, (self.num_groups, -1)) for each in (B, C))
        dt = F.softplus(dt + self.dt_bias)
        y = self._scan_method(x.size(1))(x, dt, -torch.exp(self.A_log), B, C)
        y = y + self.D[:, None] * x
        return y.flatten(-2).transpose(0, 1)

    def _scan_method(self, length: int) -> Callable[..., torch.Tensor]:
        if self.chunk_size is not None:
            return partial(mamba_chunk_scan_combined, chunk_size=self.chunk_size)
        if length > LONGEST_RECURRENCE:
            raise ValueError(
                f"MambaMixer with chunk_size None goes token by token, but there are {length} tokens; "
                f"give a chunk_size, or at most {LONGEST_RECURRENCE} tokens"
            )
        return mamba_recurrence

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves and casts all parts of this module; its own three parameters are moved, never cast.

        `Float16Module` casts a whole model in this way.
        """
        for child in self.children() if recurse else ():
            child._apply(fn)
        return super()._apply(partial(_moved_not_cast, fn), recurse=False)

    def backward_dw(self) -> None:
        """With `delay_wgrad_compute`: weight gradients of the oldest microbatch that is owed."""
        self.out_proj.backward_dw()
        self.in_proj.backward_dw()


def _moved_not_cast(
    fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor
) -> torch.Tensor:
    result = fn(tensor)
    return result if result.dtype == tensor.dtype else tensor.to(result.device)
