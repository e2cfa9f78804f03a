"""What ties an optimizer to its model: what must be alike first, and what it looks at in each step.

Megatron has no counterpart: there, where copies of a model differ, the numbers are wrong without a
word. `frozen_alike` has another check of this kind.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import words
from minimegatron.core.collectives import ReduceOp, all_reduce
from minimegatron.core.distributed.data_parallel_base import named_parameters_inside
from minimegatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from minimegatron.core.distributed.frozen_alike import (
    OF_ONE_COPY,
    check_frozen_alike,
    number_of,
    ranks_of,
)
from minimegatron.core.distributed.step_checks import (
    forget_reads_of_scale,
    refuse_changed_parameters,
    refuse_unsummed_grads,
)
from minimegatron.core.optimizer.optimizer import MegatronOptimizer
from minimegatron.core.optimizer.optimizer_config import OptimizerConfig
from minimegatron.core.parameter import KINDS, kind_of
from minimegatron.core.parameter_marks import restore_marks
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.subject_fields import enter_hooks
from minimegatron.core.tensor_parallel.random import check_same_dropout
from minimegatron.core.transformer.module_state import named_saved_buffers
from minimegatron.core.utils import get_device, unwrap_model

BY_COPY = (
    "set one seed, load one checkpoint, or call the data-parallel wrapper's broadcast_params(), then "
    "the optimizer's reload_model_params()"
)
BY_TENSOR = (
    "draw what is not cut alike on all tensor ranks, with one seed and in one order, or load one "
    "checkpoint; mark what is cut by set_tensor_model_parallel_attributes"
)


# -- Before the first step: the copies of a model are copies --


def check_same_groups(model: Sequence[torch.nn.Module], pg_collection: Any) -> None:
    """Raises ValueError where model, wrapper and optimizer have groups of other ranks, by one name.

    Its layers would exchange over some ranks, its gradients be summed over others. Embedding groups may
    differ: no layer exchanges over them.
    """
    for chunk in model:
        for part in (chunk, unwrap_model(chunk)):
            own = vars(part).get("pg_collection")
            for name in sorted(vars(own).keys() & vars(pg_collection).keys()) if own else ():
                ours, theirs = ranks_of(getattr(pg_collection, name)), ranks_of(getattr(own, name))
                if ours != theirs and name not in ("embd", "pos_embd"):
                    raise ValueError(
                        f"the group {name} is of ranks {theirs} for the {type(part).__name__}, but of "
                        f"{ours} for its optimizer; give model, data-parallel wrapper and optimizer "
                        "one pg_collection"
                    )


def refuse_shared_weights(model: Sequence[torch.nn.Module]) -> None:
    """Raises ValueError for a weight that is trained in two chunks of this rank.

    Each chunk would sum it over the copies of the model, and the optimizer would update it twice.
    """
    first: dict[torch.nn.Parameter, int] = {}
    shared = [
        f"{name} of chunk {number}, which is in chunk {first[param]} too"
        for number, chunk in enumerate(model)
        for name, param in named_parameters_inside(chunk)
        if first.setdefault(param, number) != number and param.requires_grad
    ]
    if shared:
        raise ValueError(
            f"{len(shared)} weights are in several chunks: {words.first_few(shared)}; give each chunk "
            "its own, or put all that use a weight into one chunk; LanguageModule shows how copies of "
            "an embedding on two stages stay alike"
        )


@torch.no_grad()
def check_copies_alike(model: Sequence[torch.nn.Module], pg_collection: Any) -> None:
    """Raises ValueError on ranks whose copy of the model has other weights than their peers'.

    Data-parallel ranks have copies of all weights, tensor ranks of those that are not cut. All ranks
    must call it. It reads a weight once for each group with copies of it, and sends one number; the
    same bits give the same number in whatever order they are added.

    Args:
        model: this rank's chunks, wrapped or not.
        pg_collection: a group that it lacks, or has a stand-in for, is not asked.
    """
    named = [pair for chunk in model for pair in named_parameters_inside(chunk)]
    problems = []  # raised last: another group's ranks may wait for this one's numbers
    for kind in KINDS.values():
        ours = [(name, param) for name, param in named if kind_of(param) is kind]
        whole = [pair for pair in ours if not getattr(pair[1], "tensor_model_parallel", False)]
        for group, pairs, remedy in ((kind.reduce, ours, BY_COPY), (kind.tensor, whole, BY_TENSOR)):
            problem = _difference(pairs, getattr(pg_collection, group, None), group)
            if problem:
                problems.append(f"{problem}; {remedy}")
    if problems:
        raise ValueError(problems[0])


@torch.no_grad()
def note_saved_buffers(model: Sequence[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Name and sum of bits of every buffer that a checkpoint keeps, for `check_buffers_alike`.

    As they are when the model is set up: a running mean differs between copies from the first step on.
    Those of experts are left out: within `dp_cp`, ranks have others.
    """
    return [
        (f"{name} {tuple(buffer.shape)} {buffer.dtype}", _sum_of_bits(buffer))
        for chunk in model
        for name, buffer in named_saved_buffers(unwrap_model(chunk))
        if ".experts." not in name and not buffer.is_meta
    ]


