"""What classes of this folder have besides, as Megatron's do. A plain step calls none of it.

Random states are taken away and put back by checkpoints, recompute and a step that failed.

Counterpart: three methods of `CudaRNGStatesTracker` in `megatron.core.tensor_parallel.random`; and
`symbolic` of the classes in `megatron.core.tensor_parallel.mappings`.
"""

from types import SimpleNamespace

import torch


class KeptRNGStates:
    """Has the states by name."""

    states_: dict[str, torch.Tensor]

    def is_initialized(self) -> bool:
        """True once a state was added or restored."""
        return bool(self.states_)

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name, in a dict of their own. The tensors are the tracker's; it replaces
        them, and does not change them.
        """
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Restores what `get_states` returned."""
        self.states_ = dict(states)


class SymbolicRegion(torch.autograd.Function):
    """A row of the table in `mappings`."""

    @classmethod
    def symbolic(cls, graph, input_, *options):
        """The row's forward, without a backward. Megatron's classes have it under this name."""
        return cls.forward(SimpleNamespace(), input_, *options)
