"""One rank of a pipeline plans a step for all: what the others get, and what all of them raise."""

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import parallel_state
from minimegatron.core.model_parallel_config import ModelParallelConfig
from minimegatron.core.orders import lowering, planned_schedule, shared_step
from minimegatron.core.orders.lowering import common_order, lowered_step
from minimegatron.core.orders.order_check import Problem, ScheduleError
from minimegatron.core.orders.orders import (
    BREADTH_FIRST,
    COMBINED,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    TAGGED,
    UNTAGGED,
    PlanConfig,
    get_schedule,
    register_order,
)
from minimegatron.core.orders.placement import LINE, V
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tracing import observed_by
from minimegatron.planner.plan import plan
from minimegatron.planner.registry import register_schedule
from minimegatron.training.pipeline_schedule import get_planned_forward_backward_func
from tests.core.pipeline_parallel.test_real_ranks import (
    BATCH,
    HIDDEN,
    SEQ,
    Stage,
    batches,
    forward_step_func,
)
from tests.planner.known_orders import dualpipe_v, registered
from tests.ranks import has_shared_memory, run_ranks

tells = pytest.mark.skipif(not has_shared_memory(), reason="gloo's ranks wait for the time-out")


# -- One rank's part, without ranks --


def wired(name: str, p: int, M: int, v: int, G: int | None = None, **more) -> list[PlanConfig]:
    """On either wire."""
    placement = get_schedule(name).placed(p, v)
    sizes = (name, p, M, placement.num_model_chunks, G)
    return [PlanConfig(*sizes, placement=placement, wire=w, **more) for w in (TAGGED, UNTAGGED)]


@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_part_of_one_rank_gives_what_the_lists_of_all_ranks_have(p):
    """Also after it has travelled."""
    with registered(dualpipe_v, V) as pairs:
        cases = [(ONE_F_ONE_B, 5, 1, None), (GPIPE, 3, 1, None), (BREADTH_FIRST, 4, 3, None)]
        cases += [(INTERLEAVED, 2 * p, 2, p), (COMBINED, 2 * p, 2, p), (pairs, 2 * p, 2, None)]
        configs = [
            config
            for case in cases
            for fo in (False, True)
            for config in wired(case[0], p, *case[1:], forward_only=fo)
        ]
        for config in configs:
            step, common = lowered_step(config), common_order(config)
            assert step.ranks == plan_of(config)
            for rank in range(p):
                part = common.of_rank(rank)
                for one in (part, shared_step._unpacked(shared_step._packed(part))):
                    assert one.ready(config) == step.of_rank(rank), (config, rank)


def plan_of(config: PlanConfig) -> list:
    chunks = config.num_model_chunks if config.num_model_chunks > 1 else None
    group = config.microbatch_group_size_per_vp_stage
    sizes = (config.schedule, config.pp_size, config.num_microbatches, chunks, group)
    return plan(*sizes, forward_only=config.forward_only, wire=config.wire).ranks


def test_the_error_of_a_schedule_travels():
    error = ScheduleError([Problem("absent", 1, 0, 0, "forward is never done")] * 2)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.problems) == (ScheduleError, str(error), error.problems)


# -- Orders for ranks --


def one_by_one(rank):
    for i in range(rank.num_microbatches):
        yield rank.forward(i)
        yield rank.backward(i)


@register_order("asked-on-rank-0")
def asked_on_rank_0(rank):
    """The order function of every other rank is not called."""
    if dist.is_initialized() and dist.get_rank():
        raise RuntimeError("asked")
    yield from one_by_one(rank)


@register_order("without-a-backward")
def without_a_backward(rank):
    yield rank.forward(0)


@register_order("in-a-ring")
def in_a_ring(rank):
    """The first rank wants a gradient of what it has not forwarded; the last waits for that."""
    if rank.pp_rank == rank.pp_size - 1:
        yield from one_by_one(rank)
        return
    for i in reversed(range(rank.num_microbatches)):
        yield rank.forward(i)
        yield rank.backward(i)


@register_order("split-backward")
def split_backward(rank):
    for i in range(rank.num_microbatches):
        yield rank.forward(i)
        yield rank.backward_input(i)
        yield rank.backward_weight(i)


@register_order("too-few", smallest=lambda p: 10 * p)
def too_few(rank):
    yield from one_by_one(rank)


class Odd(Exception):
    """Cannot be made from its text."""

    def __init__(self, number: int, unit: str):
        super().__init__(f"{number} {unit}")


