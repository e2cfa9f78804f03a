"""From gradients to new parameters: unscale, agree on overflow, clip, update, copy back.

Counterpart: `megatron.core.optimizer.optimizer`, under the same names.

The class below does a step; what differs between its kinds is where the *main* parameters are, the
ones the update rule works on:

    kind                                main parameter
    FP32Optimizer                       the model's own
    Float16OptimizerWithFloat16Params   an fp32 copy of each bf16 or fp16 one
    DistributedOptimizer                this rank's shard, an fp32 copy of it if it is bf16 or fp16
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp, all_reduce
from minimegatron.core.distributed.data_parallel_base import get_main_grad
from minimegatron.core.optimizer import optimizer_checks
from minimegatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from minimegatron.core.optimizer.grad_scaler import MegatronGradScaler
from minimegatron.core.optimizer.optimizer_config import OptimizerConfig
from minimegatron.core.optimizer.optimizer_state import CountsZeros, OptimizerState
from minimegatron.core.optimizer.param_groups import NamedParamGroup, make_torch_optimizer
from minimegatron.core.parameter import KINDS, ParameterKind, kind_of, tensor_group
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.sharding import param_is_not_tensor_parallel_duplicate
from minimegatron.core.tracing import traced
from minimegatron.core.utils import HALF_DTYPES, get_device
from minimegatron.exports import all_of

__getattr__, __dir__ = all_of(__name__, "minimegatron.core.optimizer.chained_optimizer")


@dataclass(eq=False)
class ParamShard:
    """The part of one of this rank's parameters that this rank updates; mostly all of it.

    It covers the elements [start, end) of the flattened parameter. `main_param` has that many
    elements: shaped like the parameter where it covers all of it, else flat.
    """

    name: str
    """"model{chunk}.{name within the chunk}", as in "model0.decoder.final_layernorm.weight"."""
    model_param: torch.nn.Parameter
    main_param: torch.Tensor
    start: int
    end: int

    def _part_of(self, whole: torch.Tensor) -> torch.Tensor:
        if self.end - self.start == whole.numel():
            return whole
        return whole.view(-1)[self.start : self.end]

    def model_data(self) -> torch.Tensor:
        """This part of the model's parameter, a view."""
        return self._part_of(self.model_param.data)

    def model_grad(self) -> torch.Tensor | None:
        """This part of the parameter's accumulated gradient, a view."""
        grad = get_main_grad(self.model_param)
        return None if grad is None else self._part_of(grad)

    @property
    def is_copy(self) -> bool:
        """False where the main parameter shares the model's memory."""
        return self.main_param.data_ptr() != self.model_data().data_ptr()


