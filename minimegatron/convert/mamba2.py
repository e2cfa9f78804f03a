"""Mamba-2: layers that are a norm and a mixer, no attention, no biases but the convolution's.

Dao and Gu 2024 (https://arxiv.org/abs/2405.21060); Hugging Face's `Mamba2ForCausalLM`. Both sides stack
the rows of `in_proj` as z, x, B, C, dt. For Megatron's counterpart see `family`.
"""

import math
from types import SimpleNamespace
from typing import Any

from minimegatron.convert.family import ConvertedFamily, Weight, refuse
from minimegatron.core.ssm.mamba_config import sizes_of_mamba

CONVOLUTION = 4
"""Tokens that it sees."""
LONGEST = 2**20
"""There is no table of positions; theirs names no longest sequence, and ours must name one."""
IN_A_MIXER = (
    *("in_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias"),
    *("norm.weight", "out_proj.weight"),
)


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Their config.json to our arguments."""
    activation, width = config.get("hidden_act", "silu"), config.get("conv_kernel", CONVOLUTION)
    heads, head_dim = config["num_heads"], config["head_dim"]
    wide = config.get("expand", 2) * config["hidden_size"]
    refuse(
        "mamba2",
        {
            f"hidden_act {activation}": activation != "silu",
            f"conv_kernel {width} instead of {CONVOLUTION}": width != CONVOLUTION,
            "use_bias": config.get("use_bias", False),
            "a convolution without bias": not config.get("use_conv_bias", True),
            "a limit on the time step (time_step_limit)": _is_limited(config),
            f"{heads} heads of {head_dim} features, where expand x hidden_size is {wide}": (
                heads * head_dim != wide
            ),
        },
    )
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": math.gcd(heads, config["hidden_size"]),  # not used, but checked
        "ffn_hidden_size": 4 * config["hidden_size"],
        "max_position_embeddings": LONGEST,
        "mamba_state_dim": config["state_size"],
        "mamba_head_dim": head_dim,
        "mamba_num_groups": config["n_groups"],
        "mamba_num_heads": heads,
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        **needs({"num_layers": config["num_hidden_layers"], "hybrid_override_pattern": None}),
    }


def _is_limited(config: dict[str, Any]) -> bool:
    """JSON has no infinity; transformers 5 writes it as an object."""
    lowest, highest = config.get("time_step_limit") or (0.0, math.inf)
    if isinstance(highest, dict):
        highest = float(highest.get("__float__", "nan"))
    return lowest > 0 or highest != math.inf


def config(args: dict[str, Any]) -> dict[str, Any]:
    """Our arguments to their config.json.

    Raises ValueError for heads that are not a whole number of hidden sizes wide: their `expand`.
    """
    num_heads, head_dim, num_groups, state_dim = sizes_of_mamba(SimpleNamespace(**args))
    h = args["hidden_size"]
    problem = f"{num_heads} heads of {head_dim} features, not a multiple of hidden_size {h}"
    refuse("mamba2", {problem: num_heads * head_dim % h != 0})
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "num_hidden_layers": args["num_layers"],
        "hidden_size": h,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "n_groups": num_groups,
        "state_size": state_dim,
        "expand": num_heads * head_dim // h,
        "conv_kernel": CONVOLUTION,
        "hidden_act": "silu",
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": args["norm_epsilon"],
        "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
    }


def needs(args: dict[str, Any]) -> dict[str, Any]:
    """What a `Mamba2ForCausalLM` is: layers of one kind."""
    pattern = args["hybrid_override_pattern"]
    only_mamba = "M" * args["num_layers"]
    return {
        "hybrid_override_pattern": pattern if pattern in (None, only_mamba) else only_mamba,
        "position_embedding_type": "none",
        "normalization": "RMSNorm",
    }


def weights(args: dict[str, Any]) -> list[Weight]:
    """Every weight, with its name on both sides."""
    found = [Weight("embedding.word_embeddings.weight", ("backbone.embeddings.weight",))]
    for layer in range(args["num_layers"]):
        ours, theirs = f"decoder.layers.{layer}", f"backbone.layers.{layer}"
        for name in ("norm.weight", *(f"mixer.{part}" for part in IN_A_MIXER)):
            found.append(Weight(f"{ours}.{name}", (f"{theirs}.{name}",)))
    found.append(Weight("decoder.final_layernorm.weight", ("backbone.norm_f.weight",)))
    if args["untie_embeddings_and_output_weights"]:
        found.append(Weight("output_layer.weight", ("lm_head.weight",)))
    return found


MAMBA2 = ConvertedFamily("mamba2", arguments, config, weights, needs, model_family="mamba")
