"""Which samples each copy of the model sees, and from where on.

Counterpart: `megatron.training.datasets.data_samplers`.

`consumed_samples` counts over all copies and all epochs; a run that stopped goes on at exactly the
sample it would have taken next, however many copies there are now.
"""

from collections.abc import Iterator

import torch

from minimegatron.core.datasets.utils import DataError
from minimegatron.core.utils import get_device
from minimegatron.exports import lazily
from minimegatron.training.datasets import random_sampler, workers

_RANDOM = "minimegatron.training.datasets.random_sampler"
__getattr__, __dir__ = lazily(
    __name__,
    {"MegatronPretrainingRandomSampler": f"{_RANDOM}:MegatronPretrainingRandomSampler"},
)


class MegatronPretrainingSampler:
    """The dataset in its own order, once. Each step of `micro_batch_size x copies` is dealt in turn.

    >>> [list(MegatronPretrainingSampler(8, 2, 1, rank, 2)) for rank in (0, 1)]
    [[[2], [4], [6]], [[3], [5], [7]]]
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ):
        if consumed_samples >= total_samples:
            raise DataError(
                f"{consumed_samples} samples are consumed, but the dataset has {total_samples}; "
                "raise --train-iters, or use --dataloader-type cyclic"
            )
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size, self.drop_last = micro_batch_size, drop_last
        self.data_parallel_rank = data_parallel_rank
        self.step = micro_batch_size * data_parallel_size

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        """Batches of sample numbers for this copy: the rank-th part of each step's samples."""
        mine = self.data_parallel_rank * self.micro_batch_size
        for first in range(self.consumed_samples, self.total_samples, self.step):
            whole = range(first, min(first + self.step, self.total_samples))
            part = list(whole[mine : mine + self.micro_batch_size])
            if len(whole) == self.step or (part and not self.drop_last):
                yield part


def build_pretraining_data_loader(
    dataset: torch.utils.data.Dataset | None,
    consumed_samples: int,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    dataloader_type: str = "single",
    num_workers: int = 0,
    seed: int = 0,
) -> torch.utils.data.DataLoader | None:
    """Microbatches of this copy, as dicts of tensors [micro_batch_size, ...]; None for no dataset."""
    if dataset is None:
        return None
    share = (
        len(dataset),
        consumed_samples,
        micro_batch_size,
        data_parallel_rank,
        data_parallel_size,
    )
    if dataloader_type == "single":
        sampler = MegatronPretrainingSampler(*share)
    else:
        sampler = random_sampler.MegatronPretrainingRandomSampler(*share, seed=seed)
    if num_workers > 0:
        workers.prepare_for_workers(dataset, num_workers, micro_batch_size)
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        pin_memory=get_device().type == "cuda",
        persistent_workers=num_workers > 0,
        # Every iterator draws a number. From the default generator, which dropout uses on a CPU,
        # it would draw only on ranks that load data, and tensor-parallel ranks would drop apart.
        generator=torch.Generator().manual_seed(seed),
    )


# -- The end of a data set, where a run asks for more; in Megatron the iterator ends --

SPLITS = (
    ("training", "--train-iters or --global-batch-size"),
    ("validation", "--eval-iters, or raise --eval-interval"),
    ("test", "--eval-iters"),
)
"""Of each split: what it is called, and which flags say how much is asked of it."""


def used_up(loader: torch.utils.data.DataLoader, split: str, flags: str) -> Iterator:
    """Stands after a loader's microbatches: who asks for one more learns that there is none."""
    yield from ()
    sampler = loader.batch_sampler
    raise DataError(
        f"the {split} data set has {len(loader.dataset)} samples, but the run asks for more. It began "
        f"at sample {sampler.consumed_samples}, and one microbatch on each copy of the model takes "
        f"{sampler.step}; give it more samples, lower {flags}, or use --dataloader-type cyclic"
    )
