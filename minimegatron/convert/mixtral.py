"""Mixtral: Llama with experts; each token chooses two of them.

Jiang et al. 2024 (https://arxiv.org/abs/2401.04088); Hugging Face's `MixtralForCausalLM`. Its router
takes the softmax over all experts and divides by the sum of those chosen: the softmax over the chosen.
For Megatron's counterpart see `family`.
"""

from typing import Any

from minimegatron.convert import llama
from minimegatron.convert.family import ConvertedFamily, Same, Stacked, Weight, refuse

CHOICE = {
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_enable_expert_bias": False,
    "moe_expert_capacity_factor": None,
    "moe_apply_probs_on_input": False,
}
"""How tokens choose in every Mixtral, in our arguments."""


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Their config.json to our arguments."""
    window = config.get("sliding_window")
    refuse("mixtral", {f"a sliding window of {window} tokens": window is not None})
    return llama.arguments(config) | {
        "num_experts": config["num_local_experts"],
        "moe_ffn_hidden_size": config["intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_load_balancing_type": "aux_loss",
        **CHOICE,
    }


def config(args: dict[str, Any]) -> dict[str, Any]:
    """Our arguments to their config.json."""
    return llama.config(args) | {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": args["moe_ffn_hidden_size"] or args["ffn_hidden_size"],
        "num_local_experts": args["num_experts"],
        "num_experts_per_tok": args["moe_router_topk"],
        "sliding_window": None,
    }


def needs(args: dict[str, Any]) -> dict[str, Any]:
    """What a Mixtral is: a Llama with experts, any number of them."""
    balance = args.get("moe_router_load_balancing_type")
    return llama.needs(args) | {
        "moe_router_load_balancing_type": "aux_loss" if "sinkhorn" in (balance or ()) else balance,
        "num_experts": args["num_experts"] or "not given",
        **CHOICE,
    }


def weights(args: dict[str, Any]) -> list[Weight]:
    """Every weight, with its name on both sides."""
    found = [weight for weight in llama.weights(args) if ".mlp." not in weight.ours]
    for layer in range(args["num_layers"]):
        ours = f"decoder.layers.{layer}.mlp"
        theirs = f"model.layers.{layer}.block_sparse_moe"
        found.append(Weight(f"{ours}.router.weight", (f"{theirs}.gate.weight",)))
        for expert in range(args["num_experts"]):
            for name, parts, way in (
                ("linear_fc1", ("w1", "w3"), Stacked()),
                ("linear_fc2", ("w2",), Same()),
            ):
                names = tuple(f"{theirs}.experts.{expert}.{part}.weight" for part in parts)
                found.append(
                    Weight(f"{ours}.experts.local_experts.{expert}.{name}.weight", names, way)
                )
    return found


MIXTRAL = ConvertedFamily("mixtral", arguments, config, weights, needs)
