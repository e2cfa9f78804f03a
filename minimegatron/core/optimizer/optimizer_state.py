"""What an optimizer and a loss scale keep, in memory and in a checkpoint; and zeros of the gradient.

Counterpart: `megatron.core.optimizer.clip_grads`; the rest Megatron has in the classes of
`megatron.core.optimizer.optimizer` and `megatron.core.optimizer.grad_scaler`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp
from minimegatron.core.optimizer.clip_grads import _reduce_over
from minimegatron.core.optimizer.optimizer_config import OptimizerConfig
from minimegatron.core.parameter import ParameterKind
from minimegatron.core.tracing import traced
from minimegatron.core.utils import device_is_asynchronous, get_device

__all__ = ["count_zeros_fp32"]


class OptimizerState:
    """The part of `MegatronOptimizer` that looks at, saves and loads what the update rule keeps."""

    config: OptimizerConfig
    optimizer: torch.optim.Optimizer
    grad_scaler: "GradScalerState | None"
    shards: list[Any]
    """Each a `ParamShard`."""

    @property
    def chained_optimizers(self) -> "list[OptimizerState]":
        """This one alone. Megatron has one for dense parameters and one for the experts'."""
        return [self]

    @property
    def is_stub_optimizer(self) -> bool:
        """Whether this rank has nothing to train."""
        return not self.shards

    @property
    def state(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """What the update rule keeps of each main parameter, such as its moments; torch's own."""
        return self.optimizer.state

    # -- Of each parameter, and in a checkpoint --

    def initialize_state(self) -> None:
        """Gives every parameter the moments it would have before its first step: zeros."""
        if self.config.optimizer == "adam":
            moments = ["exp_avg", "exp_avg_sq"]
        else:
            moments = ["momentum_buffer"] if self.config.sgd_momentum > 0.0 else []
        for main_param in self.get_parameters():
            state = self.optimizer.state[main_param]
            if state or not moments:
                continue
            for moment in moments:
                state[moment] = torch.zeros_like(main_param)
            if self.config.optimizer == "adam":
                # The fused kernel reads it where the parameter is; the others count on the CPU.
                place = main_param.device if device_is_asynchronous() else "cpu"
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device=place)

    def parameter_state(self, shard: Any) -> dict[str, torch.Tensor]:
        """Everything kept per element, by name: "param" (the main parameter), "exp_avg", ...

        These are the tensors themselves: writing into them changes the optimizer. A checkpoint
        that is to be cut differently later takes them with `shard.name`, `start` and `end`.
        """
        moments = self.optimizer.state[shard.main_param]
        tensors = {k: v for k, v in moments.items() if k != "step" and v is not None}
        return {"param": shard.main_param, **tensors}

    def get_step(self) -> int:
        """Updates made so far, as Adam's bias correction counts them."""
        return max(self.get_steps().values(), default=0)

    def get_steps(self) -> dict[str, int]:
        """The same of each parameter, by `shard.name`: fewer for one that was without a gradient."""
        states = {shard.name: self.optimizer.state[shard.main_param] for shard in self.shards}
        return {name: int(state["step"]) for name, state in states.items() if "step" in state}

    def set_step(self, step: int, steps: Mapping[str, int] | None = None) -> None:
        """Overwrites what `get_step` returns; `steps` has those of single parameters, by `shard.name`.

        After `initialize_state`.
        """
        for shard in self.shards:
            state = self.optimizer.state[shard.main_param]
            if "step" in state:
                state["step"].fill_((steps or {}).get(shard.name, step))

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings and tensors only, for this rank's part at this layout.

        `state[name]` holds `start`, `end` and the tensors of `parameter_state`.
        """
        self.initialize_state()
        result: dict[str, Any] = {
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.param_groups
            ],
            "step": self.get_step(),
            "steps": self.get_steps(),
            "state": {
                shard.name: {"start": shard.start, "end": shard.end, **self.parameter_state(shard)}
                for shard in self.shards
            },
        }
        if self.grad_scaler is not None:
            result["grad_scaler"] = self.grad_scaler.state_dict()
        return result

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Makes the main copies follow the model, whose weights somebody else has set.

        To be called after loading weights without optimizer state: otherwise the first step would
        copy the old main parameters back over them.
        """
        for shard in self.shards:
            if shard.is_copy:
                shard.main_param.copy_(shard.model_data())

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave on the same rank of the same layout.

        Raises ValueError, before anything is changed, where a parameter, a range or a tensor is
        missing or too many: moments that are silently dropped cost a run.
        """
        self.initialize_state()
        self._check_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        for shard in self.shards:
            saved = state_dict["state"][shard.name]
            for key, tensor in self.parameter_state(shard).items():
                tensor.copy_(saved[key])
        self.set_step(state_dict["step"], state_dict["steps"])
        if self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    def _check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        here = {
            shard.name: {(shard.start, shard.end), *self.parameter_state(shard)}
            for shard in self.shards
        }
        there = {
            name: {(saved["start"], saved["end"]), *(saved.keys() - {"start", "end"})}
            for name, saved in state_dict["state"].items()
        }
        wrong = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"the optimizer state does not fit for {len(wrong)} of {len(here)} parameters; "
                f"{name} has {here.get(name, 'no place')} here but {there.get(name, 'nothing')} in "
                "the checkpoint; load at the same layout, or through a re-sharding checkpoint"
            )
        if (self.grad_scaler is not None) != ("grad_scaler" in state_dict):
            raise ValueError(
                "the loss scale's state is in only one of optimizer and checkpoint; "
                "use the same fp16 / bf16 / loss_scale settings"
            )


# -- How many elements of the gradient are zero: no step asks unless the configuration says so --


class CountsZeros:
    """The part of `MegatronOptimizer` that counts them."""

    kinds_of_groups: dict[tuple[dist.ProcessGroup, ...], list[ParameterKind]]

    @traced("optimizer-count-zeros")
    def count_zeros(self) -> int:
        """Zero elements in the whole model's gradient; every rank must call it."""
        return sum(
            count_zeros_fp32(self._counted_params(kinds), groups)
            for groups, kinds in self.kinds_of_groups.items()
        )


@torch.no_grad()
def count_zeros_fp32(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    grad_stats_parallel_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
) -> int:
    """How many elements of all `.grad` of all ranks of the group are zero; groups as for the norm."""
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    total = torch.zeros((), dtype=torch.float64, device=get_device())
    for param in parameters:
        if param.grad is not None:
            total += param.grad.numel() - torch.count_nonzero(param.grad)
    return int(_reduce_over(total, grad_stats_parallel_group, ReduceOp.SUM))


# -- What a loss scale keeps from step to step --


class GradScalerState(ABC):
    """What `MegatronGradScaler` leaves to each kind of scale."""

    @abstractmethod
    def update(self, found_inf: bool) -> None:
        """Called after every attempted step, on all ranks alike: whether a gradient overflowed."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same scales."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave."""


class UnchangedScale(GradScalerState):
    """Keeps nothing: the scale is always that of the configuration."""

    def update(self, found_inf: bool) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember: the scale comes from the configuration."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take over."""


class CountedScale(GradScalerState):
    """Keeps the scale and both counts of `DynamicGradScaler`."""

    _scale: float
    _growth_tracker: int
    _hysteresis_tracker: int

    def state_dict(self) -> dict[str, Any]:
        """The scale and both counts."""
        return {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the scale and both counts."""
        self._scale = float(state_dict["scale"])
        self._growth_tracker = int(state_dict["growth_tracker"])
        self._hysteresis_tracker = int(state_dict["hysteresis_tracker"])
