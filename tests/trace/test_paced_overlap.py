"""Paced all-to-alls: hiding them gains in time what the two lanes of the layers say."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import minimegatron
from minimegatron.core import collectives
from minimegatron.core.tracing import traced
from minimegatron.tracing import pace as pace_module
from tests.figures import figure
from tests.trace.paced_overlap import Ran, measured

PACES_MS = (40.0, 120.0, 360.0)
"""Of an attention, in turn: a machine that has other work is late by milliseconds, not by a share."""
TIMES = 3
CLOSE = 0.05


def is_close(ran: list[Ran]) -> bool:
    """Within 5 %: what combined steps leave exposed, and what they gain over ordinary ones."""
    ordinary, *combined = ran
    return all(
        abs(one.exposed / one.planned_exposed - 1) < CLOSE
        and abs(ordinary.length / one.length * one.planned_length / ordinary.planned_length - 1)
        < CLOSE
        for one in combined
    )


@pytest.mark.processes
def test_every_way_follows_its_plan_node_by_node(tmp_path):
    """Pair by pair, message by message, and no step is shorter than its pace allows."""
    ran = measured(str(tmp_path), 2, 4, 3.0)
    assert [one.problems for one in ran] == [()] * 3
    assert all(one.length > 0.995 * one.planned_length for one in ran)
    ordinary, combined, delayed = (one.planned_length for one in ran)
    assert ordinary > combined > delayed


def keeps_pace(ordinary: Ran) -> bool:
    """Whether the machine can: nothing is hidden there, so only other work makes it longer."""
    pairs = [
        (ordinary.length, ordinary.planned_length),
        (ordinary.exposed, ordinary.planned_exposed),
    ]
    return all(abs(took / planned - 1) < CLOSE for took, planned in pairs)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(("pp", "M"), [(1, 2), (2, 4)])
def test_what_is_exposed_and_what_is_gained(tmp_path, pp, M):
    """Of three steps each the one that the machine disturbed least; when that is much, more slowly."""
    for pace_ms in PACES_MS:
        ran = measured(str(tmp_path / f"{pace_ms}"), pp, M, pace_ms, TIMES)
        words = f"paced at {pace_ms:g} ms: " + "; ".join(map(str, ran))
        figure(words)
        if is_close(ran):
            return
    if not keeps_pace(ran[0]):
        pytest.skip(f"other work makes even ordinary steps more than 5 % longer, {words}")
    pytest.fail(f"not within 5 %, {words}")


# -- The pace itself, without ranks --


@dataclass
class Tensor:
    """As much as a pacer asks of what is sent."""

    dims: int

    def dim(self) -> int:
        return self.dims


@traced("all-to-all")
def exchange(input: Tensor, async_op: bool = True):
    return collectives.Pending(collectives.Done(), "all-to-all") if async_op else None


@traced(
    "layer-node", lambda a: {"node": a["self"].name, "direction": a["direction"], "lane": "compute"}
)
def run_node(self, direction: str):
    """The node's own work takes no time."""


@traced("forward-compute")
def forward(num_exchanges: int):
    for _ in range(num_exchanges):
        exchange(Tensor(2), async_op=False)
        exchange(Tensor(1), async_op=False)


def node(name: str, delays: bool = False):
    config = SimpleNamespace(delay_wgrad_compute=delays)
    return SimpleNamespace(name=name, layer=SimpleNamespace(config=config))


class Clock:
    """Stands in for `time`: sleeping is all that takes time, but for a little with each look."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def of(self, function, *args) -> float:
        """How many milliseconds a call takes."""
        before = self.now
        function(*args)
        return round(1e3 * (self.now - before), 1)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(pace_module, "time", found)
    return found


def test_an_all_to_all_is_under_way_while_the_program_computes(clock):
    with minimegatron.pace(1, 1, all_to_all_ms=40):
        one, two, probabilities = (exchange(Tensor(dims)) for dims in (2, 2, 1))
        assert clock.now < 0.001
        assert clock.of(one.wait) == 40
        # One after the other; probabilities go with the tokens before them.
        assert [clock.of(two.wait), clock.of(probabilities.wait)] == [40, 0]
        three = exchange(Tensor(2))
        clock.sleep(0.030)
        assert clock.of(three.wait) == 10
        four = exchange(Tensor(2))
        clock.sleep(0.050)
        assert clock.of(four.wait) == 0


def test_one_that_is_waited_for_at_once_comes_on_top_of_the_computation(clock):
    with minimegatron.pace(20, 1, all_to_all_ms=15) as pacer:
        assert [clock.of(forward, number) for number in (0, 1, 2)] == [20, 35, 50]
        assert pacer.num_late == 0


def test_nodes_take_as_long_as_what_they_compute(clock):
    with minimegatron.pace(1, 1, attention_ms=10, mlp_ms=20):
        for name, direction, delays, length in (
            ("attention", "forward", False, 10),
            ("attention", "backward", False, 20),
            ("mlp", "backward", True, 20),
            ("mlp", "backward-weight", True, 20),
            ("mlp", "backward", False, 40),
            ("add", "forward", False, 0),
        ):
            assert clock.of(run_node, node(name, delays), direction) == length, (name, direction)


def test_the_pace_of_layers_is_told_and_read():
    with (
        pytest.raises(ValueError, match="all_to_all_ms is -1"),
        minimegatron.pace(1, 1, all_to_all_ms=-1),
    ):
        pass
    with minimegatron.pace(1, 2, attention_ms=3, mlp_ms=4, all_to_all_ms=5) as pacer:
        assert str(pacer.pace) == "1/2/3/4/5 ms"
        assert pacer.pace.lengths()["all_to_all_ms"] == 5
