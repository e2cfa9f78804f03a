"""A step of a named schedule, planned once for all ranks of a pipeline and shared.

Megatron has no counterpart: a schedule there is the code that runs it.

What one rank does depends on the order of all ranks. At 64 stages that is half a million pieces of
work, so rank 0 alone asks for the order, checks and times it. Each other rank is sent its own part,
and places its own messages. So ranks cannot have different plans, even of an order that chance or the
environment decides. A later step of the same sizes sends nothing.

Over the group of the pipeline, in a step that all ranks have begun, as one that fails here must tell
the others:

1. All tell what they ask for. Where that differs, every rank raises the same error.
2. Rank 0 says how long each rank's part is, and then sends it. What has failed there is the part of
   every rank, and every rank raises it.
"""

import pickle
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from minimegatron.core import collectives
from minimegatron.core.orders.lowering import (
    CommonOrder,
    LoweredStep,
    RankOrder,
    RankStep,
)
from minimegatron.core.orders.orders import PlanConfig, Schedule
from minimegatron.core.orders.runnable import require_runnable
from minimegatron.core.orders.work import Work
from minimegatron.core.utils import get_device

_MOST_KEPT = 64
_MOST_SHOWN = 200
_PLANNER = 0
"""The rank of the pipeline that plans for all."""

Key = tuple[Schedule, tuple]
_kept: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
"""Pipeline's group -> `Asked.key` -> the step on this rank."""


class Asked(NamedTuple):
    """What a rank is asked to run."""

    schedule: Schedule
    sizes: tuple[tuple[str, Any], ...]
    """(name, value) of all that the step depends on; the same on all ranks of the pipeline."""
    make: Callable[[], CommonOrder | LoweredStep]
    """Plans it, for all ranks."""
    config: PlanConfig | None = None
    """What each rank lowers its part for; None if the schedule names its messages."""

    @property
    def key(self) -> Key:
        """The same for the same step."""
        return self.schedule, self.sizes


def step_of_rank(asked: Asked, pp_group: dist.ProcessGroup) -> RankStep:
    """The step on this rank. All ranks of the pipeline call it; a step that is kept sends nothing.

    So nobody hears of a rank that asks for another step than the others, if it is kept there.

    Raises, on all ranks alike, what making the step raises; ValueError if it cannot be run, or if the
    ranks do not ask for the same.
    """
    if (kept := _kept_of(pp_group).get(asked.key)) is not None:
        return kept
    rank = pp_group.rank()
    if not _is_shared(pp_group):
        part = _planned(asked).of_rank(rank)
    else:
        _require_same(asked, pp_group)
        if rank == _PLANNER:
            part = _plan_for_all(asked, pp_group)
        else:
            part = _unpacked(_distribute(None, pp_group))
    return part.ready(asked.config)


def keep_step(asked: Asked, step: RankStep, pp_group: dist.ProcessGroup) -> None:
    """Call it at the end of the step, before it has ended: then no later one of its kind is shared.

    The first time it waits until all ranks have come. A rank that kept what another, whose step has
    failed, had not got would not answer that one in the next step.
    """
    kept = _kept_of(pp_group)
    if asked.key in kept or not isinstance(pp_group, dist.ProcessGroup):
        return
    if _is_shared(pp_group):
        collectives.meet([pp_group])
    while len(kept) >= _MOST_KEPT:  # the oldest, which it is on every rank
        del kept[next(iter(kept))]
    kept[asked.key] = step


def _kept_of(pp_group: dist.ProcessGroup) -> dict[Key, RankStep]:
    # What stands in for a group, in tests and in exercises, need not be hashable.
    is_real = isinstance(pp_group, dist.ProcessGroup)
    return _kept.setdefault(pp_group, {}) if is_real else {}


def _is_shared(pp_group: dist.ProcessGroup) -> bool:
    return isinstance(pp_group, dist.ProcessGroup) and pp_group.size() > 1


# -- All ask for the same --


def _require_same(asked: Asked, pp_group: dist.ProcessGroup) -> None:
    names = ("schedule", *(name for name, _ in asked.sizes))
    values = (asked.schedule.name, *(value for _, value in asked.sizes))
    own = pickle.dumps(dict(zip(names, map(_shown, values), strict=True)))
    everyone = [pickle.loads(text) for text in _gather(own, pp_group)]
    for name in dict.fromkeys(name for one in everyone for name in one):
        ranks_with: dict[str, list[int]] = defaultdict(list)
        for rank, one in enumerate(everyone):
            ranks_with[one.get(name, "not said")].append(rank)
        if len(ranks_with) > 1:
            found = " and ".join(
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for value, ranks in ranks_with.items()
            )
            raise ValueError(
                f"the ranks of the pipeline were called with different steps: {name} is {found}; call "
                "the schedule with the same on all of them"
            )


