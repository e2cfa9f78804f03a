"""The sizes of state-space layers that a configuration gives, and what it refuses of them.

The fields are in `core.transformer.second_subjects`. Megatron has no counterpart: it asserts some of
this where it builds a mixer.
"""

import math
from typing import Any, NamedTuple


class MambaSizes(NamedTuple):
    """Of a whole mixer, before it is cut."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int


def sizes_of_mamba(config: Any) -> MambaSizes:
    """The sizes that `config` has; e = num_heads x head_dim features go through the scan."""
    n, P = config.mamba_num_heads, config.mamba_head_dim
    if n is None:
        n = 2 * config.hidden_size // P
    return MambaSizes(n, P, config.mamba_num_groups, config.mamba_state_dim)


def check_mamba(config: Any) -> None:
    """Raises ValueError, with the numbers and the remedy, for what no mixer could have."""
    n, P, G, _ = sizes_of_mamba(config)
    h, t = config.hidden_size, config.tensor_model_parallel_size
    heads = f"mamba_num_heads {n}"
    if config.mamba_num_heads is None:
        if 2 * h % P:
            raise ValueError(
                f"2 x hidden_size {h} = {2 * h} features are not whole heads of mamba_head_dim {P}; "
                f"give one that divides {2 * h}, such as {math.gcd(2 * h, 64)}, or mamba_num_heads"
            )
        heads = f"{n} heads (2 x hidden_size {h} / mamba_head_dim {P})"
    if n % G:
        other = "a smaller mamba_head_dim"
        if config.mamba_num_heads is not None:
            other = f"mamba_num_heads {-(-n // G) * G}"
        raise ValueError(
            f"{heads} cannot be shared by mamba_num_groups {G}: each group serves as many heads; "
            f"give mamba_num_groups {math.gcd(n, G)}, or {other}"
        )
    if G % t:
        raise ValueError(
            f"mamba_num_groups {G} is not divisible by tensor_model_parallel_size {t}: a rank has "
            f"whole groups, and their heads; make it a multiple of {t}, or use fewer ranks"
        )


def check_mamba_model(config: Any) -> None:
    """Raises ValueError, with the numbers and the remedy, for what no hybrid model has here."""
    if config.context_parallel_size > 1:
        raise ValueError(
            f"context_parallel_size {config.context_parallel_size}: a state-space layer reads tokens "
            "in order, and handing its state from rank to rank is not done here; use 1, with "
            "sequence_parallel for long sequences"
        )
    if config.num_moe_experts is not None:
        raise ValueError(
            f"num_moe_experts {config.num_moe_experts}: a hybrid model has no experts here; leave it "
            "out, or train a GPT"
        )
    if config.mtp_num_layers is not None:
        raise ValueError(
            f"mtp_num_layers {config.mtp_num_layers}: a hybrid model predicts no further tokens here; "
            "leave it out, or train a GPT"
        )
