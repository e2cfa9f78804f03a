"""Nested dicts of tensors and plain objects, saved and loaded as a program of Megatron's does it."""

import json
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import dist_checkpointing
from minimegatron.core.dist_checkpointing import meeting
from minimegatron.core.dist_checkpointing.core import COMMON, CheckpointingException
from minimegatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from minimegatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from minimegatron.core.dist_checkpointing.state_dict_utils import (
    NOTHING,
    built,
    merged,
    plain_part,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.module import MegatronModule
from tests.core.distributed.common import make_config
from tests.groups import PretendGroup
from tests.ranks import run_ranks

# -- Without ranks --


def whole(key: str, value: float) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full((2,), value))


def test_plain_objects_are_told_from_tensors_and_put_back():
    tree = {
        "only tensors": {"a": whole("a", 1.0), "list": [whole("b", 2.0)]},
        "both": [whole("c", 3.0), {"lr": 0.1}, {0: whole("d", 4.0)}],
        "empty": {},
        "here only": LocalNonpersistentObject("rank"),
    }
    plain = plain_part(built(tree))
    assert plain == {"both": [None, {"lr": 0.1}, None], "empty": {}}
    asked = built(tree | {"not saved": 1, "nor this": [1], "nor that": {"x": 1}})
    found = merged(plain | {"not asked": 2}, asked)
    assert list(found) == ["both", "empty", "not asked", "only tensors", "here only"]
    assert found["here only"] == "rank" and found["both"][1] == {"lr": 0.1}
    assert found["only tensors"]["list"][0].tolist() == [2.0, 2.0]
    assert found["both"][2][0] is tree["both"][2][0].data
    assert plain_part(built({"a": whole("a", 1.0)})) is NOTHING


class Odd:
    pass


REFUSED = [
    ({"a": {0: 1}}, r"state_dict\['a'\] has the key 0; make it text"),
    ({"a": [1, torch.zeros(1)]}, r"state_dict\['a'\]\[1\] is a Tensor; make it a ShardedTensor"),
    ({"a": Odd()}, r"state_dict\['a'\] is a Odd, and a checkpoint holds text, numbers"),
]


@pytest.mark.parametrize(("plain", "words"), REFUSED)
def test_what_json_cannot_hold_is_refused_before_anything_is_written(plain, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        dist_checkpointing.save(plain, tmp_path / "it")
    assert not any(tmp_path.iterdir())


def test_the_strategy(tmp_path):
    pair = get_default_save_sharded_strategy("torch_dist", 1)
    folder = tmp_path / "it"
    dist_checkpointing.save({"lr": 1, "a": whole("a", 1.0)}, folder, pair, None, False)
    assert get_default_load_sharded_strategy(folder) == pair
    found = dist_checkpointing.load({}, folder, pair, validate_access_integrity=False)
    assert found == {"lr": 1} == dist_checkpointing.load_common_state_dict(folder)
    with pytest.raises(ValueError, match="the strategy 'zarr', 1 is unknown; use"):
        get_default_save_sharded_strategy("zarr")
    with pytest.raises(CheckpointingException, match="is missing"):
        get_default_load_sharded_strategy(tmp_path)


def test_what_is_a_checkpoint(tmp_path):
    folder = tmp_path / "it"
    assert not dist_checkpointing.check_is_distributed_checkpoint(folder)
    dist_checkpointing.save({}, folder)
    assert dist_checkpointing.check_is_distributed_checkpoint(folder)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    assert not dist_checkpointing.check_is_distributed_checkpoint(folder)


def test_parts_that_cannot_be(tmp_path):
    with pytest.raises(CheckpointingException, match="2 of 2 along axis 0"):
        ShardedTensor.from_rank_offsets("a", torch.zeros(2), (0, 2, 2))
    wrong = ShardedTensor("a", torch.zeros(2, 2), (4,), (0,))
    with pytest.raises(CheckpointingException, match="part of 1 dimensions or fewer"):
        dist_checkpointing.save({"a": wrong}, tmp_path / "it")


NAMED = "bool int8 int16 uint16 uint32 uint64 complex64 float8_e4m3fn float8_e5m2"


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in NAMED.split()])
def test_t_words_every_dtype_that_the_format_names_is_saved(dtype, tmp_path):
    """Was: "rank 0: torch.bool"."""
    data = torch.tensor([0.0, 1.0, 2.0]).to(dtype)
    if dtype.is_complex:
        data = (data * 1j).conj()
    dist_checkpointing.save({"a": ShardedTensor.from_rank_offsets("a", data)}, tmp_path / "it")
    ((key, meta),) = dist_checkpointing.load_tensors_metadata(tmp_path / "it").items()
    found = dist_checkpointing.load({key: meta}, tmp_path / "it")["a"]
    assert found.dtype == dtype and found.tolist() == data.tolist()


