"""Ranks that hold the same weights, or wait for each other's messages, must freeze the same of them.

Megatron has no counterpart. There, ranks that differ wait for each other in backward or in
`finalize_model_grads`, or add up what does not belong together.

| group       | what its ranks share                        | what they must agree on           |
|-------------|---------------------------------------------|-----------------------------------|
| `dp_cp`     | weights                                     | names of what is trained          |
| `tp`        | weights, or have pieces of them             | the same                          |
| `embd`      | copies of the word embedding                | whether these are trained         |
| `pos_embd`  | copies of the position embedding            | the same                          |
| `tp_ep`     | a layer's experts                           | where backward ends               |

Backward ends at the first parameter that is trained. If that is an expert on one rank only, the others
send no gradients of tokens back, and that rank waits for them.

A data-parallel wrapper asks its copies; the optimizer asks the other groups.
"""

import hashlib
import inspect
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp, all_reduce
from minimegatron.core.distributed.data_parallel_base import named_parameters_inside
from minimegatron.core.parameter import KINDS, ParameterKind, kind_of
from minimegatron.core.utils import get_device, unwrap_model

EXPERTS = ".experts."
"""In the name of a parameter of one of a layer's experts, but not of its shared expert's."""
EXPERTS_OF_A_RANK = ".local_experts."
"""In the name of a parameter that is inside one of this rank's experts."""


OF_ONE_COPY = ("tp", "embd", "pos_embd", "tp_ep")
"""Groups within a copy of the model, or within the copies that have one set of experts together."""


def check_frozen_alike(
    model: Sequence[torch.nn.Module],
    pg_collection: Any,
    among: Collection[str] = ("dp_cp", *OF_ONE_COPY),
) -> None:
    """Raises ValueError on ranks that freeze other parameters than their peers. All must call it.

    `get_megatron_optimizer` does, `among` the groups of one copy.

    Args:
        model: this rank's chunks, wrapped or not.
        pg_collection: a group that it lacks, or has a stand-in for, is not asked.
        among: the groups that are asked.
    """
    named = [pair for chunk in model for pair in named_parameters_inside(chunk)]
    trained = [name for name, param in named if param.requires_grad and EXPERTS not in name]
    text = f"{len(trained)} parameters require a gradient, not counting experts"
    for group in ("dp_cp", "tp"):
        if group in among:
            _check({number_of(trained)}, pg_collection, group, text)
    for group, what, copies in (
        ("embd", "word embedding", [p for _, p in named if getattr(p, "shared_embedding", False)]),
        ("pos_embd", "position embedding", [p for n, p in named if "position_embeddings." in n]),
    ):
        is_trained = {int(copy.requires_grad) for copy in copies}
        text = f"copies of the {what}, a tied output layer's among them: {len(copies)} here, "
        text += f"and {sum(copy.requires_grad for copy in copies)} of them require a gradient"
        if group in among:
            _check(is_trained, pg_collection, group, text)
    if "tp_ep" in among and any(EXPERTS in name for name, _ in named):
        place, name = _where_backward_ends(model)
        _check({place}, pg_collection, "tp_ep", f"backward ends at {name}")


def refuse_unmarked_in_experts(module: torch.nn.Module, pg_collection: Any) -> None:
    """Raises ValueError where a parameter that a program has added to an expert has no mark.

    Experts of one name on two ranks are two experts. Taken for a dense one, what was added to one of
    them would get the sum of both gradients.
    """
    unmarked = [
        (name, param)
        for name, param in named_parameters_inside(module)
        if EXPERTS_OF_A_RANK in name
        and param.requires_grad
        and not (hasattr(param, "allreduce") or hasattr(param, "kind"))
    ]
    if not unmarked:
        return
    name, param = unmarked[0]
    taken = _groups_of_kind(kind_of(param), pg_collection)
    known = [_groups_of_kind(kind, pg_collection) for kind in KINDS.values()]
    others = [groups for groups in known if None not in groups and groups != taken]
    if not others:
        return
    raise ValueError(
        f"{len(unmarked)} parameters inside experts, such as {name}, do not say whether each expert "
        f"has its own (set param.allreduce = False: summed over ranks {others[0][0]}) or all experts "
        f"of all ranks have the same (param.allreduce = True: over {taken[0]}); set it before the "
        "model is wrapped, or build the layer with is_expert=True"
    )


