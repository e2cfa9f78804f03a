"""The player's graph and its timing against the planner's, for plans that it offers and for any others.

`planner.simulator` says when everything happens; docs/javascripts/engine.js must say the same, to
the last bit: whole numbers and floats go through the same sums and maxima.
"""

import contextlib
import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minimegatron.core.orders.orders import WRITTEN_HERE
from minimegatron.core.orders.placement import BOTH, LINE, V
from minimegatron.planner.actions import ACTIVATION, COMMUNICATE, KINDS, SEND, Action, parts_of
from minimegatron.planner.imagined_transport import BUFFERED, RENDEZVOUS, match_messages
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.simulator import Costs, simulate
from tests.planner import known_orders

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
sys.path.insert(0, str(ROOT / "docs" / "tools"))

from player import emit_orders, plan_words  # noqa: E402

MAX_FIRST_BYTES, MAX_BYTES = 40_000, 250_000

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")


@cache
def plan_of(key: str) -> Plan:
    """The plan that the player calls so."""
    name, p, M, v, G, *overlap = key.split()
    chunks: dict[str, Any] = {"vpp": int(v)} if int(v) > 1 else {}
    if int(G):
        chunks |= {"group_size": int(G), "overlap_p2p_comm": bool(overlap)}
    return plan(name, int(p), int(M), **chunks)


@pytest.fixture
def folder(site: Path) -> Path:
    """Where the site has the plans that the player offers."""
    return site / "javascripts"


