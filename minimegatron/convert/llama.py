"""Llama: rotary positions, RMSNorm, SwiGLU, grouped queries, no biases.

Touvron et al. 2023; Hugging Face's `LlamaForCausalLM`. For Megatron's counterpart see `family`.
"""

from typing import Any

from minimegatron.convert.family import QKV, ConvertedFamily, Same, Stacked, Weight, refuse


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Their config.json to our arguments."""
    # transformers 5 keeps the base of the angles beside their scaling; before, it stood alone.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = config.get("rope_theta", rope.get("rope_theta", 10000.0))
    activation = config.get("hidden_act", "silu")
    refuse(
        "llama",
        {
            f"hidden_act {activation}": activation != "silu",
            "attention_bias": config.get("attention_bias", False),
            "mlp_bias": config.get("mlp_bias", False),
            f"rotary positions scaled by {kind}": kind != "default",
            f"rope_theta {base}, no whole number": base != int(base),
        },
    )
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": config["intermediate_size"],
        "kv_channels": width if width * heads != hidden else None,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_base": int(base),
        "rotary_percent": 1.0,
        "normalization": "RMSNorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "qk_layernorm": False,
        "swiglu": True,
        "openai_gelu": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
    }


def _shape(args: dict[str, Any]) -> QKV:
    heads = args["num_attention_heads"]
    groups = args["num_query_groups"] if args["group_query_attention"] else heads
    return QKV(heads, groups, args["kv_channels"] or args["hidden_size"] // heads)


def config(args: dict[str, Any]) -> dict[str, Any]:
    """Our arguments to their config.json."""
    shape = _shape(args)
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": args["num_layers"],
        "hidden_size": args["hidden_size"],
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_groups,
        "head_dim": shape.width,
        "intermediate_size": args["ffn_hidden_size"],
        "max_position_embeddings": args["max_position_embeddings"],
        "rope_theta": float(args["rotary_base"]),
        "rms_norm_eps": args["norm_epsilon"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
    }


def needs(args: dict[str, Any]) -> dict[str, Any]:
    """What a Llama is."""
    return {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "rotary_percent": 1.0,
        "num_experts": None,
    }


def weights(args: dict[str, Any]) -> list[Weight]:
    """Every weight, with its name on both sides."""
    found = [Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))]
    for layer in range(args["num_layers"]):
        for ours, theirs, way in (
            ("input_layernorm", ("input_layernorm",), Same()),
            (
                "self_attention.linear_qkv",
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                _shape(args),
            ),
            ("self_attention.linear_proj", ("self_attn.o_proj",), Same()),
            ("pre_mlp_layernorm", ("post_attention_layernorm",), Same()),
            ("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), Stacked()),
            ("mlp.linear_fc2", ("mlp.down_proj",), Same()),
        ):
            names = tuple(f"model.layers.{layer}.{name}.weight" for name in theirs)
            found.append(Weight(f"decoder.layers.{layer}.{ours}.weight", names, way))
    found.append(Weight("decoder.final_layernorm.weight", ("model.norm.weight",)))
    if args["untie_embeddings_and_output_weights"]:
        found.append(Weight("output_layer.weight", ("lm_head.weight",)))
    return found


LLAMA = ConvertedFamily("llama", arguments, config, weights, needs)
