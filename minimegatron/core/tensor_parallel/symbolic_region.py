"""An autograd function whose forward can be run by itself, without a backward.

Counterpart: `symbolic` of the classes in `megatron.core.tensor_parallel.mappings`.
"""

from types import SimpleNamespace

import torch


class SymbolicRegion(torch.autograd.Function):
    """A row of the table in `mappings`."""

    @classmethod
    def symbolic(cls, graph, input_, *options):
        """The row's forward, without a backward. Megatron's classes have it under this name."""
        return cls.forward(SimpleNamespace(), input_, *options)
