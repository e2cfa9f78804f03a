"""Paced steps of experts, ordinary and combined, beside what the two lanes of their layers say.

    python -m tests.trace.paced_overlap [--pace-ms 20] [--times 3]

Real ranks, tensors and all-to-alls; computation and all-to-alls are padded to the pace. What a step and
its exposed all-to-alls should take is worked out from the pace (`planner.layer_plan`), and messages
between stages are free there.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

import minimegatron
from minimegatron.core import parallel_state
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.tracing.compare import compare_with_plan, wrong_messages
from minimegatron.tracing.lanes import exposure
from minimegatron.tracing.node_order import wrong_nodes
from minimegatron.tracing.step import Step
from minimegatron.tracing.step_costs import planned_exposure
from tests import parity
from tests.ranks import run_ranks

RATIO = 0.75
"""An all-to-all over an attention, or an mlp's forward: all fits beside the computation."""


@dataclass(frozen=True)
class Ran:
    """One recorded step, in milliseconds."""

    name: str
    length: float
    planned_length: float
    exposed: float
    """Of the rank that waits longest."""
    planned_exposed: float
    num_late: int
    problems: tuple[str, ...]
    """Where the step left its plan."""

    def __str__(self) -> str:
        return (
            f"{self.name:<28} {self.length:8.1f} ms, by the pace {self.planned_length:8.1f}; exposed "
            f"{self.exposed:7.1f}, by the pace {self.planned_exposed:7.1f}; {self.num_late} late"
        )


def cases(pp: int, M: int) -> Iterator[tuple[str, parity.Case]]:
    """The step in three ways, on one or several stages, each of two expert ranks."""
    vp = None if pp == 1 else 2
    sizes = {
        "pp": pp,
        "vp": vp,
        "dp": 2,
        "ep": 2,
        "M": M,
        "experts": 4,
        "topk": 1 if pp == 1 else 2,
        "overlap": pp > 1,
        "num_layers": 2 if pp == 1 else 4,
    }
    yield "ordinary", parity.Case(**sizes)
    yield "combined", parity.Case(**sizes, combined=True)
    yield "combined, weights delayed", parity.Case(**sizes, combined=True, delay_wgrad=True)


def record(
    directory: str, pp: int, M: int, pace_ms: float, num_layers: int, times: int
) -> list[Ran]:
    """In each rank: the three ways, each recorded when it has run once before. Rank 0's are filled."""
    found = []
    for number, (name, case) in enumerate(cases(pp, M)):
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=case.pp,
            virtual_pipeline_model_parallel_size=case.vp,
            expert_model_parallel_size=case.ep,
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunks, _ = parity.build(case, groups)
        data = parity.batches(case.M * case.dp)[groups.dp.rank() :: case.dp]

        def step(case=case, groups=groups, chunks=chunks, data=data):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            parity.run_step(case, groups, chunks, [iter(data) for _ in chunks], False)

        step()
        lengths = {
            "forward_ms": num_layers * 2 * pace_ms,
            "backward_ms": num_layers * 4 * pace_ms,
            "attention_ms": pace_ms,
            "mlp_ms": pace_ms,
            "all_to_all_ms": RATIO * pace_ms,
        }
        with (
            minimegatron.pace(**lengths),
            minimegatron.trace(f"{directory}/{number}", gather=True) as run,
        ):
            for _ in range(times):
                step()
        parallel_state.destroy_model_parallel()
        if run.ranks:
            found.append(least_disturbed([ran_of(name, run.step(n)) for n in range(times)]))
    return found


def least_disturbed(same: list[Ran]) -> Ran:
    """The shortest of steps that are alike, with what any of them did wrong.

    None is shorter than its pace, and a machine that has other work too makes them longer.
    """
    problems = [problem for ran in same for problem in ran.problems]
    return replace(min(same, key=lambda ran: ran.length), problems=(*dict.fromkeys(problems),))


def ran_of(name: str, step: Step) -> Ran:
    """The figures of a recorded step."""
    stages = range(len(step.stages))
    return Ran(
        name,
        step.makespan / 1e3,
        float(step.simulation.makespan) / 1e3,
        max(exposure(step.events[rank]).exposed for rank in stages) / 1e3,
        max(planned_exposure(step, rank) for rank in stages) / 1e3,
        step.num_late,
        (*map(str, compare_with_plan(step)), *wrong_messages(step), *wrong_nodes(step)),
    )


def measured(directory: str, pp: int, M: int, pace_ms: float, times: int = 1) -> list[Ran]:
    """The three ways, in the order of `cases`: of each the least disturbed of so many steps."""
    given = (directory, pp, M, pace_ms, 2 if pp == 1 else 1, times)
    return run_ranks(record, 2 * pp, *given, timeout=60 + 0.4 * pace_ms * times)[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pace-ms", type=float, default=20.0, help="of an attention, of an mlp")
    parser.add_argument(
        "--times", type=int, default=3, help="steps of each way; the shortest counts"
    )
    given = parser.parse_args()
    for num_stages, num_microbatches in ((1, 4), (2, 4)):
        with TemporaryDirectory() as folder:
            print(f"{num_stages} stages, 2 expert ranks, {num_microbatches} microbatches; paced")
            for ran in measured(folder, num_stages, num_microbatches, given.pace_ms, given.times):
                print(" ", ran)
                for problem in ran.problems:
                    print("    ", problem)
