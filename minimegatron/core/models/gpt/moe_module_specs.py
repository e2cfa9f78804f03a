"""What a layer of experts is made of.

Counterpart: `megatron.core.models.gpt.moe_module_specs`.
"""

from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from minimegatron.core.transformer.mlp import MLPSubmodules
from minimegatron.core.transformer.moe.experts import SequentialMLP
from minimegatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from minimegatron.core.transformer.moe.shared_experts import SharedExpertMLP
from minimegatron.core.transformer.spec_utils import ModuleSpec


def get_moe_module_spec() -> ModuleSpec:
    """Experts and a shared one, of the same two projections. How many there are, the config says."""
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=SequentialMLP, submodules=linears),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears),
        ),
    )
