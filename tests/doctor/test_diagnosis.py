"""`diagnose` on records written by hand: every kind of cause, and those that real ranks seldom show."""

import doctest
import importlib
import json
from dataclasses import replace

import pytest

from minimegatron.doctor import findings
from minimegatron.doctor.diagnosis import diagnose
from minimegatron.doctor.records import (
    CaughtException,
    Collective,
    GroupUse,
    MessageCount,
    OpenCall,
    RankRecord,
    record_from_dict,
    record_to_dict,
)

STEP = {
    "schedule": "1f1b",
    "pp_size": 4,
    "num_microbatches": 8,
    "num_model_chunks": 1,
    "microbatch_group_size_per_vp_stage": None,
    "forward_only": False,
}


def stage(rank: int, *calls: OpenCall, **more) -> RankRecord:
    """A rank of a pipeline of four, in step 0, quiet for three seconds."""
    values = {"step": STEP, "num_steps": 1, "pipeline": (0, 1, 2, 3), **more}
    return RankRecord(rank, 4, pid=100 + rank, calls=calls, seen_at=10, last_progress=7, **values)


def receives(peer: int, payload: str, number: int) -> OpenCall:
    return OpenCall("p2p-wait", doing="receiving", payload=payload, peer=peer, number=number)


def sends(peer: int, payload: str, number: int) -> OpenCall:
    return OpenCall("p2p-wait", doing="sending", payload=payload, peer=peer, number=number)


def in_collective(number: int, name: str = "all-reduce") -> OpenCall:
    return OpenCall(name, group=0, number=number, shape=(4,), dtype="float32", op="sum")


def entered(*names: str, ranks: tuple[int, ...], group: str = "g", shape=(4,)) -> GroupUse:
    recent = [Collective(i, name, shape, "float32", "sum") for i, name in enumerate(names)]
    return GroupUse(group, ranks, "tensor", len(names), tuple(recent))


def test_everybody_waits_for_one_that_computes():
    found = diagnose(
        [
            stage(0, receives(1, "gradient", 0)),
            stage(1, receives(2, "gradient", 0)),
            stage(
                2, OpenCall("forward-compute", number=0, microbatch=0, chunk=0), process="computing"
            ),
            stage(3, receives(2, "activation", 0)),
        ]
    )
    assert (found.kind, found.ranks, found.cycle) == (findings.STUCK, (2,), ())
    assert "has been computing for 3.0 s, in the forward of microbatch 0" in found.cause
    assert "Ranks 0, 1 and 3 wait for it." in found.cause
    assert found.quiet == 3.0
    assert "(stage 2 of 4)" in found.text
    # A layer's number is `TransformerLayer.layer_number`. Was: said to count from 0 too.
    assert found.text.endswith("microbatches and #numbers count from 0, layers from 1)")
    assert {(m.waited_for_by, m.rank) for m in found.missing} == {(0, 1), (1, 2), (3, 2)}


def test_messages_are_named_by_the_plan():
    # The fifth gradient that stage 2 sends back belongs to microbatch 4, whatever came before.
    waits = receives(1, "activation", 5)
    found = diagnose([stage(1, process="sleeping"), stage(2, waits)])
    assert (found.situations[2].microbatch, found.situations[2].chunk) == (5, 0)
    interleaved = {**STEP, "schedule": "interleaved", "pp_size": 2, "num_model_chunks": 2}
    step = {**interleaved, "microbatch_group_size_per_vp_stage": 2}
    waits = receives(0, "activation", 5)
    records = [
        stage(0, process="sleeping", step=step, pipeline=(0, 1)),
        stage(1, waits, step=step, pipeline=(0, 1)),
    ]
    assert (diagnose(records).situations[1].microbatch, 0) == (3, 0)
    assert "the activation of microbatch 3, chunk 0 from rank 0" in diagnose(records).text


def test_a_schedule_that_nobody_knows_takes_its_microbatches_in_turn():
    step = {**STEP, "schedule": "one of my own"}
    records = [stage(0, step=step), stage(1, receives(0, "activation", 6), step=step)]
    assert diagnose(records).situations[1].microbatch == 6
    step = {**step, "num_model_chunks": 2}
    records = [stage(0, step=step), stage(1, receives(0, "activation", 6), step=step)]
    assert diagnose(records).situations[1].microbatch is None
    assert "waits for activation #6 from rank 0" in diagnose(records).text


