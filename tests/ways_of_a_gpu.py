"""The ways that the package takes on a GPU, on a machine without one: for tests.

What differs there is asked of one function, `core.utils.device_is_asynchronous`. Here it says yes,
while tensors are those of the CPU, or of the meta device, where they have no numbers.
"""

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

import torch

from minimegatron.core import utils


@contextlib.contextmanager
def ways_of_a_gpu() -> Iterator[None]:
    """Every function of the package that asks what kind of device it has is told: a GPU."""
    name = utils.device_is_asynchronous.__name__
    asking = [
        module
        for key, module in list(sys.modules.items())
        if key.startswith("minimegatron.") and hasattr(module, name)
    ]
    with contextlib.ExitStack() as stack:
        for module in asking:
            stack.enter_context(mock.patch.object(module, name, lambda: True))
        yield


@contextlib.contextmanager
def staged() -> Iterator[None]:
    """Within it, the backend takes the tensors for those of a GPU that ranks share.

    What they exchange goes through copies in the host's memory. Fails if no tensor was asked where it
    is: then nothing was exchanged.
    """
    num_asked = [0]

    def is_cpu(tensor: torch.Tensor) -> bool:
        num_asked[0] += 1
        return False

    def copy_in_host(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    with mock.patch.multiple(torch.Tensor, is_cpu=property(is_cpu), cpu=copy_in_host):
        yield
    assert num_asked[0], "no tensor went through the backend"


@contextlib.contextmanager
def device_is(device: str) -> Iterator[None]:
    """Within it, this rank's tensors are made there."""
    with mock.patch.object(utils, "_device", torch.device(device)):
        yield
