"""Lowered schedules in recordings: exchanges, placements, kinds of work, without any real rank."""

import json
from dataclasses import replace
from unittest import mock

import pytest

from minimegatron.planner.actions import (
    ACTIVATION,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    GRADIENT,
    KINDS,
    RECEIVE,
    SEND,
)
from minimegatron.planner.plan import plan, plan_config_from_json
from minimegatron.tracing import html, plot
from minimegatron.tracing.compare import compare_with_plan, wrong_messages
from minimegatron.tracing.diff import diff_report
from minimegatron.tracing.rank_trace import paced_ms, save_rank
from minimegatron.tracing.step import Step
from minimegatron.tracing.trace_view import Trace
from minimegatron.tracing.trace_words import action_name, pace_words
from tests.trace.fake_run import NUM_BYTES, config_of, record, registered


@pytest.fixture(scope="module", autouse=True)
def orders():
    with registered():
        yield


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("name", ["test-folded", "1f1b", "gpipe", "breadth-first"])
@pytest.mark.parametrize("wire", ["tagged", "untagged"])
def test_a_lowered_schedule_does_what_its_plan_says(name, p, wire):
    config = config_of(name, p, 3, wire=wire, message_bytes=NUM_BYTES if p > 1 else 0)
    step = record(config).step(0)
    assert (step.config.placement, step.config.wire) == (config.placement, wire)
    assert compare_with_plan(step) == [] and wrong_messages(step) == []
    assert [a.phase for a in step.actions(p - 1)] == [a.phase for a in step.plan.ranks[p - 1]]


@pytest.mark.parametrize("p", [2, 3, 4])
def test_in_a_v_one_payload_goes_to_two_peers(p):
    config = config_of("test-folded", p, 3)
    step = record(config).step(0)
    # 2p - 2 boundaries between ranks, both ways; that of the fold is no message.
    assert len(step.transfers) == 2 * (2 * p - 2) * 3
    peers = {(m.sender, m.receiver) for m in step.transfers if m.payload == ACTIVATION}
    assert peers == {(r, r + 1) for r in range(p - 1)} | {(r + 1, r) for r in range(p - 1)}
    for message in step.transfers:
        place = config.placement.place_of(
            config.placement.stage_of(message.sender, message.sent_unit[1])
            + (1 if message.payload == ACTIVATION else -1)
        )
        assert (message.receiver, message.received_unit[1]) == place
        maker, user = step.maker(message), step.user(message)
        assert step.event(maker).action.microbatch == step.event(user).action.microbatch
        # Waits and starts found their message, each among those of its own peer.
        assert message.waited and message.sent_at > step.event(maker).start
        for place in message.waited:
            action = step.event(place).action
            assert (action.microbatch, action.chunk) == message.received_unit


def test_waits_in_another_order_than_the_sends_say_which_they_are():
    step = record(config_of("test-folded", 2, 3)).step(0)
    waits = [e for e in step.events[0].values() if e.name == "p2p-wait"]
    sent = [e for e in waits if e.attributes["doing"] == "sending"]
    assert [e.attributes["ordinal"] for e in sent] == [2, 1, 0, 2, 1, 0]
    assert [e.action.microbatch for e in sent] == [2, 1, 0, 2, 1, 0]
    assert "number" not in sent[0].attributes
    received = [e for e in waits if e.attributes["doing"] == "receiving"]
    assert [e.attributes["ordinal"] for e in received] == [0, 1, 2, 0, 1, 2]


def test_the_hand_over_at_the_fold_is_no_message():
    step = record(config_of("test-folded", 2, 2)).step(0)
    received = [m for a in step.actions(1) for m in a.messages if m.direction == RECEIVE]
    assert {(m.payload, m.chunk) for m in received} == {(ACTIVATION, 0), (GRADIENT, 1)}
    sent = [m for a in step.actions(1) for m in a.messages if m.direction == SEND]
    assert {(m.payload, m.chunk) for m in sent} == {(ACTIVATION, 1), (GRADIENT, 0)}
    assert step.gaps(1)[-1].before is None


def test_swapped_messages_are_seen():
    """Rank 1 takes the inputs of microbatches 0 and 1 for each other's."""
    units = {1: ((ACTIVATION, 0, 0), (ACTIVATION, 1, 0))}
    step = record(config_of("test-folded", 3, 2), mix_up=units).step(0)
    assert wrong_messages(step) == [
        f"the activation of microbatch {i}, chunk 0 from rank 0 to rank 1 was used for microbatch "
        f"{1 - i}, chunk 0"
        for i in range(2)
    ]
    (divergence,) = compare_with_plan(step)
    assert divergence.rank == 1


def test_a_message_to_the_wrong_rank_is_seen():
    step = record(config_of("test-folded", 3, 2)).step(0)
    message = next(m for m in step.transfers if (m.sender, m.receiver) == (1, 2))
    message.receiver = 0
    assert wrong_messages(step) == [
        f"the {message.payload} of microbatch 0, chunk 0 from rank 1 to rank 0 was meant for rank 2"
    ]
    message.sent_unit = (0, 7)
    assert "was used for microbatch 0" in wrong_messages(step)[0]


def test_another_order_than_planned_is_seen():
    config = config_of("1f1b", 2, 3)
    step = record(config, play_as=replace(config, schedule="gpipe")).step(0)
    # Rank 0 warms up with one forward only; so does rank 1 with none.
    assert {divergence.rank for divergence in compare_with_plan(step)} == {0, 1}
    assert {action.phase for action in step.actions(0)} == {None}


# -- Split backwards and pairs --


@pytest.fixture(scope="module")
def split() -> Step:
    return record(config_of("test-paired", 2, 3)).step(0)


