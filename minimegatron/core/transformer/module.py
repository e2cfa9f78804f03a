"""What every model and layer is: a torch module that knows its config; and its 16-bit wrapper.

Counterpart: `megatron.core.transformer.module`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from minimegatron.core.parameter import tensor_group
from minimegatron.core.parameter_marks import note_marks
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.initial_weights import draw_named_weight
from minimegatron.core.tensor_parallel.sharding import (
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from minimegatron.core.transformer import layer_checks
from minimegatron.core.transformer.module_state import ModuleState, named_global_parameters
from minimegatron.core.transformer.second_subjects import note_built
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.utils import HALF_DTYPES


class MegatronModule(ModuleState):
    """A module that carries its config."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        note_built(config)

    def global_name(self, name: str) -> str:
        """The name in the full model, from this module on, of what this chunk calls `name`.

        `name` has dots. What follows its first dot is a name in the full model already: the part
        before it has been asked. A module that has a part of something longer, or a copy of something,
        overrides this.
        """
        return name

    def initialize_weights(self, pg_collection: ProcessGroupCollection) -> None:
        """Draws every weight by its name in the full model (see `initial_weights`).

        A model calls this once it is built, and whoever has built it on the device "meta", after
        `to_empty`. Parameters without an `init_method` keep what they have. Marks are noted here.
        """
        for name, param in named_global_parameters(self):
            set_defaults_if_not_set_tensor_model_parallel_attributes(param)
            if hasattr(param, "init_method"):
                group = tensor_group(param, pg_collection)
                draw_named_weight(param, name, self.config.init_seed, group.rank(), group.size())
        note_marks(self)


class PartOfModuleList(torch.nn.ModuleList):
    """Some neighbours out of a list of the full model, where the first is number `first`.

    The layers of a chunk; the experts of a rank.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], first: int = 0):
        super().__init__(modules)
        self.first = first

    def global_name(self, name: str) -> str:
        """Here the module "0" is the full model's `first`."""
        index, dot, rest = name.partition(".")
        return f"{self.first + int(index)}{dot}{rest}"


# -- 16-bit models --


def fp32_to_float16(val: Any, float16_convertor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """float32 tensors of nested tuples and lists converted; others (token ids, masks) as they are."""
    if isinstance(val, tuple | list):
        return type(val)(fp32_to_float16(item, float16_convertor) for item in val)
    is_fp32 = isinstance(val, torch.Tensor) and val.dtype == torch.float32
    return float16_convertor(val) if is_fp32 else val


def float16_to_fp32(val: Any) -> Any:
    """fp16 and bf16 tensors of nested tuples and lists to float32; others as they are."""
    if isinstance(val, tuple | list):
        return type(val)(float16_to_fp32(item) for item in val)
    is_half = isinstance(val, torch.Tensor) and val.dtype in HALF_DTYPES
    return val.float() if is_half else val


class Float16Module(MegatronModule):
    """A model chunk in fp16 or bf16, whose callers see float32.

    Conversion happens at the model's ends only: what the first stage is given, and what the last
    returns. Between stages activations stay 16-bit. A module that does not say whether it is an end
    (`pre_process`, `post_process`) is taken for a whole model.

    Raises:
        ValueError: `config` asks for neither fp16 nor bf16.
    """

    def __init__(self, config: TransformerConfig, module: torch.nn.Module):
        super().__init__(config)
        layer_checks.check_is_half(config)
        self.float16_convertor = torch.Tensor.half if config.fp16 else torch.Tensor.bfloat16
        self.module = module.half() if config.fp16 else module.bfloat16()
        self.vp_stage = getattr(module, "vp_stage", None)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """As the chunk's own."""
        self.module.set_input_tensor(input_tensor)

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """The chunk's own outputs; in float32 on the last stage, unless `fp32_output` is off."""
        if getattr(self.module, "pre_process", True):
            inputs = fp32_to_float16(inputs, self.float16_convertor)
        outputs = self.module(*inputs, **kwargs)
        if getattr(self.module, "post_process", True) and fp32_output:
            outputs = float16_to_fp32(outputs)
        return outputs
