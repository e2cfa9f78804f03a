"""T5 as of version 1.1: relative positions, RMSNorm, no biases, an output layer of its own.

Raffel et al. 2020 (https://arxiv.org/abs/1910.10683); Hugging Face's `T5ForConditionalGeneration`. The
first version's output layer is tied and scales its input, which is refused. Their attention divides by
nothing, ours by the root of a head's width; so that root is in our queries' weights. For Megatron's
counterpart see `family`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from minimegatron.convert.family import QKV, ConvertedFamily, Same, Stacked, Tensors, Weight, refuse

ACTIVATIONS = {
    "gated-gelu": {"swiglu": True, "openai_gelu": True},
    "gated-silu": {"swiglu": True, "openai_gelu": False},
    "gelu_new": {"swiglu": False, "openai_gelu": True},
    "gelu": {"swiglu": False, "openai_gelu": False},
}
"""Their `feed_forward_proj`, and our flags."""
LONGEST = 2**20
"""There is no table of places; ours must name a longest sequence."""


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Their config.json to our arguments."""
    activation = config.get("feed_forward_proj", "relu")
    # transformers 5 writes that output layers are tied, whatever they are, and this beside it.
    is_scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    refuse(
        "t5",
        {
            f"feed_forward_proj {activation}": activation not in ACTIVATIONS,
            "the tied output layer of T5's first version, which scales its input,": is_scaled,
        },
    )
    heads, hidden, width = config["num_heads"], config["d_model"], config["d_kv"]
    layers, decoder_layers = config["num_layers"], config.get("num_decoder_layers")
    return {
        "num_layers": layers,
        "decoder_num_layers": None if decoder_layers in (None, layers) else decoder_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_channels": width if width * heads != hidden else None,
        "ffn_hidden_size": config["d_ff"],
        "max_position_embeddings": LONGEST,
        "relative_attention_num_buckets": config.get("relative_attention_num_buckets", 32),
        "relative_attention_max_distance": config.get("relative_attention_max_distance", 128),
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-6),
        **ACTIVATIONS[activation],
        **needs({}),
    }


def config(args: dict[str, Any]) -> dict[str, Any]:
    """Our arguments to their config.json."""
    encoder_layers, decoder_layers = _layers(args)
    flags = {name: args[name] for name in ("swiglu", "openai_gelu")}
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "num_layers": encoder_layers,
        "num_decoder_layers": decoder_layers,
        "d_model": args["hidden_size"],
        "num_heads": args["num_attention_heads"],
        "d_kv": _width(args),
        "d_ff": args["ffn_hidden_size"],
        "relative_attention_num_buckets": args["relative_attention_num_buckets"],
        "relative_attention_max_distance": args["relative_attention_max_distance"],
        "layer_norm_epsilon": args["norm_epsilon"],
        "feed_forward_proj": next(name for name, given in ACTIVATIONS.items() if given == flags),
        "is_encoder_decoder": True,
        "tie_word_embeddings": False,
        "scale_decoder_outputs": False,
    }


def _layers(args: dict[str, Any]) -> tuple[int, int]:
    number = args["num_layers"]
    encoder_layers, decoder_layers = args.get("encoder_num_layers"), args.get("decoder_num_layers")
    return encoder_layers or number, decoder_layers or number


def _width(args: dict[str, Any]) -> int:
    return args["kv_channels"] or args["hidden_size"] // args["num_attention_heads"]


def needs(args: dict[str, Any]) -> dict[str, Any]:
    """What a T5 of version 1.1 is."""
    return {
        "position_embedding_type": "relative",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "group_query_attention": False,
        "qk_layernorm": False,
        "num_experts": None,
        "untie_embeddings_and_output_weights": True,
    }


# -- Weights --


class ScaledQKV(QKV):
    """`QKV`, with the queries times the root of a head's width here."""

    def to_ours(self, tensors: Tensors) -> Tensors:
        query, key, value = tensors
        return super().to_ours([query * math.sqrt(self.width), key, value])

    def to_theirs(self, tensors: Tensors) -> Tensors:
        query, key, value = super().to_theirs(tensors)
        return [query / math.sqrt(self.width), key, value]


