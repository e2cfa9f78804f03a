"""Records of lowered schedules: the doctor names the microbatch of a message by its peer and number."""

import json

import pytest

from minimegatron.core import tracing
from minimegatron.core.orders.orders import PlanConfig
from minimegatron.core.tracing import Call
from minimegatron.doctor import findings
from minimegatron.doctor.diagnosis import diagnose
from minimegatron.doctor.observer import MAX_PLACED, RecordingObserver, step_config
from minimegatron.doctor.records import MessageCount, OpenCall, RankRecord
from minimegatron.doctor.shared_record import RecordWriter, read_record
from minimegatron.doctor.units import StepUnits, placement_of
from minimegatron.planner.plan import plan_config_from_json, plan_config_to_json
from tests.trace.fake_run import Group, config_of, registered

PIPELINE = (4, 5, 6)
"""The ranks of a pipeline need not begin with 0."""
T5_STEP = PlanConfig("1f1b", 3, 3, message_sizes=((0,), (0, 0), (0, 0)))


@pytest.fixture(scope="module", autouse=True)
def orders():
    with registered():
        yield


def step_of(name: str, p: int = 3, **more) -> dict:
    return json.loads(json.dumps(plan_config_to_json(config_of(name, p, 3, **more))))


def stage(rank: int, *calls: OpenCall, **more) -> RankRecord:
    values = {"step": step_of("test-folded"), "num_steps": 1, "pipeline": PIPELINE, **more}
    return RankRecord(rank, 7, pid=rank, calls=calls, seen_at=10, last_progress=7, **values)


def awaits(peer: int, payload: str, number: int, doing: str = "receiving") -> OpenCall:
    return OpenCall("p2p-wait", doing=doing, payload=payload, peer=peer, number=number)


def unit_of(record: RankRecord) -> tuple:
    return StepUnits(record).of_message(record.calls[-1])


