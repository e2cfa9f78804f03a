"""A lane per communicator: recordings of fake GPUs keep the schema, and are drawn as the fake ran."""

import json
import re
from functools import cache

import pytest

from minimegatron.planner.actions import BACKWARD, FORWARD, KINDS
from minimegatron.tracing.chrome import chrome_trace
from minimegatron.tracing.lanes import COMPUTE, RECEIVING, WAITS, lanes_of
from minimegatron.tracing.rank_trace import save_rank
from minimegatron.tracing.recording_shape import check_recording
from minimegatron.tracing.render_lanes import render_lanes
from minimegatron.tracing.trace_view import Trace
from tests.core.pipeline_parallel.fake_step import Case
from tests.trace.fake_gpu import FORWARD_MS, MESSAGE_MS, record
from tests.trace.test_outputs import minimegatron

BATCHED = [Case(2, 4), Case(4, 6)]
LONE = [Case(2, 4, batched=False), Case(4, 6, batched=False)]
OVERLAPPED = [
    Case(2, 4, v=2, G=2, batched=False, overlap=True),
    Case(4, 4, v=2, G=4, batched=False, overlap=True),
]
VARIABLE = [
    Case(4, 4, variable=True),
    Case(3, 3, v=2, G=3, variable=True, batched=False, overlap=True),
]
LOWERED = [
    Case(4, 4, 2, order="breadth-first"),
    Case(4, 4, 2, order="breadth-first", batched=False),
]
CASES = [*BATCHED, *LONE, *OVERLAPPED, *VARIABLE, *LOWERED, Case(4, 4, v=2, G=4)]
recorded = cache(record)


def names_of(case: Case, rank: int) -> list[str]:
    """The communicators of a stage: the group's for batches, one per neighbour for lone messages."""
    if case.batched:
        return [f"pp 0-{case.p - 1}"]
    neighbours = {rank - 1, rank + 1} & set(range(case.p))
    if case.v is not None:
        neighbours = {(rank - 1) % case.p, (rank + 1) % case.p}
    return sorted(f"pp {min(rank, peer)}:{max(rank, peer)}" for peer in neighbours)


def name_in_machine(communicator: tuple) -> str:
    """The same of one of the fake's communicators."""
    kind, ranks = communicator
    return f"pp {ranks[0]}{'-' if kind == 'batch' else ':'}{ranks[-1]}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recordings_keep_the_schema(case):
    run, _ = recorded(case)
    for rank in run.ranks:
        data = json.loads(json.dumps(rank.to_json()))
        check_recording(data)
        assert data["rank"]["device"] == "cuda"
    assert run.compare_with_plan() == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_lane_has_the_bars_that_the_machine_ran(case):
    run, machine = recorded(case)
    step = run.step(0)
    for rank, (compute, *others) in enumerate(lanes_of(step)):
        assert compute.name == COMPUTE
        ran = [times for name, *times in machine.kernels[rank] if re.match("(for|back)ward", name)]
        begin = compute.bars[0].start - 1000 * ran[0][0]
        assert spans(compute, begin) == ran
        assert [lane.name for lane in others] == names_of(case, rank)
        posts = {name_in_machine(key): found for key, found in machine.posts(rank).items()}
        for lane in others:
            assert spans(lane, begin) == [times for _, *times in posts[lane.name]], lane.name
            sizes = [len(bar.events) for bar in lane.bars]
            assert sizes == [len(post.parts) for post, *_ in posts[lane.name]]


def test_a_batch_whose_handle_is_not_shown_is_drawn_with_the_next_one():
    """Batches of sizes alone, where the program runs on, are started and waited for unseen."""
    run, machine = recorded(Case(4, 4, 2, order="breadth-first", variable=True))
    num_joined = 0
    for rank, (compute, *others) in enumerate(lanes_of(run.step(0))):
        first = next(
            start for name, start, _ in machine.kernels[rank] if name.startswith("forward")
        )
        begin = compute.bars[0].start - 1000 * first
        posts = {name_in_machine(key): found for key, found in machine.posts(rank).items()}
        for lane in others:
            drawn_as = spans(lane, begin)
            starts, ends = zip(*(times for _, *times in posts[lane.name]), strict=True)
            assert all(start in starts and end in ends for start, end in drawn_as)
            assert sum(len(bar.events) for bar in lane.bars) == sum(
                len(post.parts) for post, *_ in posts[lane.name]
            )
            num_joined += len(starts) - len(drawn_as)
    assert num_joined > 0


def spans(lane, begin: float) -> list[list[float]]:
    """Of each bar, start and end on the machine's clock."""
    found = [[(at - begin) / 1000 for at in (bar.start, bar.end)] for bar in lane.bars]
    assert all(before[1] <= after[0] for before, after in zip(found, found[1:], strict=False))
    return [[round(at, 6) for at in bar] for bar in found]


