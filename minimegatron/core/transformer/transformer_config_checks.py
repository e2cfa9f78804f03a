"""What a transformer's configuration refuses of its sizes; what is no configuration of 16 bits.

Megatron has this in `megatron.core.transformer.transformer_config`.
"""

from typing import Any


def check_width_of_heads(config: Any) -> None:
    """Raises ValueError, with the remedy, where heads do not divide the hidden size."""
    h, a = config.hidden_size, config.num_attention_heads
    if h % a:
        raise ValueError(
            f"hidden_size {h} is not divisible by num_attention_heads {a}; "
            f"try {h // a * a or a}, or set kv_channels"
        )


def check_sizes(config: Any) -> None:
    """Raises ValueError, with the remedy, for sizes that groups or ranks do not divide."""
    t = config.tensor_model_parallel_size
    a, g, f = config.num_attention_heads, config.num_query_groups, config.ffn_hidden_size
    if g < 1 or a % g:
        raise ValueError(
            f"num_attention_heads {a} is not divisible by num_query_groups {g}; "
            "every group serves the same number of heads"
        )
    for name, size in (
        ("num_attention_heads", a),
        ("num_query_groups", g),
        ("ffn_hidden_size", f),
    ):
        # A configuration without a hidden size has an MLP of width 0.
        if size % t or size < 1 and config.hidden_size:
            raise ValueError(
                f"{name} {size} is not divisible by tensor_model_parallel_size {t}; "
                f"make {name} a multiple of {t}"
            )


def check_is_half(config: Any) -> None:
    """Raises ValueError where a model is to be converted to 16 bits, and `config` has none."""
    if not (config.fp16 or config.bf16):
        raise ValueError("Float16Module needs config.fp16 or config.bf16; both are off")
