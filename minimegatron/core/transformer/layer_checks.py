"""What a model's layers, their configuration and their placement refuse.

Torch-free. Megatron has no counterpart.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def check_hidden_size(config: Any) -> None:
    """Raises ValueError for a configuration without a hidden size."""
    if config.hidden_size == 0:
        raise ValueError("a model needs the configuration's hidden_size, which is 0; set it")


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


def layers_on_each(config: Any, extra: int = 0) -> int:
    """Layers, and `extra` for embedding and loss, on each virtual stage, where all have as many.

    Raises ValueError unless they divide over stages.
    """
    p, total = config.pipeline_model_parallel_size, config.num_layers + extra
    if total % p:
        counted = f" (+ {extra} for embedding and loss)" if extra else ""
        raise ValueError(
            f"num_layers {config.num_layers}{counted} is not divisible by "
            f"pipeline_model_parallel_size {p}; use {total // p * p - extra} or "
            f"{-(-total // p) * p - extra} layers, or set num_layers_in_first_pipeline_stage "
            "or num_layers_in_last_pipeline_stage"
        )
    check_division_over_chunks(config, [total // p] * p)
    return total // p // (config.virtual_pipeline_model_parallel_size or 1)


def check_division_over_chunks(config: Any, layers_of_ranks: list[int]) -> None:
    """Raises ValueError unless the layers of each pipeline rank divide over its chunks."""
    v = config.virtual_pipeline_model_parallel_size or 1
    for rank, number in enumerate(layers_of_ranks):
        if number % v:
            raise ValueError(
                f"pipeline stage {rank} has {number} layers, not divisible by "
                f"virtual_pipeline_model_parallel_size {v}; change num_layers "
                f"{config.num_layers} or the number of chunks"
            )


def check_chunk(config: Any, vp_stage: int | None, pp_rank: int) -> None:
    """Raises ValueError for a rank that the pipeline has not, or a chunk that is not told."""
    p, v = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    if not 0 <= pp_rank < p:
        raise ValueError(
            f"pipeline rank {pp_rank} is not one of the {p} that pipeline_model_parallel_size says; "
            "make the configuration's size that of the process groups"
        )
    if vp_stage is None and v is not None and v > 1:
        raise ValueError(f"vp_stage is None but each stage has {v} chunks; pass the chunk's number")


def check_head_norms(config: Any, submodules: Any) -> None:
    """Raises ValueError unless the spec has both norms, or with no `qk_layernorm` none."""
    given = (submodules.q_layernorm is not None, submodules.k_layernorm is not None)
    if given != (config.qk_layernorm, config.qk_layernorm):
        raise ValueError(
            f"config.qk_layernorm is {config.qk_layernorm} but the layer's spec has "
            f"(q, k) norms {given}; pass the same qk_layernorm to get_gpt_layer_local_spec"
        )


def turned_width(kv_channels: int, rotary_percent: float) -> int:
    """This share of a head's features. Raises ValueError unless it is an even number of 2 or more."""
    width = int(kv_channels * rotary_percent)
    if width < 2 or width % 2:
        raise ValueError(
            f"kv_channels {kv_channels} x rotary_percent {rotary_percent} turns {width} "
            "features; they are turned in pairs, so give an even number of 2 or more"
        )
    return width


def refuse_angles(freqs: "torch.Tensor", t: "torch.Tensor") -> None:
    """Raises ValueError: the angles are not those of the positions of `t`, queries or keys."""
    raise ValueError(
        f"rotary angles are {list(freqs.shape)} for queries or keys {list(t.shape)}; give "
        f"[{t.size(0)}, 1, 1, d'], one row for each of this rank's tokens"
    )


def refuse_logits(logits: "torch.Tensor", vocab_size: int, ranks: int) -> None:
    """Raises ValueError: these are not what one of `ranks` ranks scores of the vocabulary."""
    raise ValueError(
        f"logits have {logits.size(-1)} columns, but of a vocabulary of {vocab_size} each "
        f"of {ranks} ranks scores {vocab_size // ranks}; give this rank's slice"
    )