def test_the_first_receive_of_1f1b_waits_for_all_forwards_before_it():
    run, _ = recorded(Case(4, 6, batched=False))
    begin = lanes_of(run.step(0))[0][0].bars[0].start
    for rank, (compute, before, *_) in enumerate(lanes_of(run.step(0))[1:], 1):
        receive, forward = before.bars[0], compute.bars[0]
        assert (receive.kind, receive.label, forward.label) == (RECEIVING, "<F0", "F0")
        # It was posted at once, and each stage before took a forward and a message.
        assert (receive.start - begin) / 1000 == pytest.approx(0, abs=1e-6)
        until = rank * (FORWARD_MS + MESSAGE_MS)
        assert (receive.end - begin) / 1000 == pytest.approx(until)
        assert forward.start == receive.end


def test_messages_travel_while_the_stage_computes_with_overlap_alone():
    def num_hidden(case):
        hidden = 0
        for compute, *others in lanes_of(recorded(case)[0].step(0)):
            for bar in (bar for lane in others for bar in lane.bars):
                hidden += any(
                    min(work.end, bar.end) - max(work.start, bar.start) > 1 for work in compute.bars
                )
        return hidden

    assert [num_hidden(case) for case in (*LONE, *BATCHED)] == [0, 0, 0, 0]
    assert min(map(num_hidden, OVERLAPPED)) >= 8


# -- The text --

LABEL = re.compile(r"[<>]?[FB]\d+'?")


def drawn(run: Trace, width: int) -> dict[str, str]:
    """By rank and lane, the cells of a line; the legend under "legend"."""
    lines = render_lanes(run.step(0), width)
    assert max(map(len, lines)) <= width
    num_lanes = sum(len(lanes) for lanes in lanes_of(run.step(0)))
    indent = len(re.match(r"ms +", lines[0])[0])
    found, rank = {"legend": " ".join(lines[1 + num_lanes :])}, ""
    for line in lines[1 : 1 + num_lanes]:
        title, cells = line[:indent].rstrip(), line[indent:]
        rank = title if title.startswith("rank") else rank
        found[title if title == rank else rank + title] = cells
    return found


@pytest.mark.parametrize("case", [*LONE, *OVERLAPPED], ids=str)
def test_the_text_has_a_line_per_communicator_and_a_name_per_bar(case):
    run, machine = recorded(case)
    text = drawn(run, 2000)
    lanes = {name for name in text if "pp" in name}
    assert lanes == {f"rank {r}  {name}" for r in range(case.p) for name in names_of(case, r)}
    for rank in range(case.p):
        posts = {name_in_machine(key): found for key, found in machine.posts(rank).items()}
        for name, found in posts.items():
            line = text[f"rank {rank}  {name}"]
            assert len(LABEL.findall(line)) == len(found)
            sends = sum(post.parts[0].is_send for post, *_ in found)
            assert len(re.findall(">[FB]", line)) == sends
        assert len(LABEL.findall(text[f"rank {rank}"])) == 2 * case.M * (case.v or 1)


@pytest.mark.parametrize("case", [*BATCHED, *LONE], ids=str)
@pytest.mark.parametrize("width", [80, 140])
def test_a_receive_ends_in_the_column_where_the_forward_begins(case, width):
    run, _ = recorded(case)
    text = drawn(run, width)
    for rank in range(1, case.p):
        forward = text[f"rank {rank}"].index("F0")
        line = text[f"rank {rank}  {names_of(case, rank)[0]}"]
        first = re.match("<F0<*", line)
        assert first[0].startswith("<F0"[: len(first[0])])
        # In a line of many messages the next one may begin in the same column.
        assert line[:forward] == first[0][:forward]
        assert forward == len(first[0]) or line[forward] in "<x>"


def test_the_width_that_is_named_shows_every_name():
    run, _ = recorded(OVERLAPPED[1])
    legend = drawn(run, 80)["legend"]
    width = int(re.search(r"With --width (\d+), every piece of work has its name\.", legend)[1])
    assert "--width" not in (wide := drawn(run, width))["legend"]
    for rank in range(4):
        assert len(LABEL.findall(wide[f"rank {rank}"])) == 2 * 4 * 2


def test_the_legend_explains_what_is_drawn_and_no_more():
    lone, batched = (drawn(recorded(case)[0], 100)["legend"] for case in (LONE[1], BATCHED[1]))
    for words in ("F0- forward of microbatch 0, B0= its backward", "includes the wait for other"):
        assert words in lone and words in batched
    assert "pp 0:1 is the NCCL communicator of ranks 0 and 1 alone." in lone
    assert " batch" not in lone and "chunk" not in lone
    assert "x is a batch" in batched and "pp 0-3 is the communicator of a whole group" in batched


