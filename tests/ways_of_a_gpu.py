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
def device_is(device: str) -> Iterator[None]:
    """Within it, this rank's tensors are made there."""
    with mock.patch.object(utils, "_device", torch.device(device)):
        yield
