"""The random numbers of one rank, as tensors that a checkpoint can hold.

Counterpart: `get_rng_state` of `megatron.training.checkpointing`.

Random numbers belong to a place, (stage, tensor rank), and with `--data-parallel-random-init` also
the copy of the model. Ranks that share a sequence have the same, as in Megatron. At the same layout
each place goes on where it stopped. At another there are other places, and all are seeded anew, from
the seed and the iteration.
"""

import random
from typing import Any

import numpy
import torch

from minimegatron.core import parallel_state, tensor_parallel
from minimegatron.core.dist_checkpointing.mapping import ShardedTensor
from minimegatron.core.utils import get_device
from minimegatron.training.initialize import set_random_seed

ITERATIONS_APART = 1_000_003
"""Between the seeds of two iterations, so that no other use of a seed comes to lie between."""


def rng_layout(per_copy: bool) -> dict[str, Any]:
    """The places there are, and whose generators run there."""
    layout = {
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size() if per_copy else 1,
        "device": get_device().type,
    }
    # Each rank draws for its part of a sequence. Checkpoints without this entry are of whole ones.
    num_parts = parallel_state.get_context_parallel_world_size()
    return layout if num_parts == 1 else layout | {"cp": num_parts}


def sharded_rng_state(per_copy: bool) -> list[ShardedTensor]:
    """This place's states. `per_copy`: copies of the model have their own; else the first's is all."""
    copy = parallel_state.get_data_parallel_rank()
    among_all = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    in_copy = parallel_state.get_context_parallel_rank()
    place = (
        f"rng.pp{parallel_state.get_pipeline_model_parallel_rank()}"
        f".tp{parallel_state.get_tensor_model_parallel_rank()}.dp{copy if per_copy else 0}"
    )
    return [
        ShardedTensor.from_rank_offsets(
            f"{place}.{stream}", state, replica_id=in_copy if per_copy else among_all
        )
        for stream, state in _get_states().items()
    ]


def take_rng_state(tensors: list[ShardedTensor]) -> None:
    """Goes on from the states in `tensors`, which `sharded_rng_state` made and a load filled."""
    states = {tensor.key.split(".", 4)[4]: tensor.data for tensor in tensors}
    words = [int(word) for word in states["python"]]
    random.setstate(
        (3, tuple(words[:625]), None if not words[625] else float(states["python"][626]))
    )
    words = states["numpy"].tolist()
    keys = numpy.array(words[:624], dtype=numpy.uint32)
    numpy.random.set_state(("MT19937", keys, int(words[624]), int(words[625]), words[626]))
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], get_device())
    tracked = {
        stream.removeprefix("tracker."): state
        for stream, state in states.items()
        if stream.startswith("tracker.")
    }
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def _get_states() -> dict[str, torch.Tensor]:
    _, words, gauss = random.getstate()
    python = [*words, gauss is not None, gauss or 0.0]
    _, keys, *rest = numpy.random.get_state()
    # float64 holds their 32-bit words exactly, and the spare Gaussian number beside them.
    states = {
        "python": torch.tensor(python, dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), *rest], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if get_device().type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(get_device())
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {f"tracker.{name}": state.clone() for name, state in tracked.items()}


def seed_again(seed: int, iteration: int, per_copy: bool) -> None:
    """Seeds everything as at the beginning, but so that `iteration` makes a difference."""
    set_random_seed((seed + ITERATIONS_APART * iteration) % 2**31, per_copy)
