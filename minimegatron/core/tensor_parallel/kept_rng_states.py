"""Random states that can be taken away and put back: by checkpoints, recompute, a step that failed.

Counterpart: three methods of `CudaRNGStatesTracker` in `megatron.core.tensor_parallel.random`.
"""

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