@register_order("raises")
def raises(rank):
    yield rank.forward([0][rank.num_microbatches])


@register_order("raises-odd")
def raises_odd(rank):
    yield rank.forward(0)
    raise Odd(3, "microbatches")


@register_schedule("sends-nothing")
def sends_nothing(stage):
    yield stage.forward(0)


FAULTS = {
    "without-a-backward": "ScheduleError: rank 0, microbatch 0, chunk 0: absent: backward is never",
    "in-a-ring": "ScheduleError: rank 0, microbatch 2, chunk 0: deadlock",
    "split-backward": "ValueError: schedule split-backward has work of the kind backward-input",
    "too-few": "ValueError: schedule too-few needs 30 or more microbatches on 3 ranks",
    "raises": "IndexError: list index out of range",
    "raises-odd": "ValueError: Odd: 3 microbatches",
    "sends-nothing": "ScheduleError: rank 0, microbatch 0, chunk 0: ",
}


# -- Real ranks --


class Names:
    """Of the collectives and messages that a step starts."""

    def __init__(self):
        self.seen: list[str] = []

    def start(self, call) -> None:
        if call.name in ("all-gather", "broadcast", "all-to-all", "all-reduce", "exchange"):
            self.seen.append(call.name)

    def stop(self, call) -> None:
        pass


def groups_of_run(tp: int) -> ProcessGroupCollection:
    """Over all ranks: `tp` pipelines side by side."""
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tp, dist.get_world_size() // tp)
    return ProcessGroupCollection.use_mpu_process_groups()


def step(
    name: str, M: int, v: int | None = None, forward_only: bool = False, tp: int = 1, **more
) -> list:
    """One step of plain layers in this order; returns what it has reported."""
    groups = groups_of_run(tp)
    p, rank = groups.pp.size(), groups.pp.rank()
    config = ModelParallelConfig(
        pipeline_model_parallel_size=p,
        virtual_pipeline_model_parallel_size=v,
        pipeline_dtype=torch.float64,
        params_dtype=torch.float64,
        pipeline_schedule=None if name == "sends-nothing" else name,
    )
    config.hidden_size = HIDDEN
    if name == "sends-nothing":
        function, num_chunks = get_planned_forward_backward_func(name), 1
    else:
        function = get_forward_backward_func(p, v, name)
        num_chunks = get_schedule(name).placed(p, v).num_model_chunks
    placement = get_schedule(name).placed(p, v)
    num_chunks = more.pop("num_chunks", num_chunks)
    chunks = [Stage(placement.stages[rank][0] + i, config) for i in range(num_chunks)]
    data = batches(M, (SEQ,))
    with torch.no_grad() if forward_only else nullcontext():
        return function(
            forward_step_func=forward_step_func,
            data_iterator=[iter(data) for _ in chunks],
            model=chunks,
            num_microbatches=M,
            seq_length=SEQ,
            micro_batch_size=BATCH,
            forward_only=forward_only,
            pg_collection=groups,
        )


def error_of(run: Callable) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_what_is_sent(name: str, M: int, v: int | None) -> list:
    """The steps that the runner is given on this rank, with and without backwards."""
    found = []

    class Seen(planned_schedule.PlannedRun):
        def __init__(self, step, *rest):
            found.append(step)
            super().__init__(step, *rest)

    planned_schedule.PlannedRun = Seen
    for forward_only in (False, True):
        step(name, M, v, forward_only)
    return [(one.config, one.rank, one.actions, one.limit, one.most_in_flight) for one in found]


@pytest.mark.parametrize(
    ("name", "p", "M", "v"),
    [(GPIPE, 3, 4, None), (BREADTH_FIRST, 3, 4, 2), (BREADTH_FIRST, 2, 3, 4)],
)
def test_each_rank_runs_the_planners_list(name, p, M, v):
    for rank, found in enumerate(run_ranks(run_what_is_sent, p, name, M, v)):
        assert len(found) == 2
        for config, its_rank, actions, limit, most in found:
            whole = lowered_step(config)
            assert (its_rank, actions, limit) == (rank, whole.ranks[rank], whole.limits[rank])
            assert actions == plan_of(config)[rank] and most == whole.most_in_flight


def run_twice() -> list[list[str]]:
    found = []
    for M in (3, 3, 2, 3, 2):
        names = Names()
        with observed_by(names):
            step("asked-on-rank-0", M)
        found.append([name for name in names.seen if name != "exchange"])
    return found


