"""What a configuration says of activations: kept by ranks that share a sequence, or computed again.

Torch-free. Megatron writes these fields in `TransformerConfig` itself, under the same names, and checks
them there and in `validate_args`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from minimegatron.core import knobs

# -- Ranks that share each sequence; and what cannot be --


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

    Layers after the model's own, which predict further tokens, have the last one's.
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


# -- Activations that backward computes again --


knob = partial(knobs.knob, section="model")


@dataclass
class RecomputeConfig:
    """What is recomputed, and of how many layers."""

    recompute_granularity: Literal["selective", "full"] | None = knob()
    """Recompute in backward: attention's core only, or whole layers."""
    recompute_method: Literal["uniform", "block"] | None = knob()
    """full: groups of layers, or the first layers of each chunk."""
    recompute_num_layers: int | None = knob(minimum=1)
    """full: layers per group, or how many."""


def check_recompute(config: Any) -> None:
    """Raises ValueError, with the remedy, for fields that do not go together."""
    granularity, method = config.recompute_granularity, config.recompute_method
    if granularity == "full" and method is None:
        raise ValueError(
            "recompute_granularity='full' needs recompute_method 'uniform' or 'block', not None"
        )
    if granularity == "full" and config.recompute_num_layers is None:
        raise ValueError(
            "recompute_granularity='full' needs recompute_num_layers of 1 or more, not None"
        )
    if granularity == "selective" and method is not None:
        raise ValueError(
            f"recompute_method {method!r} goes with recompute_granularity='full'; drop it"
        )
