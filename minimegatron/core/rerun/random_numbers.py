"""Every generator of random numbers of this process, as it is now, and put back.

Counterpart: `_save_state` and `_restore_state` of `megatron.core.rerun_state_machine`.
"""

import random
from collections.abc import Callable

import numpy
import torch

from minimegatron.core.utils import get_device


def keep_random_numbers() -> Callable[[], None]:
    """Notes where Python's, NumPy's, torch's and the GPU's generators stand; the function returned
    puts all of them back there."""
    python, of_numpy, of_torch = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    device = get_device()
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back() -> None:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)

    return put_back