def test_what_is_too_short_for_a_column_has_one():
    run, _ = recorded(LONE[1])
    text = drawn(run, 40)
    assert set(text["rank 0"]) & {KINDS[FORWARD].fill, KINDS[BACKWARD].fill}
    assert "<" in text["rank 3  pp 2:3"] and ">" in text["rank 3  pp 2:3"]


# -- Recordings without a device --


def test_a_recording_of_cpus_shows_where_the_program_waited(plain):
    step = plain.step(0)
    for rank, (compute, *others) in enumerate(lanes_of(step)):
        assert [lane.name for lane in others] == [WAITS]
        waits = [event for event in step.events[rank].values() if event.name == "p2p-wait"]
        assert [(bar.start, bar.end) for bar in others[0].bars] == [
            (event.start, event.end) for event in waits
        ]
        assert len(compute.bars) == 2 * 4
    text = drawn(plain, 100)
    assert "the program was in a call that waits" in text["legend"]
    assert (
        "are no times of a communicator" in text["legend"]
        and "NCCL communicator" not in text["legend"]
    )


# -- Other outputs --


def test_chrome_has_a_thread_per_communicator():
    run, machine = recorded(LONE[1])
    trace = json.loads(json.dumps(chrome_trace(run)))["traceEvents"]
    names = {
        (line["pid"], line["tid"]): line["args"]["name"]
        for line in trace
        if line["ph"] == "M" and line["name"] == "thread_name" and line["tid"] > 1
    }
    assert sorted(names.items()) == [
        ((rank, tid), name)
        for rank in range(4)
        for tid, name in enumerate(names_of(LONE[1], rank), 2)
    ]
    for (rank, tid), name in names.items():
        posts = {name_in_machine(key): found for key, found in machine.posts(rank).items()}[name]
        bars = [b for b in trace if (b["pid"], b["tid"], b["ph"]) == (rank, tid, "X")]
        assert [bar["dur"] / 1000 for bar in bars] == pytest.approx([e - s for _, s, e in posts])
        assert all(bar["args"]["moves"] for bar in bars)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    for rank in recorded(LONE[1])[0].ranks:
        save_rank(rank, folder)
    return folder


def test_the_command_draws_lanes(folder, capsys):
    code, out, _ = minimegatron(capsys, "show", folder, "--lanes", "--width", 90)
    assert code == 0 and "step 0: 1F1B, 4 stages, 6 microbatches" in out
    assert out.count("pp 1:2  ") == 2 and max(map(len, out.splitlines())) <= 90
    assert minimegatron(capsys, "show", folder, "--lanes")[0] == 0
    for arguments, error in (
        (("--width", 90), "add --lanes"),
        (("--lanes", "--width", 39), "--width is 39; give 40 or more"),
        (("--lanes", "--rank", 1), "leave out --rank 1"),
        (("--lanes", "--depth", 1), "--depth chooses calls of one rank"),
    ):
        code, _, printed = minimegatron(capsys, "show", folder, *arguments)
        assert code != 0 and error in printed


def test_every_other_command_reads_a_recording_of_devices(folder, capsys):
    assert "plan: followed exactly" in minimegatron(capsys, "show", folder)[1]
    tree = minimegatron(capsys, "show", folder, "--rank", 1, "--microbatch", 0)[1]
    assert "receiving activation of microbatch 0 from stage 0  12.0 ms on pp 0:1" in tree
    assert minimegatron(capsys, "diff", folder, "plan")[0] == 0
    assert minimegatron(capsys, "diff", folder, folder)[0] == 0
    for name in ("json", "chrome", "html", "png"):
        output = folder / f"written.{name}"
        assert minimegatron(capsys, "export", folder, "--format", name, "--output", output)[0] == 0
        assert output.stat().st_size > 1000
    events = json.loads((folder / "written.json").read_text())["ranks"][1]
    assert sum("communicator" in event.get("attributes", {}) for event in events) == 6 * 4


@pytest.mark.parametrize("missing", ["communicator", "device_start", "device_end"])
def test_times_without_a_communicator_are_refused(missing):
    data = json.loads(json.dumps(recorded(LONE[0])[0].ranks[0].to_json()))
    place, event = next(
        (place, event)
        for place, event in enumerate(data["ranks"][0])
        if "communicator" in event.get("attributes", {})
    )
    event["attributes"] = {k: v for k, v in event["attributes"].items() if k != missing}
    with pytest.raises(ValueError, match=rf"ranks\.0\.{place}\.attributes lacks '{missing}'"):
        check_recording(data)