def test_a_step_is_shared_once_and_its_order_asked_for_on_one_rank():
    for first, second, other, again, other_again in run_ranks(run_twice, 2):
        assert first == other == ["all-gather", "all-gather", "broadcast", "all-to-all"]
        assert second == again == other_again == []


def run_faults() -> list[str]:
    found = []
    for name in FAULTS:
        found += [error_of(partial(step, name, 3, num_chunks=1)) for _ in range(2)]
    found.append(error_of(partial(step, GPIPE, 3)))
    return found


def test_what_is_wrong_is_raised_on_all_ranks_alike():
    first, *others = run_ranks(run_faults, 3)
    assert others == [first, first]
    for number, words in enumerate(FAULTS.values()):
        assert first[2 * number].startswith(words)
        assert first[2 * number + 1] == first[2 * number]
    assert first[-1] == ""  # a good step follows


def run_different(sizes: list) -> tuple[str, str]:
    name, M, forward_only = sizes[dist.get_rank()]
    return error_of(partial(step, name, M, None, forward_only)), error_of(partial(step, GPIPE, 2))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ((GPIPE, 6, False), "num_microbatches is 4 on ranks 0, 2 and 6 on rank 1"),
        ((ONE_F_ONE_B + "-2", 4, False), "schedule is gpipe on ranks 0, 2 and 1f1b-2 on rank 1"),
        ((GPIPE, 4, True), "forward_only is False on ranks 0, 2 and True on rank 1"),
    ],
    ids=("microbatches", "name", "forward-only"),
)
def test_ranks_that_ask_for_different_steps_are_told(changed, words):
    sizes = [(GPIPE, 4, False), changed, (GPIPE, 4, False)]
    for found, after in run_ranks(run_different, 3, sizes):
        assert found.startswith("ValueError: the ranks of the pipeline were called with different")
        assert words in found and "call the schedule with the same on all of them" in found
        assert after == ""


register_order(ONE_F_ONE_B + "-2", placement=LINE)(one_by_one)


# -- One rank fails --


class Planted(Exception):
    """What a test makes a rank raise."""


def fail_on(failing: int, place: str, tp: int = 1) -> list[str]:
    """A step that fails on one rank before, while or after it is shared; then good ones."""
    found, is_failing = [], dist.get_rank() == failing
    known = {"gather": shared_step._gather, "distribute": shared_step._distribute}

    def planted(*_):
        raise Planted("planted")

    for forward_only in (False, True):
        if is_failing and place in known:
            setattr(shared_step, f"_{place}", planted)
        if is_failing and place == "ready":
            lowering.RankOrder.ready, kept = planted, lowering.RankOrder.ready
        run = partial(step, GPIPE, forward_only=forward_only, tp=tp)
        chunks = {"num_chunks": 2} if is_failing and place == "chunks" else {}
        M = 0 if is_failing and place == "arguments" else 3
        found.append(error_of(partial(run, M, **chunks)))
        for name, function in known.items():
            setattr(shared_step, f"_{name}", function)
        if is_failing and place == "ready":
            lowering.RankOrder.ready = kept
        # The first shares, if the one before has not; the second must not.
        found += [error_of(partial(run, 3)) for _ in range(2)]
    return found


@tells
@pytest.mark.parametrize("place", ["arguments", "gather", "distribute", "ready", "chunks"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_others_are_told_of_a_rank_that_fails_around_the_sharing(failing, place):
    own = {"arguments": "ValueError: num_microbatches is 0", "chunks": "ValueError: schedule gpipe"}
    for rank, found in enumerate(run_ranks(fail_on, 3, failing, place, timeout=30)):
        for raised, *good in (found[:3], found[3:]):
            assert good == ["", ""]
            if rank == failing:
                assert raised.startswith(own.get(place, "Planted: planted"))
            else:
                assert raised.startswith(("WireError", "ConnectionError")) and "given up" in raised


@tells
@pytest.mark.parametrize("place", ["arguments", "distribute", "chunks"])
def test_of_two_pipelines_the_other_goes_on_or_hears_of_it_at_the_end(place):
    """It keeps its step of an evaluation; the one that has failed shares its own anew."""
    ranks = run_ranks(fail_on, 4, 2, place, 2, timeout=30)
    for rank, (training, *good, evaluation, _, _) in enumerate(ranks):
        assert good == ["", ""] and ranks[rank][4:] == ["", ""]
        in_its_pipeline = rank % 2 == 0
        assert bool(training) and bool(evaluation) == in_its_pipeline
        if rank != 2:
            assert "given up" in training and (not evaluation or "given up" in evaluation)
