"""JSON that is nested too deep ends in one line, wherever users hand in JSON: no RecursionError."""

import json
import re
import socket

import pytest

from minimegatron.convert.hugging_face import _read_config, _read_safetensors
from minimegatron.core.dist_checkpointing.core import (
    COMMON,
    CheckpointingException,
    load_common_state_dict,
)
from minimegatron.doctor.machines import Head
from minimegatron.exercises.room.verdict import Verdict
from minimegatron.exercises.student.student_folder import STATE, StudentFolder
from minimegatron.planner.plan import Plan, plan
from minimegatron.tracing.rank_trace import load_ranks
from tests.faults.test_fuzz_inputs import check_answer, run_command
from tests.trace.conftest import plain_folder  # noqa: F401

DEPTHS = (500, 100_000)
"""Deeper than anything of ours; deeper than Python's reader goes."""


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "command",
    [
        ("show",),
        ("show", "--rank", "0", "--all"),
        ("diff", "plan"),
        ("export", "--format=html", "--output=x"),
        ("export", "--format=chrome", "--output=x"),
        ("export", "--format=json", "--output=x"),
    ],
    ids=" ".join,
)
def test_a_deep_recording_is_refused(plain_folder, tmp_path, monkeypatch, command, depth):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    for path in plain_folder[0].glob("rank-*.json"):
        text = path.read_text()
        if path.name.endswith("1.json"):
            text = text.replace('"attributes":{', f'"attributes":{{"deep":{deep(depth)},', 1)
        (tmp_path / path.name).write_text(text)
    action, *rest = command
    answer = run_command("trace", action, str(tmp_path), *rest)
    check_answer(*answer)
    assert answer[0] == 2
    assert re.search(r"rank-\S*1\.json: lists or objects are nested deeper than 100", answer[2])


def test_calls_that_are_nested_too_deep_are_refused(plain_folder, tmp_path):  # noqa: F811
    """The tree of calls is printed by recursion."""
    path = next(plain_folder[0].glob("rank-*0.json"))
    data = json.loads(path.read_text())
    (events,) = data["ranks"]
    first = len(events)
    plain = next(event for event in events if event["kind"] == "forward")
    last = {key: value for key, value in plain.items() if key not in ("attributes", "parent")}
    for number in range(5000):
        events.append(last | {"parent": first + number - 1} if number else dict(last))
    (tmp_path / path.name).write_text(json.dumps(data))
    answer = run_command("trace", "show", str(tmp_path), "--rank", "0", "--all")
    assert answer[0] == 2, answer
    assert re.search(r"is a call within 200 others", answer[2]), answer
    check_answer(*answer)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_deep_plan_is_refused(depth):
    data = plan("1f1b", 2, 4).to_json()
    value: list = []
    for _ in range(depth):
        value = [value]
    data["config"]["schedule"] = value
    with pytest.raises(ValueError, match="the plan: lists or objects are nested deeper than 100"):
        Plan.from_json(data)
    while value:
        value = value[0]


@pytest.mark.parametrize("ranks", [None, 3, [3], [[3]], [["start"]]])
def test_a_plan_without_lists_of_objects_is_refused(ranks):
    data = plan("1f1b", 2, 4).to_json() | {"ranks": ranks}
    with pytest.raises(ValueError, match="not a timeline|not an action"):
        Plan.from_json(data)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_deep_verdict_is_refused(depth):
    with pytest.raises(ValueError, match="a verdict: lists or objects are nested deeper"):
        Verdict.from_json(f'{{"kind": "passed", "achieved": {deep(depth)}}}')


@pytest.mark.parametrize("text", ["[]", "3", '{"kind": "passed", "nonsense": 1}'])
def test_what_is_no_verdict_is_refused(text):
    with pytest.raises(ValueError, match="verdict"):
        Verdict.from_json(text)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_students_deep_record_is_refused(tmp_path, depth):
    (tmp_path / STATE).write_text(deep(depth))
    with pytest.raises(ValueError, match=f"{STATE} cannot be read .*nested deeper than 100"):
        StudentFolder.open(tmp_path)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_deep_checkpoint_is_refused(tmp_path, depth):
    (tmp_path / COMMON).write_text(f'{{"args": {deep(depth)}}}')
    with pytest.raises(CheckpointingException, match=f"{COMMON} is damaged .*nested deeper"):
        load_common_state_dict(tmp_path)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_deep_model_of_hugging_face_is_refused(tmp_path, depth):
    (tmp_path / "config.json").write_text(deep(depth))
    with pytest.raises(ValueError, match=r"config\.json: lists or objects are nested deeper"):
        _read_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(deep(depth))
    with pytest.raises(ValueError, match=r"index\.json: lists or objects are nested deeper"):
        _read_safetensors(tmp_path)


def test_a_damaged_model_of_hugging_face_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json is damaged: it holds a list"):
        _read_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"index\.json is damaged: it has no weight_map"):
        _read_safetensors(tmp_path)


def test_a_strangers_deep_message_does_not_end_the_watchman():
    head = Head(1, "token")
    with socket.create_connection(("127.0.0.1", head.port)) as stranger:
        stranger.sendall(deep(100_000).encode() + b"\n[1]\n")
        for _ in range(50):
            head.look()
    assert not head.have_all_come()


def test_load_ranks_names_the_file(tmp_path):
    (tmp_path / "rank-0.json").write_text(deep(100_000))
    with pytest.raises(ValueError, match=r"rank-0\.json: lists or objects are nested deeper"):
        load_ranks(tmp_path)
