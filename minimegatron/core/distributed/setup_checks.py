"""What must be alike before the first step, so that the copies of a model stay copies.

Megatron has no counterpart: there, the numbers are wrong without a word. `frozen_alike` has another
check of this kind.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp, all_reduce
from minimegatron.core.distributed.data_parallel_base import named_parameters_inside
from minimegatron.core.distributed.frozen_alike import number_of
from minimegatron.core.parameter import KINDS, kind_of
from minimegatron.core.utils import get_device, unwrap_model


def check_same_groups(model: Sequence[torch.nn.Module], pg_collection: Any) -> None:
    """Raises ValueError where model, wrapper and optimizer have groups of other ranks, by one name.

    Its layers would exchange over some ranks, its gradients be summed over others. Embedding groups may
    differ: no layer exchanges over them.
    """
    for chunk in model:
        for part in (chunk, unwrap_model(chunk)):
            own = vars(part).get("pg_collection")
            for name in sorted(vars(own).keys() & vars(pg_collection).keys()) if own else ():
                ours, theirs = _ranks(getattr(pg_collection, name)), _ranks(getattr(own, name))
                if ours != theirs and name not in ("embd", "pos_embd"):
                    raise ValueError(
                        f"the group {name} is of ranks {theirs} for the {type(part).__name__}, but of "
                        f"{ours} for its optimizer; give model, data-parallel wrapper and optimizer "
                        "one pg_collection"
                    )


def _ranks(group: Any) -> Any:
    is_real = isinstance(group, dist.ProcessGroup)
    return dist.get_process_group_ranks(group) if is_real else group


@torch.no_grad()
def check_copies_alike(model: Sequence[torch.nn.Module], pg_collection: Any) -> None:
    """Raises ValueError on ranks whose copy of the model has other weights than their peers'.

    All ranks must call it. It reads each weight once, and sends one number for each; the same bits give
    the same number in whatever order they are added.

    Args:
        model: this rank's chunks, wrapped or not.
        pg_collection: a group that it lacks, or has a stand-in for, is not asked.
    """
    named = [pair for chunk in model for pair in named_parameters_inside(chunk)]
    shapes = [f"{name} {tuple(param.shape)} {param.dtype}" for name, param in named]
    _compare(
        [f"{len(named)} names, shapes and dtypes of parameters"],
        [number_of(shapes)],
        pg_collection,
        "dp_cp",
    )
    for kind in KINDS.values():
        ours = [(name, param) for name, param in named if kind_of(param) is kind]
        if ours:
            names, params = zip(*ours, strict=True)
            _compare(names, [_sum_of_bits(param) for param in params], pg_collection, kind.reduce)


def _sum_of_bits(param: torch.Tensor) -> torch.Tensor:
    as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = param.detach().contiguous().view(as_integers[param.element_size()])
    return bits.sum(dtype=torch.int64).to(get_device())


def _compare(names: Sequence[str], numbers: Sequence[Any], pg_collection: Any, name: str) -> None:
    group = getattr(pg_collection, name, None)
    # What stands in for a group connects nobody.
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
        return
    numbers = torch.stack([torch.as_tensor(number, device=get_device()) for number in numbers])
    highest = torch.cat([numbers, -numbers])
    all_reduce(highest, group, ReduceOp.MAX)
    highest, lowest = highest.chunk(2)
    differ = [names[i] for i in (highest != -lowest).nonzero().flatten().tolist()]
    if differ:
        raise ValueError(
            f"rank {group.rank()} of the {group.size()} in group {name}: {len(differ)} of {len(names)} "
            f"weights, such as {differ[0]}, are not the same on all of them, and the copies of the "
            "model would stay apart; set one seed, load one checkpoint, or call the "
            "data-parallel wrapper's broadcast_params(), then the optimizer's reload_model_params()"
        )