WAYS = ("use_distributed_optimizer", "average_in_collective", "overlap_grad_reduce")
"""Of a wrapper's configuration: which messages carry its gradients."""


def check_summed_alike(
    module: torch.nn.Module, pg_collection: Any, ddp_config: Any, buffers: Sequence[Any] = ()
) -> None:
    """Raises ValueError on ranks whose copy of the module would sum other gradients than their peers.

    Buffers have no names in them: a layer's gradients would be added to another layer's. All ranks with
    a copy must call it: `DistributedDataParallel` does before its first step, torch's when it is made.

    Args:
        module: what the wrapper wraps.
        buffers: where the gradients will be, if that is known; for each group buckets of one size.
    """
    named, problems = named_parameters_inside(module), []
    for kind in KINDS.values():
        ours = [(name, param) for name, param in named if kind_of(param) is kind]
        group = vars(pg_collection).get(kind.reduce)
        trained = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in ours if p.requires_grad]
        here = [buffer for buffer in buffers if buffer.data_parallel_group is group]
        buckets = [[*b.grad_data.shape, b.grad_data.dtype] for buf in here for b in buf.buckets]
        way = {name: getattr(ddp_config, name) for name in WAYS} | {"buckets": len(buckets)}
        way = ", ".join(f"{name} {value}" for name, value in way.items())
        frozen = [name for name, param in ours if not param.requires_grad] or ["none"]
        # Raised last: another group's ranks may wait for this one's number.
        if ours and _is_other({number_of([*trained, way, str(buckets)])}, group):
            problems.append(
                f"rank {group.rank()} of the {group.size()} in group {kind.reduce}: another copy of "
                f"the model would sum other gradients; here {len(trained)} of {len(ours)} parameters "
                f"require a gradient (frozen: {', '.join(frozen[:3])}), with {way}; set requires_grad, "
                "DistributedDataParallelConfig and disable_bucketing alike on all of them"
            )
    if problems:
        raise ValueError(problems[0])


def _groups_of_kind(kind: ParameterKind, pg_collection: Any) -> list[Any]:
    return [ranks_of(vars(pg_collection).get(name)) for name in (kind.reduce, kind.tensor)]


def ranks_of(group: Any) -> Any:
    """The group's ranks; what stands in for a group is itself."""
    is_real = isinstance(group, dist.ProcessGroup)
    return dist.get_process_group_ranks(group) if is_real else group


def number_of(names: Iterable[str]) -> int:
    """56 bits of a digest: ranks that have other names have another number."""
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _where_backward_ends(model: Sequence[torch.nn.Module]) -> tuple[int, str]:
    """The first trained parameter's name, after a number for its place.

    The number is twice the count of the parameters before it, experts' left out; plus 1 if it is an
    expert's own.
    """
    for chunk in unwrap_model(list(model)):
        if getattr(chunk, "pre_process", True):
            before = 0
            for name, param in chunk.named_parameters():
                if param.requires_grad:
                    return 2 * before + (EXPERTS in name), name
                before += EXPERTS not in name
            return 2 * before, "the chunk's end, for nothing in it is trained"
    return 0, "the chunk's input"


def _check(numbers: set[int], pg_collection: Any, name: str, text: str) -> None:
    """That all numbers of all ranks of a group are one; a rank may have none."""
    group = getattr(pg_collection, name, None)
    if _is_other(numbers, group):
        raise ValueError(
            f"rank {group.rank()} of the {group.size()} in group {name}: another rank of it has frozen "
            f"other parameters; here {text}; set requires_grad alike on all of them"
        )


def _is_other(numbers: set[int], group: Any) -> bool:
    # What stands in for a group connects nobody.
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
        return False
    bounds = [max(numbers, default=-1), max((-n for n in numbers), default=-(1 << 62))]
    bounds = torch.tensor(bounds, device=get_device())
    inspect.unwrap(all_reduce)(bounds, group, ReduceOp.MAX)  # of no step, so no observer is told
    highest, lowest = bounds[0].item(), -bounds[1].item()
    return highest > lowest
