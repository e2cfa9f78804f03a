"""Whatever the commands are given, they answer or refuse in one line: never in a traceback.

Layout strings, planner input and recorded traces, as Hypothesis draws and damages them; the same in
every run. For command lines of training see `test_fuzz_arguments`, for `.idx` files
`tests/core/datasets/test_indexed_dataset.py`.
"""

import contextlib
import copy
import io
import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.__main__ import main
from minimegatron.planner.registry import schedule_names
from tests.ranks import run_ranks
from tests.trace.recordings import record

NUM_RECORDINGS = 150
repeatable = settings(max_examples=150, deadline=None)


def run_command(*argv: str) -> tuple[int, str, str]:
    """Exit code and what was printed. Anything but an exit is passed on, and fails the test."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = main(argv)
        except SystemExit as ending:
            code = ending.code
    return code, out.getvalue(), err.getvalue()


def check_answer(code: int, out: str, err: str, refusal_lines: tuple[int, ...] = (1,)) -> None:
    assert code in (0, 1, 2)
    if code == 2:
        assert ": error: " in err
        assert len(err.splitlines()) in refusal_lines, err
    else:
        assert out or err


# -- Layouts and plans --


@given(st.text("EtmL|()*,-0123 x\n\té", max_size=14), st.sampled_from(["1", "2", "4", "0", "x"]))
@repeatable
def test_layouts(text, pp):
    code, out, err = run_command("layout", f"--pp={pp}", "--", text)
    check_answer(code, out, err, (1, 3))
    if len(err.splitlines()) == 3:
        assert err.splitlines()[2].strip() == "^"


COUNTS = st.sampled_from(["1", "2", "3", "4", "8", "0", "-1", "x", "1.5", ""])
TIMES = st.sampled_from(["1", "2", "1/3", "0.5", "0", "-1", "1/0", "nan", "1e400", "x", "1,2", ""])
PLAN_FLAGS = {
    "--vpp": COUNTS,
    "--group-size": COUNTS,
    "--schedule": st.sampled_from([*schedule_names(), "spiral", ""]),
    "--user-schedule": st.sampled_from(["x", "x.py:f", ":", f"{__file__}:nothing"]),
    "--message-bytes": COUNTS,
    "--forward-time": TIMES,
    "--backward-time": TIMES,
    "--comm-time": TIMES,
    "--bandwidth": TIMES,
    "--imbalance": TIMES,
    "--layout": st.sampled_from(["Et|tL", "E|t|t|L", "Et*", "", "(((", "Et|tt|tt|tL"]),
    "--context-parallel-size": st.sampled_from(["1", "4", "0", "-1"]),
    "--ring-times": st.sampled_from(["1,1", "2,0", "1", "-1,1", "x,1"]),
    "--layer-time": st.sampled_from(["loss=1:2", "loss=1", "x=1:2", "=", "decoder=-1:0"]),
    "--transport": st.sampled_from(["rendezvous", "buffered", "pigeon"]),
    "--format": st.sampled_from(["text", "svg", "json", "chrome", "gif"]),
    "--width": st.sampled_from(["40", "39", "200", "-1", "x"]),
}
PLAN_SWITCHES = ["--forward-only", "--overlap-p2p-comm", "--no-batch-p2p-comm", "--critical-path"]


@st.composite
def plan_commands(draw: st.DrawFn) -> list[str]:
    words = [f"--pp={draw(COUNTS)}", f"--microbatches={draw(COUNTS)}"]
    for flag in draw(st.lists(st.sampled_from(sorted(PLAN_FLAGS)), max_size=4, unique=True)):
        words.append(f"{flag}={draw(PLAN_FLAGS[flag])}")
    return words + draw(st.lists(st.sampled_from(PLAN_SWITCHES), max_size=2, unique=True))


@given(plan_commands())
@repeatable
def test_plans(words):
    check_answer(*run_command("plan", *words), refusal_lines=(1, 3))


# -- Recordings --


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> list[dict]:
    """Two stages, two microbatches, one step."""
    folder = tmp_path_factory.mktemp("recording")
    run_ranks(record, 2, str(folder), 2, 2, None, False, 1, False)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


ODD_VALUES = [None, -1, 0, 10**9, 1.5, True, "x", "", [], {}, [0], {"a": 1}]


def damaged(data: Any, dice: random.Random) -> Any:
    """A copy of `data` with one value somewhere in it replaced, removed or doubled."""
    changed = copy.copy(data)
    key = dice.choice(list(data) if isinstance(data, dict) else range(len(data)))
    if isinstance(data[key], dict | list) and data[key] and dice.random() < 0.85:
        changed[key] = damaged(data[key], dice)
    elif dice.random() < 0.2:
        del changed[key]
    elif dice.random() < 0.2 and isinstance(data, list):
        changed.insert(key, data[key])
    else:
        changed[key] = dice.choice(ODD_VALUES)
    return changed


LOOKS = [
    ("show",),
    ("show", "--rank", "0"),
    ("show", "--rank", "1", "--all"),
    ("diff", "plan"),
    ("export", "--format", "chrome", "--output", "out.json"),
    ("export", "--format", "json", "--output", "out.json"),
    ("export", "--format", "html", "--output", "out.html"),
]


def test_recordings(recording, tmp_path):
    dice = random.Random(0)
    codes = Counter()
    for number in range(NUM_RECORDINGS):
        ranks, which = [*recording], dice.randrange(2)
        for _ in range(dice.randint(1, 2)):
            ranks[which] = damaged(ranks[which], dice)
        texts = [json.dumps(rank) for rank in ranks]
        if dice.random() < 0.1:
            texts[which] = texts[which][: dice.randrange(len(texts[which]))]
        for rank, text in enumerate(texts):
            (tmp_path / f"rank-{rank:05d}.json").write_text(text)
        action, *rest = dice.choice(LOOKS)
        rest = [str(tmp_path / word) if word.startswith("out.") else word for word in rest]
        try:
            answer = run_command("trace", action, str(tmp_path), *rest)
            check_answer(*answer)
        except Exception as error:
            error.add_note(f"recording {number}, trace {action} {rest}; see {tmp_path}")
            raise
        codes[answer[0]] += 1
    assert codes[0] > 10 and codes[2] > 10, codes
