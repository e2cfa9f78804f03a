"""The player's timing against the planner's, for every plan that the player offers.

`planner.simulator` says when everything happens; docs/javascripts/engine.js must say the same, to
the last bit: whole numbers and floats go through the same sums and maxima.
"""

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from minimegatron.planner.actions import ACTIVATION, SEND, Action
from minimegatron.planner.imagined_transport import BUFFERED, RENDEZVOUS
from minimegatron.planner.plan import Plan
from minimegatron.planner.simulator import Costs, simulate

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import emit_orders  # noqa: E402

MAX_FIRST_BYTES, MAX_BYTES = 20_000, 200_000

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")


@cache
def plans() -> dict[str, Plan]:
    return dict(emit_orders.plans())


@pytest.fixture
def orders_file(site: Path) -> Path:
    """The plans that the player offers, as the site has them; interleaved ones are beside it."""
    return site / "javascripts" / "orders.js"


def ask_node(cases: list[dict[str, Any]], orders_file: Path, whole: bool) -> list[dict[str, Any]]:
    engine = ROOT / "docs" / "javascripts" / "engine.js"
    command = ["node", HERE / "player_timing.js", engine, orders_file, "whole" if whole else ""]
    lines = "\n".join(map(json.dumps, cases))
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def answer(plan: Plan, case: dict[str, Any], whole: bool) -> dict[str, Any]:
    """What the engine should say."""
    p, v = plan.config.pp_size, plan.config.num_model_chunks
    order = [(rank, chunk) for chunk in range(v) for rank in range(p)]
    times = [[case[kind][rank][chunk] for rank, chunk in order] for kind in ("forward", "backward")]
    step = simulate(
        plan,
        Costs(*times, latency=case["message"]),
        BUFFERED if case["buffered"] else RENDEZVOUS,
    )
    ranks = range(p)
    said = {
        "sums": [[add(times) for times in lists] for lists in (step.starts, step.ends, step.waits)],
        "makespan": step.makespan,
        "idle": [step.idle(rank) for rank in ranks],
        "overIdeal": float(step.bubble_over_ideal),
        "overTotal": float(step.bubble_over_total),
        "peaks": [plan.peak_in_flight(rank) for rank in ranks],
        "gaps": [[list(gap)[1:] for gap in map(gap_parts, step.gaps(rank))] for rank in ranks],
        "critical": [list(place) for place in step.critical_path()],
    }
    if whole:
        said |= {"starts": step.starts, "ends": step.ends, "waits": step.waits}
        said["actions"] = [[action_parts(action) for action in actions] for actions in plan.ranks]
        said["causes"] = [[place and list(place) for place in causes] for causes in step.causes]
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
    parts = [action.microbatch, action.chunk, action.phase, action.call, messages, action.overlap]
    return [action.kind[0].upper(), *parts]


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


def uneven_case(key: str, plan: Plan, message: float, buffered: bool) -> dict[str, Any]:
    p, v = plan.config.pp_size, plan.config.num_model_chunks
    forward = [[1 + 0.25 * ((rank + 3 * chunk) % 3) for chunk in range(v)] for rank in range(p)]
    backward = [[2 - 0.125 * ((rank + chunk) % 4) for chunk in range(v)] for rank in range(p)]
    return {
        "key": key,
        "forward": forward,
        "backward": backward,
        "message": message,
        "buffered": buffered,
    }


def even_case(key: str, plan: Plan) -> dict[str, Any]:
    p, v = plan.config.pp_size, plan.config.num_model_chunks
    return {
        "key": key,
        "forward": [[1] * v] * p,
        "backward": [[2] * v] * p,
        "message": 0,
        "buffered": False,
    }


def compare(cases: list[dict[str, Any]], orders_file: Path, whole: bool) -> None:
    for case, said in zip(cases, ask_node(cases, orders_file, whole), strict=True):
        expected = answer(plans()[case["key"]], case, whole)
        for name, value in expected.items():
            if said[name] != value:
                same(value, said[name], f"{case['key']}, message {case['message']}: {name}")


@needs_node
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.full)])
def test_times_of_plans(orders_file: Path, every: int) -> None:
    """Eleven is prime: every schedule comes along with every number of stages, and of chunks."""
    some = list(plans().items())[::every]
    compare([even_case(key, plan) for key, plan in some], orders_file, whole=False)


@needs_node
@pytest.mark.parametrize("buffered", [False, True])
def test_uneven_stages_and_messages_take_time(orders_file: Path, buffered: bool) -> None:
    some = list(plans().items())[::40]
    cases = [uneven_case(key, plan, 0.375, buffered) for key, plan in some]
    compare(cases, orders_file, whole=True)


@needs_node
def test_times_that_are_no_binary_fractions(orders_file: Path) -> None:
    keys = ["1f1b 4 8 1 0", "gpipe 8 16 1 0", "interleaved 4 8 2 4", "interleaved 4 8 4 4 overlap"]
    cases = []
    for key in keys:
        case = uneven_case(key, plans()[key], 0.1, False)
        case["forward"] = [[time / 3 for time in times] for times in case["forward"]]
        cases.append(case)
    compare(cases, orders_file, whole=True)


def test_every_formula_is_the_planners(orders_file: Path) -> None:
    formulas = emit_orders.formula_values(plans()["1f1b 4 8 1 0"])
    assert formulas["total"] == ["(p - 1)/(M + p - 1)", "3/11"]
    assert formulas["peak"] == ["min(M, p - r)", [4, 3, 2, 1]]


def test_the_files_are_small(orders_file: Path) -> None:
    assert orders_file.stat().st_size < MAX_FIRST_BYTES
    assert orders_file.with_name("orders_interleaved.js").stat().st_size < MAX_BYTES
