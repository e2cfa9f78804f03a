"""`config.schedule_plan_builders`: another way to do a piece of work of a planned order."""

from dataclasses import dataclass, field

import pytest

from minimegatron.core.orders.placement import LINE
from minimegatron.core.orders.work import BACKWARD, FORWARD, parts_of
from tests.core.pipeline_parallel.fake_step import Case, computations, run_case
from tests.planner.known_orders import registered_lists, work_of

PAIRED = ("F0 F1 [F2&A0] A1 A2", "F0 [F1&A0] [F2&A1] A2")


@dataclass(frozen=True)
class Served(Case):
    """A case whose model has schedule-plan builders."""

    builders: tuple = field(default=(), compare=False)

    def config(self):
        config = super().config()
        config.schedule_plan_builders = self.builders
        return config


class BackwardFirst:
    """Builds plans for pairs only, which do the second part first."""

    def __init__(self):
        self.asked, self.served = [], []

    def __call__(self, run, action):
        self.asked.append((run.rank, [part.kind for part in parts_of(action)]))
        if len(parts_of(action)) == 1:
            return None

        def plan():
            forward, backward = parts_of(action)
            grad, tensor = run.take(backward), run.take(forward)
            input_grad = run.chunks[backward.chunk].backward_step(grad, backward.microbatch)
            output = run.chunks[forward.chunk].forward_step(forward.microbatch, tensor)
            run.hand_over(forward, output)
            run.hand_over(backward, input_grad)
            self.served.append((run.rank, forward.microbatch, backward.microbatch))

        return plan


@pytest.fixture
def paired():
    with registered_lists([list(work_of(words)) for words in PAIRED], LINE(2)) as name:
        yield name


@pytest.mark.parametrize("tagged", [False, True])
def test_a_builder_serves_the_pairs_and_the_runner_the_rest(paired, tagged):
    def none(run, action):
        return None

    build = BackwardFirst()
    case = Served(2, 3, order=paired, tagged=tagged, batched=not tagged, builders=(none, build))
    reports, network, _ = run_case(case)
    assert build.served == [(0, 2, 0), (1, 1, 0), (1, 2, 1)]
    one, two = [FORWARD], [FORWARD, BACKWARD]
    assert [kinds for rank, kinds in build.asked if rank == 0] == [
        one,
        one,
        two,
        [BACKWARD],
        [BACKWARD],
    ]
    log = computations(network.log[1])
    assert log[:3] == [("F", 0, 1), ("B", 0, 1), ("F", 1, 1)]  # backward first, as the plan does
    # Every kernel has read what it should: the run came to its end.
    assert [report["microbatch"] for report in reports[1]] == [0, 1, 2]
    _, plain, _ = run_case(Case(2, 3, order=paired, tagged=tagged, batched=not tagged))
    assert computations(plain.log[1])[:3] == [("F", 0, 1), ("F", 1, 1), ("B", 0, 1)]
    assert sorted(log) == sorted(computations(plain.log[1]))


def test_the_first_plan_that_is_built_is_the_one(paired):
    first, second = BackwardFirst(), BackwardFirst()
    run_case(Served(2, 3, order=paired, builders=(first, second)))
    assert len(first.served) == 3 and not second.served