def test_t11_what_no_rank_would_save_is_refused(tmp_path):
    """Was: it was not in the checkpoint, and nobody said so."""
    copy = ShardedTensor.from_rank_offsets("b", torch.ones(2), replica_id=(0, 1))
    with pytest.raises(CheckpointingException, match="1 of 2 tensors, such as rank 0's b, have"):
        dist_checkpointing.save({"a": whole("a", 1.0), "b": copy}, tmp_path / "it")
    assert not any(tmp_path.iterdir())


def test_t_words_another_dtype_is_refused_in_a_sentence(tmp_path):
    wide = ShardedTensor.from_rank_offsets("a", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointingException, match="a is torch.complex128, and the files hold"):
        dist_checkpointing.save({"a": wide}, tmp_path / "it")
    assert not any(tmp_path.iterdir())


# -- On two ranks --


def state_dict(rank: int, value: float) -> dict[str, Any]:
    """Rows 2r and 2r + 1 of a matrix; layer r of a stack; gate and up, stacked on each rank."""

    def halves(key, data, replica_id, flattened_range):
        rows = ShardedTensor.from_rank_offsets
        return [
            rows(f"{key}.{name}", part, (0, rank, 2), replica_id=replica_id)
            for name, part in zip(("gate", "up"), data.chunk(2), strict=True)
        ]

    data = value + 10 * rank + torch.arange(4.0)
    layer = ShardedTensor.from_rank_offsets("layers", data + 1, (0, rank, 2), prepend_axis_num=1)
    return {
        "model": {
            "rows": ShardedTensor.from_rank_offsets("rows", data.view(2, 2), (0, rank, 2)),
            "layer": layer,
            "mlp": ShardedTensorFactory("mlp", data + 2, halves, torch.cat),
        },
        "same": ShardedTensor.from_rank_offsets(
            "same", torch.full((2,), value), replica_id=(0, rank)
        ),
        "optimizer": {"param_groups": [{"lr": 0.1 + rank, "betas": (0.9, 0.95)}]},
        "rank": LocalNonpersistentObject(rank),
    }


def save_and_load(folder: str) -> tuple:
    rank = dist.get_rank()
    dist_checkpointing.save(state_dict(rank, 1.0), f"{folder}/it")
    asked = state_dict(rank, 5.0)
    found = dist_checkpointing.load(asked, f"{folder}/it")
    in_place = found["model"]["rows"] is asked["model"]["rows"].data
    # -- Another layout: each rank takes all of it --
    metadata = dist_checkpointing.load_tensors_metadata(f"{folder}/it")
    all_of_it = dist_checkpointing.load(metadata, f"{folder}/it")
    # -- Both ranks would save one box --
    for name, part in (
        ("content", torch.full((2,), 1.0 + rank)),
        ("order", torch.arange(2.0).roll(rank)),
        ("dtype", torch.zeros(2, dtype=(torch.int32, torch.float32)[rank])),
        ("shape", torch.zeros(2 + rank)),
    ):
        mine = ShardedTensor(name, part, (4,), (1,))
        refused = rf"{name} at \(1,\): rank 0 would save .*, rank 1 .*, both with replica_id 0"
        with pytest.raises(CheckpointingException, match=refused):
            dist_checkpointing.save({"a": mine}, f"{folder}/both")
    alike = ShardedTensor.from_rank_offsets("a", torch.ones(2))
    dist_checkpointing.save({"a": alike, "here": LocalNonpersistentObject(rank)}, f"{folder}/it2")
    assert dist_checkpointing.load({"a": alike}, f"{folder}/it2")["a"].tolist() == [1.0, 1.0]
    # -- One rank's plain objects are wrong --
    with pytest.raises(ValueError, match="has the key 0"):
        dist_checkpointing.save({"a": {0: 1}} if rank == 0 else {}, f"{folder}/wrong")
    return found, in_place, {**all_of_it}


