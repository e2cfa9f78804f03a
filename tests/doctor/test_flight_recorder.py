"""What a GPU waits for, read from torch's flight recorder; and what the diagnosis makes of it."""

import ast
import doctest
import importlib
import json
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from minimegatron.doctor import findings
from minimegatron.doctor.diagnosis import diagnose
from minimegatron.doctor.flight_recorder import turn_on_recorder, with_device_calls
from minimegatron.doctor.records import (
    Collective,
    GroupUse,
    MessageCount,
    OpenCall,
    RankRecord,
    record_from_dict,
    record_to_dict,
)
from tests.doctor.nccl_json import TENSOR, answer, batch_end, entry, in_tensor_group
from tests.test_house import modules, tree

STACK = '  File "/home/ada/train.py", line 30 in train\n    loss.item()'


def rank(number: int, text: bytes | None, **more) -> RankRecord:
    """A rank whose program stands in `.item()`, with the processor spinning, and what it answers."""
    values = {"process": "computing", "stack": STACK, "seen_at": 10.0, "last_progress": 7.0, **more}
    record = RankRecord(number, 3, pid=100 + number, **values)
    return record if text is None else with_device_calls(record, text)


# -- Who is missing --


def test_a_collective_that_one_rank_has_not_begun():
    done = [in_tensor_group("all_reduce", number, "completed") for number in range(1, 18)]
    waits = answer(*done, in_tensor_group("all_reduce", 18), ranks=(0, 1, 2))
    late = answer(*done, ranks=(0, 1, 2))
    found = diagnose([rank(0, waits), rank(1, late), rank(2, waits)])
    assert (found.kind, found.ranks) == (findings.STUCK, (1,))
    assert "Rank 1 has been computing" in found.cause
    assert "Ranks 0 and 2 wait for it" in found.cause
    assert found.situations[0].text == (
        "does not move: its GPU waits in all-reduce #17 ([4, 8] float32) of the tensor group "
        "(ranks 0, 1 and 2), for rank 1; its program stands at line 30 of train.py: loss.item()"
    )
    assert {(m.rank, m.waited_for_by) for m in found.missing} == {(1, 0), (1, 2)}
    assert "has given its GPU 17 collectives of this group, not yet #17" in found.text


def test_a_message_that_nobody_sends():
    found = diagnose(
        [
            rank(0, answer(entry("recv 0<-1", 4))),
            rank(1, answer(entry("all_reduce", 1, "completed"))),
        ]
    )
    assert (found.kind, found.ranks) == (findings.STUCK, (1,))
    assert "its GPU waits for a message from rank 1" in found.situations[0].text
    assert "has not given its GPU the other side of this message" in found.text


def test_peers_are_places_in_their_group():
    found = rank(5, answer(entry("send 1->0", 1), ranks=(2, 5))).device_calls
    assert [(call.doing, call.peer) for call in found] == [("sending", 2)]


def test_two_ranks_that_both_receive_first():
    texts = [answer(entry("recv 0<-1", 1)), answer(entry("recv 1<-0", 1))]
    found = diagnose([rank(r, text) for r, text in enumerate(texts)])
    assert (found.kind, found.cycle) == (findings.CYCLE, (0, 1))


def test_collectives_in_two_orders():
    world, tensor = entry("all_reduce", 1), in_tensor_group("all_reduce", 1)
    for texts in [
        # Each waits for its first one at once; or gives the GPU both, and waits later.
        (answer(world), answer(tensor)),
        (answer(world, tensor), answer(tensor, world)),
    ]:
        found = diagnose([rank(r, text) for r, text in enumerate(texts)])
        assert (found.kind, found.cycle) == (findings.ORDER, (0, 1))
        assert "rank 0 is in all-reduce #0 ([4, 8] float32) of the group of all 2" in found.cause
        assert "rank 1 is in all-reduce #0 ([4, 8] float32) of the tensor group" in found.cause


