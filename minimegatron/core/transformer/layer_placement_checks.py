"""Layers divided over stages; numbers that do not divide, and chunks that there are not, are refused.

Torch-free. Megatron has no counterpart.
"""

from typing import Any


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