@pytest.mark.parametrize("number", range(6))
def test_a_link_with_two_tensors_has_two_messages_of_each_microbatch(number):
    step = json.loads(json.dumps(plan_config_to_json(T5_STEP)))
    for peer, payload, doing, each in (
        (4, "activation", "receiving", 1),
        (6, "activation", "sending", 2),
        (6, "gradient", "receiving", 2),
        (4, "gradient", "sending", 1),
    ):
        wanted = (number // each, 0) if number < 3 * each else (None, None)
        assert unit_of(stage(5, awaits(peer, payload, number, doing), step=step)) == wanted


@pytest.mark.parametrize(
    "peer, payload, doing, chunk",
    [
        (4, "activation", "receiving", 0),
        (6, "activation", "receiving", 1),
        (6, "activation", "sending", 0),
        (4, "activation", "sending", 1),
        (6, "gradient", "receiving", 0),
        (4, "gradient", "receiving", 1),
    ],
)
def test_in_a_v_the_peer_says_which_chunk(peer, payload, doing, chunk):
    for number in range(3):
        assert unit_of(stage(5, awaits(peer, payload, number, doing))) == (number, chunk)
    assert unit_of(stage(5, awaits(peer, payload, 3, doing))) == (None, None)


def test_the_awaited_message_is_named_in_the_text():
    waiting = diagnose([stage(4), stage(5, awaits(6, "activation", 2)), stage(6)])
    text = "waits for the activation of microbatch 2, chunk 1 from rank 6"
    assert waiting.situations[5].text == text
    assert (waiting.situations[5].microbatch, waiting.situations[5].chunk) == (2, 1)


def test_an_old_step_without_placement_takes_its_schedules():
    step = step_of("test-folded")
    del step["placement"], step["wire"]
    assert unit_of(stage(5, awaits(6, "activation", 1), step=step)) == (1, 1)
    assert placement_of(stage(5, step=step)).name == "v"


@pytest.mark.parametrize("wire", ["tagged", "untagged"])
def test_parts_of_pairs_are_counted_one_by_one(wire):
    units = StepUnits(stage(4, step=step_of("test-paired", wire=wire)))
    for name in ("forward", "backward-input", "backward-weight"):
        assert [units.of_work(f"{name}-compute", n) for n in range(3)] == [(n, 0) for n in range(3)]
    assert units.of_work("backward-compute", 0) == (None, None)


def test_a_schedule_or_sizes_without_a_plan():
    step = {**step_of("test-folded"), "schedule": "nobody's"}
    assert unit_of(stage(5, awaits(4, "activation", 0), step=step)) == (None, None)
    assert unit_of(stage(5, awaits(4, "activation", 0), step={"schedule": "1f1b"})) == (None, None)
    shorter = step_of("test-folded", 2)
    assert unit_of(stage(5, awaits(4, "activation", 0), step=shorter)) == (None, None)
    assert placement_of(stage(5, step=shorter)) is None


def test_the_work_of_a_split_backward_is_named():
    call = OpenCall("backward-weight-compute", number=1, microbatch=1, chunk=0)
    seen = diagnose([stage(4, call, step=step_of("test-paired", 1), pipeline=(4,))]).situations[4]
    assert (seen.work, seen.microbatch) == ("weight gradient", 1)
    assert "in the weight gradient of microbatch 1" in seen.text


@pytest.mark.parametrize("peer, is_wrong", [(4, False), (6, False), (5, True), (9, True)])
def test_in_a_v_both_neighbours_are_right(peer, is_wrong):
    counts = (MessageCount("sending", "activation", peer, 1, 0),)
    waits = awaits(4, "activation", 0)
    records = [stage(4, awaits(5, "activation", 0)), stage(5, waits, messages=counts), stage(6)]
    found = diagnose(records)
    assert (found.kind == findings.WRONG_PEER) == is_wrong
    if is_wrong:
        assert f"to rank {peer}, but its next stages are on ranks 4 and 6." in found.cause


# -- What is written down --


@pytest.fixture
def observed(tmp_path):
    path = tmp_path / "0.record"
    observer = RecordingObserver(RecordWriter(path, 0, 3))
    tracing.add_observer(observer)
    yield observer, lambda: read_record(path)
    tracing.remove_observer(observer)


def call(name: str, arguments: dict | None = None, **attributes) -> Call:
    return Call(name, f"somewhere.{name}", "", 1, attributes, arguments or {})


class Communicator:
    def __init__(self, size: int):
        self.pp_group = Group(0, size)


def schedule_run(size: int, **attributes) -> Call:
    arguments = {"model": [None, None], "num_microbatches": 3}
    arguments["p2p_communicator"] = Communicator(size)
    return call("forward-backward", arguments, **attributes)


def test_messages_are_numbered_per_peer_or_as_they_say(observed):
    observer, read = observed
    observer.start(schedule_run(3))
    numbers = []
    for peer, more in ((1, {}), (2, {}), (1, {}), (2, {"number": 7}), (1, {"number": 0})):
        told = {"doing": "sending", "payload": "activation", "peer": peer, "stage": 0, **more}
        one = call("p2p-wait", **told)
        observer.start(one)
        numbers.append(read().calls[-1].number)
        observer.stop(one)
    assert numbers == [0, 0, 1, 7, 0]
    assert [(count.peer, count.num_awaited) for count in read().messages] == [(1, 3), (2, 2)]


def test_each_kind_of_work_is_counted(observed):
    observer, read = observed
    observer.start(schedule_run(3))
    for name, attributes in (
        ("forward-compute", {"microbatch": 0, "chunk": 1}),
        ("backward-compute", {}),
        ("backward-input-compute", {}),
        ("backward-weight-compute", {"microbatch": 0, "chunk": 1}),
    ):
        one = call(name, **attributes)
        observer.start(one)
        last = read().calls[-1]
        assert (last.number, last.microbatch) == (0, attributes.get("microbatch"))
        observer.stop(one)
    assert (read().num_forwards, read().num_backwards) == (1, 2)


def test_the_step_says_wire_and_placement_where_there_is_room(observed):
    observer, read = observed
    observer.start(schedule_run(3, schedule="test-folded", wire="untagged"))
    config = plan_config_from_json(read().step)
    assert (config.wire, config.placement.stages) == ("untagged", ((0, 5), (1, 4), (2, 3)))
    large = step_config(schedule_run(MAX_PLACED, schedule="test-folded", wire="tagged"))
    assert "placement" not in large and large["wire"] == "tagged"
    own = step_config(schedule_run(3))
    assert (own["schedule"], "placement" in own, "wire" in own) == (
        "forward-backward",
        False,
        False,
    )
