"""A layer of experts on one rank, against a loop over tokens; what its parameters say of themselves."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from minimegatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.module_state import global_parameter_name
from minimegatron.core.transformer.moe.moe_layer import MoELayer
from minimegatron.core.transformer.moe_config import WITH_CAPACITY
from minimegatron.core.transformer.spec_utils import build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.groups import PretendGroup

HIDDEN, EXPERTS = 6, 4
SIZES = {
    "num_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "ffn_hidden_size": 12,
    "moe_ffn_hidden_size": 10,
    "num_moe_experts": EXPERTS,
    "params_dtype": torch.float64,
    "init_method_std": 0.5,
}
PLAIN = {"moe_router_load_balancing_type": "none"}
LLAMA = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
SHARED = {
    **LLAMA,
    "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True,
}
KINDS = {"biases": {}, "llama": LLAMA, "shared": SHARED, "three": {"moe_router_topk": 3}}


def groups(**places) -> ProcessGroupCollection:
    names = [entry.name for entry in dataclasses.fields(ProcessGroupCollection)]
    alone = dict.fromkeys(names, PretendGroup())
    return ProcessGroupCollection(
        **alone | {name: PretendGroup(*place) for name, place in places.items()}
    )


def layer(pg_collection=None, **options) -> MoELayer:
    torch.manual_seed(5)
    config = TransformerConfig(**SIZES | PLAIN | options)
    made = build_module(
        get_moe_module_spec(), config=config, pg_collection=pg_collection or groups()
    )
    made.set_layer_number(1)
    with torch.no_grad():
        for name, param in made.named_parameters():
            if name.endswith("bias"):
                param.normal_()
    return made


def one_expert(expert: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Written out for one token."""
    weights = [expert.linear_fc1.weight, expert.linear_fc2.weight]
    biases = [expert.linear_fc1.bias, expert.linear_fc2.bias]
    wide = F.linear(x, weights[0], biases[0])
    if expert.config.gated_linear_unit:
        gate, up = wide.chunk(2)
        wide = F.silu(gate) * up
    else:
        wide = F.gelu(wide)
    return F.linear(wide, weights[1], biases[1])


