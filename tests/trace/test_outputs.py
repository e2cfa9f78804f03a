"""Every output of a recording: right in itself, and the same story in each."""

import json
import re
import shutil
import struct
import subprocess
from collections import defaultdict
from dataclasses import replace

import pytest

from minimegatron.__main__ import main
from minimegatron.planner.actions import FORWARD, timeline_from_json
from minimegatron.planner.plan import Plan
from minimegatron.tracing import html, step_report
from minimegatron.tracing.chrome import chrome_trace
from minimegatron.tracing.html import html_page, page_data
from minimegatron.tracing.plot import THEMES
from tests.trace.fake_run import config_of, record


def minimegatron(capsys, *arguments: object) -> tuple[int, str, str]:
    try:
        code = main(["trace", *map(str, arguments)])
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err


# -- Perfetto --

REQUIRED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
"""What the trace-event format asks of each phase used here."""


def test_chrome_trace_is_valid(plain, interleaved):
    for run in (plain, interleaved):
        trace = json.loads(json.dumps(chrome_trace(run)))
        assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
        for event in trace["traceEvents"]:
            assert set(event) >= REQUIRED[event["ph"]]
            assert all(isinstance(event[key], int) for key in ("pid", "tid"))
            assert event.get("dur", 0) >= 0


def slices(trace: dict) -> dict[tuple[int, int], list[dict]]:
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def test_chrome_slices_nest(plain):
    for track in slices(chrome_trace(plain)).values():
        open_ends = []
        for event in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
            while open_ends and open_ends[-1] <= event["ts"] + 1e-4:  # a tenth of a nanosecond
                open_ends.pop()
            assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1] + 1e-4
            open_ends.append(event["ts"] + event["dur"])


def test_chrome_has_an_arrow_for_every_message(plain, interleaved):
    for run in (plain, interleaved):
        trace = chrome_trace(run)
        steps = [run.step(number) for number in range(run.num_steps)]
        ends = defaultdict(dict)
        for event in trace["traceEvents"]:
            if event["ph"] in "sf":
                ends[event["id"]][event["ph"]] = event
        assert len(ends) == sum(len(step.transfers) for step in steps)
        tracks = slices(trace)
        for pair in ends.values():
            assert pair["s"]["pid"] != pair["f"]["pid"] and pair["s"]["ts"] <= pair["f"]["ts"]
            for end in pair.values():
                # A viewer drops an arrow whose ends lie in no call.
                assert any(
                    event["ts"] <= end["ts"] < event["ts"] + event["dur"]
                    for event in tracks[end["pid"], end["tid"]]
                )


def test_chrome_names_processes_and_work(plain):
    trace = chrome_trace(plain)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"rank {r}: stage {r} (paced: forward 8 ms, backward 16 ms)" for r in range(3)]
    work = [e["name"] for e in trace["traceEvents"] if e.get("cat") == FORWARD and e["pid"] == 0]
    assert work == ["F0", "F1", "F2", "F3"] * 2


# -- HTML --


