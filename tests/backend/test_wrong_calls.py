"""Wrong arguments, and ranks that call different things: a sentence with the numbers, and no hang."""

import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from tests.backend.operations import all_gather_one, reduce_scatter_one
from tests.backend.shm_groups import in_threads, make_group, needs_shared_memory, refusal, run_case

MIB = 1 << 20
Call = Callable[[dist.ProcessGroup], object]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def some(*sizes: int) -> list[torch.Tensor]:
    return [zeros(size) for size in sizes]


def with_op(op: str, dtype: torch.dtype = torch.float32) -> Call:
    return lambda group: dist.all_reduce(zeros(3, dtype=dtype), getattr(dist.ReduceOp, op), group)


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


# -- Wrong on one rank: nothing is sent --

WRONG: dict[str, tuple[Call, str]] = {
    "op that only NCCL knows": (
        lambda group: dist.all_reduce(zeros(3), dist._make_nccl_premul_sum(2.0), group),
        "SUM, AVG, PRODUCT",
    ),
    "reduce with it": (
        lambda group: dist.reduce(zeros(3), 0, dist._make_nccl_premul_sum(2.0), group),
        "SUM, AVG, PRODUCT",
    ),
    "mean of whole numbers": (with_op("AVG", torch.int64), "AVG of torch.int64"),
    "bits of floats": (with_op("BAND"), "BAND of torch.float32"),
    "bits of complex numbers": (with_op("BXOR", torch.complex64), "BXOR on complex"),
    "largest complex number": (with_op("MAX", torch.complex64), "MAX on complex"),
    "sparse all_reduce": (lambda group: dist.all_reduce(sparse(), group=group), "sparse"),
    "sparse broadcast": (lambda group: dist.broadcast(sparse(), 0, group), "sparse"),
    "sparse all_gather": (
        lambda group: dist.all_gather([sparse() for _ in range(2)], sparse(), group),
        "sparse",
    ),
    "no tensor": (lambda group: dist.all_reduce([1.0, 2.0], group=group), "Tensor"),
    "two tensors": (lambda group: group.allreduce(some(3, 3)), "2 tensors"),
    "root outside the world": (lambda group: dist.broadcast(zeros(3), 9, group), "9"),
    "root outside the group": (
        lambda group: dist.broadcast(zeros(3), group=group, group_src=2),
        "rank 2 is not in a group of 2",
    ),
    "reduce to such a root": (
        lambda group: dist.reduce(zeros(3), group=group, group_dst=2),
        "rank 2 is not in a group of 2",
    ),
    "gather, list too long": (lambda group: dist.gather(zeros(3), some(3, 3, 3), 0, group), "3"),
    "gather without a list": (lambda group: dist.gather(zeros(3), None, 0, group), "gather_list"),
    "gather, other size": (
        lambda group: dist.gather(zeros(3), some(3, 4), 0, group),
        "tensor 1 has 4 elements",
    ),
    "scatter, list too short": (lambda group: dist.scatter(zeros(3), some(3), 0, group), "1"),
    "scatter, other size": (
        lambda group: dist.scatter(zeros(3), some(3, 5), 0, group),
        "tensor 1 has 5 elements",
    ),
    "all_gather, list too short": (lambda group: dist.all_gather(some(3), zeros(3), group), "1"),
    "all_gather, other size": (
        lambda group: dist.all_gather(some(3, 4), zeros(3), group),
        "tensor 1 has 4 elements",
    ),
    "all_gather, other dtype": (
        lambda group: dist.all_gather([zeros(3), zeros(3).int()], zeros(3), group),
        "int32",
    ),
    "all_gather into one, too small": (
        lambda group: all_gather_one(zeros(5), zeros(3), group=group),
        "5 elements",
    ),
    "reduce_scatter, list too long": (
        lambda group: dist.reduce_scatter(zeros(3), some(3, 3, 3), group=group),
        "list of 3",
    ),
    "reduce_scatter, other size": (
        lambda group: dist.reduce_scatter(zeros(3), some(3, 2), group=group),
        "tensor 1 has 2 elements",
    ),
    "reduce_scatter of one, too large": (
        lambda group: reduce_scatter_one(zeros(3), zeros(8), group=group),
        "8 elements",
    ),
    "all_to_all, lists differ": (
        lambda group: dist.all_to_all(some(3, 3), some(3), group),
        "2 outputs and 1 inputs",
    ),
    "all_to_all, dtypes differ": (
        lambda group: dist.all_to_all(some(3, 3), [zeros(3), zeros(3).int()], group),
        "dtype",
    ),
    "all_to_all_single, odd rows": (
        lambda group: dist.all_to_all_single(zeros(5), zeros(5), group=group),
        "5 rows",
    ),
    "all_to_all_single, wrong sum": (
        lambda group: dist.all_to_all_single(zeros(4), zeros(4), [2, 2], [2, 3], group),
        "sum 5",
    ),
    "all_to_all_single, wrong number": (
        lambda group: dist.all_to_all_single(zeros(4), zeros(4), [4], [2, 2], group),
        "1 numbers",
    ),
    "all_to_all_single, below zero": (
        lambda group: dist.all_to_all_single(zeros(4), zeros(4), [5, -1], [2, 2], group),
        "-1",
    ),
    "all_to_all_single, to itself": (
        lambda group: dist.all_to_all_single(zeros(4), zeros(4), [1, 3], [2, 2], group),
        "rank 0 sends itself 2 elements",
    ),
    "send to itself": (lambda group: dist.send(zeros(3), 0, group), "rank"),
    "send to nobody": (lambda group: dist.send(zeros(3), 7, group), "7"),
    "send outside the group": (
        lambda group: dist.send(zeros(3), group=group, group_dst=4),
        "rank 4 is not in a group of 2",
    ),
    "recv from nobody": (lambda group: dist.recv(zeros(3), 7, group), "7"),
    "recv of no tensor": (lambda group: dist.recv(None, 1, group), "Tensor"),
    "sparse send": (lambda group: dist.send(sparse(), 1, group), "sparse"),
}


