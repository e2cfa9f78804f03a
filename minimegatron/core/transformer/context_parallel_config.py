"""What a configuration says of ranks that share each sequence, and what cannot be.

Ours: Megatron checks this in `TransformerConfig` and in `validate_args`.
"""

from dataclasses import dataclass
from typing import Any

from minimegatron.core import knobs

COMM_TYPES = ("p2p", "all_gather", "a2a")
"""Ways for attention to reach the whole sequence; see `context_parallel`."""


@dataclass
class ContextParallelConfig:
    """How attention reaches tokens of other ranks."""

    cp_comm_type: list[str] | str | None = knobs.knob(None, section="parallel", nargs="+")
    """How attention reaches the whole sequence with --context-parallel-size: p2p, all_gather or a2a.

    One for all layers, or one for each layer of the model; by default p2p, a ring."""


def comm_type_of_layer(config: Any, layer_number: int) -> str:
    """The way of one layer, whose number counts from 1 within the whole model.

    Layers behind the model's own, which predict further tokens, have the last one's.
    """
    given = config.cp_comm_type or "p2p"
    if isinstance(given, str):
        return given
    return given[0] if len(given) == 1 else given[min(layer_number, len(given)) - 1]


def check_context_parallel(config: Any) -> None:
    """Raises ValueError, with numbers and remedy, for ways that are unknown or do not fit the heads."""
    given = config.cp_comm_type
    ways = [given] if isinstance(given, str) else list(given or ["p2p"])
    for way in ways:
        check_comm_type(config, way)
    if len(ways) not in (1, config.num_layers):
        raise ValueError(
            f"cp_comm_type has {len(ways)} entries, but num_layers is {config.num_layers}; give one "
            "for all layers, or one for each"
        )


def check_comm_type(config: Any, way: str) -> None:
    """The same for one of them."""
    if way == "a2a+p2p":
        raise ValueError(
            "cp_comm_type 'a2a+p2p' needs groups of groups, which are not implemented here; use "
            f"one of {', '.join(COMM_TYPES)}"
        )
    if way not in COMM_TYPES:
        raise ValueError(f"cp_comm_type {way!r} is unknown; use one of {', '.join(COMM_TYPES)}")
    c, t = config.context_parallel_size, config.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups") if way == "a2a" else ():
        number = getattr(config, name)
        if number // t % c:
            raise ValueError(
                f"cp_comm_type 'a2a' gives each rank whole heads: {name} {number} / "
                f"tensor_model_parallel_size {t} = {number // t} is not divisible by "
                f"context_parallel_size {c}; use p2p or all_gather, or another number"
            )