def test_html_needs_nothing_else(plain):
    page = html_page(plain)
    addresses = set(re.findall(r"""(?:https?:)?//[\w.]+\.\w+[^"'\s<]*""", page.split("<script")[0]))
    assert addresses == set()
    assert set(re.findall(r"https?://[^\"'\s<\\]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page and "@import" not in page and "url(" not in page
    assert page.count("</script>") == 2


def test_html_holds_the_whole_story(plain):
    data = page_data(plain)
    assert len(data["steps"]) == 2
    first, step = data["steps"][0], plain.step(0)
    assert [len(owner["events"]) for owner in first["ranks"]] == [len(x) for x in step.indices]
    assert len(first["messages"]) == len(step.transfers)
    assert all(
        message["d"] is not None and message["u"] is not None for message in first["messages"]
    )
    for owner in first["ranks"]:
        for event in owner["events"]:
            for source, line in data["stacks"][event["st"]]:
                text = data["sources"][source]["t"]
                assert 0 <= line - int(source.rpartition(":")[2]) < max(1, text.count("\n"))
    assert first["paced"].startswith("paced: forward 8 ms, backward 16 ms")
    assert len(page_data(plain, steps=[1])["steps"]) == 1


def test_g_stacks_show_no_decorators(plain):
    """Which hand every call on, and are no step of anything."""
    data = page_data(plain)

    def is_decorator(key: str) -> bool:
        return data["sources"][key]["t"].lstrip().startswith("@functools.wraps(")

    shown = [[key for key, _ in stack] for stack in data["stacks"]]
    assert not [key for stack in shown for key in stack if is_decorator(key)]
    recorded = {key for rank in plain.ranks for stack in rank.stacks for key, _ in stack}
    texts = [rank.sources[key].text for rank in plain.ranks for key in recorded & {*rank.sources}]
    assert any("@functools.wraps(" in text for text in texts)


def test_g_one_stage_has_no_pipeline():
    step = record(config_of("1f1b", 1, 3)).step(0)
    (bubble,) = [one for one in html._figures(step) if one["label"].startswith("bubble")]
    assert bubble["value"] == "no pipeline" and "between its calls" in bubble["remark"]
    assert "bubble  no pipeline" in (report := "\n".join(step_report.bubble_lines(step)))
    assert "0.0 % =" not in report and len(report.splitlines()) == 2


def test_html_text_cannot_end_its_script(plain):
    data = html_page(plain).split('id="data">')[1].split("</script>")[0]
    assert "<" not in data
    assert json.loads(data)["clock"] == plain.clock_words


def with_source(run, text: str):
    """The same run, recorded with other sources: those of whoever sent the recording."""
    ranks = [
        replace(
            rank,
            sources={
                key: replace(source, text=text + source.text)
                for key, source in rank.sources.items()
            },
        )
        for rank in run.ranks
    ]
    return type(run)(ranks)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize(
    "source",
    ["", "<!-- <script> ", "</script><script>throw 1</script>"],
    ids=["", "open", "closed"],
)
def test_html_draws_itself_from_a_file(plain, tmp_path, source):
    """Whatever a recorded source says: `<!--` with `<script` would hide the page's own program."""
    page = tmp_path / "timeline.html"
    with_source(plain, source).to_html(page)
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    flags += " --disable-background-networking --disable-component-update --disable-sync"
    flags += f" --user-data-dir={tmp_path / 'profile'} --enable-logging=stderr --dump-dom"
    stage, index = 1, plain.step(0).work(1)[2]
    address = f"file://{page}#step=0&stage={stage}&action={index}"
    done = subprocess.run(
        ["chromium", *flags.split(), address], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    dom = done.stdout
    assert len(re.findall(r'class="bar(?: \w+)*"', dom)) == 3 * 4 * 2
    assert dom.count('class="row"') == 3
    chosen = plain.step(0).events[1][index].action
    assert f"<h2>{chosen.kind.capitalize()} of microbatch {chosen.microbatch}</h2>" in dom
    assert "Call stack" in dom and "schedules.py:" in dom


def test_a_run_without_a_pipeline_has_no_timeline(plain):
    empty = type(plain)([])
    with pytest.raises(ValueError, match="no schedule run of a whole pipeline"):
        html_page(empty)


# -- Pictures --


@pytest.mark.parametrize("theme", THEMES)
def test_pictures(plain, interleaved, tmp_path, theme):
    for run, plan in ((plain, True), (interleaved, False)):
        figure = run.plot(tmp_path / "x.png", plan=plan, theme=theme)
        header = (tmp_path / "x.png").read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", header[16:24])
        assert width > 1200 and 300 < height < width
        assert "measured on" in figure.texts[1].get_text()
    with pytest.raises(ValueError, match="theme is 'red'; use 'light' or 'dark'"):
        plain.plot(theme="red")


def test_bars_carry_their_microbatch(plain):
    """In a picture so wide that every bar has room, however short a slow moment has made some."""
    step = plain.step(0)
    work = [step.events[rank][index] for rank in range(3) for index in step.work(rank)]
    # A number of one digit needs 4 points of type, 0.62 of that across, and 1.5 around it.
    points = step.makespan / min(event.end - event.start for event in work) * (4 * 0.62 + 1.5)
    texts = [text.get_text() for text in plain.plot(width=2 + points / 72).axes[0].texts]
    assert texts == [str(event.action.microbatch) for event in work]


def test_a_narrow_bar_carries_no_number(plain):
    assert not plain.plot(width=1.02).axes[0].texts


# -- The command line --


def test_show_prints_the_report(plain_folder, capsys):
    code, out, _ = minimegatron(capsys, "show", plain_folder[0], "--step", 1)
    assert code == 0
    assert "step 1: 1F1B, 3 stages, 4 microbatches" in out
    assert "plan: followed exactly" in out and "33.3 % = (p - 1)/(M + p - 1)" in out
    assert re.search(r"before B0: [\d.]+ ms waiting for B0 of stage 1", out)


def test_show_prints_one_ranks_calls(plain_folder, capsys):
    folder = plain_folder[0]
    code, out, _ = minimegatron(capsys, "show", folder, "--rank", 1, "--microbatch", 2)
    assert code == 0 and "forward_step  F2  steady" in out and "F1" not in out
    assert "activation of microbatch 2 <- stage 0, 480 B  [5 x 2 x 6] float64" in out
    code, out, _ = minimegatron(capsys, "show", folder, "--rank", 1, "--depth", 1)
    assert "more inside" in out
    code, all_of_it, _ = minimegatron(capsys, "show", folder, "--rank", 1, "--all")
    assert len(all_of_it.splitlines()) == len(plain_folder[1].ranks[1].events) + 3
    code, _, err = minimegatron(capsys, "show", folder, "--microbatch", 2)
    assert code == 2 and "--microbatch chooses calls of one rank; add --rank" in err


def test_diff_says_by_its_exit_code_whether_runs_agree(plain_folder, tmp_path, capsys):
    folder = plain_folder[0]
    assert minimegatron(capsys, "diff", folder, "plan")[0] == 0
    code, out, _ = minimegatron(capsys, "diff", folder, folder, "--other-step", 1)
    assert code == 0 and "actions: the same" in out
    for path in folder.glob("rank-*"):
        data = json.loads(path.read_text())
        for events in data["ranks"]:
            for event in events:
                if event["kind"] == "forward" and event["microbatch"] == 3:
                    event["microbatch"] = 2
        (tmp_path / path.name).write_text(json.dumps(data))
    code, out, _ = minimegatron(capsys, "diff", folder, tmp_path)
    assert code == 1 and "expected forward of microbatch 3" in out
    code, out, _ = minimegatron(capsys, "diff", tmp_path, "plan")
    assert code == 1 and "NOT followed" in out
    assert minimegatron(capsys, "show", tmp_path)[0] == 1


def test_export(plain_folder, tmp_path, capsys):
    folder, trace = plain_folder
    for name in ("chrome", "html", "png", "json"):
        path = tmp_path / name
        assert minimegatron(capsys, "export", folder, "--format", name, "--output", path)[0] == 0
        assert path.stat().st_size > 10_000
    data = json.loads((tmp_path / "json").read_text())
    assert Plan.from_json(data).ranks == trace.step(0).plan.ranks
    events = timeline_from_json(data)
    assert sum(event.wait for event in events[1]) > 0
    assert data["source"] == "run" and data["pace"] == {"forward_ms": 8.0, "backward_ms": 16.0}


def test_bad_requests_end_in_one_line(plain_folder, tmp_path, capsys):
    for arguments, words in (
        (("show", tmp_path), "has no rank-*.json"),
        (("show", plain_folder[0], "--step", 7), "the recording has 2 steps"),
        (("show", plain_folder[0], "--tp", 1), "recorded pipelines: (tp 0, dp 0, cp 0)"),
        (("show", plain_folder[0], "--rank", 5), "there is no recording of rank 5"),
        (("export", plain_folder[0], "--format", "gif"), "invalid choice: 'gif'"),
        (("--version",), "show|diff|unroll|export"),
    ):
        code, _, err = minimegatron(capsys, *arguments)
        assert code == 2 and words in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "number", "words"),
    [
        (("rank", "world_size"), 10**11, "rank.world_size is 100000000000"),
        (("rank", "sizes", "pp"), 10**11, "rank.sizes.pp is 100000000000"),
        (("ranks", 0, 0, "start"), float("inf"), "start is inf, not within 1e+15"),
        (("ranks", 0, 0, "start"), float("nan"), "start is nan, not within 1e+15"),
    ],
)
def test_numbers_that_no_run_has_are_refused(plain_folder, tmp_path, capsys, field, number, words):
    """Was: NaN gave a page without its program, and a large size took all memory."""
    for path in plain_folder[0].glob("rank-*"):
        data = place = json.loads(path.read_text())
        for key in field[:-1]:
            place = place[key]
        assert field[-1] in place
        place[field[-1]] = number
        (tmp_path / path.name).write_text(json.dumps(data))
    code, _, err = minimegatron(capsys, "show", tmp_path)
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1
