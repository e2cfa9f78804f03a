"""The recordings that the documentation replays: small, honest about where they come from, and every
call in them still in the source. A line may be edited or moved. Where its call is gone: `make traces`.
"""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDINGS = sorted((ROOT / "docs" / "recordings").glob("*.json"))
MAX_BYTES = 300_000


@pytest.fixture(scope="module")
def emit():
    return importlib.import_module("player.emit_player")


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_every_frame_is_a_line_of_the_source(path: Path, emit, package) -> None:
    data = emit.resolve(json.loads(path.read_text()), package)
    assert not data["gone"], "run make traces:\n" + "\n".join(data["gone"])
    for _, url, text in data["frames"]:
        page, number = re.fullmatch(r"source/(.+)\.html#L(\d+)", url).groups()
        assert package.pages[page].lines[int(number) - 1].strip() == text
    for name, url, dotted in data["functions"]:
        assert "#" in url, f"{name} ({dotted}) is not in the annotated source"


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_recording_says_where_it_comes_from(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    data = json.loads(path.read_text())
    provenance = data["provenance"]
    assert set(provenance) == {"command", "date", "versions", "machine", "clock"}
    assert "-m minimegatron.pretrain_" in provenance["command"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", provenance["date"])
    for step in data["steps"]:
        (plan,) = [figure for figure in step["figures"] if figure["label"] == "plan"]
        assert plan["value"] == "followed exactly"
        assert bool(step["paced"]) == ("--pace-forward-ms" in provenance["command"])


def test_g_stacks_begin_with_the_steps_own_functions(emit, package) -> None:
    decorators = emit.decorators_of(package)
    assert "minimegatron.core.pipeline_parallel.failed_step.schedule.<locals>.run" in decorators
    recordings = emit.read_recordings()
    for name in ("1f1b", "combined-paced", "one-rank"):
        data = recordings[name]
        recorded = {data["sources"][source][0] for source, _, _ in data["frames"]}
        assert not recorded & decorators, "a recording leaves them out, and so does the page"
        found = emit.resolve(data, package)
        shown = {found["frames"][number][0] for stack in found["stacks"] for number in stack}
        assert not shown & decorators, name


def test_g_one_stage_says_that_there_is_no_pipeline(emit) -> None:
    seen = set()
    for data in emit.read_recordings().values():
        for step in data["steps"]:
            (bubble,) = [one for one in step["figures"] if one["label"].startswith("bubble")]
            has_pipeline = len(step["ranks"]) > 1
            assert (bubble["value"] == "no pipeline") != has_pipeline
            seen.add(has_pipeline)
    assert seen == {True, False}


def test_there_is_one_of_each_kind(emit) -> None:
    recordings = emit.read_recordings()
    assert {"1f1b-paced", "1f1b", "interleaved-paced", "tp2-pp2"} <= set(recordings)
    assert len(recordings["tp2-pp2"]["steps"]) == 2, "one pipeline per tensor-parallel rank"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "no-pipelining"])
def test_every_schedule_has_call_chains(schedule: str, emit, package) -> None:
    if schedule == "gpipe":
        chains = emit.planned_chains(package)
    else:
        (name,) = [name for name, which in emit.SCHEDULES.items() if which == schedule]
        chains = emit.recorded_chains(emit.resolve(emit.read_recordings()[name], package))
    for letter, function in (("F", "forward_step"), ("B", "backward_step")):
        (chain, *_) = [frames for key, frames in chains.items() if key.startswith(f"{letter} ")]
        assert chain[-1][0].endswith(function)
        assert all(url.startswith("source/") for _, url, _ in chain)