def test_a_pair_is_recorded_as_its_two_parts(split):
    assert compare_with_plan(split) == [] and wrong_messages(split) == []
    kinds = [split.events[1][i].action.kind for i in split.work(1)]
    assert kinds == 3 * [FORWARD] + [BACKWARD_INPUT] + 2 * [BACKWARD_INPUT, BACKWARD_WEIGHT] + [
        BACKWARD_WEIGHT
    ]
    units = [split.events[1][i].action.microbatch for i in split.work(1)]
    assert units == [0, 1, 2, 0, 1, 0, 2, 1, 2]
    assert any(action.parts for action in split.plan.ranks[0])


def test_the_maker_of_a_gradient_is_the_half_that_gives_it(split):
    gradient = next(m for m in split.transfers if m.payload == GRADIENT)
    makers = [split.event(at(gradient)).action.kind for at in (split.maker, split.user)]
    assert makers == [BACKWARD_INPUT, BACKWARD_INPUT]


def test_words_and_letters_come_from_the_table(split):
    names = [action_name(split.events[0][i].action) for i in split.work(0)]
    assert names == ["F0", "F1", "F2", "I0", "I1", "W0", "I2", "W1", "W2"]
    planned = next(action for action in split.plan.ranks[0] if action.parts)
    assert action_name(planned) == "I1 & W0"
    text = "\n".join(diff_report(replaced_simulation(split), replaced_simulation(split)))
    assert "stage 0: mean input gradient" in text and "stage 1: mean weight gradient" in text
    assert "mean backward" not in text


def replaced_simulation(step: Step) -> Step:
    """The step with planned work of a millisecond each, however pairs are simulated."""
    starts = [[1000 * n for n in range(len(actions))] for actions in step.plan.ranks]
    step.__dict__["simulation"] = mock.Mock(
        plan=step.plan,
        starts=starts,
        ends=[[start + 1000 for start in of_rank] for of_rank in starts],
        makespan=40_000,
        bubble_over_total=0.5,
    )
    return step


def plain_shade(kind: str, chunk: int, num_chunks: int) -> str:
    return KINDS[kind].shades[1]


def test_pictures_show_every_kind(split):
    step = replaced_simulation(split)
    with mock.patch.object(plot, "shade", plain_shade):
        figure = plot.plot_step(step, plan=True)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:3] == ["forward", "input gradient", "weight gradient"]
    with mock.patch.object(html, "shade", plain_shade):
        run = Trace(step.stages)
        with mock.patch.object(Trace, "step", lambda *_, **__: step):
            (data,) = html.page_data(run)["steps"]
    assert data["words"]["backward-input"] == "input gradient"
    assert set(data["words"]) == set(data["colours"])
    pairs = [bar for bar in data["ranks"][0]["plan"] if "h" in bar]
    assert [(bar["a"], bar["h"]) for bar in pairs[:2]] == [("I1", [0, 2]), ("W0", [1, 2])]
    assert pairs[0]["s"] == pairs[1]["s"] and pairs[0]["l"] == pairs[1]["l"]


def test_a_paced_split_takes_half_unless_told_otherwise():
    pace = {"forward_ms": 4.0, "backward_ms": 8.0}
    assert [paced_ms(pace, kind) for kind in (FORWARD, "backward", BACKWARD_INPUT)] == [4, 8, 4]
    pace["backward_weight_ms"] = 3.0
    assert paced_ms(pace, BACKWARD_WEIGHT) == 3
    assert pace_words(pace) == "paced: forward 4 ms, backward 8 ms, weight gradient 3 ms"


# -- Files --


def test_a_lowered_recording_survives_its_file(tmp_path):
    config = config_of("test-folded", 2, 2)
    run = record(config)
    for rank in run.ranks:
        save_rank(rank, tmp_path)
    step = Trace.load(tmp_path).step(0)
    assert step.config == plan_config_from_json(config_json(run)) == config
    assert compare_with_plan(step) == [] and wrong_messages(step) == []


def config_json(run: Trace) -> dict:
    return json.loads(json.dumps(run.ranks[0].to_json()))["config"]


def broken(tmp_path, change) -> None:
    for rank in record(config_of("test-folded", 2, 2)).ranks:
        path = save_rank(rank, tmp_path)
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))


def first_work(data: dict) -> dict:
    return next(event for event in data["ranks"][0] if event["kind"] == "forward")


def config_in(data: dict) -> dict:
    return data["ranks"][0][0]["attributes"]["config"]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda data: first_work(data).update(kind="teleport"), "unknown kind of work 'teleport'"),
        (lambda data: first_work(data).update(kind="pair"), "is a pair of parts"),
        (lambda data: data.update(version=3), "this program reads versions 1 to 2"),
        (
            lambda data: config_in(data)["placement"].update(stages=[[0, 1], [2, 2]]),
            "is no plan's: placement v",
        ),
        (
            lambda data: config_in(data)["placement"].update(stages=[[0, 1]]),
            r"placement has 1 ranks of 2 chunks, but pp_size is 2",
        ),
        (lambda data: config_in(data).update(placement=[1]), "placement is"),
        (lambda data: config_in(data).update(wire=1), "wire is 1, not str or null"),
    ],
)
def test_recordings_that_no_run_makes_are_refused(tmp_path, change, words):
    broken(tmp_path, change)
    with pytest.raises(ValueError, match=words):
        Trace.load(tmp_path)


def test_an_old_recording_has_the_usual_placement():
    config = plan_config_from_json({"schedule": "1f1b", "pp_size": 2, "num_microbatches": 4})
    assert config.wire is None and config.placement.name == "line"
    assert plan("1f1b", 2, 4).config.placement == config.placement