@pytest.mark.processes
def test_t11_two_ranks_save_and_load_but_do_not_save_other_content_as_one_box(tmp_path):
    results = run_ranks(save_and_load, 2, str(tmp_path))
    for rank, (found, in_place, _) in enumerate(results):
        data = 1.0 + 10 * rank + torch.arange(4.0)
        assert in_place
        assert torch.equal(found["model"]["rows"], data.view(2, 2))
        assert torch.equal(found["model"]["layer"], data + 1)
        assert torch.equal(found["model"]["mlp"], data + 2)
        assert found["same"].tolist() == [1.0, 1.0]
        # The first rank's, and a tuple is a list.
        assert found["optimizer"] == {"param_groups": [{"lr": 0.1, "betas": [0.9, 0.95]}]}
        assert found["rank"] == rank
    full = results[1][2]
    assert full["layers"].shape == (2, 4) and full["rows"].shape == (4, 2)
    assert full["mlp.up"].tolist() == [5.0, 6.0, 15.0, 16.0]
    common = json.loads((tmp_path / "it" / COMMON).read_text())
    assert list(common) == ["optimizer"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it", "it2"]


def hurry() -> None:
    """A word after 0.05 s, the end after 0.5 s."""
    meeting.SECONDS_TO_A_WORD = 0.05
    meeting._time_limit = lambda group: 0.5 / meeting.SHARE_OF_TIME_LIMIT


def call_alone(folder: str) -> list[str]:
    """Rank 0 saves and loads what rank 1 does not, and then both do."""
    rank = dist.get_rank()
    hurry()
    calls = [
        lambda: dist_checkpointing.save({"a": whole("a", 1.0)}, f"{folder}/it"),
        lambda: dist_checkpointing.load({"a": whole("a", 0.0)}, f"{folder}/it"),
    ]
    said = []
    for call in calls:
        if rank == 0:
            with pytest.warns(UserWarning) as warned, pytest.raises(CheckpointingException) as end:
                call()
            said += [str(warned[0].message), str(end.value)]
        dist.barrier()
        call()
    # -- Each rank to, or from, its own folder --
    dist_checkpointing.save({"a": whole("a", 2.0)}, f"{folder}/it2")
    for call in (
        lambda: dist_checkpointing.save({"a": whole("a", 1.0)}, f"{folder}/rank{rank}"),
        lambda: dist_checkpointing.load({"a": whole("a", 0.0)}, f"{folder}/{('it', 'it2')[rank]}"),
    ):
        with pytest.raises(CheckpointingException) as refused:
            call()
        said.append(str(refused.value))
    return said


@pytest.mark.processes
def test_v4_a_rank_that_saves_or_loads_alone_says_for_whom_it_waits(tmp_path):
    """Was: silent until the group's time-out of half an hour."""
    (saving, saved, loading, loaded, *rest), (*same,) = run_ranks(call_alone, 2, str(tmp_path))
    alone = r"rank 0 has waited \d\.\d s to (save|load) .*it: 1 of 2 ranks have not come: 1; every"
    assert all(re.match(alone, text) for text in (saving, saved, loading, loaded))
    elsewhere, other = rest
    assert rest[0].partition(":")[2] == same[0].partition(":")[2]
    assert re.search("rank 0 would save to .*/rank0, rank 1 to .*/rank1, and a check", elsewhere)
    assert re.search("rank 1 would load .*/it2, which is another .* than rank 0's .*/it;", other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it", "it2"]


class Averaging(MegatronModule):
    """A weight, and a running mean of what its rank has seen."""

    def __init__(self, seen: float):
        super().__init__(make_config())
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.full((2,), seen))
        self.register_buffer("same", torch.zeros(2))
        self.register_buffer("unsaved", torch.full((2,), seen), persistent=False)
        self.pg_collection = ProcessGroupCollection(tp=PretendGroup(), dp_cp=dist.group.WORLD)


def save_buffers_apart(folder: str) -> tuple[list[str], list[float]]:
    model = Averaging(1.0 + dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        dist_checkpointing.save(model.sharded_state_dict(), f"{folder}/it")
    found = dist_checkpointing.load(model.sharded_state_dict(), f"{folder}/it")
    model.load_state_dict(found)
    return [str(one.message) for one in caught], model.mean.tolist()


@pytest.mark.processes
def test_v2_a_buffer_that_copies_have_apart_is_told_and_rank_0s_is_read_back(tmp_path):
    """Was: saved without a word, as in Megatron."""
    (told, mean), (silent, read) = run_ranks(save_buffers_apart, 2, str(tmp_path))
    assert mean == read == [1.0, 1.0] and silent == []
    (text,) = told
    assert text.endswith(
        "it: 1 of 2 buffers, such as mean, differ between copies of the model: rank 0's, with mean 1, "
        "is saved, rank 1's, with mean 2, is not, and after a load all have the first; average them "
        "over the copies before they are saved, if all are to count"
    )


def test_a_shorter_tensor_ends_with_zeros(tmp_path):
    dist_checkpointing.save({"a": whole("a", 3.0)}, tmp_path / "it")
    longer = ShardedTensor.from_rank_offsets("a", torch.ones(4), allow_shape_mismatch=True)
    assert dist_checkpointing.load({"a": longer}, tmp_path / "it")["a"].tolist() == [3, 3, 0, 0]
    # On a rank that has a later part there may be nothing to load.
    for part, found in ((0, [3]), (1, [3]), (2, [0])):
        piece = ShardedTensor.from_rank_offsets(
            "a", torch.ones(1), (0, part, 3), allow_shape_mismatch=True
        )
        assert dist_checkpointing.load({"a": piece}, tmp_path / "it")["a"].tolist() == found


def test_a_load_that_is_refused_changes_nothing(tmp_path):
    dist_checkpointing.save({"a": whole("a", 3.0)}, tmp_path / "it")
    longer = ShardedTensor.from_rank_offsets("a", torch.ones(4), allow_shape_mismatch=True)
    with pytest.raises(CheckpointingException, match="b is not in it"):
        dist_checkpointing.load({"a": longer, "b": whole("b", 1.0)}, tmp_path / "it")
    assert longer.data.tolist() == [1, 1, 1, 1]
