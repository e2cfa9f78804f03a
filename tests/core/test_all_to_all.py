"""The all-to-all: what arrives, what is refused before anything is sent, what observers are told."""

import json

import pytest
import torch
import torch.distributed as dist

from minimegatron.backend.group import MAX_BYTES
from minimegatron.core import collectives
from minimegatron.core.collectives import Pending
from minimegatron.core.tensor_parallel import all_to_all, mappings
from minimegatron.tracing.lanes import in_flight
from minimegatron.tracing.recorder import trace
from minimegatron.tracing.recording_shape import check_recording
from tests.core.wire_kinds import SHARED, group_over, over_each_kind, run_over
from tests.groups import PretendGroup


def rows_to(size: int, kind: str) -> list[list[int]]:
    """[i][j]: how many rows rank i sends to rank j."""
    if kind == "uneven":
        return [[(2 * i + j) % 3 for j in range(size)] for i in range(size)]
    if kind == "one gets all":
        return [[3 if j == 0 else 0 for j in range(size)] for _ in range(size)]
    return [[0 if kind == "nothing" else 2] * size for _ in range(size)]


def sent(kind: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Row n for rank j has the value 100 i + 10 j + n, modulo what the type holds."""
    rows = rows_to(dist.get_world_size(), kind)[rank]
    values = [100 * rank + 10 * j + n for j, number in enumerate(rows) for n in range(number)]
    whole = torch.tensor(values, dtype=torch.float64).view(-1, *[1] * len(shape))
    return whole.expand(-1, *shape).remainder(2 if dtype == torch.bool else 64).to(dtype)


def exchange(
    group: dist.ProcessGroup, kind: str, shape: tuple[int, ...], dtype: torch.dtype, async_op: bool
) -> bool:
    rank = dist.get_rank()
    rows = rows_to(group.size(), kind)
    out_splits, in_splits = [row[rank] for row in rows], rows[rank]
    parts = [sent(kind, i, shape, dtype).split(row)[rank] for i, row in enumerate(rows)]
    output = torch.empty(sum(out_splits), *shape, dtype=dtype)
    # A tensor that is not contiguous, and gone when the exchange ends.
    mine = sent(kind, rank, shape, dtype)
    mine = torch.stack([mine, mine], dim=-1)[..., 0]
    splits = (None, None) if kind in ("equal", "nothing") else (out_splits, in_splits)
    handle = collectives.all_to_all(output, mine, group, *splits, async_op=async_op)
    del mine
    if async_op:
        assert isinstance(handle, Pending)
        assert handle.wait()
    return torch.equal(output, torch.cat(parts))


def all_exchanges(wire: str) -> list:
    group = group_over(wire)
    wrong = [
        (kind, shape, dtype, async_op)
        for kind in ("uneven", "one gets all", "equal", "nothing")
        for shape in ((), (3,), (2, 2))
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool)
        for async_op in (False, True)
        if not exchange(group, kind, shape, dtype, async_op)
    ]
    check_overlapping(group)
    check_refusals(group)
    check_gradients(group)
    check_uneven_gathers(group)
    check_what_is_told(group)
    if wire == SHARED:
        check_ways(group)
        check_after_a_failed_step(group)
    return wrong


def check_overlapping(group: dist.ProcessGroup) -> None:
    """Several under way, small collectives between them, waited for in another order."""
    size = dist.get_world_size()
    outputs, handles = [], []
    for number in range(4):
        outputs.append(torch.empty(size))
        mine = torch.full((size,), 10.0 * number + dist.get_rank())
        handles.append(collectives.all_to_all(outputs[-1], mine, group, async_op=True))
        total = torch.ones(3)
        collectives.all_reduce(total, group)
        assert total.tolist() == [size] * 3
    for handle in reversed(handles):
        handle.wait()
    for number, output in enumerate(outputs):
        assert output.tolist() == [10.0 * number + rank for rank in range(size)]


def check_refusals(group: dist.ProcessGroup) -> None:
    """Nothing was sent: what follows arrives as if these had not been tried."""
    size = dist.get_world_size()
    right = [1] * size
    for output_splits, input_splits, words in (
        (right, [*right, 1], rf"input_splits .* are {size + 1} numbers"),
        (right, [2] * size, rf"sum {2 * size}, .* {size} ranks and the input {size} rows"),
        ([3, *right[1:]], right, r"output_splits"),
        ([-1, 3, *right[2:]], right, r"output_splits"),
    ):
        with pytest.raises(ValueError, match=words):
            collectives.all_to_all(
                torch.empty(size), torch.ones(size), group, output_splits, input_splits
            )
    with pytest.raises(ValueError, match=f"the input has {size + 1} rows"):
        collectives.all_to_all(torch.empty(size), torch.ones(size + 1), group)
    for output, words in (
        (torch.empty(size, dtype=torch.float64), r"float32 \[\], .*float64"),
        (torch.empty(size, 2), r"float32 \[\], .*float32 \[2\]"),
        (torch.empty(2 * size)[::2], "is not contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            collectives.all_to_all(output, torch.ones(size), group)
    assert exchange(group, "uneven", (2,), torch.float64, async_op=False)


def check_ways(group: dist.ProcessGroup) -> None:
    """All pieces go through shared memory, and some ranks may leave out splits that others give."""
    size, rank = dist.get_world_size(), dist.get_rank()
    before = group._inside._begun.count
    for rows in (1, MAX_BYTES // 4 // size + 1):
        splits = [[rows] * size] * 2 if rank == 0 else [None] * 2
        output, mine = torch.zeros(rows * size), torch.full((rows * size,), 1.0 + rank)
        collectives.all_to_all(output, mine, group, *splits)
        assert output[::rows].tolist() == [1.0 + other for other in range(size)]
    assert group._inside._begun.count == before


def check_gradients(group: dist.ProcessGroup) -> None:
    """Rows that come back are the sender's: the gradient of each is what its receiver made of it."""
    rank = dist.get_rank()
    rows = rows_to(group.size(), "uneven")
    x = sent("uneven", rank, (2,), torch.float64).requires_grad_()
    output_splits = [row[rank] for row in rows]
    output = all_to_all(group, x, output_splits, rows[rank])
    place = torch.arange(output.size(0), dtype=torch.float64).unsqueeze(-1)
    (output.pow(2) * (10 * rank + place)).sum().backward()
    firsts = [sum(row[j] for row in rows[:rank]) for j in range(group.size())]
    factors = [10 * j + firsts[j] + n for j, number in enumerate(rows[rank]) for n in range(number)]
    wanted = 2 * x.detach() * torch.tensor(factors, dtype=torch.float64).unsqueeze(-1)
    assert torch.equal(x.grad, wanted)
    half = torch.ones(2 * group.size(), 3, requires_grad=True)
    all_to_all(group, half).sum().backward()
    assert half.grad.eq(1).all()


def check_uneven_gathers(group: dist.ProcessGroup) -> None:
    """Against the same rows gathered by hand; sizes may be 0, on one rank or on all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for sizes in ([2 * i for i in range(size)], [3, *[0] * (size - 1)], [0] * size):
        whole = torch.arange(2.0 * sum(sizes), dtype=torch.float64).view(-1, 2)
        for shape in ((-1, 2), (-1,)):
            share = whole.split(sizes)[rank].reshape(shape).clone().requires_grad_()
            mine = [n * (1 if shape == (-1, 2) else 2) for n in sizes]
            given = mappings.gather_from_sequence_parallel_region(
                share, group=group, output_split_sizes=mine
            )
            assert torch.equal(given, whole.view(shape))
            (given * (rank + 1)).sum().backward()
            assert share.grad.eq(size * (size + 1) / 2).all()
            term = (whole.view(shape) + rank).requires_grad_()
            total = mappings.reduce_scatter_to_sequence_parallel_region(term, group, mine)
            wanted = size * whole + size * (size - 1) / 2
            assert torch.equal(total, wanted.view(shape).split(mine)[rank])
            (total * (rank + 1)).sum().backward()
            factors = [torch.full((n,), i + 1.0) for i, n in enumerate(mine)]
            assert torch.equal(
                term.grad, torch.cat(factors).view(-1, *[1] * (term.dim() - 1)).expand_as(term)
            )
        once = mappings.gather_from_sequence_parallel_region(
            whole.split(sizes)[rank].requires_grad_(), False, group, sizes
        )
        once.sum().backward()
    wrong = [1] * size
    with pytest.raises(ValueError, match=f"for 2 rows on rank {rank} of a group of {size}"):
        mappings.gather_from_sequence_parallel_region(torch.ones(2), True, group, wrong)
    with pytest.raises(ValueError, match=f"for {size + 1} rows on rank {rank}"):
        mappings.reduce_scatter_to_sequence_parallel_region(torch.ones(size + 1), group, wrong)
    with pytest.raises(ValueError, match="give one size per rank"):
        mappings.gather_from_sequence_parallel_region(torch.ones(1), True, group, [])


def check_what_is_told(group: dist.ProcessGroup) -> None:
    """Attributes of the call; in a recording, the span from the start to the end of the wait."""
    size, rank = dist.get_world_size(), dist.get_rank()
    splits = [2, *[1] * (size - 1)]
    arriving = [2] * size if rank == 0 else [1] * size
    with trace() as run:
        handles = []
        for _ in range(2):
            output = torch.empty(sum(arriving), 3)
            args = (output, torch.ones(sum(splits), 3), group, arriving, splits)
            handles.append(collectives.all_to_all(*args, async_op=True))
        for handle in reversed(handles):
            handle.wait()
        collectives.all_to_all(*args)
    events = dict(enumerate(run.ranks[rank].events))
    first, second, third = in_flight(events)
    told = first.events[0].attributes
    assert told["input_splits"] == splits and told["output_splits"] == arriving
    assert (told["bytes"], told["shape"], told["dtype"]) == (
        12 * sum(splits),
        [size + 1, 3],
        "float32",
    )
    assert told["bytes_sent"] == 12 * (sum(splits) - splits[rank])
    assert [event.name for event in first.events] == ["all-to-all", "collective-wait"]
    assert first.start < second.start < second.end < first.end < third.start
    assert len(third.events) == 1 and first.label == "A2A"
    data = json.loads(json.dumps(run.ranks[rank].to_json()))
    check_recording(data)
    waits = [one for one in data["ranks"][0] if "begun" in one["attributes"]]
    waits[0]["attributes"]["begun"] = len(events)
    with pytest.raises(ValueError, match="begun"):
        check_recording(data)


def check_after_a_failed_step(group: dist.ProcessGroup) -> None:
    """What only one rank has begun is not paired with the next step's of the others."""
    size = dist.get_world_size()
    collectives.begin_step([group])
    if dist.get_rank() == 0:
        collectives.all_to_all(torch.empty(size), torch.ones(size), group, async_op=True)
    collectives.abandon([group], "planted")
    collectives.begin_step([group])
    assert exchange(group, "uneven", (3,), torch.float64, async_op=True)
    collectives.end_step([group])


@pytest.mark.parametrize("size", [2, 3])
@over_each_kind
def test_over_real_ranks(kind, size):
    assert run_over(kind, all_exchanges, size) == [[]] * size


def test_the_backward_exchanges_the_splits(monkeypatch):
    asked = []

    def fake(output, input, group, output_splits, input_splits):
        asked.append((output.size(0), output_splits, input_splits))
        output.zero_()

    monkeypatch.setattr(mappings.collectives, "all_to_all", fake)
    x = torch.ones(3, 2, requires_grad=True)
    all_to_all(PretendGroup(0, 2), x, [4, 1], [1, 2]).sum().backward()
    assert asked == [(5, [4, 1], [1, 2]), (3, [1, 2], [4, 1])], "splits of the backward"


def test_a_group_of_one_gets_a_copy():
    mine, output = torch.arange(6.0).view(3, 2), torch.empty(3, 2)
    handle = collectives.all_to_all(output, mine, PretendGroup(), [3], [3], async_op=True)
    assert handle.wait() and torch.equal(output, mine)
    assert output.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
    collectives.all_to_all(output, mine + 1, PretendGroup())
    assert torch.equal(output, mine + 1)
    assert all_to_all(PretendGroup(), mine) is mine
    with pytest.raises(ValueError, match="sum 4"):
        collectives.all_to_all(output, mine, PretendGroup(), [3], [4])
