"""Process groups on real ranks: right members, as few as possible, the same calls everywhere."""

import gc
import os
import threading
import time
from dataclasses import fields
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import parallel_state as mpu
from minimegatron.core import rank_generator
from minimegatron.core.orders.placement import Placement, V, usual_placement
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.rank_generator import GROUP_KINDS, all_groups, make_grids
from tests.groups import PretendGroup
from tests.ranks import run_ranks

LAYOUTS = [
    # tp, pp, cp, ep, etp, order
    (1, 1, 1, 1, None, "tp-cp-ep-dp-pp"),
    (2, 1, 1, 1, None, "tp-cp-ep-dp-pp"),
    (2, 2, 1, 1, None, "tp-cp-ep-dp-pp"),
    (2, 2, 1, 1, None, "dp-tp-pp"),
    (1, 4, 1, 1, None, "tp-cp-ep-dp-pp"),
    (4, 1, 1, 2, 1, "tp-cp-ep-dp-pp"),
    (1, 2, 2, 2, 1, "tp-cp-ep-dp-pp"),
    (1, 1, 1, 4, 1, "tp-pp-ep-dp-cp"),
    (1, 2, 1, 1, None, "pp-dp-tp"),
]


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def members(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def build_every_layout(layouts: list[tuple]) -> list[dict]:
    """Per layout: the creation calls made, and each kind's group as this rank sees it."""
    seen = []
    new_group = dist.new_group
    calls: list[tuple[int, ...]] = []

    def counted(ranks, **kwargs):
        calls.append(tuple(ranks))
        return new_group(ranks, **kwargs)

    dist.new_group = counted
    dist.all_reduce(torch.ones(1))
    threads_before = count_threads()
    for tp, pp, cp, ep, etp, order in layouts:
        calls.clear()
        mpu.initialize_model_parallel(
            tp,
            pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            order=order,
        )
        collection = ProcessGroupCollection.use_mpu_process_groups()
        groups = {kind.name: getattr(collection, kind.name) for kind in GROUP_KINDS}
        distinct = {id(group) for group in groups.values() if group is not None}
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=groups["tp"])
        seen.append(
            {
                "calls": list(calls),
                "members": {name: members(group) for name, group in groups.items()},
                "distinct": len(distinct),
                "uses the default group": any(
                    group is dist.group.WORLD
                    for group in groups.values()
                    if group is not None and group.size() == dist.get_world_size()
                ),
                "tp sum": total.item(),
                "answers": ask_getters(),
            }
        )
        mpu.destroy_model_parallel()
        del collection, groups
    gc.collect()
    seen.append({"threads": (threads_before, count_threads())})
    return seen


def ask_getters() -> dict:
    return {
        "tp": (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()),
        "pp": (
            mpu.get_pipeline_model_parallel_rank(),
            mpu.get_pipeline_model_parallel_world_size(),
        ),
        "dp": (mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()),
        "dp_cp": (
            mpu.get_data_parallel_rank(with_context_parallel=True),
            mpu.get_data_parallel_world_size(with_context_parallel=True),
        ),
        "cp": (mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()),
        "tp_cp": (
            mpu.get_tensor_and_context_parallel_rank(),
            mpu.get_tensor_and_context_parallel_world_size(),
        ),
        "ep": (mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size()),
        "expt_tp": (
            mpu.get_expert_tensor_parallel_rank(),
            mpu.get_expert_tensor_parallel_world_size(),
        ),
        "expt_dp": (
            mpu.get_expert_data_parallel_rank(),
            mpu.get_expert_data_parallel_world_size(),
        ),
        "tp_ep": (
            mpu.get_expert_tensor_and_model_parallel_rank(),
            mpu.get_expert_tensor_and_model_parallel_world_size(),
        ),
        "src": {
            "tp": mpu.get_tensor_model_parallel_src_rank(),
            "mp": mpu.get_model_parallel_src_rank(),
            "dp": mpu.get_data_parallel_src_rank(),
            "dp_cp": mpu.get_data_parallel_src_rank(with_context_parallel=True),
            "ep": mpu.get_expert_model_parallel_src_rank(),
        },
        "cp ranks": mpu.get_context_parallel_global_ranks(),
        "neighbours": (
            mpu.get_pipeline_model_parallel_first_rank(),
            mpu.get_pipeline_model_parallel_prev_rank(),
            mpu.get_pipeline_model_parallel_next_rank(),
            mpu.get_pipeline_model_parallel_last_rank(),
        ),
        "on gloo": [
            mpu.get_data_parallel_group_gloo(cp) is mpu.get_data_parallel_group(cp)
            for cp in (False, True)
        ]
        + [mpu.get_expert_data_parallel_group_gloo() is mpu.get_expert_data_parallel_group()],
        "amax": [
            members(mpu.get_amax_reduction_group(cp, tp_only))
            for cp in (False, True)
            for tp_only in (False, True)
        ],
        "first, last": (mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()),
        "embedding": (mpu.is_rank_in_embedding_group(), mpu.is_rank_in_position_embedding_group()),
        "all": mpu.get_all_ranks(),
        "initialized": (mpu.is_initialized(), mpu.model_parallel_is_initialized()),
    }


