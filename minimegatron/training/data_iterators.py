"""From the user's dataset provider to iterators over microbatches.

Counterpart: the functions of the same names in `megatron.training.training`.

Only the first rank of each tensor-parallel group holds data; `get_batch_on_this_tp_rank` shares it.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import collectives, parallel_state
from minimegatron.core.utils import get_device
from minimegatron.training.datasets.data_samplers import (
    SPLITS,
    build_pretraining_data_loader,
    used_up,
)
from minimegatron.training.function_checks import check_datasets
from minimegatron.training.global_vars import get_args, get_train_state
from minimegatron.training.reruns import with_replay


def get_train_valid_test_num_samples(args: Any = None) -> tuple[int, int, int]:
    """Sequences that the whole run will ask of each dataset, at most; of another run by its `args`."""
    args = get_args() if args is None else args
    num_evals = 1 + (args.train_iters // args.eval_interval if args.eval_interval else 0)
    return (
        args.train_iters * args.global_batch_size,
        num_evals * args.eval_iters * args.global_batch_size,
        args.eval_iters * args.global_batch_size,
    )


def build_train_valid_test_data_loaders(
    build_train_valid_test_datasets_provider: Callable[[tuple[int, int, int]], tuple],
) -> tuple[Any, Any, Any]:
    """A loader per split, or None: on this rank, or because there is no such data.

    Also decides, for all ranks alike, whether there is anything to train on, validate and test.
    """
    args, state = get_args(), get_train_state()
    loaders = [None, None, None]
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        datasets = check_datasets(
            build_train_valid_test_datasets_provider(get_train_valid_test_num_samples())
        )
        consumed = (state.consumed_train_samples, state.consumed_valid_samples, 0)
        needed = (args.train_iters > state.iteration, args.eval_iters > 0, args.eval_iters > 0)
        for split, (dataset, skip) in enumerate(zip(datasets, consumed, strict=True)):
            if needed[split]:
                loaders[split] = build_pretraining_data_loader(
                    dataset,
                    skip,
                    micro_batch_size=args.micro_batch_size,
                    data_parallel_rank=parallel_state.get_data_parallel_rank(),
                    data_parallel_size=parallel_state.get_data_parallel_world_size(),
                    dataloader_type=args.dataloader_type,
                    num_workers=args.num_workers,
                    seed=args.seed,
                )
    # Stages without data do what those with data do. What a chunk with data has set stays set.
    flags = torch.tensor([x is not None for x in loaders], dtype=torch.int32, device=get_device())
    collectives.all_reduce(flags, dist.group.WORLD, op=collectives.ReduceOp.MAX)
    state.do_train |= bool(flags[0])
    state.do_valid |= bool(flags[1])
    state.do_test |= bool(flags[2])
    return loaders[0], loaders[1], loaders[2]


def build_train_valid_test_data_iterators(
    build_train_valid_test_datasets_provider: Callable[[tuple[int, int, int]], tuple],
) -> tuple[Iterator | None, Iterator | None, Iterator | None]:
    """An iterator over microbatches per split; None where this rank loads none.

    An iterator raises ValueError where one more microbatch is asked for than there are.
    """
    loaders = build_train_valid_test_data_loaders(build_train_valid_test_datasets_provider)
    train, valid, test = (
        None if loader is None else itertools.chain(iter(loader), used_up(loader, *words))
        for loader, words in zip(loaders, SPLITS, strict=True)
    )
    return None if train is None else with_replay(train), valid, test
