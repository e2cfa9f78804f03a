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
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core.collectives import ReduceOp, all_reduce
from minimegatron.core.distributed.data_parallel_base import named_parameters_inside
from minimegatron.core.utils import get_device, unwrap_model

EXPERTS = ".experts."
"""In the name of a parameter of one of a layer's experts, but not of its shared expert's."""


def check_frozen_alike(model: Sequence[torch.nn.Module], pg_collection: Any) -> None:
    """Raises ValueError on ranks that freeze other parameters than their peers. All must call it.

    Args:
        model: this rank's chunks, wrapped or not.
        pg_collection: a group that it lacks, or has a stand-in for, is not asked.
    """
    named = [pair for chunk in model for pair in named_parameters_inside(chunk)]
    trained = [name for name, param in named if param.requires_grad and EXPERTS not in name]
    text = f"{len(trained)} parameters require a gradient, not counting experts"
    for group in ("dp_cp", "tp"):
        _check({number_of(trained)}, pg_collection, group, text)
    for group, what, copies in (
        ("embd", "word embedding", [p for _, p in named if getattr(p, "shared_embedding", False)]),
        ("pos_embd", "position embedding", [p for n, p in named if "position_embeddings." in n]),
    ):
        is_trained = {int(copy.requires_grad) for copy in copies}
        text = f"copies of the {what}, a tied output layer's among them: {len(copies)} here, "
        text += f"and {sum(copy.requires_grad for copy in copies)} of them require a gradient"
        _check(is_trained, pg_collection, group, text)
    if any(EXPERTS in name for name, _ in named):
        place, name = _where_backward_ends(model)
        _check({place}, pg_collection, "tp_ep", f"backward ends at {name}")


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
    # What stands in for a group connects nobody.
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
        return
    bounds = [max(numbers, default=-1), max((-n for n in numbers), default=-(1 << 62))]
    bounds = torch.tensor(bounds, device=get_device())
    all_reduce(bounds, group, ReduceOp.MAX)
    highest, lowest = bounds[0].item(), -bounds[1].item()
    if highest > lowest:
        raise ValueError(
            f"rank {group.rank()} of the {group.size()} in group {name}: another rank of it has frozen "
            f"other parameters; here {text}; set requires_grad alike on all of them"
        )