class MegatronOptimizer(OptimizerState, CountsZeros, ABC):
    """A training step's last part, on every rank at once.

    Args:
        param_groups: this rank's parameters, by name.
        config: see `OptimizerConfig`.
        grad_scaler: None for gradients that come unscaled.
        pg_collection: needs `tp` and `mp`, for the distributed optimizer `dp_cp` too; and the like
            for other kinds of parameters (see `core.parameter`).
    """

    def __init__(
        self,
        param_groups: Sequence[NamedParamGroup],
        config: OptimizerConfig,
        grad_scaler: MegatronGradScaler | None,
        pg_collection: ProcessGroupCollection,
    ):
        self.config = config
        self.grad_scaler = grad_scaler
        self.pg_collection = pg_collection
        self.tp_group = pg_collection.tp  # as in Megatron; of dense parameters
        # By the groups that complete a sum over a kind's gradients, in turn. Every rank must have
        # the same, also one without any such parameter: so it follows from the groups alone.
        self.kinds_of_groups: dict[tuple[dist.ProcessGroup, ...], list[ParameterKind]] = {}
        for kind in KINDS.values():
            if hasattr(pg_collection, kind.model):
                self.kinds_of_groups.setdefault(self._grad_stats_groups(kind), []).append(kind)
        self.named_params = [pair for group in param_groups for pair in group.params]
        self.model_params = [param for _, param in self.named_params]
        self.shards: list[ParamShard] = []
        torch_groups = []
        for group in param_groups:
            shards = [shard for pair in group.params if (shard := self._make_shard(*pair))]
            self.shards += shards
            params = [shard.main_param for shard in shards]
            # No group has a learning rate of its own: a log may show that of any.
            torch_groups.append(
                {"params": params, "wd_mult": group.wd_mult, "default_config": True}
            )
        self.optimizer = make_torch_optimizer(torch_groups, config)
        self._is_unscaled = False  # the main gradients: from `prepare_grads` until they are used
        self.grad_checks: list[Callable[[], None]] = []
        """Called with each norm, for which the program has waited: on a GPU, the right moment to look
        at what was noted of the gradients. What they raise comes before the update."""
        self.first_checks: list[Callable[[], None]] = []
        """Called once, by all ranks: by the first step, unless somebody has done so before."""

    def _grad_stats_groups(self, kind: ParameterKind) -> tuple[dist.ProcessGroup, ...]:
        """Sums over these groups, one after the other, count every gradient of the kind once."""
        return (getattr(self.pg_collection, kind.model),)

    @property
    def grad_stats_parallel_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of all kinds: together they reach every rank that has another gradient."""
        return tuple(dict.fromkeys(group for groups in self.kinds_of_groups for group in groups))

    @abstractmethod
    def _make_shard(self, name: str, param: torch.nn.Parameter) -> ParamShard | None:
        """The part of `param` this rank updates, with its main parameter; None for no part."""

    # -- What training asks for --

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Torch's parameter groups: `lr`, `weight_decay`, `wd_mult` and the rule's own."""
        return self.optimizer.param_groups

    def get_parameters(self) -> list[torch.Tensor]:
        """The main parameters."""
        return [shard.main_param for shard in self.shards]

    def get_loss_scale(self) -> torch.Tensor:
        """What the loss is multiplied by before backward, a scalar; 1 without a loss scale."""
        return torch.tensor(1.0) if self.grad_scaler is None else self.grad_scaler.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale; the schedules' `config.grad_scale_func`."""
        return self.get_loss_scale() * loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets `param.grad` everywhere. The buffers are `DDP.zero_grad_buffer`'s to clear."""
        self._is_unscaled = False
        for param in [*self.model_params, *self.get_parameters()]:
            param.grad = None if set_to_none or param.grad is None else param.grad.zero_()

    # -- One step --

    @traced("optimizer")
    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """One attempted update: (update_successful, grad_norm, num_zeros_in_grad).

        The norm is that of the whole model's unclipped gradient, the same on every rank. Where any
        rank's gradients overflowed, no rank updates, and the result is (False, None, None).
        `num_zeros_in_grad` is None unless `config.log_num_zeros_in_grad`.
        """
        self.check_first()
        found_inf = self.prepare_grads()
        if found_inf:
            self._release_main_grads()
            return False, None, None
        grad_norm = self.clip_grad_norm(self.config.clip_grad)
        for check in self.grad_checks:
            check()
        num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        update_successful = self.step_with_ready_grads()
        self._release_main_grads()
        return update_successful, grad_norm, num_zeros

    def check_first(self) -> None:
        """Does once what is to be checked before the first step; every rank must call it."""
        for check in self.first_checks:
            check()
        self.first_checks.clear()

    def prepare_grads(self) -> bool:
        """Puts unscaled gradients where the update rule reads them; True if a rank found Inf or NaN.

        The loss scale counts the step, and may change. Once per step, which calls it. Raises
        RuntimeError for gradients that are unscaled already, and ValueError for a frozen parameter
        that has a gradient.
        """
        if self._is_unscaled:
            optimizer_checks.refuse_second_preparation()
        frozen = [
            name
            for name, param in self.named_params
            if not param.requires_grad and getattr(param, "main_grad", param.grad) is not None
        ]
        if frozen:
            optimizer_checks.refuse_grads_of_frozen(frozen)
        self._copy_model_grads_to_main_grads()
        if self.grad_scaler is None:
            return False
        found_inf = self._unscale_main_grads_and_check_for_nan()
        self._is_unscaled = not found_inf
        self.grad_scaler.update(found_inf)
        return found_inf

    @traced("optimizer-copy-to-main-grad")
    def _copy_model_grads_to_main_grads(self) -> None:
        for shard in self.shards:
            grad = shard.model_grad()
            # No copy where the dtype is right already: then clipping writes into the buffer.
            shard.main_param.grad = None if grad is None else grad.to(shard.main_param.dtype)

    @traced("optimizer-unscale-and-check-inf")
    def _unscale_main_grads_and_check_for_nan(self) -> bool:
        """Divides by the loss scale; True, on all ranks, if a gradient of any is Inf or NaN.

        All must agree: a rank that skipped the step alone would have other weights from then on. Copies
        of a model have equal gradients. So the ranks of one model ask each other; where each copy has
        only its shard of them, all ranks do.
        """
        found_inf = torch.zeros((), device=get_device())
        inv_scale = self.grad_scaler.inv_scale.to(found_inf.device, non_blocking=True)
        grads = [param.grad for param in self.get_parameters() if param.grad is not None]
        if grads:
            # One pass over all of them: multiplies, and notes in `found_inf` what is not finite.
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        for group in self.grad_stats_parallel_groups:
            all_reduce(found_inf, group, ReduceOp.MAX)
        return bool(found_inf.item())

    @traced("optimizer-inner-step")
    def step_with_ready_grads(self) -> bool:
        """The update rule on the main parameters, then their way into the model."""
        self._require_main_grads()
        self._is_unscaled = False
        self.optimizer.step()
        self._copy_main_params_to_model_params()
        return True

    def _release_main_grads(self) -> None:
        """Frees copies of gradients, and undoes aliases of `main_grad`.

        An alias left in `param.grad` would make the next backward accumulate into the buffer, and
        the hook after it add the buffer to itself.
        """
        self._is_unscaled = False
        for shard in self.shards:
            # Else `grad` is where the model's gradient lives.
            if shard.main_param is not shard.model_param or hasattr(shard.model_param, "main_grad"):
                shard.main_param.grad = None

    # -- Norm and clipping --

    def _is_counted(self, shard: ParamShard) -> bool:
        """True for exactly one copy of this parameter, data-parallel ones aside.

        A word embedding is counted on the first stage (another copy may be in another chunk of the
        same rank), a parameter that the ranks of its tensor group have whole on the first of them.
        """
        param = shard.model_param
        if getattr(param, "shared", False):
            return False
        group = tensor_group(param, self.pg_collection)
        return param_is_not_tensor_parallel_duplicate(param, group)

    def _counted_params(self, kinds: Sequence[ParameterKind]) -> list[torch.Tensor]:
        """Main parameters of these kinds that have a gradient which is counted here."""
        self._require_main_grads()
        return [
            shard.main_param
            for shard in self.shards
            if shard.main_param.grad is not None
            and kind_of(shard.model_param) in kinds
            and self._is_counted(shard)
        ]

    def _require_main_grads(self) -> None:
        """RuntimeError where the update rule would miss the model's gradients, or see them scaled."""
        waiting = [
            shard.name
            for shard in self.shards
            if shard.main_param.grad is None and shard.model_grad() is not None
        ]
        if waiting or (self.grad_scaler is not None and not self._is_unscaled):
            optimizer_checks.refuse_unprepared_grads(len(waiting), len(self.shards))

    def get_main_grads_for_grad_norm(
        self, kinds: Sequence[ParameterKind] | None = None
    ) -> list[torch.Tensor]:
        """Gradients of this rank that are counted here, each once in the model; None for all kinds."""
        kinds = list(KINDS.values()) if kinds is None else kinds
        return [param.grad for param in self._counted_params(kinds)]

    def get_grad_norm(self) -> float:
        """2-norm of the whole model's gradient; every rank must call it."""
        norms = [
            get_grad_norm_fp32(self.get_main_grads_for_grad_norm(kinds), 2.0, groups)
            for groups, kinds in self.kinds_of_groups.items()
        ]
        return math.hypot(*norms)

    @traced("optimizer-clip-main-grad")
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scales gradients down to norm `clip_grad`, 0 for not at all; returns the norm before."""
        grad_norm = self.get_grad_norm()
        if clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(self.get_parameters(), clip_grad, grad_norm)
        return grad_norm

    # -- Main and model parameters --

    @traced("optimizer-copy-main-to-model-params")
    def _copy_main_params_to_model_params(self) -> None:
        copies = [shard for shard in self.shards if shard.is_copy]
        if copies:
            of_model = [shard.model_data() for shard in copies]
            torch._foreach_copy_(of_model, [shard.main_param for shard in copies])


class FP32Optimizer(MegatronOptimizer):
    """Updates the model's own parameters: float32, or float64 for parity tests."""

    def _make_shard(self, name: str, param: torch.nn.Parameter) -> ParamShard:
        optimizer_checks.check_precision(name, param.dtype)
        return ParamShard(name, param, param, 0, param.numel())


class MixedPrecisionOptimizer(MegatronOptimizer):
    """Half-precision parameters have main copies in fp32; a loss scale is possible."""

    def _main_copy_or_view(self, part: torch.Tensor) -> torch.Tensor:
        """What the update rule works on, for this part of a parameter's memory.

        bf16 has 8 significant binary digits. An update below 1/512 of the weight always rounds to
        nothing, one up to 1/256 may, in every step anew. In the fp32 copy such updates add up.
        """
        return part.float() if part.dtype in HALF_DTYPES else part


class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    """bf16 or fp16 parameters, fp32 main copies, every data-parallel rank updating all of them."""

    def _make_shard(self, name: str, param: torch.nn.Parameter) -> ParamShard:
        main_param = self._main_copy_or_view(param.detach())
        return ParamShard(name, param, main_param, 0, param.numel())
