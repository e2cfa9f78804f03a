"""What a parameter and the modules above it know: kind, groups, scale, unequal sections, name."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.core.dist_checkpointing.mapping import make_sharded_tensors
from minimegatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchDistributedDataParallel,
)
from minimegatron.core.distributed.distributed_data_parallel import gradient_scaling_factor
from minimegatron.core.parameter import KINDS, kind_of, reduce_group, tensor_group
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.initial_weights import new_weight
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear
from minimegatron.core.tensor_parallel.sharding import (
    copy_tensor_model_parallel_attributes,
    full_shape,
    section_sizes,
    set_tensor_model_parallel_attributes,
    shard_parameter,
    unshard_parameter,
)
from minimegatron.core.transformer.module import MegatronModule, PartOfModuleList
from minimegatron.core.transformer.module_state import global_parameter_name
from tests.core.distributed.common import make_config
from tests.groups import PretendGroup

# -- Kinds and groups --


def parameter(**marks):
    param = torch.nn.Parameter(torch.zeros(3))
    for name, value in marks.items():
        setattr(param, name, value)
    return param


def test_a_mark_says_the_kind_and_the_kind_the_groups():
    for marks, kind in (
        ({}, "dense"),
        ({"allreduce": True}, "dense"),
        ({"allreduce": False}, "expert"),
        ({"allreduce": False, "kind": "dense"}, "dense"),
    ):
        assert kind_of(parameter(**marks)) is KINDS[kind]
    with pytest.raises(ValueError, match=r"'shared'; use dense, expert"):
        kind_of(parameter(kind="shared"))
    names = ("tp", "dp_cp", "expt_tp", "expt_dp")
    groups = ProcessGroupCollection(**{name: PretendGroup(i, 9) for i, name in enumerate(names)})
    expert = parameter(allreduce=False)
    assert tensor_group(parameter(), groups) is groups.tp
    assert reduce_group(parameter(), groups) is groups.dp_cp
    assert tensor_group(expert, groups) is groups.expt_tp
    assert reduce_group(expert, groups) is groups.expt_dp
    with pytest.raises(AttributeError, match="no 'expt_dp', only .*give it expt_dp="):
        reduce_group(expert, ProcessGroupCollection(dp_cp=PretendGroup()))


@pytest.mark.parametrize(
    ("dp_cp", "edp", "factor"), [(2, 1, 1 / 2), (4, 2, 1 / 4), (1, 2, 1.0), (2, 4, 1 / 2)]
)
def test_every_kind_is_divided_by_the_number_of_losses(dp_cp, edp, factor):
    """Never by the number of copies; what the collective divides by is taken back."""
    plain = DistributedDataParallelConfig()
    assert gradient_scaling_factor(make_config(), plain, dp_cp, edp) == factor
    average = DistributedDataParallelConfig(average_in_collective=True)
    assert gradient_scaling_factor(make_config(), average, dp_cp, edp) / edp == factor
    assert gradient_scaling_factor(make_config(), average, dp_cp) == 1.0
    per_token = make_config(calculate_per_token_loss=True)
    assert gradient_scaling_factor(per_token, plain, dp_cp, edp) == 1.0


def groups_of(dp: int, edp: int) -> ProcessGroupCollection:
    return ProcessGroupCollection(
        dp_cp=PretendGroup(0, dp), expt_dp=PretendGroup(0, edp), pp=PretendGroup()
    )


class Mixed(torch.nn.Module):
    """Two kinds and two dtypes, in turn."""

    def __init__(self):
        super().__init__()
        for number in range(8):
            dtype = torch.bfloat16 if number % 4 > 1 else torch.float32
            param = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
            param.allreduce = number % 2 == 0
            self.register_parameter(f"p{number}", param)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_buffer_has_one_group_and_buckets_keep_the_order_of_backward(sharded):
    module = Mixed()
    options = {"use_distributed_optimizer": sharded}
    for overlap in (False, True):
        config = DistributedDataParallelConfig(
            overlap_grad_reduce=overlap, bucket_size=1, **options
        )
        ddp = DistributedDataParallel(
            make_config(), config, module, pg_collection=groups_of(dp=4, edp=2)
        )
        sizes = [buffer.data_parallel_group.size() for buffer in ddp.all_buffers]
        assert sizes == [4, 2, 4, 2]
        assert [[*group.params.values()] for group in ddp.all_bucket_groups] == (
            [[f"p{number}"] for number in range(7, -1, -1)]
            if overlap
            else [["p3", "p7", "p1", "p5"], ["p2", "p6", "p0", "p4"]]
        )
        for group in ddp.all_bucket_groups:
            for param in group.params:
                assert group.data_parallel_group is reduce_group(param, ddp.pg_collection)
            assert all(bucket.gradient_scaling_factor == 1 / 4 for bucket in group.buckets)
    # Where both kinds have the same ranks, nothing is divided.
    ddp = DistributedDataParallel(
        make_config(), config, module, pg_collection=groups_of(dp=4, edp=4)
    )
    assert len(ddp.all_buffers) == 2


def test_f4_buffers_of_experts_stand_apart_and_none_twice():
    """Clients read `buffers + expert_parallel_buffers` after every step, in a dense model too."""
    for edp, num_dense, num_others in ((2, 2, 2), (4, 2, 0)):  # per dtype
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
        groups = groups_of(dp=4, edp=edp)
        ddp = DistributedDataParallel(make_config(), config, Mixed(), pg_collection=groups)
        assert (len(ddp.buffers), len(ddp.expert_parallel_buffers)) == (num_dense, num_others)
        for mine, others, together in (
            (ddp.buffers, ddp.expert_parallel_buffers, ddp.all_buffers),
            (ddp.bucket_groups, ddp.expert_parallel_bucket_groups, ddp.all_bucket_groups),
        ):
            assert sorted(map(id, mine + others)) == sorted(map(id, together))
            assert {id(x.data_parallel_group) for x in mine} == {id(groups.dp_cp)}
            assert {id(x.data_parallel_group) for x in others} <= {id(groups.expt_dp)}


def test_torchs_wrapper_refuses_what_it_would_sum_over_the_wrong_ranks():
    with pytest.raises(ValueError, match=r"4 parameters, such as p1, need another"):
        TorchDistributedDataParallel(
            make_config(),
            DistributedDataParallelConfig(),
            Mixed(),
            pg_collection=groups_of(dp=4, edp=2),
        )


# -- Sections --


def cut(sizes, dim=0, tensor=None):
    param = torch.empty(0) if tensor is None else tensor
    set_tensor_model_parallel_attributes(param, True, dim, 1, sizes)
    return param


def test_each_section_is_cut_by_itself():
    full = torch.arange(24)  # z of 8, x of 8, B of 2, C of 2, dt of 4
    like = cut((4, 4, 1, 1, 2))
    assert shard_parameter(full, like, 0, 2).tolist() == [*range(4), *range(8, 12), 16, 18, 20, 21]
    assert shard_parameter(full, like, 1, 2).tolist() == [
        *range(4, 8),
        *range(12, 16),
        *(17, 19, 22, 23),
    ]
    # Stride k is k equal sections.
    strided = torch.empty(0)
    set_tensor_model_parallel_attributes(strided, True, 0, 3)
    for rank in range(2):
        expected = shard_parameter(full, strided, rank, 2)
        assert torch.equal(shard_parameter(full, cut((4, 4, 4)), rank, 2), expected)
    assert section_sizes(strided, 12) == section_sizes(cut((4, 4, 4)), 12) == [4, 4, 4]
    assert section_sizes(like, 24) == [8, 8, 2, 2, 4]


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any),
    rest=st.integers(1, 3),
    dim=st.integers(0, 1),
    tp_size=st.integers(2, 3),
    shards=st.integers(1, 3),
)
def test_sections_of_all_ranks_are_the_whole(sizes, rest, dim, tp_size, shards):
    """Cut and put together; and the boxes of each rank's flat shards, as with ZeRO-1."""
    length = tp_size * sum(sizes)
    full = torch.randn((length, rest) if dim == 0 else (rest, length))
    whole, times = torch.zeros_like(full), torch.zeros_like(full)
    pieces = [shard_parameter(full, cut(sizes, dim), rank, tp_size) for rank in range(tp_size)]
    assert torch.equal(unshard_parameter(pieces, cut(sizes, dim)), full)
    for rank, piece in enumerate(pieces):
        param = cut(sizes, dim, piece.clone())
        assert full_shape(param, tp_size) == full.shape
        numel = param.numel()
        for shard in range(shards):
            start, end = numel * shard // shards, numel * (shard + 1) // shards
            data = param.view(-1)[start:end]
            for box in make_sharded_tensors("w", param, data, rank, tp_size, start):
                ends = zip(box.global_offset, box.data.shape, strict=True)
                where = tuple(slice(first, first + size) for first, size in ends)
                whole[where] = box.data
                times[where] += 1
    assert torch.equal(whole, full) and (times == 1).all()