@pytest.fixture(scope="module")
def four_ranks() -> list[list[dict]]:
    return run_ranks(build_every_layout, 4, LAYOUTS)


def expected_groups(layout: tuple) -> dict[str, list[list[int]]]:
    tp, pp, cp, ep, etp, order = layout
    return all_groups(4, tp, pp, cp, ep, etp, order)


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_every_rank_gets_the_group_that_the_arithmetic_lists(four_ranks, number):
    expected = expected_groups(LAYOUTS[number])
    for rank, seen in enumerate(four_ranks):
        for kind in GROUP_KINDS:
            mine = [ranks for ranks in expected[kind.name] if rank in ranks]
            assert seen[number]["members"][kind.name] == (mine[0] if mine else None), (
                f"{kind.name} on rank {rank}"
            )
        assert seen[number]["tp sum"] == sum(seen[number]["members"]["tp"])


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_one_group_per_distinct_set_made_by_the_same_calls_on_all_ranks(four_ranks, number):
    expected = expected_groups(LAYOUTS[number])
    sets = {tuple(sorted(ranks)) for groups in expected.values() for ranks in groups}
    calls = four_ranks[0][number]["calls"]
    assert sorted(calls) == sorted(sets)
    for rank, seen in enumerate(four_ranks):
        assert seen[number]["calls"] == calls, f"rank {rank} made other calls than rank 0"
        assert not seen[number]["uses the default group"]
        assert seen[number]["distinct"] == len({ranks for ranks in sets if rank in ranks})


def test_destroy_frees_every_thread(four_ranks):
    for seen in four_ranks:
        before, after = seen[-1]["threads"]
        assert after <= before, f"{after} threads after {len(LAYOUTS)} layouts, {before} before"


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_getters_agree_with_the_coordinates(four_ranks, number):
    tp, pp, cp, ep, etp, order = LAYOUTS[number]
    expected = expected_groups(LAYOUTS[number])
    dense, expert = make_grids(4, tp, pp, cp, ep, etp, order)
    for rank, seen in enumerate(four_ranks):
        answers = seen[number]["answers"]
        place, expert_place = dense.coordinates(rank), expert.coordinates(rank)
        for name in ("tp", "pp", "dp", "cp"):
            assert answers[name] == (place[name], dense.name_to_size[name])
        for name, word in (("ep", "ep"), ("expt_tp", "tp"), ("expt_dp", "dp")):
            assert answers[name] == (expert_place[word], expert.name_to_size[word])
        mine = {name: next((g for g in groups if rank in g), None) for name, groups in
                expected.items()}  # fmt: skip
        for name in ("dp_cp", "tp_cp", "tp_ep"):
            assert answers[name] == (mine[name].index(rank), len(mine[name]))
        assert answers["src"] == {name: mine[name][0] for name in answers["src"]}
        assert answers["cp ranks"] == mine["cp"]
        assert answers["on gloo"] == [True, True, True]
        assert answers["amax"] == [mine[name] for name in ("tp_dp", "tp", "tp_dp_cp", "tp_cp")]
        stage, stages = place["pp"], mine["pp"]
        assert answers["neighbours"] == (
            stages[0],
            stages[stage - 1],
            stages[(stage + 1) % pp],
            stages[-1],
        )
        assert answers["first, last"] == (stage == 0, stage == pp - 1)
        assert answers["embedding"] == (stage in (0, pp - 1), stage == 0)
        assert (
            answers["all"]
            == "_".join(str(place[w]) for w in ("tp", "dp", "cp", "pp")) + f"_{expert_place['ep']}"
        )
        assert answers["initialized"] == (True, True)