def by_hand(moe: MoELayer, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for i in range(x.size(0)):
        for j in range(x.size(1)):
            token = x[i, j]
            scores, chosen = (moe.router.weight @ token).topk(moe.config.moe_router_topk)
            for weight, number in zip(scores.softmax(0), chosen.tolist(), strict=True):
                out[i, j] += weight * one_expert(moe.experts.local_experts[number], token)
            if moe.shared_experts is not None:
                gate = torch.sigmoid(moe.shared_experts.gate_weight @ token)
                out[i, j] += gate * one_expert(moe.shared_experts, token)
    return out


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_loop_over_tokens(dispatcher, kind):
    moe = layer(moe_token_dispatcher_type=dispatcher, **KINDS[kind])
    x = torch.randn(5, 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    output, bias = moe(x)
    wanted = by_hand(moe, x)
    assert bias is None and torch.allclose(output, wanted, atol=1e-12, rtol=0)
    grads = torch.autograd.grad(output.square().sum(), [x, *moe.parameters()], allow_unused=True)
    by_loop = torch.autograd.grad(wanted.square().sum(), [x, *moe.parameters()], allow_unused=True)
    for found, expected in zip(grads, by_loop, strict=True):
        # In a loop, an expert that nobody chose has no gradient; here it has one of zero.
        expected = torch.zeros_like(found) if expected is None else expected
        assert torch.allclose(found, expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_an_expert_without_tokens_has_a_gradient_of_zero(dispatcher):
    moe = layer(moe_token_dispatcher_type=dispatcher, moe_router_topk=2)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[:2] = 1.0
    moe(torch.rand(3, 1, HIDDEN, dtype=torch.float64))[0].sum().backward()
    for number, expert in enumerate(moe.experts.local_experts):
        for param in expert.parameters():
            assert param.grad is not None and (number < 2 or not param.grad.any())


@pytest.mark.parametrize("kind", WITH_CAPACITY)
def test_every_balance_that_goes_with_a_capacity_has_its_gradient(kind):
    """Dropping changes the choice, not the loss: the router's gradient is that of both."""
    x, grads = torch.rand(6, 2, HIDDEN, dtype=torch.float64), []
    for weight in (0.0, 0.5):
        moe = layer(
            moe_router_load_balancing_type=kind,
            moe_aux_loss_coeff=0.0 if kind == "none" else weight,
            moe_expert_capacity_factor=1.0,
        )
        moe(x)[0].square().sum().backward()
        grads.append(moe.router.weight.grad)
    assert torch.equal(*grads) is (kind == "none")


def test_weights_that_wait():
    moe, same = layer(**SHARED), layer(**SHARED, delay_wgrad_compute=True)
    x = torch.randn(4, 1, HIDDEN, dtype=torch.float64)
    for made in (moe, same):
        made(x)[0].square().sum().backward()
    late = [p for p in same.parameters() if getattr(p, "skip_backward_post_hook", False)]
    assert len(late) == 2 * EXPERTS + 2 and all(p.grad is None for p in late)
    same.backward_dw()
    for one, other in zip(moe.parameters(), same.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_experts_are_named_by_their_number_in_the_whole_layer():
    moe = layer(groups(ep=(1, 2), tp_ep=(1, 2)), expert_model_parallel_size=2)
    names = [name for name, _ in moe.named_parameters() if name.startswith("experts.")]
    numbers = {global_parameter_name(moe, name).split(".")[2] for name in names}
    assert moe.local_expert_indices == [2, 3] and numbers == {"2", "3"}


def test_what_kind_of_parameter_each_is():
    alone = layer(moe_token_dispatcher_type="alltoall")
    assert all(getattr(p, "allreduce", True) for p in alone.parameters())
    pair = groups(ep=(0, 2), tp_ep=(0, 2))
    shared = layer(pair, expert_model_parallel_size=2, **SHARED)
    for name, param in shared.named_parameters():
        is_expert = name.startswith("experts.")
        assert getattr(param, "allreduce", True) is not is_expert, name


def test_an_expert_that_is_cut_alone_is_no_dense_parameter():
    """e = 1, etp = 2, t = 1: its pieces have other replicas than the dense parameters have."""
    pair = groups(expt_tp=(0, 2), tp_ep=(0, 2))
    moe = layer(pair, expert_tensor_parallel_size=2, **LLAMA)
    assert not any(p.allreduce for p in moe.experts.parameters())


def test_biases_of_experts_are_not_summed_over_tensor_ranks():
    """Tensor ranks have different experts there; a sum would add the biases of those."""
    places = groups(tp=(0, 2), ep=(0, 2), tp_ep=(0, 2), tp_cp=(0, 2), tp_dp_cp=(0, 2))
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    sizes |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    moe = layer(places, **sizes)
    for name, param in moe.named_parameters():
        is_partial = name == "router.weight"
        assert getattr(param, "sequence_parallel", False) is is_partial, name


def test_which_layers_of_a_model_have_experts():
    config = TransformerConfig(**SIZES | PLAIN | {"num_layers": 3, "moe_layer_freq": [0, 1, 0]})
    specs = [spec.submodules.mlp.module for spec in get_gpt_decoder_layer_specs(config)]
    assert [spec is MoELayer for spec in specs] == [False, True, False]


def test_refused():
    with pytest.raises(
        ValueError, match="expert_model_parallel_size=1, but the expert group has 2"
    ):
        layer(groups(ep=(0, 2)))
    with pytest.raises(ValueError, match="needs the configuration's num_moe_experts"):
        layer(num_moe_experts=None, moe_ffn_hidden_size=None)