def _shown(value: Any) -> str:
    text = str(value)
    if len(text) > _MOST_SHOWN:  # what follows may differ too
        text = f"{text[:_MOST_SHOWN]}... (checksum {crc32(text.encode())})"
    return text


def _gather(own: bytes, pp_group: dist.ProcessGroup) -> list[bytes]:
    """What each rank gives, on all."""
    device, size = get_device(), pp_group.size()
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    collectives.all_gather(lengths, torch.tensor([len(own)], device=device), pp_group)
    longest = int(lengths.max())
    texts = torch.empty(size * longest, dtype=torch.uint8, device=device)
    collectives.all_gather(texts, _tensor_of(own.ljust(longest, b"\0")), pp_group)
    rows = texts.view(size, longest).cpu().numpy()
    return [row.tobytes()[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]


# -- One plans for all --


class _Failure(NamedTuple):
    """An error of the rank that plans, on its way to the others."""

    text: str
    error: bytes | None
    """None for an error that cannot be sent."""

    def read(self) -> Exception:
        """The error, or else a ValueError with its words."""
        with suppress(Exception):  # a type of one's own may do anything
            if self.error is not None:
                return pickle.loads(self.error)
        return ValueError(self.text)


def _planned(asked: Asked) -> CommonOrder | LoweredStep:
    step = asked.make()
    require_runnable(step)
    return step


def _plan_for_all(asked: Asked, pp_group: dist.ProcessGroup) -> RankOrder | RankStep:
    """Sends every other rank its part; returns this rank's own."""
    try:
        step = _planned(asked)
        others = range(1, pp_group.size())
        packed = [_packed(step.of_rank(rank)) for rank in others]
    except Exception as error:  # the order is the user's: it may raise anything
        failure = _failure_of(error)
        _distribute([pickle.dumps(failure)] * (pp_group.size() - 1), pp_group)
        shown = failure.read()
        if type(shown) is type(error) and str(shown) == str(error):
            raise  # with its own traceback
        raise shown from error
    _distribute(packed, pp_group)
    return step.of_rank(_PLANNER)


def _failure_of(error: Exception) -> _Failure:
    text = f"{type(error).__name__}: {error}"
    try:
        packed = pickle.dumps(error)
        copy = pickle.loads(packed)
        is_same = type(copy) is type(error) and str(copy) == str(error)
    except Exception:  # a type of one's own may do anything
        return _Failure(text, None)
    return _Failure(text, packed if is_same else None)


def _distribute(parts: list[bytes] | None, pp_group: dist.ProcessGroup) -> bytes:
    """From the rank that plans, which gives all parts but its own: each other rank's part, there."""
    size, rank, device = pp_group.size(), pp_group.rank(), get_device()
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    if parts is not None:
        lengths = torch.tensor([0, *map(len, parts)], device=device)
    collectives.broadcast(lengths, _PLANNER, pp_group)
    given = lengths.tolist() if parts is not None else [0] * size
    taken = [int(lengths[rank]), *[0] * (size - 1)]
    input = _tensor_of(b"".join(parts or ()))
    output = torch.empty(sum(taken), dtype=torch.uint8, device=device)
    collectives.all_to_all(output, input, pp_group, output_splits=taken, input_splits=given)
    return output.cpu().numpy().tobytes()


def _tensor_of(data: bytes) -> torch.Tensor:
    if not data:  # which `frombuffer` refuses
        return torch.empty(0, dtype=torch.uint8, device=get_device())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(get_device())


# -- A part as bytes --


def _packed(part: RankOrder | RankStep) -> bytes:
    if isinstance(part, RankOrder):
        # Column by column: a tenth of the time that a tuple for each piece of work would take.
        part = part._replace(order=list(zip(*part.order, strict=True)))
    return pickle.dumps(part)


def _unpacked(data: bytes) -> RankOrder | RankStep:
    """Raises the error that has come instead."""
    part = pickle.loads(data)
    if isinstance(part, _Failure):
        raise part.read()
    if isinstance(part, RankOrder):
        part = part._replace(order=list(map(Work._make, zip(*part.order, strict=True))))
    return part