def test_one_collective_with_two_sizes():
    texts = [
        answer(in_tensor_group("all_reduce", 1, input_sizes=[size])) for size in ([4, 8], [2, 8])
    ]
    found = diagnose([rank(r, text) for r, text in enumerate(texts)])
    assert found.kind == findings.MISMATCH
    assert "all-reduce of [2, 8] float32" in found.cause


def test_sizes_that_may_differ():
    texts = [
        answer(in_tensor_group("all_to_all", 1, input_sizes=[size])) for size in ([4, 8], [2, 8])
    ]
    assert diagnose([rank(r, text) for r, text in enumerate(texts)]).kind == findings.NOBODY


def test_a_rank_whose_GPU_first_waits_for_another():
    """Rank 1 has given its GPU the collective too, behind a message that rank 2 does not send."""
    collective = in_tensor_group("all_reduce", 1)
    config = {"pg_config": {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"},
        "3": {"name": "3", "desc": "tp", "ranks": "[0, 1]"},
    }}  # fmt: skip
    found = diagnose(
        [
            rank(0, answer(collective, **config)),
            rank(1, answer(entry("recv 1<-2", 1), collective, **config)),
            rank(2, answer(**config)),
        ]
    )
    assert (found.kind, found.ranks) == (findings.STUCK, (2,))
    assert [found.situations[r].waits_for for r in range(3)] == [(1,), (2,), ()]
    assert "has given its GPU #0 of this group too, behind something else" in found.text


def test_where_everybody_has_come_the_GPUs_may_be_slow():
    for texts, what in [
        ([answer(in_tensor_group("all_reduce", 1))] * 2, "all-reduce #0 ([4, 8] float32) of the"),
        ([answer(entry("recv 0<-1", 1)), answer(entry("send 1->0", 1))], "a message with rank 1"),
    ]:
        found = diagnose([rank(r, text) for r, text in enumerate(texts)])
        assert found.kind == findings.NOBODY
        assert "been computing for 3.0 s" in found.situations[0].text
        assert f"loss.item(); its GPU has not completed {what}" in found.situations[0].text


def test_a_rank_that_does_not_answer_is_waited_for():
    waits = answer(in_tensor_group("all_reduce", 1))
    found = diagnose([rank(0, waits), rank(1, None)])
    assert (found.kind, found.ranks) == (findings.STUCK, (1,))
    assert "but rank 1 does not say what its GPU was given" in found.text
    # One that is certainly missing counts for more.
    waits = answer(in_tensor_group("all_reduce", 1), ranks=(0, 1, 2))
    found = diagnose([rank(0, waits), rank(1, None), rank(2, answer())])
    assert found.situations[0].waits_for == (2,)


def test_a_program_that_waits_in_a_call_itself():
    """As over gloo: what the GPU was given does not matter."""
    call = OpenCall("p2p-wait", doing="receiving", payload="activation", peer=1, number=0)
    waits = rank(0, answer(in_tensor_group("all_reduce", 1)), calls=(call,))
    assert "waits for activation #0 from rank 1" in diagnose([waits]).text


# -- What is over --


def test_nothing_is_under_way():
    texts = [
        answer(),
        answer(entry("all_reduce", 1, "completed"), entry("send 0->1", 1, "completed")),
    ]
    for text in texts:
        found = rank(0, text)
        assert found.device_calls == ()
        assert diagnose([found]).kind == findings.NOBODY


def test_a_batch_is_over_when_its_own_entry_is():
    """Of its messages torch never says so."""
    messages = [entry("send 0->1", 1), entry("recv 0<-1", 1)]
    assert rank(0, answer(*messages, batch_end(1, "completed"))).device_calls == ()
    under_way = rank(0, answer(*messages, batch_end(1))).device_calls
    assert [(call.doing, call.peer) for call in under_way] == [("sending", 1), ("receiving", 1)]
    # The buffer may have lost them already.
    (lost,) = rank(0, answer(batch_end(1))).device_calls
    assert (lost.doing, lost.peer) == ("receiving", None)
    found = diagnose([rank(0, answer(batch_end(1)))])
    assert found.kind == findings.NOBODY
    assert "its GPU has not completed a message" in found.situations[0].text