def test_wrong_sections_are_refused_with_numbers():
    with pytest.raises(ValueError, match=r"9 elements.* 2 stacked .* 2:1, .* 2 ranks; .* of 6 "):
        shard_parameter(torch.zeros(9), cut((2, 1)), 0, 2)
    # The sizes of the whole, where one rank's are wanted.
    piece = cut((4, 2), tensor=torch.zeros(3))
    with pytest.raises(ValueError, match=r"has 3 elements.* 4:2, .* of 6 .* one rank's pieces"):
        make_sharded_tensors("w", piece, piece, 0, 2)
    copy = torch.empty(3)
    copy_tensor_model_parallel_attributes(copy, cut((2, 1)))
    assert copy.partition_sizes == (2, 1)


def test_a_layer_draws_its_sections_from_one_matrix():
    def init(weight):
        torch.nn.init.normal_(weight)

    def build(group):
        torch.manual_seed(3)
        sizes = [8 // group.size(), 4 // group.size()]
        config = make_config()
        options = {"config": config, "init_method": init, "tp_group": group}
        return ColumnParallelLinear(5, 12, partition_sizes=sizes, **options)

    whole = build(PretendGroup()).weight
    for rank in range(2):
        layer = build(PretendGroup(rank, 2))
        assert layer.weight.partition_sizes == layer.bias.partition_sizes == [4, 2]
        rows = [*range(4 * rank, 4 * rank + 4), *range(8 + 2 * rank, 10 + 2 * rank)]
        assert torch.equal(layer.weight, whole[rows])


# -- Names --


class Tied(MegatronModule):
    """Its `copy` is the full model's `original`."""

    def __init__(self):
        super().__init__(make_config())
        self.copy = torch.nn.Linear(2, 2)
        self.parts = PartOfModuleList([torch.nn.Linear(2, 2) for _ in range(2)], first=6)

    def global_name(self, name: str) -> str:
        return name.replace("copy.", "original.")


def test_a_name_is_asked_of_every_module_on_the_way():
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = torch.nn.Module()
    model.encoder = PartOfModuleList([Tied()], first=2)
    model.decoder = torch.nn.ModuleList([Wrapper(Tied())])
    wrapped = Wrapper(Wrapper(model))
    names = [global_parameter_name(wrapped, name) for name, _ in wrapped.named_parameters()]
    assert names[::2] == [
        "encoder.2.original.weight",
        "encoder.2.parts.6.weight",
        "encoder.2.parts.7.weight",
        "decoder.0.original.weight",
        "decoder.0.parts.6.weight",
        "decoder.0.parts.7.weight",
    ]
    inside = dict(model.encoder[0].named_parameters())
    assert global_parameter_name(model.encoder[0], "parts.1.weight") == "parts.7.weight"
    assert "parts.1.weight" in inside


def test_initial_weights_follow_name_and_kind():
    """Of an expert that the tensor group does not cut, each rank has the whole."""

    class Model(MegatronModule):
        def __init__(self, groups, first):
            super().__init__(make_config())
            init = torch.nn.init.normal_
            each = [torch.nn.Module(), torch.nn.Module()]
            for module in each:
                shape = (4 // groups.expt_tp.size(), 3)
                module.weight = new_weight(shape, torch.float64, init, 0, groups.expt_tp)
                module.weight.allreduce = False
            self.parts = PartOfModuleList(each, first)
            self.initialize_weights(groups)

    cut_in_two = ProcessGroupCollection(tp=PretendGroup(), expt_tp=PretendGroup(1, 2))
    whole = ProcessGroupCollection(tp=PretendGroup(1, 2), expt_tp=PretendGroup())
    a, b, c = Model(whole, 0), Model(whole, 1), Model(cut_in_two, 1)
    assert torch.equal(a.parts[1].weight, b.parts[0].weight)
    assert torch.equal(a.parts[1].weight[2:], c.parts[0].weight)
    assert not torch.equal(a.parts[0].weight, b.parts[0].weight)