def call_wrongly(names: list[str]) -> dict[str, str]:
    """Rank 0 makes each wrong call alone; after each, both ranks make a right one."""
    group, found = make_group(), {}
    for name in names:
        call, _ = WRONG[name]
        if dist.get_rank() == 0:
            found[name] = refusal(call, group)
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.eq(2).all(), f"the call after {name} is wrong"
    return found


def test_a_wrong_argument_is_told_before_anything_is_sent():
    found = run_case(call_wrongly, 2, list(WRONG))[0]
    for name, (_, words) in WRONG.items():
        kind = found[name].partition(":")[0]
        assert kind in ("ValueError", "TypeError", "RuntimeError"), f"{name}: {found[name]!r}"
        assert words in found[name], f"{name}: {found[name]!r}"
        assert len(found[name].split()) > 5, f"{name}: {found[name]!r}"


def use_what_has_ended() -> tuple[str, str]:
    group = make_group()
    dist.all_reduce(zeros(3), group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    return (
        refusal(group.allreduce, [zeros(3)]),
        refusal(group.send, [zeros(3)], 1 - dist.get_rank(), 0),
    )


def test_a_group_that_was_destroyed_says_so():
    for told in run_case(use_what_has_ended, 2):
        assert all("destroyed" in words for words in told), told


# -- Ranks that call different things --


def reduces(size: int, op: str = "SUM", dtype: torch.dtype = torch.float32) -> Call:
    return lambda group: dist.all_reduce(
        zeros(size, dtype=dtype), getattr(dist.ReduceOp, op), group
    )


def in_future(size: int, op: str) -> Call:
    return lambda group: (
        dist.all_reduce(zeros(size), getattr(dist.ReduceOp, op), group, async_op=True)
        .get_future()
        .wait()
    )


def broadcasts(size: int, root: int = 0) -> Call:
    return lambda group: dist.broadcast(zeros(size), root, group)


def gathers(size: int) -> Call:
    return lambda group: dist.all_gather(some(*[size] * group.size()), zeros(size), group)


def exchanges(*rows: int) -> Call:
    """To each rank as many rows as it gets from it."""
    return lambda group: dist.all_to_all_single(
        zeros(sum(rows)), zeros(sum(rows)), list(rows), list(rows), group
    )


DIFFERENT: dict[str, tuple[Call, Call, list[str]]] = {
    "sizes": (reduces(3), reduces(4), ["12 bytes", "16 bytes"]),
    "dtypes": (reduces(3), reduces(3, dtype=torch.int32), ["float32", "int32"]),
    "ops": (reduces(3), reduces(3, "MAX"), ["SUM", "MAX"]),
    "a barrier": (reduces(3), lambda group: dist.barrier(group), ["all_reduce", "barrier"]),
    "functions": (reduces(3), gathers(3), ["all_reduce", "all_gather"]),
    "sizes gathered": (gathers(3), gathers(5), ["12 bytes", "20 bytes"]),
    "splits": (exchanges(2, 1), exchanges(2, 3), ["another size", "bytes"]),
    "large and small": (reduces(3), reduces(MIB), ["12 bytes", f"{4 * MIB} bytes"]),
    "large sizes": (reduces(MIB), reduces(MIB + 2), [f"{4 * MIB}", f"{4 * MIB + 8}"]),  # B4
    "large ops": (reduces(MIB), reduces(MIB, "MAX"), ["SUM", "MAX"]),
    "large functions": (reduces(MIB), gathers(MIB), ["all_reduce", "all_gather"]),
    "ops, by future": (in_future(3, "SUM"), in_future(3, "MAX"), ["SUM", "MAX"]),
}
"""What rank 0 calls, what rank 1 calls, and what both are told, in which each waits for the other."""


def call_differently(names: list[str]) -> dict[str, str]:
    """Each pair of calls on a group of its own; another group is used after each."""
    sound, found = make_group(), {}
    for name in names:
        group = make_group()
        found[name] = refusal(DIFFERENT[name][dist.get_rank()], group)
        total = torch.ones(3)
        dist.all_reduce(total, group=sound)
        assert total.eq(2).all()
    return found


@needs_shared_memory
def test_ranks_that_call_different_collectives_are_told_both():
    told = run_case(call_differently, 2, list(DIFFERENT))
    for name, (_, _, words) in DIFFERENT.items():
        for rank, of_rank in enumerate(told):
            assert re.match(r"(\w*Connection|Wire|Runtime)Error: ", of_rank[name]), (name, of_rank)
            assert f"rank {1 - rank}" in of_rank[name], (name, of_rank[name])
            assert all(word in of_rank[name] for word in words), (name, of_rank[name])


def reduces_to(size: int, root: int) -> Call:
    return lambda group: dist.reduce(zeros(size), root, group=group)


ONE_WAY: dict[str, tuple[Call, Call, list[int]]] = {
    "broadcast, two roots": (broadcasts(3, 0), broadcasts(3, 1), []),
    "broadcast, sizes": (broadcasts(3), broadcasts(4), [1]),
    "broadcast and all_reduce": (broadcasts(3), reduces(3), [1]),
    "all_reduce and reduce": (reduces(3), reduces_to(3, 0), [0]),
    "scatter, sizes": (
        lambda group: dist.scatter(zeros(3), some(3, 3), 0, group),
        lambda group: dist.scatter(zeros(4), None, 0, group),
        [1],
    ),
    "gather, sizes": (
        lambda group: dist.gather(zeros(3), some(3, 3), 0, group),
        lambda group: dist.gather(zeros(4), None, 0, group),
        [0],
    ),
}
"""Calls in which a rank that needs nothing from the other waits for nobody; and who is told."""


def call_one_way(names: list[str]) -> dict[str, str]:
    """Where the call tells nobody, the next one does."""
    found = {}
    for name in names:
        group = make_group()
        *calls, who = ONE_WAY[name]
        found[name] = refusal(calls[dist.get_rank()], group)
        if not who:
            assert not found[name]
            found[name] = refusal(dist.barrier, group)
    return found


@needs_shared_memory
def test_who_takes_something_is_told_that_the_giver_has_called_another_thing():
    told = run_case(call_one_way, 2, list(ONE_WAY))
    for name, (_, _, who) in ONE_WAY.items():
        for rank, of_rank in enumerate(told):
            if rank in who or not who:
                words = f"rank {1 - rank} of the group has called "
                assert words in of_rank[name] and "and this rank" in of_rank[name], of_rank[name]
            else:
                assert not of_rank[name], of_rank[name]


AT_LAST: dict[str, tuple[Call, Call, list[int]]] = {
    "broadcast": (broadcasts(3, 1), broadcasts(3, 0), [0, 1]),
    "reduce": (reduces_to(3, 0), reduces_to(3, 1), [0, 1]),
    "large broadcast": (broadcasts(MIB, 1), broadcasts(MIB, 0), [0, 1]),
    "large reduce": (reduces_to(MIB, 0), reduces_to(MIB, 1), [0, 1]),
    "large broadcast, sizes": (broadcasts(MIB), broadcasts(MIB + 1), [0, 1]),
    "large ops, by future": (in_future(MIB, "SUM"), in_future(MIB, "MAX"), [0, 1]),
}
"""Calls in which a rank waits for what the other never sends; and who is told, at the latest by the
time-out of the group."""


def call_until_the_time_out(names: list[str]) -> dict[str, str]:
    """All of them at once, each on a group of its own, so that the time-outs pass together."""
    groups = [make_group(timeout=timedelta(seconds=2)) for _ in names]
    found: dict[str, str] = {}

    def call(name: str, group: dist.ProcessGroup) -> None:
        found[name] = refusal(AT_LAST[name][dist.get_rank()], group)

    in_threads(*(partial(call, *pair) for pair in zip(names, groups, strict=True)))
    dist.barrier()
    return found


@needs_shared_memory
def test_who_waits_for_what_never_comes_is_told_by_the_time_out():
    for rank, of_rank in enumerate(run_case(call_until_the_time_out, 2, list(AT_LAST))):
        for name, (_, _, who) in AT_LAST.items():
            if rank in who:
                is_gloos = name.endswith("future") and "gloo, inside the group" in of_rank[name]
                assert is_gloos or f"rank {1 - rank}" in of_rank[name], (name, of_rank)


@needs_shared_memory
def send_another_size() -> list[str]:
    group, rank, tensor = make_group(), dist.get_rank(), zeros(5)
    if rank == 0:
        dist.isend(tensor, 1, group, tag=2)
        dist.isend(torch.ones(3), 1, group, tag=3)
    found = []
    if rank == 1:
        found.append(refusal(dist.recv, zeros(3), 0, group, 2))
        message = zeros(3)
        dist.recv(message, 0, group, tag=3)
        found.append(str(message.tolist()))
    dist.barrier()
    return found


@needs_shared_memory
def test_a_message_of_another_size_is_told_and_other_tags_go_on():
    wrong, right = run_case(send_another_size, 2)[1]
    assert "20 bytes" in wrong and "12" in wrong and "rank 0" in wrong, wrong
    assert right == "[1.0, 1.0, 1.0]"


def wait_in_vain() -> list[str]:
    """Rank 1 of three calls nothing; each wait ends with the group's time-out."""
    found, rank = [], dist.get_rank()
    for call in (
        lambda group: dist.all_reduce(zeros(3), group=group),
        lambda group: dist.all_reduce(zeros(MIB), group=group),
        lambda group: dist.recv(zeros(3), 1, group),
        lambda group: dist.recv(zeros(3), None, group),
        lambda group: dist.barrier(group, async_op=True).get_future().wait(),
    ):
        group = make_group(timeout=timedelta(seconds=1))
        if rank != 1:
            found.append(refusal(call, group))
        dist.barrier()
    return found


@needs_shared_memory
def test_a_time_out_names_the_rank_that_did_not_come():
    for told in run_case(wait_in_vain, 3)[::2]:
        for words in told:
            assert re.search(r"within 1 s|[Tt]ime", words), words
        for words in (*told[:3], told[4]):
            assert re.search(r"rank 1\b|ranks \[1\]", words), words


def call_alike_after_calls_that_differ() -> str:
    """Rank 0 has begun a large sum over gloo; rank 1 has refused its own call before gloo began."""
    group = make_group()
    if dist.get_rank() == 0:
        refusal(lambda group: dist.all_reduce(zeros(MIB), group=group, async_op=True).wait(), group)
    else:
        refusal(lambda group: dist.all_reduce(zeros(MIB), dist.ReduceOp.MAX, group), group)
    return refusal(lambda group: dist.all_reduce(zeros(MIB), group=group), group)


@needs_shared_memory
def test_large_calls_after_calls_that_differ_are_not_paired_with_those():
    for told in run_case(call_alike_after_calls_that_differ, 2):
        assert not told or "collectives over gloo, and this rank" in told, told
