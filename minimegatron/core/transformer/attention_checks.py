"""What self-attention refuses: norms of heads that the configuration and the spec see differently.

Megatron has no counterpart.
"""

from typing import Any


def check_head_norms(config: Any, submodules: Any) -> None:
    """Raises ValueError unless the spec has both norms, or with no `qk_layernorm` none."""
    given = (submodules.q_layernorm is not None, submodules.k_layernorm is not None)
    if given != (config.qk_layernorm, config.qk_layernorm):
        raise ValueError(
            f"config.qk_layernorm is {config.qk_layernorm} but the layer's spec has "
            f"(q, k) norms {given}; pass the same qk_layernorm to get_gpt_layer_local_spec"
        )
