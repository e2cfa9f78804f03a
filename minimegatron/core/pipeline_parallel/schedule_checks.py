"""What a schedule refuses before its step begins.

Megatron has no counterpart: it fails later, or with Python's own words.
"""

from collections.abc import Callable
from typing import Any

from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders import orders
from minimegatron.core.orders.work import INTERLEAVED, NO_PIPELINING, ONE_F_ONE_B
from minimegatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


def refuse_shared_iterators(data_iterators: list) -> None:
    """Raises ValueError where two chunks would take microbatches from each other.

    None, for a chunk that reads nothing, may be there several times; so may what is no iterator.
    """
    chunk_of: dict[int, int] = {}
    for chunk_id, iterator in enumerate(data_iterators):
        if hasattr(iterator, "__next__") and chunk_of.setdefault(id(iterator), chunk_id) < chunk_id:
            raise ValueError(
                f"chunks {chunk_of[id(iterator)]} and {chunk_id} have one data iterator between them: "
                "what one reads, the other never sees; give each an iterator of its own, over the same "
                "microbatches, or None to a chunk that reads nothing"
            )


def check_fits(schedule: str | None, pp_size: int, vp_size: int | None, fitting: str) -> None:
    """Raises ValueError for one of the three written schedules that does not fit these sizes."""
    if schedule != fitting and schedule in (NO_PIPELINING, INTERLEAVED, ONE_F_ONE_B):
        raise ValueError(
            f"the schedule {schedule} does not fit pp_size {pp_size} and vp_size {vp_size}; "
            f"{fitting} does"
        )


def refuse_several(given: list, name: str) -> None:
    """Raises ValueError: a schedule for one chunk got several."""
    raise ValueError(
        f"{name} is a list of {len(given)}, but this schedule runs one model chunk; "
        "for more, set virtual_pipeline_model_parallel_size"
    )


def check_plain(config: ModelParallelConfig) -> None:
    """Raises ValueError for a configuration that plain 1F1B cannot follow."""
    if config.overlap_p2p_comm:
        raise ValueError(
            "overlap_p2p_comm is on, but plain 1F1B sends and receives in one exchange; turn it "
            "off, or use virtual stages (virtual_pipeline_model_parallel_size)"
        )
    if config.pipeline_schedule is not None:
        orders.require_usual_placement(config)


def check_chunks(
    model: Any, data_iterator: Any, config: Any, adjust_tensor_shapes_fn: Callable | None
) -> None:
    """Raises ValueError for arguments that interleaving cannot take."""
    if not isinstance(model, list) or not isinstance(data_iterator, list):
        raise ValueError("interleaving needs a list of model chunks and a list of data iterators")
    if len(model) != len(data_iterator):
        raise ValueError(
            f"{len(model)} model chunks but {len(data_iterator)} data iterators; give one iterator "
            "per chunk, each going through all microbatches by itself"
        )
    refuse_shared_iterators(data_iterator)
    if adjust_tensor_shapes_fn is not None:
        raise ValueError("adjust_tensor_shapes_fn works with plain 1F1B only; drop virtual stages")
    if config.overlap_p2p_comm and config.batch_p2p_comm:
        raise ValueError("overlap_p2p_comm needs batch_p2p_comm=False")
    if config.pipeline_schedule is not None:
        orders.require_usual_placement(config)


def check_ring(p2p: Any) -> None:
    """Raises ValueError where this communicator could swap what interleaving sends."""
    if isinstance(p2p, P2PCommunicator):  # somebody else's has Megatron's nine methods, and no more
        p2p.refuse_a_ring_of_two()