def ask_about_chunks() -> dict:
    """pp=3, v=2: who is first, last and in the embedding group, per chunk."""
    mpu.initialize_model_parallel(1, 3, 2)
    answers = {
        "size, rank": (
            mpu.get_virtual_pipeline_model_parallel_world_size(),
            mpu.get_virtual_pipeline_model_parallel_rank(),
        ),
        "first": [mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=c) for c in (0, 1)],
        "last": [mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=c) for c in (0, 1)],
        "embd": [mpu.is_rank_in_embedding_group(ignore_virtual=False, vp_stage=c) for c in (0, 1)],
        "ignoring": (mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()),
    }
    mpu.set_virtual_pipeline_model_parallel_rank(1)
    answers["set"] = mpu.get_virtual_pipeline_model_parallel_rank()
    for vp_stage in (None, 2, -1):
        with pytest.raises(ValueError, match=rf"vp_stage is {vp_stage}; each stage has 2 chunks"):
            mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    if dist.get_rank() == 1:
        assert mpu.get_embedding_group(check_initialized=False) is None
        with pytest.raises(RuntimeError, match="rank 1 is in no embedding group"):
            mpu.get_embedding_group()
    mpu.destroy_model_parallel()
    assert mpu.get_virtual_pipeline_model_parallel_world_size() is None
    return answers


def test_chunks_of_a_stage():
    first, middle, last = run_ranks(ask_about_chunks, 3)
    assert first["size, rank"] == (2, 0)
    assert first["set"] == 1
    assert [rank["first"] for rank in (first, middle, last)] == [[True, False], [False] * 2] + [
        [False] * 2
    ]
    assert [rank["last"] for rank in (first, middle, last)] == [[False] * 2, [False] * 2] + [
        [False, True]
    ]
    assert [rank["embd"] for rank in (first, middle, last)] == [[True, False], [False] * 2] + [
        [False, True]
    ]
    assert first["ignoring"] == (True, False)
    assert last["ignoring"] == (False, True)


SHUFFLED = Placement("shuffled", ((1, 4), (2, 5), (0, 3)))
"""A loop that begins on rank 2 and ends on rank 1."""


def ask_about_placements() -> list[dict]:
    """pp=3, v=2: who holds which end of the model, per chunk."""
    answers = []
    for placement in (V(3), SHUFFLED):
        mpu.initialize_model_parallel(1, 3, 2, pipeline_placement=placement)
        chunks = [{"ignore_virtual": False, "vp_stage": chunk} for chunk in (0, 1)]
        answers.append(
            {
                "is kept": mpu.get_pipeline_placement() == placement,
                "first": [mpu.is_pipeline_first_stage(**chunk) for chunk in chunks],
                "last": [mpu.is_pipeline_last_stage(**chunk) for chunk in chunks],
                "embd": [mpu.is_rank_in_embedding_group(**chunk) for chunk in chunks],
                "ignoring": (mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()),
                "groups": [
                    members(mpu.get_group(kind, check_initialized=False))
                    for kind in ("embd", "pos_embd")
                ],
                "ends": (
                    mpu.get_pipeline_model_parallel_first_rank(),
                    mpu.get_pipeline_model_parallel_last_rank(),
                ),
            }
        )
        mpu.set_virtual_pipeline_model_parallel_world_size(None)
        assert mpu.get_pipeline_placement().name == "line"
        mpu.destroy_model_parallel()
    return answers


def test_ends_of_the_model_are_where_the_placement_has_them():
    ranks = run_ranks(ask_about_placements, 3)
    assert all(answer["is kept"] for answers in ranks for answer in answers)
    first, middle, last = (answers[0] for answers in ranks)
    assert (first["first"], first["last"]) == ([True, False], [False, True])
    assert first["embd"] == [True, True]
    assert first["ignoring"] == (True, True)
    assert first["groups"] == [[0], [0]]
    assert first["ends"] == middle["ends"] == (0, 0)
    for other in (middle, last):
        assert other["first"] == other["last"] == other["embd"] == [False, False]
        assert (other["ignoring"], other["groups"]) == ((False, False), [None, None])
    first, middle, last = (answers[1] for answers in ranks)
    assert (last["first"], last["last"]) == ([True, False], [False, False])
    assert (middle["first"], middle["last"]) == ([False, False], [False, True])
    assert (last["embd"], middle["embd"], first["embd"]) == (
        [True, False],
        [False, True],
        [False, False],
    )
    assert last["groups"] == [[1, 2], [2]] and middle["groups"] == [[1, 2], None]
    assert first["groups"] == [None, None]
    assert first["ends"] == (2, 1)


