"""Against megatron-core: the same process groups of every kind, and the same sizes refused."""

import itertools

import pytest

from minimegatron.core.rank_generator import GROUP_KINDS, RankGenerator, all_groups
from tests.conformance.megatron import megatron_module, record_groups
from tests.figures import figure

parallel_state = megatron_module("parallel_state")

WORLD_SIZES = (1, 2, 4, 6, 8, 12, 16, 24)
SIZES = (1, 2, 3, 4, 8)
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "dp-tp-cp-ep-pp", "tp-pp-dp-cp-ep", "pp-dp-cp-ep-tp")

DESCRIPTIONS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "mp": "MODEL_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "dp_cp": "DATA_PARALLEL_GROUP_WITH_CP",
    "tp_cp": "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "tp_dp": "TENSOR_AND_DATA_PARALLEL_GROUP",
    "tp_dp_cp": "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    "embd": "EMBEDDING_GROUP",
    "pos_embd": "POSITION_EMBEDDING_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "expt_tp": "EXPERT_TENSOR_PARALLEL_GROUP",
    "expt_dp": "EXPERT_DATA_PARALLEL_GROUP",
    "tp_ep": "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "tp_ep_pp": "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
}


def _theirs(world_size: int, tp, pp, cp, ep, etp, order) -> dict | None:
    try:
        made = record_groups(
            parallel_state,
            world_size,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            order=order,
        )
    except (RuntimeError, AssertionError):
        return None
    return {name: made[description] for name, description in DESCRIPTIONS.items()}


def _ours(world_size: int, tp, pp, cp, ep, etp, order) -> dict | None:
    try:
        return all_groups(world_size, tp, pp, cp, ep, etp, order)
    except ValueError:
        return None


def test_every_kind_of_group_is_compared():
    assert [kind.name for kind in GROUP_KINDS] == list(DESCRIPTIONS)


@pytest.mark.parametrize(
    "world_size", [*WORLD_SIZES, pytest.param(64, marks=pytest.mark.full, id="64")]
)
def test_same_groups(world_size: int):
    """All of (tp, pp, cp, ep, etp, order) whose dense grid fits `world_size`, and some that do not."""
    num_same = num_refused = 0
    for tp, pp, cp, ep in itertools.product(SIZES, repeat=4):
        if tp * pp * cp > world_size or ep * pp > world_size:
            continue
        for etp, order in [(1, ORDERS[0])] + [(None, order) for order in ORDERS]:
            sizes = (world_size, tp, pp, cp, ep, etp, order)
            theirs, ours = _theirs(*sizes), _ours(*sizes)
            assert ours == theirs, sizes
            num_same += theirs is not None
            num_refused += theirs is None
    figure(f"world size {world_size}: {num_same} grids the same, {num_refused} refused by both")
    assert num_same > 0


@pytest.mark.parametrize("rank_offset", [0, 5])
@pytest.mark.parametrize("order", ORDERS)
def test_same_ranks_for_every_token(order: str, rank_offset: int):
    names = ["tp", "cp", "ep", "dp", "pp"]
    tokens = ["-".join(t) for n in range(1, 4) for t in itertools.permutations(names, n)]
    for tp, cp, dp, pp in itertools.product((1, 2, 3), (1, 2), (1, 2), (1, 3)):
        for cp_size, ep_size in ((cp, 1), (1, cp)):
            sizes = {"tp": tp, "ep": ep_size, "dp": dp, "pp": pp, "cp": cp_size}
            theirs = parallel_state.RankGenerator(**sizes, order=order, rank_offset=rank_offset)
            ours = RankGenerator(**sizes, order=order, rank_offset=rank_offset)
            for token in tokens:
                assert ours.get_ranks(token) == theirs.get_ranks(token), (sizes, token)
