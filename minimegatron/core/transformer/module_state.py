"""What a module gives away of itself: names in the full model, its state for a checkpoint, a copy.

Megatron has the state and the copy in `megatron.core.transformer.module`.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch

from minimegatron.core.parameter_marks import restore_marks
from minimegatron.core.process_groups_config import groups_of
from minimegatron.core.transformer import sharded_state

# -- Names of parameters in the full model: they do not depend on the layout --


def global_parameter_name(model: torch.nn.Module, name: str) -> str:
    """The name in the full model of what the chunk `model` calls `name`.

    Every module on the way from the parameter up to `model` that has a `global_name` is asked for
    it. `decoder.layers.0.` of a later chunk becomes `decoder.layers.{its place in the model}.`; the
    last stage's copy of a tied embedding gets the embedding's own name.

    Args:
        model: a model chunk, wrapped (`Float16Module`, DDP) or not.
        name: from `model.named_parameters()`; the prefixes of wrappers are dropped.
    """
    while hasattr(model, "module"):
        model = model.module
        name = name.removeprefix("module.")
    child, dot, rest = name.partition(".")
    if dot:
        name = f"{child}.{global_parameter_name(getattr(model, child), rest)}"
    return model.global_name(name) if hasattr(model, "global_name") else name


def named_global_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """`model.named_parameters()` under their names in the full model, with all their marks."""
    restore_marks(model)
    for name, param in model.named_parameters():
        yield global_parameter_name(model, name), param


# -- State, and a copy --


class ModuleState(torch.nn.Module):
    """A base of `MegatronModule`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModuleState":
        """A module with weights of its own. It shares process groups, and what its config calls.

        Its configs are copies, so other functions may be put into them.
        """
        for module in self.modules():
            if (config := vars(module).get("config")) is not None and id(config) not in memo:
                memo[id(config)] = copy.copy(config)
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        """Every weight and saved buffer by its name here, as `dist_checkpointing` takes it.

        In the checkpoint it has its name in the full model, after `prefix`; there any layout finds its
        piece. What `load` returns, `load_state_dict` takes.

        With `overlap_param_gather`, weights are incomplete until the next forward, and this raises
        RuntimeError: call the wrapper's `start_param_sync(force_sync=True)` first.
        """
        self.state_dict()  # for the wrapper's hook, which raises
        restore_marks(self)
        groups = groups_of(self)
        return {
            prefix + name: sharded_state.sharded_tensor(
                prefix + global_parameter_name(self, name), one, groups
            )
            for name, one in (*self.named_parameters(), *named_saved_buffers(self))
        }


def named_saved_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that belong to the model's state, by their names here."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), buffer