def refuse_bad_calls() -> None:
    threads = threading.active_count()
    for arguments, message in (
        ({"tensor_model_parallel_size": 3}, "world size 2 is not divisible by tp=3"),
        ({"pipeline_model_parallel_size": 0}, "pp is 0"),
        ({"virtual_pipeline_model_parallel_size": 2}, "needs a pipeline"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 0},
            "virtual_pipeline_model_parallel_size is 0",
        ),
        ({"order": "tp-pp"}, "dp is 2 but order 'tp-pp' lacks it"),
        ({"distributed_timeout_minutes": 0}, "distributed_timeout_minutes is 0"),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_placement": V(2)},
            "placement v has 2 chunks on each of 2 ranks, but .* is 2 and .* is None",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            mpu.initialize_model_parallel(**arguments)
        assert not mpu.model_parallel_is_initialized()
    assert threading.active_count() == threads
    # A refused call must leave nothing behind: the good one below still works.
    mpu.initialize_model_parallel(2)
    with pytest.raises(RuntimeError, match=r"exist already; call destroy_model_parallel\(\)"):
        mpu.initialize_model_parallel(2)
    with pytest.raises(ValueError, match="Invalid process groups requested: 'tq'; use tp, pp"):
        ProcessGroupCollection.use_mpu_process_groups(["tp", "tq"])
    some = ProcessGroupCollection.use_mpu_process_groups(["tp", "embd"])
    assert repr(some) == "ProcessGroupCollection(tp(2), embd(1))"
    with (
        mock.patch.object(dist, "get_backend_config", lambda group: "cuda:nccl"),
        pytest.raises(RuntimeError, match="the data group sends over cuda:nccl, and no .* gloo"),
    ):
        mpu.get_data_parallel_group_gloo()
    mpu.destroy_model_parallel()
    mpu.destroy_model_parallel()


def test_bad_calls_are_refused_before_any_group_is_made():
    run_ranks(refuse_bad_calls, 2)


SETTERS = [
    f"{kind}_{what}"
    for kind in (
        "tensor_model_parallel",
        "pipeline_model_parallel",
        "expert_model_parallel",
        "expert_tensor_parallel",
    )
    for what in ("world_size", "rank")
]


@pytest.mark.parametrize("name", [*SETTERS, "data_parallel_rank"])
def test_what_is_set_goes_before_the_group_until_it_is_taken_back(name):
    getter, setter = getattr(mpu, f"get_{name}"), getattr(mpu, f"set_{name}")
    others = [getattr(mpu, f"get_{other}") for other in SETTERS if other != name]
    for forget in (lambda: setter(None), mpu.destroy_model_parallel):
        setter(5)
        setter(0)
        assert getter() == 0
        for other in others:
            with pytest.raises(RuntimeError, match="does not exist"):
                other()
        forget()
        with pytest.raises(RuntimeError, match="does not exist"):
            getter()


def ask_about_sizes_set_by_hand() -> None:
    mpu.initialize_model_parallel(1, 2, pipeline_placement=SWAPPED)
    rank = dist.get_rank()
    assert mpu.is_pipeline_first_stage() == (rank == 1)
    mpu.set_pipeline_model_parallel_world_size(4)
    mpu.set_pipeline_model_parallel_rank(3)
    assert mpu.get_pipeline_placement() == usual_placement(4, 1)
    assert mpu.is_pipeline_last_stage() and not mpu.is_pipeline_first_stage()
    mpu.set_data_parallel_rank(7)
    assert mpu.get_data_parallel_rank() == mpu.get_data_parallel_rank(True) == 7
    mpu.set_pipeline_model_parallel_world_size(None)
    mpu.set_pipeline_model_parallel_rank(None)
    assert mpu.get_pipeline_placement() == SWAPPED
    assert mpu.get_pipeline_model_parallel_rank() == rank
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(1, 2)
    assert mpu.get_data_parallel_rank() == 0
    mpu.destroy_model_parallel()


SWAPPED = Placement("swapped", ((1,), (0,)))
"""A line of two ranks that begins on rank 1."""


def test_stages_follow_the_sizes_set_by_hand():
    run_ranks(ask_about_sizes_set_by_hand, 2)


def test_megatrons_names_from_the_arithmetic():
    assert mpu.RankGenerator is rank_generator.RankGenerator
    assert mpu.default_embedding_ranks([3, 5, 7]) == [3, 7]
    assert mpu.default_position_embedding_ranks([3, 5, 7]) == [3]