def test_a_batch_of_collectives_counts_once():
    parts = [in_tensor_group("all_gather", 2), in_tensor_group("all_gather", 2)]
    end = in_tensor_group("ALLGATHER_coalesced", 2)
    found = rank(0, answer(in_tensor_group("all_reduce", 1, "completed"), *parts, end))
    (call,) = found.device_calls
    assert (call.name, call.number, call.shape) == ("all-gather", 1, None)
    assert [one.name for one in found.groups[0].recent] == ["all-reduce", "all-gather"]


def test_a_full_buffer():
    """Two thousand calls, two of them not over; the first is what the GPU waits for."""
    done = [in_tensor_group("_all_gather_base", number, "completed") for number in range(500, 2498)]
    found = rank(0, answer(*done, *(in_tensor_group("all_reduce", n) for n in (2498, 2499))))
    assert [call.number for call in found.device_calls] == [2497, 2498]
    assert found.groups[0].num_started == 2499
    assert len(found.groups[0].recent) == 8


# -- What the rank's own record adds --

STEP = {
    "schedule": "1f1b",
    "pp_size": 2,
    "num_microbatches": 8,
    "num_model_chunks": 1,
    "microbatch_group_size_per_vp_stage": None,
    "forward_only": False,
}
IN_STEP = {"step": STEP, "num_steps": 1, "pipeline": (0, 1)}


def test_a_message_has_its_microbatch():
    counts = (MessageCount("receiving", "gradient", 1, 4, 4),)
    found = diagnose([rank(0, answer(entry("recv 0<-1", 9)), messages=counts, **IN_STEP)])
    seen = found.situations[0]
    assert "its GPU waits for the gradient of microbatch 3 from rank 1" in seen.text
    assert (seen.microbatch, seen.chunk) == (3, 0)
    # Of two payloads from one rank, nobody knows which is under way.
    counts += (MessageCount("receiving", "activation", 1, 1, 1),)
    found = diagnose([rank(0, answer(entry("recv 0<-1", 9)), messages=counts, **IN_STEP)])
    assert "its GPU waits for a message from rank 1" in found.situations[0].text


def test_a_message_that_the_program_has_not_asked_for_stops_nobody():
    """Rank 0 has begun to receive ahead of time; what stops it is a collective without rank 2."""
    config = {"pg_config": {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"},
        "3": {"name": "3", "desc": "tp", "ranks": "[0, 2]"},
    }}  # fmt: skip
    counts = (MessageCount("receiving", "gradient", 1, num_started=4, num_awaited=3),)
    text = answer(entry("recv 0<-1", 9), in_tensor_group("all_reduce", 1), **config)
    records = [
        rank(0, text, messages=counts, **IN_STEP),
        rank(1, answer(entry("recv 1<-0", 9), **config)),
        rank(2, answer(**config)),
    ]
    found = diagnose(records)
    assert (found.kind, found.ranks) == (findings.STUCK, (2,))
    assert [found.situations[r].waits_for for r in range(3)] == [(2,), (0,), ()]
    # Asked for, it does: then ranks 0 and 1 wait for each other.
    counts = (MessageCount("receiving", "gradient", 1, num_started=4, num_awaited=4),)
    found = diagnose([rank(0, text, messages=counts, **IN_STEP), *records[1:]])
    assert found.kind == findings.CYCLE


def traced(*shapes: tuple[int, ...], num_started: int = 40) -> GroupUse:
    """The tensor group as the rank's own record has it, which began to count later than torch."""
    recent = [
        Collective(num_started - len(shapes) + i, "all-reduce", shape, "float32", "sum",
                   "forward-compute", 2, layer=i)
        for i, shape in enumerate(shapes)
    ]  # fmt: skip
    return GroupUse("3", (0, 1), "tensor", num_started, tuple(recent))


