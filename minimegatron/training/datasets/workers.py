"""What `--num-workers` needs of a machine, before a worker is started.

Megatron has no counterpart. Workers hand batches over in /dev/shm, which is small in many a container;
they would be killed there (SIGBUS) in the middle of a run.
"""

import errno

import numpy
import torch

from minimegatron.core.datasets.atomic_file import CannotWrite
from minimegatron.doctor.folders import IN_MEMORY, has_room, keep_sockets

BATCHES_PER_WORKER = 3
"""Two that are ready, and one that is in use."""
LEAST_BYTES = 1 << 16
"""What the workers' queues need in any case."""


def prepare_for_workers(
    dataset: torch.utils.data.Dataset, num_workers: int, micro_batch_size: int
) -> None:
    """Finds a place for the workers' sockets. Raises CannotWrite if their batches have no room.

    Reads one sample, to know how large they are.
    """
    keep_sockets()
    sample = dataset[0]
    values = sample.values() if isinstance(sample, dict) else ()
    sample_bytes = sum(numpy.asarray(value).nbytes for value in values if value is not None)
    num_bytes = LEAST_BYTES + BATCHES_PER_WORKER * num_workers * micro_batch_size * sample_bytes
    if IN_MEMORY.is_dir() and not has_room(IN_MEMORY, num_bytes):
        raise CannotWrite(
            errno.ENOSPC,
            f"--num-workers {num_workers} hands batches over there, and {num_bytes:,} bytes have no "
            "room; give --num-workers 0, or more room (docker run --shm-size 1g)",
            str(IN_MEMORY),
        )