def test_getters_raise_before_initialization():
    with pytest.raises(RuntimeError, match=r"tensor group does not exist; call initialize_model"):
        mpu.get_tensor_model_parallel_group()
    assert mpu.get_tensor_model_parallel_group(check_initialized=False) is None
    with pytest.raises(RuntimeError, match=r"pipeline group does not exist"):
        mpu.get_pipeline_model_parallel_rank()
    assert not mpu.is_rank_in_embedding_group()
    assert not mpu.is_rank_in_position_embedding_group()
    with pytest.raises(RuntimeError, match="init_process_group"):
        mpu.initialize_model_parallel()
    with pytest.raises(RuntimeError, match="no process groups exist"):
        ProcessGroupCollection.use_mpu_process_groups()


def use_groups_made_by_hand() -> float:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    collection = ProcessGroupCollection(tp=pairs[dist.get_rank() // 2], embd=None)
    assert not mpu.is_initialized()
    assert collection.embd is None
    assert not hasattr(collection, "pp")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=collection.tp)
    return total.item()


def test_a_collection_by_hand_needs_no_global_state():
    assert run_ranks(use_groups_made_by_hand, 4) == [1.0, 1.0, 5.0, 5.0]
    with pytest.raises(AttributeError, match=r"has no 'pp', only ProcessGroupCollection\(empty\)"):
        _ = ProcessGroupCollection().pp
    with pytest.raises(ValueError, match="no process group is called 'tensor'; use tp, pp"):
        ProcessGroupCollection(tensor=None)


def choose_embedding_stages() -> list[int] | None:
    """As multi-token prediction does: a second-to-last stage that needs the embedding too."""
    mpu.initialize_model_parallel(
        1, 4, get_embedding_ranks=lambda ranks: [ranks[0], ranks[2], ranks[3]]
    )
    mine = members(mpu.get_embedding_group(check_initialized=False))
    mpu.destroy_model_parallel()
    return mine


def test_embedding_stages_can_be_chosen():
    assert run_ranks(choose_embedding_stages, 4) == [[0, 2, 3], None, [0, 2, 3], [0, 2, 3]]


def make_groups_slowly() -> bool:
    """Rank 1 is late in making the group of both; whether it had come when this rank went on."""
    new_group, store = dist.new_group, dist.distributed_c10d._get_default_store()

    def slow_new_group(ranks, **kwargs):
        group = new_group(ranks, **kwargs)
        if dist.get_rank() == 1 and len(ranks) == 2:
            time.sleep(0.3)
            store.set("came", "")
        return group

    dist.new_group = slow_new_group
    mpu.initialize_model_parallel(pipeline_model_parallel_size=2)
    had_come = store.check(["came"])
    mpu.destroy_model_parallel()
    return had_come


def groups_made_by(rank: int) -> tuple[list, set]:
    """What rank `rank` of 8 asks `torch.distributed` for, which is only pretended to be there."""
    asked, used = [], []

    def new_group(ranks, group_desc, **_):
        asked.append((tuple(ranks), group_desc))
        return PretendGroup(ranks.index(rank) if rank in ranks else 0, len(ranks))

    with (
        mock.patch.multiple(mpu.dist, new_group=new_group, get_rank=lambda: rank),
        mock.patch.object(mpu, "barrier", used.append),
    ):
        state = mpu._create_groups(all_groups(8, 2, 2, 1, 1), timedelta(seconds=1), None)
    # On NCCL too: a group's first collective takes seconds, which would be in the first step.
    assert used == [group for group in state.created if group.size() > 1]
    return asked, {kind for kind, group in state.groups.items() if group is not None}


def test_every_rank_asks_for_all_groups_also_those_of_others():
    """Making a group is collective over the world: who skips one leaves the others waiting."""
    asked, mine = groups_made_by(0)
    for rank in range(1, 8):
        assert groups_made_by(rank)[0] == asked, f"rank {rank} and rank 0 differ"
    assert len(asked) > 10 and len({ranks for ranks, _ in asked}) == len(asked)
    assert {"tp", "pp", "dp", "embd"} <= mine


def test_no_rank_leaves_before_all_have_made_the_groups():
    """gloo breaks the connections of who still makes a group that another rank destroys."""
    assert run_ranks(make_groups_slowly, 2) == [True, True]


def test_every_kind_is_a_field_of_the_collection():
    names = [entry.name for entry in fields(ProcessGroupCollection)]
    assert sorted(names) == sorted(kind.name for kind in GROUP_KINDS)