def test_a_circle_of_four_is_drawn_in_order():
    found = diagnose([stage(rank, sends((rank + 1) % 4, "activation", 0)) for rank in range(4)])
    assert (found.kind, found.cycle) == (findings.CYCLE, (0, 1, 2, 3))
    lines = [line.split() for line in found.text.splitlines() if line.startswith("    +-")]
    assert [line[2] for line in lines[:4]] == ["0", "1", "2", "3"]
    assert found.text.count("and so back to rank 0") == 1


def test_ranks_behind_a_circle_are_not_in_it():
    records = [
        stage(0, receives(1, "gradient", 0)),
        stage(1, sends(2, "activation", 1)),
        stage(2, sends(1, "gradient", 0)),
        stage(3, receives(2, "activation", 1)),
    ]
    assert diagnose(records).cycle == (1, 2)


def test_a_process_that_is_gone():
    records = [stage(0, receives(1, "gradient", 0)), stage(1, process="gone")]
    found = diagnose(records)
    assert (found.kind, found.ranks) == (findings.LEFT, (1,))
    assert "its process is gone" in found.cause


def test_a_rank_that_left_a_collective_out_before_it_returned():
    work = {"work": "forward-compute", "layer": 1}
    long = [
        Collective(i, "all-reduce", (4,), "float32", "sum", work_number=i, **work) for i in range(3)
    ]
    short = [long[0], replace(long[2], number=1)]
    records = [
        stage(0, in_collective(2), groups=(GroupUse("g", (0, 1), "tensor", 3, tuple(long)),)),
        stage(1, state="returned", groups=(GroupUse("g", (0, 1), "tensor", 2, tuple(short)),)),
    ]
    found = diagnose(records)
    assert (found.kind, found.ranks) == (findings.LEFT, (1,))
    (detail,) = found.details
    assert "as #1 of the tensor group (ranks 0 and 1)" in detail
    assert "in forward #2, layer 1, rank 0" in detail


def test_a_collective_one_ahead_names_the_rank_that_skipped():
    big, small = (4, 8), (16,)
    usual = [Collective(i, "all-reduce", s, "float32", "sum") for i, s in enumerate((big, small))]
    skipped = [Collective(0, "all-reduce", small, "float32", "sum")]
    ranks = (0, 1, 2)
    records = [
        stage(r, in_collective(1), groups=(GroupUse("g", ranks, "tensor", 2, tuple(usual)),))
        for r in (0, 1)
    ]
    group = GroupUse("g", ranks, "tensor", 1, tuple(skipped))
    found = diagnose([*records, stage(2, in_collective(0), groups=(group,))])
    assert (found.kind, found.ranks) == (findings.MISMATCH, (2,))
    assert "What rank 2 entered as #0 looks like #1 of rank 0" in found.details[0]


def test_a_mismatch_of_long_ago_explains_nothing():
    # Of two ranks that wait for messages; the collective is over, so it cannot be what they wait in.
    ranks = (0, 1)
    records = [
        stage(0, sends(1, "activation", 0), groups=(entered("all-reduce", ranks=ranks),)),
        stage(1, sends(0, "gradient", 0), groups=(entered("broadcast", ranks=ranks),)),
    ]
    assert diagnose(records).kind == findings.CYCLE


def test_copies_of_the_model_may_run_different_steps():
    other = {**STEP, "num_microbatches": 2}
    records = [
        stage(0, in_collective(0), pipeline=(0,), coordinates={"dp": 0}),
        stage(1, process="computing", pipeline=(1,), coordinates={"dp": 1}, step=other),
    ]
    records[0] = replace(records[0], groups=(entered("all-reduce", ranks=(0, 1)),))
    assert diagnose(records).kind == findings.STUCK
    same = [replace(record, coordinates={"dp": 0}) for record in records]
    assert diagnose(same).kind == findings.UNEQUAL


def test_an_exception_of_an_earlier_step_explains_nothing():
    caught = CaughtException("OSError: disk", OpenCall("forward-compute"), 1.0, num_steps=1)
    waits = stage(0, receives(1, "gradient", 0), num_steps=3)
    records = [waits, stage(1, process="sleeping", num_steps=3, caught=caught)]
    assert diagnose(records).kind == findings.STUCK
    records[1] = replace(records[1], caught=replace(caught, num_steps=3))
    assert diagnose(records).kind == findings.SWALLOWED