def check_buffers_alike(noted: Sequence[tuple[str, torch.Tensor]], pg_collection: Any) -> None:
    """Raises ValueError on ranks whose copy of the model began with other saved buffers.

    Of a buffer a checkpoint keeps the first copy's alone. All ranks must call it.
    """
    group = getattr(pg_collection, KINDS["dense"].reduce, None)
    problem = _difference(noted, group, KINDS["dense"].reduce, "buffers")
    if problem:
        raise ValueError(
            f"{problem}, and a checkpoint would keep one of them; fill them alike before the optimizer "
            "is made, or register with persistent=False what each rank is to have for itself"
        )


def _sum_of_bits(param: torch.Tensor) -> torch.Tensor:
    as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    flat = param.detach().contiguous().view(-1)
    bits = flat.view(as_integers.get(param.element_size(), torch.int64))
    return bits.sum(dtype=torch.int64).to(get_device())


def _difference(named: Sequence[Any], group: Any, group_name: str, what: str = "weights") -> str:
    """Tells how `named`, pairs of name and tensor, differ between the ranks of the group."""
    # What stands in for a group connects nobody.
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
        return ""
    shapes = number_of(f"{name} {tuple(param.shape)} {param.dtype}" for name, param in named)
    names = [f"{len(named)} names, shapes and dtypes of {what}"]
    differ = _differ(names, [torch.tensor(shapes, device=get_device())], group)
    if named and not differ:  # as many numbers on each rank
        names = [name for name, _ in named]
        differ = _differ(names, [_sum_of_bits(param) for _, param in named], group)
    if not differ:
        return ""
    return (
        f"rank {group.rank()} of the {group.size()} in group {group_name}: {len(differ)} of "
        f"{len(names)} {what}, such as {differ[0]}, are not the same on all of them, and the "
        "copies of the model would stay apart"
    )


def _differ(names: Sequence[str], numbers: Sequence[torch.Tensor], group: Any) -> list[str]:
    numbers = torch.stack(list(numbers))
    highest = torch.cat([numbers, -numbers])
    all_reduce(highest, group, ReduceOp.MAX)
    highest, lowest = highest.chunk(2)
    return [names[i] for i in (highest != -lowest).nonzero().flatten().tolist()]


# -- Before the optimizer is made, and when it is --


def check_learning_rate(lr: float | None) -> None:
    """There is one."""
    if lr is None:
        raise ValueError("OptimizerConfig.lr is None; give a learning rate")


def check_model(
    config: OptimizerConfig,
    model_chunks: Sequence[torch.nn.Module],
    pg_collection: ProcessGroupCollection,
) -> None:
    """Refuses chunks that do not fit the configuration, each other, or those of other ranks.

    On the way, parameters get back the marks that a copy of the model has lost: the last check reads
    them. All ranks must call it.
    """
    _check_wrappers(config, model_chunks)
    check_same_groups(model_chunks, pg_collection)
    refuse_shared_weights(model_chunks)
    for chunk in model_chunks:
        restore_marks(chunk)
    check_frozen_alike(model_chunks, pg_collection, OF_ONE_COPY)


def _check_wrappers(config: OptimizerConfig, model_chunks: Sequence[torch.nn.Module]) -> None:
    """Optimizer and data-parallel wrapper must mean the same: otherwise ranks silently diverge."""
    for chunk in model_chunks:
        ddp_config = chunk.ddp_config if hasattr(chunk, "ddp_config") else None
        for name in ("use_distributed_optimizer", "overlap_param_gather"):
            ours = getattr(config, name)
            theirs = ddp_config is not None and getattr(ddp_config, name)
            if ours != theirs:
                raise ValueError(
                    f"{name} is {ours} in OptimizerConfig but {theirs} for the model's "
                    f"{type(chunk).__name__}; set both alike"
                )


def connect(optimizer: MegatronOptimizer, model_chunks: Sequence[torch.nn.Module]) -> None:
    """The chunks learn the loss scale; the optimizer, what to check before and in its steps."""
    pg_collection = optimizer.pg_collection
    optimizer.first_checks += [
        partial(check_copies_alike, model_chunks, pg_collection),
        partial(check_buffers_alike, note_saved_buffers(model_chunks), pg_collection),
    ]
    # Before checks that one rank alone may fail.
    optimizer.grad_checks.append(partial(check_same_dropout, model_chunks, pg_collection.tp))
    for chunk in model_chunks:
        chunk.grad_scaler = optimizer.grad_scaler
        if optimizer.grad_scaler is not None and hasattr(chunk, "config"):
            hook = {"before_step_funcs": (forget_reads_of_scale,)}
            enter_hooks(chunk.config, True, hook.copy)
        if isinstance(chunk, DistributedDataParallel):
            chunk.optimizer_checks_grads = True
            optimizer.grad_checks.append(chunk.check_grads)
        else:
            places = {param: (param.dtype, param.device, None) for param in optimizer.model_params}
            optimizer.grad_checks.append(partial(refuse_changed_parameters, chunk, places))
            if hasattr(chunk, "check_grads"):
                optimizer.grad_checks.append(chunk.check_grads)
            else:
                unsummed = partial(refuse_unsummed_grads, optimizer.model_params, pg_collection)
                optimizer.grad_checks.append(unsummed)
