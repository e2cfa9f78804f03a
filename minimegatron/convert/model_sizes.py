"""Which shape each weight of ours has, whatever family it is of: checked before anything is written.

Megatron has no counterpart; there a weight of another shape ends in torch's error while it is loaded.
"""

from types import SimpleNamespace
from typing import Any

import torch

from minimegatron.core.ssm.mamba_config import sizes_of_mamba

Shape = tuple[int | None, ...]
"""None for the vocabulary's rows, of which there may be any number."""


def check_shape(name: str, tensor: torch.Tensor, args: dict[str, Any], source: str) -> None:
    """Raises ValueError unless our weight `name`, made of `source`, is as large as `args` say."""
    wanted = _shape_of(name, args)
    found = tuple(tensor.shape)
    fits = len(found) == len(wanted) and all(
        size in (None, there) for size, there in zip(wanted, found, strict=True)
    )
    if not fits:
        raise ValueError(
            f"config.json and weights disagree: {source} makes {name} {_words(found)}, but by "
            f"config.json it is {_words(wanted)}; take both from one model"
        )


def _words(shape: Shape) -> str:
    return " x ".join("any" if size is None else str(size) for size in shape)


def _shape_of(name: str, args: dict[str, Any]) -> Shape:
    """By the end of its name; what is in no table is a vector of the hidden size."""
    h = args["hidden_size"]
    tables = _ends(args) | _attention(args) | _mlp(args)
    if ".mixer." in name:
        tables |= _mixer(args)
    for end, shape in tables.items():
        if name.endswith(f".{end}") or name == end:
            return shape
    return (h,)


def _ends(args: dict[str, Any]) -> dict[str, Shape]:
    h = args["hidden_size"]
    return {
        "word_embeddings.weight": (None, h),
        "position_embeddings.weight": (args["max_position_embeddings"], h),
        "tokentype_embeddings.weight": (2, h),
        "output_layer.weight": (None, h),
        "output_layer.bias": (None,),
        "dense.weight": (h, h),
        "binary_head.weight": (2, h),
        "binary_head.bias": (2,),
        "relative_attention_bias.weight": (
            args.get("relative_attention_num_buckets"),
            args["num_attention_heads"],
        ),
    }


def _attention(args: dict[str, Any]) -> dict[str, Shape]:
    h, heads = args["hidden_size"], args["num_attention_heads"]
    groups = heads
    if args.get("group_query_attention"):
        groups = args["num_query_groups"]
    width = args.get("kv_channels") or h // heads
    return {
        "linear_qkv.weight": ((heads + 2 * groups) * width, h),
        "linear_qkv.bias": ((heads + 2 * groups) * width,),
        "linear_q.weight": (heads * width, h),
        "linear_kv.weight": (2 * heads * width, h),
        "linear_proj.weight": (h, heads * width),
    }


def _mlp(args: dict[str, Any]) -> dict[str, Shape]:
    h, f = args["hidden_size"], args["ffn_hidden_size"]
    wide = 2 * f if args.get("swiglu") else f
    return {
        "linear_fc1.weight": (wide, h),
        "linear_fc1.bias": (wide,),
        "linear_fc2.weight": (h, f),
        "router.weight": (args.get("num_experts"), h),
    }


def _mixer(args: dict[str, Any]) -> dict[str, Shape]:
    h, (n, P, G, N) = args["hidden_size"], sizes_of_mamba(SimpleNamespace(**args))
    convolved = n * P + 2 * G * N
    return {
        "in_proj.weight": (n * P + convolved + n, h),
        "conv1d.weight": (convolved, 1, 4),
        "conv1d.bias": (convolved,),
        "norm.weight": (n * P,),
        "out_proj.weight": (h, n * P),
        "A_log": (n,),
        "D": (n,),
        "dt_bias": (n,),
    }