def test_a_collective_has_the_work_that_it_belongs_to():
    text = answer(
        in_tensor_group("all_reduce", 57, "completed", input_sizes=[[7]]),
        in_tensor_group("all_reduce", 58),
        in_tensor_group("all_reduce", 59, input_sizes=[[5]]),
    )
    groups = (traced((7,), (4, 8), (5,)),)
    found = diagnose([rank(0, text, groups=groups, **IN_STEP), rank(1, answer())])
    seen = found.situations[0]
    assert ", for rank 1, in the forward of microbatch 2, layer 1; its program stands" in seen.text
    assert "#57" in seen.text
    assert (seen.work, seen.microbatch) == ("forward", 2)


@pytest.mark.parametrize("shapes", [(), ((4, 8), (6,)), ((4, 8), (5,), (5,))])
def test_where_the_two_counts_do_not_agree_nothing_is_added(shapes):
    text = answer(
        in_tensor_group("all_reduce", 58), in_tensor_group("all_reduce", 59, input_sizes=[[5]])
    )
    found = diagnose([rank(0, text, groups=(traced(*shapes),), **IN_STEP), rank(1, answer())])
    assert found.situations[0].waits_for == (1,)
    assert found.situations[0].work is None


def test_it_travels_between_machines():
    record = rank(0, answer(in_tensor_group("all_reduce", 1), entry("recv 0<-1", 1)))
    assert len(record.device_calls) == 2
    assert record_from_dict(json.loads(json.dumps(record_to_dict(record)))) == record
    assert record_from_dict(json.loads(json.dumps(record_to_dict(rank(0, None))))) == rank(0, None)


# -- What is not understood --

GARBAGE = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "a list": b"[]",
    "null": b"null",
    "deep": b"[" * 100_000,
    "no groups": b'{"version": "2.10"}',
    "another version": answer(entry("all_reduce", 1), version="3.0"),
    "a version of another type": answer(entry("all_reduce", 1), version=2.1),
    "entries by name": answer(entry("all_reduce", 1), entries={"0": entry("all_reduce", 1)}),
    "entries that are none": answer(entry("all_reduce", 1), entries=[1, 2]),
    "an entry without a state": answer(entry("all_reduce", 1)).replace(b'"state"', b'"stage"'),
    "a number below zero": answer(entry("all_reduce", -1)),
    "a number that is a text": answer(entry("all_reduce", 1, collective_seq_id="1")),
    "a size without end": answer(entry("all_reduce", 1, input_sizes=[[float("inf")]])),
    "sizes that are none": answer(entry("all_reduce", 1, input_sizes=7)),
    "a name that is none": answer(entry("all_reduce", 1, profiling_name=None)),
    "ranks that are none": answer(entry("all_reduce", 1), pg_config={"0": {"ranks": [0, 1]}}),
    "a rank without end": answer(entry("all_reduce", 1), pg_config={"0": {"ranks": "9" * 5000}}),
}  # fmt: skip


@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE)
def test_an_answer_that_is_not_understood_changes_nothing(text):
    assert rank(0, text) == rank(0, None)
    assert diagnose([rank(0, text)]).kind == findings.NOBODY


@pytest.mark.parametrize("name", ["recv", "recv 0<-9", "recv 9<-", "send 0->1->2", "rockets"])
def test_a_message_of_which_nobody_knows_the_peer(name):
    found = rank(0, answer(entry(name, 1, is_p2p=True)))
    assert [call.peer for call in found.device_calls] == [None]
    assert diagnose([found]).kind == findings.NOBODY


