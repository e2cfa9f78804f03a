"""The first part: `local_ranges` and `shard_buffer`, on buffers without a model.

Megatron has no counterpart.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from minimegatron.core.distributed.buffer_layout import lay_out_buffer
from minimegatron.core.optimizer.distrib_optimizer import local_ranges
from minimegatron.exercises.bench.gpt_step import Seat
from minimegatron.exercises.check import Case, Result, Wrong

OURS = {"local_ranges": local_ranges}
"""In a dict, where `installed` does not replace it."""


class _Buffer:
    """What `local_ranges` looks at, as one of d ranks has it; `vector` is the buffer's memory."""

    def __init__(self, case: Case, rank: int):
        numels, d = case.numels, case.d
        self.layout = lay_out_buffer(numels, [False] * len(numels), case.bucket_size, d)
        self.vector = torch.arange(self.layout.numel)
        self.data_parallel_group = Seat(rank, d)
        self.buckets = [
            SimpleNamespace(offset=a, grad_data=self.vector[a:b]) for a, b in self.layout.buckets
        ]
        self.params = [torch.nn.Parameter(torch.empty(numel)) for numel in numels]
        self.param_index_map = dict(zip(self.params, self.layout.params, strict=True))

    def named(self, ranges: dict[Any, Any]) -> dict[Any, Any]:
        """By name, "p0" for the first parameter."""
        names = {param: f"p{i}" for i, param in enumerate(self.params)}
        return {names[param]: place for param, place in ranges.items() if param in names}


def run_ranges(student: ModuleType, case: Case) -> list[dict[str, Any]]:
    """In the room: every rank's ranges, and its slice of the last bucket."""
    found = []
    for rank in range(case.d):
        buffer = _Buffer(case, rank)
        ranges = student.local_ranges(buffer)
        if not isinstance(ranges, dict):
            raise Wrong(f"local_ranges returned {ranges!r}; return a dict {{param: (first, end)}}")
        bucket = buffer.buckets[-1].grad_data
        shard = student.shard_buffer(bucket, buffer.data_parallel_group)
        at = shard.data_ptr() - bucket.data_ptr() if isinstance(shard, torch.Tensor) else 0
        found.append(
            {"ranges": buffer.named(ranges), "shard": shard, "at": at // bucket.element_size()}
        )
    return found


def judge_ranges(case: Case, found: list[dict[str, Any]]) -> Result:
    """The ranges of every parameter on every rank, then the slices."""
    for rank, one in enumerate(found):
        buffer = _Buffer(case, rank)
        expected, got = buffer.named(OURS["local_ranges"](buffer)), one["ranges"]
        for name, place in buffer.named(buffer.param_index_map).items():
            if got.get(name) != expected.get(name):
                raise Wrong(_range_words(buffer, rank, name, place, got, expected))
        _judge_shard(rank, case.d, buffer.buckets[-1].grad_data, one)
    layout = buffer.layout
    shard = f"{layout.numel // case.d} elements"
    return Result({"buckets": len(layout.buckets), "shard": shard})


def _judge_shard(rank: int, d: int, bucket: torch.Tensor, found: dict[str, Any]) -> None:
    """`bucket` counts its elements up from one number, so a value tells its place."""
    who, shard, size = f"shard_buffer on rank {rank} of {d}", found["shard"], len(bucket) // d
    if not isinstance(shard, torch.Tensor):
        raise Wrong(f"{who} returned {shard!r}; return a slice of `buffer`")
    places = [int(value) - int(bucket[0]) for value in shard.reshape(-1).tolist()]
    first, end = rank * size, (rank + 1) * size
    if places != list(range(first, end)) or shard.dim() != 1:
        is_run = bool(places) and places == list(range(places[0], places[0] + len(places)))
        words = f"[{places[0]}, {places[-1] + 1})" if is_run else f"{_first_few(places)}"
        lines = [f"{who} returns elements {words} of {d * size}, expected [{first}, {end})"]
        if is_run and len(places) == size and places[0] % size == 0:
            lines.append(f"That is the slice of rank {places[0] // size}.")
        elif is_run and places[0] != first:
            lines.append(f"All {d} slices are of one length. Where does this rank's begin?")
        elif len(places) != size:
            lines.append(f"A slice has length // {d} = {size} elements, yours has {len(places)}.")
        raise Wrong("\n".join(lines))
    if found["at"] != first:
        raise Wrong(
            f"{who} returns a copy of the right elements\nThe reduce-scatter writes into what you "
            "return. In whose memory does the optimizer look for it afterwards?"
        )


def _first_few(places: list[int], most: int = 4) -> str:
    few = ", ".join(map(str, places[:most]))
    return f"{few}, ..." if len(places) > most else few or "(none)"


def _range_words(
    buffer: Any, rank: int, name: str, place: tuple[int, int, int], got: dict, expected: dict
) -> str:
    start, end, bucket_id = place
    bucket, d = buffer.buckets[bucket_id], buffer.data_parallel_group.size()
    size = bucket.grad_data.numel() // d
    first = bucket.offset + rank * size
    yours, right = got.get(name), expected.get(name)
    lines = [
        f"rank {rank} of {d}: local_ranges has {_said(yours)} for {name}, expected {_said(right)}",
        f"  {name} is [{start}, {end}) of the buffer, in bucket {bucket_id}",
        f"  this rank's shard of bucket {bucket_id} is [{first}, {first + size}) of the buffer",
    ]
    if right is None:
        lines.append("The two do not overlap. What has this rank to update of it?")
        return "\n".join(lines)
    in_buffer = (right[0] + start, right[1] + start)
    if yours == in_buffer:
        lines.append(
            f"[{in_buffer[0]}, {in_buffer[1]}) is the overlap, counted from the buffer's beginning. "
            f"The optimizer has {name} alone: from where does it count?"
        )
    elif bucket.offset and yours != right:
        lines.append(
            f"Bucket {bucket_id} begins at {bucket.offset} (bucket.offset), and each bucket is "
            f"divided over the ranks by itself. The overlap is [{in_buffer[0]}, {in_buffer[1]})."
        )
    else:
        lines.append(
            f"Their overlap is [{in_buffer[0]}, {in_buffer[1]}). Which numbers has it within {name}?"
        )
    return "\n".join(lines)


def _said(value: Any) -> str:
    return "nothing" if value is None else repr(value)