def ask_node(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    engine = ROOT / "docs" / "javascripts" / "engine.js"
    lines = "\n".join(map(json.dumps, cases))
    command = ["node", HERE / "player_timing.js", engine, folder]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def case_of(
    step: Plan,
    key: str | None = None,
    message: float = 0,
    buffered: bool = False,
    uneven: bool = False,
    third: bool = False,
    pairs: str = "sum",
    whole: bool = True,
) -> dict[str, Any]:
    """What node is asked. Without a key it is given the plan as a reader's own would be."""
    p, v = step.config.pp_size, step.config.num_model_chunks

    def times(whole_stage: float, change: float) -> list[list[float]]:
        change = change if uneven else 0
        found = [
            [whole_stage + change * ((rank + 3 * chunk) % 3) for chunk in range(v)]
            for rank in range(p)
        ]
        return [[time / 3 for time in of_rank] for of_rank in found] if third else found

    case = {
        "times": {
            "F": times(1, 0.25),
            "B": times(2, -0.125),
            "I": times(1.25, 0.5),
            "W": times(0.75, 0.125),
        },
        "message": message,
        "buffered": buffered,
        "pairs": pairs,
        "whole": whole,
    }
    if key is not None:
        return case | {"key": key}
    rows = [plan_words.row(actions) for actions in step.ranks]
    letters = [kind.letter for kind in KINDS.values() if kind.letter]
    return case | {
        "plan": {
            "rows": rows,
            "placement": plan_words.placement_data(step.config.placement, letters),
            "b": int(step.config.batch_p2p_comm),
            "w": int(step.config.wire == "tagged"),
        }
    }


def answer(step: Plan, case: dict[str, Any]) -> dict[str, Any]:
    """What the engine should say."""
    placement = step.config.placement
    p = step.config.pp_size

    def given(letter: str) -> list[float]:
        times: dict[int, float] = {}
        for rank, stages in enumerate(placement.stages):
            for chunk, stage in enumerate(stages):
                times[stage] = case["times"][letter][rank][chunk]
        return [times[stage] for stage in range(placement.num_stages)]

    costs = Costs(
        given("F"),
        given("B"),
        latency=case["message"],
        backward_input=given("I"),
        backward_weight=given("W"),
        pair=max if case["pairs"] == "max" else None,
    )
    found = simulate(step, costs, BUFFERED if case["buffered"] else RENDEZVOUS)
    ranks = range(p)
    said = {
        "sums": [
            [add(times) for times in lists] for lists in (found.starts, found.ends, found.waits)
        ],
        "makespan": found.makespan,
        "idle": [found.idle(rank) for rank in ranks],
        "overIdeal": float(found.bubble_over_ideal),
        "overTotal": float(found.bubble_over_total),
        "peaks": [step.peak_in_flight(rank) for rank in ranks],
        "gaps": [[list(gap)[1:] for gap in map(gap_parts, found.gaps(rank))] for rank in ranks],
        "critical": [list(place) for place in found.critical_path()],
    }
    if case["whole"]:
        said |= {"starts": found.starts, "ends": found.ends, "waits": found.waits}
        said["actions"] = [[action_parts(action) for action in actions] for actions in step.ranks]
        said["causes"] = [[place and list(place) for place in causes] for causes in found.causes]
        said |= edges(step)
    return said


def add(times: list[float]) -> float:
    total = 0
    for time in times:  # sum() of floats is more exact than JavaScript's additions
        total = total + time
    return total


def gap_parts(gap: Any) -> tuple:
    return gap.rank, gap.start, gap.end, gap.before, gap.waits_for and list(gap.waits_for)


def action_parts(action: Action) -> list[Any]:
    messages = [
        [m.direction == SEND, m.payload == ACTIVATION, m.peer, m.microbatch, m.chunk]
        for m in action.messages
    ]
    letters = [(KINDS[x.kind].letter if x.kind in KINDS else "C") for x in parts_of(action)]
    parts = [[k, x.microbatch, x.chunk] for k, x in zip(letters, parts_of(action), strict=True)]
    return [parts, action.phase, action.call, messages, action.overlap]


def edges(step: Plan) -> dict[str, Any]:
    """What each piece of work needs and feeds, worked out from the table and the placement alone."""
    placement = step.config.placement
    places, work = {}, []
    for rank, actions in enumerate(step.ranks):
        for index, action in enumerate(actions):
            if action.kind != COMMUNICATE:
                work.append([rank, index])
                for part in parts_of(action):
                    places[part.kind, rank, part.chunk, part.microbatch] = [rank, index]
    needs: dict[tuple, set] = {tuple(place): set() for place in work}
    for (kind, rank, chunk, mb), place in places.items():
        takes, sources = KINDS[kind].takes, []
        if takes is not None:
            side = placement.previous_of if takes == ACTIVATION else placement.next_of
            source = side(rank, chunk)
            sources += [(k, *source, mb) for k in KINDS if source and KINDS[k].gives == takes]
        sources += [(k, rank, chunk, mb) for k in KINDS[kind].after]
        for found in (places[source] for source in sources if source in places):
            if found != place:
                needs[tuple(place)].add(tuple(found))
    feeds: dict[tuple, set] = {tuple(place): set() for place in work}
    for place, sources in needs.items():
        for source in sources:
            feeds[source].add(place)
    return {
        "needs": [[list(x) for x in sorted(needs[tuple(place)])] for place in work],
        "feeds": [[list(x) for x in sorted(feeds[tuple(place)])] for place in work],
    }


def same(value: Any, said: Any, where: str) -> None:
    if isinstance(value, list):
        assert isinstance(said, list), where
        assert len(value) == len(said), where
        for number, (one, other) in enumerate(zip(value, said, strict=True)):
            same(one, other, f"{where}[{number}]")
    elif isinstance(value, float) and isinstance(said, int | float):
        assert said == pytest.approx(value, rel=1e-12, abs=1e-12), where
    else:
        assert said == value, where


def compare(steps: list[tuple[Plan, dict[str, Any]]], folder: Path) -> list[dict[str, Any]]:
    answers = ask_node([case for _, case in steps], folder)
    for (step, case), said in zip(steps, answers, strict=True):
        for name, value in answer(step, case).items():
            if said[name] != value:
                same(value, said[name], f"{case.get('key')}, message {case['message']}: {name}")
        if case["whole"]:
            assert len(set(said["ids"])) == len(said["ids"])
            assert len(said["messages"]) == sum(
                len(side[0]) for side in match_messages(step).values()
            )
    return answers


def offered(every: int) -> list[str]:
    """Some of the keys that the player offers, of each schedule."""
    keys = []
    for name in WRITTEN_HERE:  # other tests may have registered more
        for sizes in list(emit_orders.sizes(name))[::every]:
            key = emit_orders.key_of(name, *sizes)
            with contextlib.suppress(ValueError):  # sizes that do not go together
                plan_of(key)
                keys.append(key)
    return keys


# -- Plans that the player offers --


@needs_node
@pytest.mark.parametrize("every", [61, pytest.param(1, marks=pytest.mark.full)])
def test_times_of_plans(folder: Path, every: int) -> None:
    """A prime: every number of stages, and of chunks, comes along."""
    keys = offered(every)
    compare([(plan_of(key), case_of(plan_of(key), key, whole=False)) for key in keys], folder)


@needs_node
@pytest.mark.parametrize("buffered", [False, True])
def test_uneven_stages_and_messages_take_time(folder: Path, buffered: bool) -> None:
    keys = [key for key in offered(109) if int(key.split()[1]) <= 8]
    assert {key.split()[0] for key in keys} == {*WRITTEN_HERE}
    options = {"message": 0.375, "buffered": buffered, "uneven": True}
    compare([(plan_of(key), case_of(plan_of(key), key, **options)) for key in keys], folder)


@needs_node
def test_times_that_are_no_binary_fractions(folder: Path) -> None:
    keys = ["1f1b 4 8 1 0", "gpipe 8 16 1 0", "interleaved 4 8 2 4", "interleaved 4 8 4 4 overlap"]
    options = {"message": 0.1, "uneven": True, "third": True}
    compare([(plan_of(key), case_of(plan_of(key), key, **options)) for key in keys], folder)


# -- Any other order: split backwards, two chunks in a V, two copies of the model, pairs --


@needs_node
@pytest.mark.parametrize(
    ("order", "rule", "M"),
    [
        (known_orders.split_1f1b, LINE, 6),
        (known_orders.zb_h1, LINE, 8),
        (known_orders.zb_v, V, 7),
        (known_orders.dualpipe_v, V, 8),
        (known_orders.dualpipe, BOTH, 8),
    ],
)
def test_any_registered_order(folder: Path, order: Any, rule: Any, M: int) -> None:
    with known_orders.registered(order, rule) as name:
        step = plan(name, 4, M)
        cases = [
            case_of(step, message=message, buffered=buffered, uneven=uneven, pairs=pairs)
            # With two copies of the model a stage has two places, and one time.
            for message, buffered, uneven in [(0, False, False), (0.25, True, rule is not BOTH)]
            for pairs in ("sum", "max")
        ]
        answers = compare([(step, case) for case in cases], folder)
        splits = any(action.kind == "backward-weight" for action in step.ranks[0])
        assert (answers[0]["owed"] is not None) == splits
        if splits:
            assert all(owed[-1] == 0 and max(owed) >= 1 for owed in answers[0]["owed"])


def test_an_order_that_is_registered_is_emitted() -> None:
    with known_orders.registered(known_orders.zb_h1) as name:
        keys = [emit_orders.key_of(name, *sizes) for sizes in emit_orders.sizes(name)]
    assert f"{name} 4 8 1 0" in keys
    assert f"{name} 16 128 1 0" in keys


# -- The files --


def test_every_formula_is_the_planners() -> None:
    formulas = emit_orders.formula_values(plan_of("1f1b 4 8 1 0"))
    assert formulas["total"] == ["(p - 1)/(M + p - 1)", "3/11"]
    assert formulas["peak"] == ["min(M, p - r)", [4, 3, 2, 1]]


def test_the_largest_sizes_are_offered() -> None:
    for key in (
        "1f1b 16 128 1 0",
        "gpipe 16 128 1 0",
        "interleaved 16 128 2 16",
        "breadth-first 16 128 2 0",
    ):
        name = key.split()[0]
        assert key in [emit_orders.key_of(name, *sizes) for sizes in emit_orders.sizes(name)]
        assert plan_of(key).config.pp_size == 16


def test_the_files_are_small(folder: Path) -> None:
    assert (folder / "orders.js").stat().st_size < MAX_FIRST_BYTES
    for path in folder.glob("orders_*.js"):
        assert path.stat().st_size < MAX_BYTES, path