def test_where_only_devices_wait_the_counts_tell():
    """On NCCL a call returns at once, and programs stand wherever they next need a result."""
    counts = [MessageCount("receiving", "activation", 0, 5, 5)]
    sent = [MessageCount("sending", "activation", 1, 4, 4)]
    records = [
        stage(0, OpenCall("optimizer"), messages=tuple(sent)),
        stage(1, OpenCall("train-step"), messages=tuple(counts)),
    ]
    found = diagnose(records)
    assert (found.kind, found.ranks) == (findings.STUCK, (0,))
    ranks = (0, 1)
    groups = [entered("all-reduce", ranks=ranks), entered("all-reduce", "all-reduce", ranks=ranks)]
    records = [stage(r, OpenCall("optimizer"), groups=(groups[r],)) for r in ranks]
    found = diagnose(records)
    assert found.ranks == (0,)
    assert [(m.rank, m.waited_for_by) for m in found.missing] == [(0, 1)]


def test_a_rank_of_which_nothing_is_known():
    found = diagnose([stage(0, receives(1, "gradient", 0))])
    assert (found.kind, found.ranks) == (findings.MISSING, (1,))
    assert "nothing is known" in found.cause


def test_everybody_is_there_and_still_waits():
    groups = (entered("all-reduce", ranks=(0, 1)),)
    found = diagnose([stage(r, in_collective(0), groups=groups) for r in (0, 1)])
    assert found.kind == findings.UNKNOWN
    assert "everybody they wait for has come" in found.cause


def test_whom_a_call_waits_for_may_be_unknown():
    """Nobody has come then: neither of the two has sent, and no connection is to blame."""
    stack = '  File "/home/ada/first.py", line 7 in wait\n    handle.wait()'
    found = diagnose([RankRecord(rank, 2, stack=stack, process="sleeping") for rank in (0, 1)])
    assert (found.kind, found.ranks) == (findings.UNKNOWN, (0, 1))
    assert "Probably it is a message that nobody has sent" in found.cause
    assert "has come" not in found.cause
    anyone = OpenCall("torch.distributed.recv", doing="receiving")
    found = diagnose([RankRecord(0, 1, calls=(anyone,))])
    assert "Probably it is a message that nobody has sent" in found.cause


def test_nobody_waits():
    found = diagnose([stage(r, OpenCall("forward-compute"), process="computing") for r in (0, 1)])
    assert found.kind == findings.NOBODY
    assert found.ranks == (0, 1)


def test_one_rank_alone_and_none_at_all():
    assert diagnose([RankRecord(0, 1)]).kind == findings.NOBODY
    assert diagnose([]).kind == findings.NOBODY


def test_a_large_job_shows_those_at_fault():
    ranks = tuple(range(100))
    groups = (GroupUse("g", ranks, "data", 7),)
    records = [
        RankRecord(r, 100, calls=(in_collective(6),), groups=groups, seen_at=9) for r in ranks
    ]
    late = (GroupUse("g", ranks, "data", 6),)
    records[63] = RankRecord(63, 100, groups=late, process="sleeping", seen_at=9)
    found = diagnose(records)
    assert (found.kind, found.ranks) == (findings.STUCK, (63,))
    assert " * rank 63" in found.text
    assert "and 84 more ranks" in found.text
    assert len(found.text.splitlines()) < 100


@pytest.mark.parametrize("process", ["computing", "sleeping", None])
def test_records_and_diagnoses_travel(process):
    group = entered("all-reduce", ranks=(0, 1))
    record = stage(
        0,
        in_collective(0),
        groups=(group,),
        messages=(MessageCount("sending", "activation", 1, 2, 1),),
        caught=CaughtException("ValueError: x", OpenCall("forward-compute", microbatch=1), 2.0, 1),
        process=process,
        coordinates={"pp": 0},
        sizes={"pp": 4},
    )
    assert record_from_dict(json.loads(json.dumps(record_to_dict(record)))) == record
    found = diagnose([record])
    assert json.loads(json.dumps(found.to_dict()))["kind"] == found.kind


@pytest.mark.parametrize("module", ["diagnosis", "records", "words", "processes"])
def test_examples(module):
    results = doctest.testmod(importlib.import_module(f"minimegatron.doctor.{module}"))
    assert results.attempted and not results.failed
