"""Random numbers that agree, or differ, between tensor-parallel ranks as they must.

Counterpart: `megatron.core.tensor_parallel.random`; its names say CUDA, but here they serve the CPU
too.

Dropout needs two kinds of randomness. Where every tensor-parallel rank holds the same activations,
all must drop the same ones: they use the default generator, seeded alike. Where each holds its own
piece (heads; with sequence parallelism, tokens), each must drop others: they `fork()` to a generator
seeded by rank.

    activations                            without sequence parallelism   with it
    -------------------------------------  -----------------------------  -----------------
    between layers (hidden dropout)        default: equal over tp         model-parallel
    attention probabilities, per head      model-parallel                 model-parallel

Ranks that share a sequence draw alike, as in Megatron, though their tokens differ: no seed depends on a
context-parallel rank.

The default generator is the one of the device that this process computes on. On a CPU that is torch's
default generator, which also draws the weights of a layer that is built by itself, and a number for
each iterator of a `DataLoader` that has no generator of its own. Where only some ranks draw,
`check_same_dropout` refuses the update.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp, all_reduce
from minimegatron.core.tensor_parallel import shape_checks
from minimegatron.core.tensor_parallel.megatron_methods import KeptRNGStates
from minimegatron.core.tensor_parallel.utils import tensor_model_parallel_rank
from minimegatron.core.utils import get_device, unwrap_model
from minimegatron.exports import all_of

# Megatron has recompute here.
__getattr__, __dir__ = all_of(__name__, "minimegatron.core.tensor_parallel.recompute")

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_DATA_PARALLEL_RNG_TRACKER_NAME = "data-parallel-rng"


def get_data_parallel_rng_tracker_name() -> str:
    """The state that is equal over tensor-parallel ranks."""
    return _DATA_PARALLEL_RNG_TRACKER_NAME


# -- The default generator of the device that this process computes on --


def get_rng_state() -> torch.Tensor:
    """Where the generator stands, for `set_rng_state`."""
    device = get_device()
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """The generator gives again what it gave after `get_rng_state` returned `state`."""
    device = get_device()
    of_gpu = partial(torch.cuda.set_rng_state, device=device)
    set_state = of_gpu if device.type == "cuda" else torch.set_rng_state
    set_state(state)


def _manual_seed(seed: int) -> None:
    generator = torch.cuda if get_device().type == "cuda" else torch.default_generator
    generator.manual_seed(seed)


class CudaRNGStatesTracker(KeptRNGStates):
    """Named states of the default generator, exchanged for it within `fork`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all states."""
        self.states_ = {}
        self.seeds_: set[int] = set()
        self.current: str | None = None  # the state that a `fork` has put into the generator

    def add(self, name: str, seed: int) -> None:
        """Adds a state seeded by `seed`. Raises ValueError if either is taken."""
        shape_checks.check_is_free(name, seed, self.states_, self.seeds_)
        before = get_rng_state()
        _manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = get_rng_state()
        set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Within it, random numbers come from `name`'s state, which advances.

        A fork within a fork of the same name goes on with the outer one's numbers, and the outer one
        goes on after the inner one's.

        Raises:
            ValueError: no such state.
        """
        if name not in self.states_:
            shape_checks.refuse_unknown(name, self.states_)
        outer, before = self.current, get_rng_state()
        if outer is not None:
            self.states_[outer] = before
        set_rng_state(self.states_[name])
        self.current = name
        try:
            yield
        finally:
            self.states_[name] = get_rng_state()
            # An outer fork of the same name, or of a name forked within this one, has advanced.
            set_rng_state(before if outer is None else self.states_.get(outer, before))
            self.current = outer


_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """This process's tracker."""
    return _CUDA_RNG_STATE_TRACKER


def model_parallel_cuda_manual_seed(seed: int, *, tp_rank: int | None = None) -> None:
    """Seeds a GPU's default generator and the tracker's two states, the model-parallel one by rank too.

    torch's default generator stays as it is. A CPU's dropout between layers comes from it, so the
    caller seeds it alike on the ranks of a tensor-parallel group: `torch.manual_seed(seed)`.

    Pipeline stages and, if wanted, data-parallel ranks differ because the caller gives them another
    `seed` (Megatron: seed + 100 x pipeline rank, + 10 x data rank under data_parallel_random_init).

    Args:
        seed: equal over the ranks of a tensor-parallel group.
        tp_rank: None for `parallel_state`'s.
    """
    tp_rank = tensor_model_parallel_rank() if tp_rank is None else tp_rank
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    if get_device().type == "cuda":
        torch.cuda.manual_seed(seed)
    tracker.add(get_data_parallel_rng_tracker_name(), seed)
    # 2718 apart, so that no rank's seed is another use's seed plus a small number.
    tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + tp_rank)


@torch.no_grad()
def check_same_dropout(model: Iterable[torch.nn.Module], tp_group: Any) -> None:
    """Raises ValueError if ranks of a tensor-parallel group drop other activations between layers.

    It compares CPUs' default generators, by one number of 56 bits. All ranks of the group must call it.
    On a GPU, with sequence parallelism or without `hidden_dropout` it asks nobody.
    """
    chunks = unwrap_model(list(model))
    configs = [c.config for c in chunks if hasattr(getattr(c, "config", None), "hidden_dropout")]
    drops = any(config.hidden_dropout > 0.0 and not config.sequence_parallel for config in configs)
    is_group = isinstance(tp_group, dist.ProcessGroup) and tp_group.size() > 1
    if not (drops and is_group) or get_device().type == "cuda":
        return
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=7).digest()
    # In evaluation mode nothing drops; and ranks do not differ in it, but if so, all hear of it.
    number = int.from_bytes(digest, "little") if any(chunk.training for chunk in chunks) else 0
    bounds = torch.tensor([number, -number])
    all_reduce(bounds, tp_group, ReduceOp.MAX)
    if bounds.sum() != 0:
        shape_checks.refuse_other_dropout(tp_group)
