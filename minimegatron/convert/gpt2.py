"""GPT-2: learned positions, LayerNorm, GELU by tanh, tied embeddings, biases everywhere.

Radford et al. 2019; Hugging Face's `GPT2LMHeadModel`. For Megatron's counterpart see `family`.
"""

from typing import Any

import torch

from minimegatron.convert.family import (
    QKV,
    ConvertedFamily,
    Same,
    Tensors,
    Transposed,
    Weight,
    norms,
    refuse,
)

ACTIVATIONS = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}
"""Their names, and whether `--openai-gelu` is the same."""


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Their config.json to our arguments."""
    activation = config.get("activation_function", "gelu_new")
    refuse(
        "gpt2",
        {
            f"activation_function {activation}": activation not in ACTIVATIONS,
            "scale_attn_by_inverse_layer_idx": config.get("scale_attn_by_inverse_layer_idx", False),
            "attention without scaling": not config.get("scale_attn_weights", True),
            "cross-attention": config.get("add_cross_attention", False),
        },
    )
    return {
        "num_layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "num_attention_heads": config["n_head"],
        "ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"],
        "max_position_embeddings": config["n_positions"],
        "group_query_attention": False,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "qk_layernorm": False,
        "swiglu": False,
        "openai_gelu": ACTIVATIONS[activation],
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
    }


def config(args: dict[str, Any]) -> dict[str, Any]:
    """Our arguments to their config.json."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": args["num_layers"],
        "n_embd": args["hidden_size"],
        "n_head": args["num_attention_heads"],
        "n_inner": args["ffn_hidden_size"],
        "n_positions": args["max_position_embeddings"],
        "layer_norm_epsilon": args["norm_epsilon"],
        "activation_function": "gelu_new" if args["openai_gelu"] else "gelu",
        "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
    }


def needs(args: dict[str, Any]) -> dict[str, Any]:
    """What a GPT-2 is."""
    return {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "group_query_attention": False,
        "qk_layernorm": False,
        "kv_channels": None,
        "num_experts": None,
    }


def weights(args: dict[str, Any]) -> list[Weight]:
    """Every weight, with its name on both sides."""
    heads, hidden = args["num_attention_heads"], args["hidden_size"]
    qkv = QKV(heads, heads, hidden // heads)
    found = [
        Weight("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
        Weight("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    ]
    for layer in range(args["num_layers"]):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        for here, there, matrix, bias in (
            ("self_attention.linear_qkv", "attn.c_attn", _Fused(qkv, True), _Fused(qkv, False)),
            ("self_attention.linear_proj", "attn.c_proj", Transposed(), Same()),
            ("mlp.linear_fc1", "mlp.c_fc", Transposed(), Same()),
            ("mlp.linear_fc2", "mlp.c_proj", Transposed(), Same()),
        ):
            for kind, way in (("weight", matrix), ("bias", bias)):
                names = f"{ours}.{here}.{kind}", (f"{theirs}.{there}.{kind}",)
                found.append(Weight(*names, way))
        found += norms(f"{ours}.input_layernorm", f"{theirs}.ln_1")
        found += norms(f"{ours}.pre_mlp_layernorm", f"{theirs}.ln_2")
    found += norms("decoder.final_layernorm", "transformer.ln_f")
    if args["untie_embeddings_and_output_weights"]:
        found.append(Weight("output_layer.weight", ("lm_head.weight",)))
    return found


class _Fused(Same):
    """Their queries, keys and values side by side: a matrix [in, 3 x out] or a bias [3 x out]."""

    def __init__(self, qkv: QKV, is_matrix: bool):
        self.qkv, self.fused = qkv, Transposed() if is_matrix else Same()

    def to_ours(self, tensors: Tensors) -> Tensors:
        (rows,) = self.fused.to_ours(tensors)
        return self.qkv.to_ours(rows.chunk(3))

    def to_theirs(self, tensors: Tensors) -> Tensors:
        return self.fused.to_theirs([torch.cat(list(self.qkv.to_theirs(tensors)))])


GPT2 = ConvertedFamily("gpt2", arguments, config, weights, needs)