@dataclass(frozen=True)
class ScaledQuery(Same):
    """The same for queries alone."""

    width: int

    def to_ours(self, tensors: Tensors) -> Tensors:
        return [tensors[0] * math.sqrt(self.width)]

    def to_theirs(self, tensors: Tensors) -> Tensors:
        return [tensors[0] / math.sqrt(self.width)]


@dataclass(frozen=True)
class KeysAndValues(Same):
    """Two matrices of theirs; in ours, for each head the rows of its key, then of its value."""

    num_heads: int

    def to_ours(self, tensors: Tensors) -> Tensors:
        by_head = [tensor.reshape(self.num_heads, -1, tensor.shape[1]) for tensor in tensors]
        return [torch.cat(by_head, dim=1).reshape(-1, tensors[0].shape[1])]

    def to_theirs(self, tensors: Tensors) -> Tensors:
        by_head = tensors[0].reshape(self.num_heads, 2, -1, tensors[0].shape[1])
        return [by_head[:, part].reshape(-1, tensors[0].shape[1]) for part in range(2)]


def weights(args: dict[str, Any]) -> list[Weight]:
    """Every weight, with its name on both sides."""
    found = [Weight("embedding.word_embeddings.weight", ("shared.weight",))]
    for stack, number in zip(("encoder", "decoder"), _layers(args), strict=True):
        table = f"{stack}_relative_pos_emb.relative_attention_bias.weight"
        first_layer = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found.append(Weight(table, (first_layer,)))
        for layer in range(number):
            found += _layer(args, f"{stack}.layers.{layer}", f"{stack}.block.{layer}.layer")
        norm = f"{stack}.final_layer_norm.weight"
        found.append(Weight(f"{stack}.final_layernorm.weight", (norm,)))
    return [*found, Weight("lm_head.output_layer.weight", ("lm_head.weight",))]


def _layer(args: dict[str, Any], ours: str, theirs: str) -> list[Weight]:
    """Their parts of a layer are numbered: self-attention, in a decoder cross attention, MLP."""
    heads, width = args["num_attention_heads"], _width(args)
    own, cross = f"{theirs}.0.SelfAttention", f"{theirs}.1.EncDecAttention"
    is_decoder = ours.startswith("decoder")
    mlp = f"{theirs}.{2 if is_decoder else 1}"
    rows: list[tuple[str, tuple[str, ...], Same]] = [
        ("input_layernorm", (f"{theirs}.0.layer_norm",), Same()),
        (
            "self_attention.linear_qkv",
            tuple(f"{own}.{part}" for part in "qkv"),
            ScaledQKV(heads, heads, width),
        ),
        ("self_attention.linear_proj", (f"{own}.o",), Same()),
        ("pre_mlp_layernorm", (f"{mlp}.layer_norm",), Same()),
        ("mlp.linear_fc2", (f"{mlp}.DenseReluDense.wo",), Same()),
    ]
    if is_decoder:
        rows += [
            ("pre_cross_attn_layernorm", (f"{theirs}.1.layer_norm",), Same()),
            ("cross_attention.linear_q", (f"{cross}.q",), ScaledQuery(width)),
            ("cross_attention.linear_kv", (f"{cross}.k", f"{cross}.v"), KeysAndValues(heads)),
            ("cross_attention.linear_proj", (f"{cross}.o",), Same()),
        ]
    parts = ("wi_0", "wi_1") if args["swiglu"] else ("wi",)
    names = tuple(f"{mlp}.DenseReluDense.{part}" for part in parts)
    rows.append(("mlp.linear_fc1", names, Stacked() if args["swiglu"] else Same()))
    return [
        Weight(f"{ours}.{name}.weight", tuple(f"{part}.weight" for part in parts), way)
        for name, parts, way in rows
    ]


T5 = ConvertedFamily(
    "t5",
    arguments,
    config,
    weights,
    needs,
    model_family="t5",
    auto_class="T5ForConditionalGeneration",
    vocabulary=("embedding.word_embeddings.weight", "lm_head.output_layer.weight"),
)