def test_a_group_whose_ranks_nobody_knows_is_left_out():
    text = answer(entry("all_reduce", 1), pg_config={"": {"name": "", "desc": "", "ranks": "[]"}})
    assert rank(0, text).device_calls == ()
    known = (GroupUse("0", (0, 1, 2), "world", 1),)
    assert diagnose([rank(0, text, groups=known)]).situations[0].waits_for == (1, 2)


def test_a_new_group_with_an_old_groups_name():
    """The old one was destroyed. What it did is no reason to think that the new one has done it."""
    old = [in_tensor_group("barrier", number, "completed") for number in range(1, 6)]
    new = entry("all_reduce", 1, process_group=list(TENSOR), pg_id=7)
    late = [entry("all_reduce", 1, "completed", process_group=["4", "dp"], pg_id=8)]
    found = diagnose([rank(0, answer(*old, new)), rank(1, answer(*late))])
    assert (found.kind, found.ranks) == (findings.STUCK, (1,))
    assert "waits in all-reduce #0" in found.situations[0].text
    found = diagnose([rank(0, answer(*old, new)), rank(1, answer(*old, new))])
    assert found.kind == findings.NOBODY


def test_what_this_torch_writes_of_gloo(tmp_path):
    """The same recorder, the same JSON: it shows that the schema is the one of this torch."""
    begin_alone(tmp_path / "an older store")
    for _ in range(3):
        dist.barrier()
    dist.destroy_process_group()
    begin_alone(tmp_path / "store")
    try:
        dist.all_reduce(torch.ones(4, 8))
        # gloo's own thread notes the end of a call, and may do so after the caller has gone on.
        for _ in range(1000):
            text = c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False)
            entries = json.loads(text)["entries"]
            name = entries[-1]["process_group"][0]
            found = rank(0, text, groups=(GroupUse(name, (0,), "world"),))
            if found.device_calls == ():
                break
            time.sleep(0.01)
    finally:
        dist.destroy_process_group()
    assert entries[-1].keys() >= entry("all_reduce", 1).keys() - {"thread_id", "thread_name"}
    assert found.device_calls == ()
    last = found.groups[-1].recent[-1]
    assert (last.name, last.shape, last.dtype) == ("all-reduce", (4, 8), "float32")


def begin_alone(store: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)


# -- Turning it on --

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")


def test_it_is_turned_on():
    environment = {}
    turn_on_recorder(environment)
    assert sorted(environment) == sorted(NAMES)
    assert environment[NAMES[0]] == "2000"
    assert environment[NAMES[1]] == "1"


def test_the_users_own_values_stay():
    own = dict.fromkeys(NAMES, "mine")
    turn_on_recorder(own)
    assert own == dict.fromkeys(NAMES, "mine")
    older = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/x/"}
    turn_on_recorder(older)
    assert sorted(older) == sorted([*NAMES[1:2], *list(older)[:2]])


def test_nobody_unpickles_what_torch_writes():
    """Only JSON of the living process is asked for, and the doctor knows no pickle."""
    asking, reading = [], []
    for name, path in modules().items():
        source = path.read_text()
        asking += [(name, dump) for dump in re.findall(r"_dump_(?:nccl|fr)\w*", source)]
        reading += (
            [name] if re.search("TORCH_FR_DUMP_TEMP_FILE|distributed.flight_rec", source) else []
        )
    assert asking == [("minimegatron.doctor.inquiry", "_dump_nccl_trace_json")]
    assert reading == ["minimegatron.doctor.flight_recorder"]
    for name, path in modules().items():
        if name.startswith("minimegatron.doctor"):
            words = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
            words |= {alias.name for node in ast.walk(tree(path)) if isinstance(node, ast.Import)
                      for alias in node.names}  # fmt: skip
            assert not words & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, name
            assert "torch.load" not in path.read_text(), name


@pytest.mark.parametrize("module", ["flight_recorder", "device_waits"])
def test_examples(module):
    results = doctest.testmod(importlib.import_module(f"minimegatron.doctor.{module}"))
    assert results.attempted and not results.failed
