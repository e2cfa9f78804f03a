"""The end of a data set, where a run asks for more.

Megatron has no counterpart; there the iterator ends.
"""

from collections.abc import Iterator

import torch

from minimegatron.core.datasets.utils import DataError

SPLITS = (
    ("training", "--train-iters or --global-batch-size"),
    ("validation", "--eval-iters, or raise --eval-interval"),
    ("test", "--eval-iters"),
)
"""Of each split: what it is called, and which flags say how much is asked of it."""


def used_up(loader: torch.utils.data.DataLoader, split: str, flags: str) -> Iterator:
    """Stands behind a loader's microbatches: who asks for one more learns that there is none."""
    yield from ()
    sampler = loader.batch_sampler
    raise DataError(
        f"the {split} data set has {len(loader.dataset)} samples, but the run asks for more. It began "
        f"at sample {sampler.consumed_samples}, and one microbatch on each copy of the model takes "
        f"{sampler.step}; give it more samples, lower {flags}, or use --dataloader-type cyclic"
    )
