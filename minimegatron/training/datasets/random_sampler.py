"""Which samples each copy of the model sees where each epoch has an order of its own.

Counterpart: `MegatronPretrainingRandomSampler` of `megatron.training.datasets.data_samplers`.
"""

from collections.abc import Iterator

import numpy

from minimegatron.core.datasets.utils import DataError


class MegatronPretrainingRandomSampler:
    """Epoch after epoch, each in an order of its own that `seed` and the epoch's number decide.

    All copies share one endless row of samples: an epoch's every sample, then the next epoch's. A step
    over an epoch's end takes samples of both. Megatron leaves out what does not fill an epoch's last
    step, so there the row depends on the number of copies.

    >>> [next(iter(MegatronPretrainingRandomSampler(5, 3, 2, rank, 2))) for rank in (0, 1)]
    [[0, 1], [1, 4]]
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        seed: int = 0,
    ):
        if total_samples < 1:
            raise DataError(f"the dataset has {total_samples} samples; give it 1 or more")
        self.step = micro_batch_size * data_parallel_size
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size, self.seed = micro_batch_size, seed
        self.data_parallel_rank = data_parallel_rank
        self._epoch, self._order = -1, numpy.empty(0, dtype=numpy.int64)

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        """Batches of sample numbers for this copy, without end."""
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        while True:
            yield [self._sample(place) for place in range(first, first + self.micro_batch_size)]
            first += self.step

    def _sample(self, place: int) -> int:
        """What stands at this place of the row."""
        epoch, within = divmod(place, self.total_samples)
        if epoch != self._epoch:
            numbers = numpy.random.default_rng([self.seed, epoch])
            self._epoch, self._order = epoch, numbers.permutation(self.total_samples)
        return int(self._order[within])
