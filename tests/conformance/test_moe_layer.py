"""Against megatron-core: a layer of experts gives the same output and the same gradients.

One rank and two. Both packages get the same weights, input and groups. What 0.16.1 is known to do
wrong stands beside ours, at the end.
"""

import contextlib
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.core import parallel_state
from minimegatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from minimegatron.core.transformer.spec_utils import build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.conformance.megatron import (
    cuda_calls_on_cpu,
    experts_on_cpu,
    megatron_module,
    wide,
)
from tests.figures import figure
from tests.ranks import run_ranks

THEIRS = {
    name: megatron_module(module)
    for name, module in {
        "state": "parallel_state",
        "specs": "models.gpt.moe_module_specs",
        "layer": "transformer.moe.moe_layer",
        "utils": "transformer.moe.moe_utils",
        "config": "transformer.transformer_config",
    }.items()
}
pytestmark = pytest.mark.filterwarnings("ignore")

SEQUENCE, BATCH, HIDDEN, EXPERTS, SCALE = 6, 2, 8, 4, 0.5
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Relative, of the largest value of each tensor."""

SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
SHARED = {"moe_shared_expert_intermediate_size": 6, "moe_shared_expert_gate": True, **SWIGLU}
SIGMOID = {"moe_router_score_function": "sigmoid"}
LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.3],
    "moe_z_loss_coeff": 0.1,
}
CASES: dict[str, dict[str, Any]] = {
    "two of four": {},
    "SwiGLU, one by the softmax of all": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        **SWIGLU,
    },
    "on the input": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_apply_probs_on_input": True,
        **SWIGLU,
    },
    "sigmoid, three of four, scaled": {
        "moe_router_topk": 3,
        "moe_router_topk_scaling_factor": 2.5,
        **SIGMOID,
    },
    "sigmoid with a bias, groups": {
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        **SIGMOID,
    },
    "a shared expert with a gate, losses": {**SHARED, **LOSSES},
    "sigmoid, losses": {**SIGMOID, **LOSSES},
    "room for few": {"moe_expert_capacity_factor": 0.6, **SWIGLU},
    "room for as many": {
        "moe_expert_capacity_factor": 0.8,
        "moe_pad_expert_input_to_capacity": True,
        **SWIGLU,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
}
LAYOUTS = {
    1: [{}],
    2: [
        {"expert_model_parallel_size": 2},
        {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    ],
}
DISPATCHERS = ("alltoall", "allgather")


def is_possible(layout: dict[str, int], case: str, dispatcher: str) -> bool:
    """Over gloo theirs cannot gather unequal numbers of tokens from the ranks that share an expert."""
    is_even = "moe_pad_expert_input_to_capacity" in CASES[case]
    shares = layout.get("expert_tensor_parallel_size", 1) > 1
    return dispatcher == "allgather" or is_even or not shares


# -- The same layer in both packages --


def options_of(case: str, layout: dict[str, int], dispatcher: str) -> dict[str, Any]:
    """Biases only with e > 1: else theirs adds them in place to a view, which torch refuses."""
    without = {"add_bias_linear": layout.get("expert_model_parallel_size", 1) > 1}
    return {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "ffn_hidden_size": 12,
        "moe_ffn_hidden_size": 10,
        "num_moe_experts": EXPERTS,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": dispatcher,
        "sequence_parallel": layout.get("tensor_model_parallel_size", 1) > 1,
        **layout,
        **without,
        **CASES.get(case, {}),
    }


def ours(dtype: torch.dtype, **options: Any) -> torch.nn.Module:
    config = TransformerConfig(params_dtype=dtype, init_method_std=0.5, **options)
    pg = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(5)
    layer = build_module(get_moe_module_spec(), config=config, pg_collection=pg)
    layer.set_layer_number(1)
    generator = torch.Generator().manual_seed(11 + dist.get_rank())
    with torch.no_grad():
        for name, param in layer.named_parameters():
            if name.endswith("bias"):
                param.copy_(torch.randn(param.shape, generator=generator, dtype=dtype))
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(torch.linspace(-0.3, 0.3, EXPERTS).flip(0))
    return layer


def theirs(like: torch.nn.Module, dtype: torch.dtype, **options: Any) -> torch.nn.Module:
    """With our weights. Their router has a bias if the linears have: it starts and stays at zero."""
    config = THEIRS["config"].TransformerConfig(
        params_dtype=dtype,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        **options,
    )
    spec = THEIRS["specs"].get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    layer = THEIRS["layer"].MoELayer(config, spec.submodules, layer_number=1).to(dtype)
    weights = {name: value for name, value in like.state_dict().items() if value is not None}
    layer.load_state_dict({**layer.state_dict(), **weights})
    if layer.router.bias is not None:
        layer.router.bias.detach().zero_()
    return layer


@contextlib.contextmanager
def their_world(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(cuda_calls_on_cpu())
        stack.enter_context(experts_on_cpu())
        if dtype == torch.float64:
            stack.enter_context(wide())
        yield


def initialize(layout: dict[str, int]) -> None:
    for state in (parallel_state, THEIRS["state"]):
        state.destroy_model_parallel()
        with their_world():
            state.initialize_model_parallel(**layout)


def input_of(layout: dict[str, int], dtype: torch.dtype) -> torch.Tensor:
    """This rank's part of a sequence, or a sequence of its own."""
    t = layout.get("tensor_model_parallel_size", 1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(SEQUENCE // t, BATCH, HIDDEN, generator=generator, dtype=dtype)


def run(
    layer: torch.nn.Module, hidden: torch.Tensor, weight: float = 1.0
) -> dict[str, torch.Tensor]:
    """Output and gradients, also that of the input, by name; the objective weighs each value."""
    hidden = hidden.clone().requires_grad_()
    output, bias = layer(hidden)
    assert bias is None
    (output.sin() * torch.arange(output.numel()).view(output.shape).cos() * weight).sum().backward()
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return {"output": output.detach(), "input": hidden.grad, **grads}


def compare(layout: dict[str, int], case: str, dispatcher: str, dtype: torch.dtype) -> float:
    """The largest relative difference on this rank."""
    options, hidden = options_of(case, layout, dispatcher), input_of(layout, dtype)
    mine = ours(dtype, **options)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(SCALE))
    found = run(mine, hidden)
    with their_world(dtype):
        layer = theirs(mine, dtype, **options)
        THEIRS["utils"].MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(SCALE, dtype=dtype))
        wanted = run(layer, hidden)
    wanted.pop("router.bias", None)
    assert found.keys() == wanted.keys()
    worst = 0.0
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype == dtype, name
        largest = wanted[name].abs().max().clamp_min(1e-3)
        worst = max(worst, ((value - wanted[name]).abs().max() / largest).item())
    return worst


def compare_all(size: int) -> dict[str, float]:
    found = {}
    for layout in LAYOUTS[size]:
        initialize(layout)
        for case, dispatcher, dtype in product(CASES, DISPATCHERS, LIMITS):
            if is_possible(layout, case, dispatcher):
                name = f"{layout} {dispatcher} {case} {dtype}"
                found[name] = compare(layout, case, dispatcher, dtype) / LIMITS[dtype]
    return found


@pytest.mark.parametrize("size", LAYOUTS)
def test_same_layer(size: int):
    results = run_ranks(compare_all, size, size)
    for rank, found in enumerate(results):
        for case, difference in found.items():
            assert difference <= 1.0, f"{case} on rank {rank}: {difference} of what is allowed"
    worst = max(max(found.values()) for found in results)
    figure(f"{len(results[0])} layers on {size} ranks, worst {worst:.2f} of what is allowed")
