"""What is lost, forgotten or not alike before a step: put right, or refused in a sentence.

No test here has a second process: one rank's part is computed, and what others would send is given.
"""

import copy
import re
from contextlib import suppress
from unittest import mock

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.dist_checkpointing.mapping import make_sharded_tensors
from minimegatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    grad_checks,
)
from minimegatron.core.models.gpt import GPTModel
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, optimizer_setup
from minimegatron.core.parameter import KINDS, kind_of
from minimegatron.core.process_groups_config import ProcessGroupCollection, groups_of
from minimegatron.core.tensor_parallel.layers import ColumnParallelLinear
from minimegatron.core.tensor_parallel.sharding import (
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training.checkpointing import sharded_model_state
from tests.core.distributed.common import Toy, make_config
from tests.groups import PretendGroup

ONE = PretendGroup()
GROUPS = (
    "tp",
    "pp",
    "mp",
    "cp",
    "tp_cp",
    "tp_dp_cp",
    "ep",
    "expt_tp",
    "tp_ep",
    "tp_ep_pp",
    "dp_cp",
    "expt_dp",
)


def world(**groups: PretendGroup) -> ProcessGroupCollection:
    """Groups of one rank, but for those given."""
    return ProcessGroupCollection(**dict.fromkeys(GROUPS, ONE) | {"embd": None} | groups)


def wrapped(module: torch.nn.Module, groups: ProcessGroupCollection, **ddp_options):
    ddp_config = DistributedDataParallelConfig(**ddp_options)
    return DistributedDataParallel(make_config(), ddp_config, module, pg_collection=groups)


def optimizer_of(model, groups: ProcessGroupCollection | None, **options):
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=0.5, clip_grad=0.0, **options)
    return get_megatron_optimizer(config, [model], pg_collection=groups)


def backward(model: torch.nn.Module, factor: float = 1.0) -> None:
    dtype = next(model.parameters()).dtype
    (model(torch.ones(4, 5, dtype=dtype)).float().pow(2).mean() * factor).backward()


# -- S1: marks --


def stage(stage: int = 0, **options) -> GPTModel:
    """The first or last of two stages, rank 1 of 2 tensor ranks; with every mark that a layer gives."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        sequence_parallel=True,
        qk_layernorm=True,
        **options,
    )
    two = PretendGroup(1, 2)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(config.num_moe_experts, qk_layernorm=True),
        vocab_size=16,
        max_sequence_length=8,
        pre_process=stage == 0,
        post_process=stage == 1,
        share_embeddings_and_output_weights=True,
        pg_collection=world(
            tp=two, pp=PretendGroup(stage, 2), tp_cp=two, tp_dp_cp=two, ep=two, tp_ep=two
        ),
    )


def experts() -> GPTModel:
    kinds = {
        "num_moe_experts": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    shared = {"moe_shared_expert_intermediate_size": 8}
    return stage(add_bias_linear=False, **kinds, **shared)


def marks(model: torch.nn.Module) -> dict[str, dict]:
    """What the code reads of each parameter. `init_method` may be a copy."""
    unread = ("has_its_marks", "init_method", "main_grad", "grad_added_to_main_grad")
    return {
        name: {key: value for key, value in vars(param).items() if key not in unread}
        for name, param in model.named_parameters()
    }


def assigned(model: torch.nn.Module) -> torch.nn.Module:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return model


def put_anew(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(param.data.clone()))
    for param in model.parameters():  # as a program's own `get_model` does
        set_defaults_if_not_set_tensor_model_parallel_attributes(param)
    return model


def from_meta(model: torch.nn.Module) -> torch.nn.Module:
    return model.to("meta").to_empty(device="cpu")


@pytest.mark.parametrize(
    "build", [stage, lambda: stage(1), experts], ids=["first", "last", "experts"]
)
@pytest.mark.parametrize("change", [assigned, put_anew, copy.deepcopy, from_meta])
def test_s1_marks_survive_a_parameter_that_takes_anothers_place(build, change):
    """Was: a piece counted as a whole, an expert as dense, and norms' gradients were not summed."""
    model = build()
    wanted, model = marks(model), change(model)
    assert marks(model) != wanted
    wrapped(model, model.pg_collection)
    assert marks(model) == wanted
    assert any(param.sequence_parallel for n, param in model.named_parameters() if "norm" in n)


@pytest.mark.parametrize("change", [assigned, put_anew, from_meta])
def test_s1_a_checkpoint_and_an_optimizer_know_what_is_cut(change):
    """Was: [8, 4] was saved as the whole, by both ranks to one place, and counted on rank 0 alone."""
    layer = change(
        ColumnParallelLinear(
            4, 8, config=make_config(), init_method=torch.nn.init.ones_, tp_group=PretendGroup(1, 2)
        )
    )
    two = world(tp=PretendGroup(1, 2))
    model = torch.nn.Sequential(layer)
    optimizer = optimizer_of(model, two)
    assert all(optimizer._is_counted(shard) for shard in optimizer.shards)
    change(layer)
    ((_, weight), _) = named_global_parameters(model)
    (box,) = make_sharded_tensors("w", weight, weight.detach(), 1, 2)
    assert (box.global_shape, box.global_offset) == ((8, 4), (4, 0))


def test_s1_a_model_from_meta_can_be_drawn():
    """Was: no parameter knew how it is drawn any more, so that memory stayed as it happened to be."""
    with torch.device("meta"):
        model = stage()
    model.to_empty(device="cpu")
    for param in model.parameters():
        param.data.fill_(7.0)
    model.initialize_weights(model.pg_collection)
    drawn = dict(stage().named_parameters())
    assert all(torch.equal(param, drawn[name]) for name, param in model.named_parameters())


def test_s1_a_weight_that_is_computed_from_others_is_refused():
    model = stage()
    torch.nn.utils.parametrizations.weight_norm(model.decoder.layers[0].mlp.linear_fc1)
    with pytest.raises(
        ValueError, match=r"linear_fc1.weight of shape \(16, 8\) is computed from other"
    ):
        wrapped(model, model.pg_collection)


def test_s1_marks_that_a_program_sets_itself_stay():
    model = stage()
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    weight.allreduce = False
    wrapped(model, model.pg_collection)
    assert kind_of(weight) is KINDS["expert"] and weight.tensor_model_parallel


# -- S5: groups --


def test_s5_wrapper_and_optimizer_take_the_models_own_groups():
    """Was: layers exchanged over these, gradients were summed over those of `parallel_state`."""
    model = stage()
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    assert ddp.pg_collection is model.pg_collection
    assert optimizer_of(ddp, None).pg_collection is model.pg_collection
    assert groups_of(ddp) is model.pg_collection


def test_s5_groups_of_other_ranks_are_refused():
    model = stage()
    ddp = wrapped(model, world(tp=PretendGroup(1, 2)))
    with pytest.raises(ValueError, match=r"the group ep is of ranks .* for the GPTModel, but of"):
        optimizer_of(ddp, ddp.pg_collection)


# -- S17: gradients that nobody has summed --


@pytest.mark.parametrize(
    ("groups", "mark"),
    [
        (world(dp_cp=PretendGroup(0, 2)), ""),
        (world(tp=PretendGroup(0, 2)), "sequence_parallel"),
        (world(tp=PretendGroup(0, 2)), "average_gradients_across_tp_domain"),
        (world(), "shared_embedding"),
    ],
)
def test_s17_a_step_without_finalize_model_grads_is_refused(groups, mark):
    """Was: each copy was updated by its own gradient, and they drifted apart."""
    module = Toy()
    setattr(module.norm.weight, mark or "unread", True)
    ddp = wrapped(module, groups)
    optimizer = optimizer_of(ddp, groups)
    before = module.head.weight.clone()
    backward(ddp)
    with pytest.raises(
        RuntimeError, match=r"over [12] data-parallel ranks.*finalize_model_grads_func"
    ):
        optimizer.step()
    assert torch.equal(module.head.weight, before)
    ddp.zero_grad_buffer()
    assert optimizer.step()[0]  # no gradient came: nothing to sum


def test_s17_one_copy_needs_no_sum():
    ddp = wrapped(Toy(), world())
    optimizer = optimizer_of(ddp, world())
    backward(ddp)
    assert optimizer.step()[1] > 0.0


@pytest.mark.parametrize("mark", ["sequence_parallel", "shared_embedding"])
def test_t2_a_sum_over_copies_is_not_all_that_gradients_need(mark):
    """Was: after `finish_grad_sync` alone, partial gradients were taken for whole ones."""
    module, groups = Toy(), world(tp=PretendGroup(0, 2))
    setattr(module.norm.weight, mark, True)
    ddp = wrapped(module, groups)
    optimizer = optimizer_of(ddp, groups)
    backward(ddp)
    ddp.finish_grad_sync()
    with pytest.raises(RuntimeError, match="over 1 data-parallel ranks"):
        optimizer.step()


@pytest.mark.parametrize("group", ["dp_cp", "none"])
def test_t2_a_model_without_a_wrapper_is_one_copy(group):
    """Was: each copy was updated by its own gradient."""
    groups = world(**{group: PretendGroup(0, 2)} if group != "none" else {})
    module = Toy()
    module.config = make_config()
    optimizer = optimizer_of(module, groups)
    optimizer.first_checks.clear()  # they ask other ranks
    backward(module)
    if group == "none":
        assert optimizer.step()[0]
        return
    with pytest.raises(RuntimeError, match="not summed over 2 data-parallel ranks"):
        optimizer.step()


# -- S18: copies that begin apart --


def refusals(
    first: torch.nn.Module,
    second: torch.nn.Module,
    group: str = "dp_cp",
    check=lambda model, groups: optimizer_setup.check_copies_alike([model], groups),
) -> list[str]:
    """What two ranks of a group raise: each sees the greater of both their numbers."""
    sent, raised = [], []

    def note(numbers, group, op):
        sent.append(numbers.clone())

    def answer(numbers, group, op):
        numbers.copy_(torch.maximum(numbers, sent.pop(0)))

    for rank, (mine, other) in enumerate([(first, second), (second, first)]):
        sent.clear()
        groups = world(**{group: PretendGroup(rank, 2)})
        for model, reduce in ((other, note), (mine, answer)):
            with (
                mock.patch.object(optimizer_setup, "all_reduce", reduce),
                mock.patch("torch.distributed.ProcessGroup", PretendGroup),
            ):
                try:
                    check(model, groups)
                except ValueError as error:
                    raised.append(str(error))
    return raised


def test_s18_copies_that_begin_with_other_weights_are_refused():
    """Was: a forgotten seed gave as many models as there were ranks, of which one was reported."""
    found = refusals(Toy(), Toy(seed=8))
    assert len(found) == 2
    assert all("of the 2 in group dp_cp: 9 of 11 weights, such as inner.weight" in t for t in found)
    changed = Toy()
    changed.head.weight.data[0, 0] = torch.nextafter(changed.head.weight[0, 0], torch.tensor(9.0))
    (found, _) = refusals(Toy(), changed)
    assert "1 of 11 weights, such as head.weight" in found
    assert "names, shapes and dtypes" in refusals(Toy(), Toy(depth=2))[0]


def test_s18_experts_are_compared_with_their_own_copies_only():
    one, other = Toy(), Toy()
    for model in (one, other):
        model.head.weight.allreduce = False
    other.head.weight.data.add_(1.0)
    assert refusals(one, other, "dp_cp") == []
    assert "1 of 1 weights, such as head.weight" in refusals(one, other, "expt_dp")[0]


def with_buffers(saved: float, unsaved: float = 0.0, shape: tuple[int, ...] = ()) -> Toy:
    model = Toy()
    model.inner.register_buffer("scale", torch.full(shape, saved))
    model.inner.register_buffer("place", torch.full((2,), unsaved), persistent=False)
    return model


def test_v2_copies_that_begin_with_other_saved_buffers_are_refused():
    """Was: each rank computed with its own, and a checkpoint had rank 0's."""

    def check(model: torch.nn.Module, groups: ProcessGroupCollection) -> None:
        noted = optimizer_setup.note_saved_buffers([wrapped(model, world())])
        optimizer_setup.check_buffers_alike(noted, groups)

    found = refusals(with_buffers(1.0), with_buffers(2.0), check=check)
    assert len(found) == 2
    assert "1 of 1 buffers, such as inner.scale () torch.float32, are not the same" in found[0]
    assert "register with persistent=False" in found[0]
    longer = refusals(with_buffers(1.0), with_buffers(1.0, shape=(2,)), check=check)
    assert all("1 names, shapes and dtypes of buffers" in text for text in longer)
    assert refusals(with_buffers(1.0, 3.0), with_buffers(1.0, 4.0), check=check) == []


def test_v2_the_first_step_asks_for_the_buffers_of_the_set_up():
    model = with_buffers(1.0)
    optimizer = optimizer_of(model, world())
    model.inner.scale.add_(1.0)
    with mock.patch.object(optimizer_setup, "_difference", return_value="") as asked:
        optimizer.check_first()
    (named, _, _, what) = asked.call_args.args
    assert what == "buffers" and named[0][1] == torch.tensor(1.0).view(torch.int32)


class Twice(torch.nn.Module):
    """One weight under two names, used twice; and a long chain behind it."""

    def __init__(self, depth: int = 0):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.rest = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(depth)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.rest(self.second(self.first(inputs)))


@pytest.mark.parametrize("overlap", [False, True])
def test_v7_a_weight_of_two_names_is_summed_and_updated_once(overlap):
    model = wrapped(Twice(1), world(), overlap_grad_reduce=overlap, bucket_size=1)
    alone, optimizer = Twice(1), optimizer_of(model, world())
    model.zero_grad_buffer()
    for one in (model, alone):
        backward(one)
    model.finish_grad_sync()
    (found, expected) = model.module.first.weight, alone.first.weight
    assert torch.equal(found.main_grad, expected.grad)
    assert sum(len(bucket.params) for buffer in model.buffers for bucket in buffer.buckets) == 5
    norm = torch.stack([param.grad.norm() for param in alone.parameters()]).norm()
    assert optimizer.step()[1] == pytest.approx(float(norm), rel=1e-6)
    decay = optimizer.config.weight_decay
    torch.optim.SGD(alone.parameters(), lr=0.5, weight_decay=decay).step()
    assert torch.equal(found, expected)


def test_v7_a_weight_in_two_chunks_is_refused_in_few_words():
    """Was: updated twice in each step."""
    chunks = [Twice(9), Twice(9)]
    chunks[1].rest = chunks[0].rest
    frozen = chunks[1].first.weight = chunks[0].first.weight
    frozen.requires_grad = False  # nobody updates it
    config = OptimizerConfig(optimizer="sgd", lr=0.5)
    with pytest.raises(
        ValueError, match=r"18 weights are in several chunks: rest\.0\.weight of"
    ) as e:
        get_megatron_optimizer(
            config, [wrapped(one, world()) for one in chunks], pg_collection=world()
        )
    assert "chunk 1, which is in chunk 0 too, rest.0.bias of" in str(e.value)
    assert "too and 15 more; give each chunk its own" in str(e.value) and len(str(e.value)) < 450


@mock.patch("torch.distributed.get_rank", lambda: 0)
def test_v7_a_refusal_names_three_of_many_weights():
    """Was: all of them, thousands for a large model."""
    model = wrapped(Twice(20), world(), overlap_grad_reduce=True)
    model.zero_grad_buffer()
    with pytest.raises(RuntimeError, match="for .* and 40 more, so 43 gradients were never summed"):
        model.finish_grad_sync()
    (group,) = model.all_bucket_groups
    words = grad_checks.words_of(group.buckets[0], ["Inf"] * 43)
    assert re.search("not finite in bucket 0, .* and 40 more; look at", words)


def test_v3_an_optimizer_of_torchs_own_that_would_do_nothing_is_refused():
    """Was: the weights stayed as they were, and nobody said so."""
    model = wrapped(Toy(), world())
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    backward(model)
    words = "AdamW would update none of its 11 parameters: it reads param.grad, which is None, and"
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    for param in model.parameters():
        param.grad = param.main_grad
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))


def test_v3_who_reads_main_grad_himself_hears_nothing():
    model, alone = wrapped(Toy(), world()), Toy()
    model.zero_grad_buffer()
    for one in (model, alone):
        backward(one)
    for param in model.parameters():
        param.data -= 0.1 * param.main_grad
    for optimizer in (torch.optim.SGD(alone.parameters(), lr=0.1), optimizer_of(model, world())):
        optimizer.step()
    model.zero_grad_buffer()
    assert not torch.equal(model.module.head.weight, Toy().head.weight)


def test_t9_whole_parameters_are_compared_over_tensor_ranks():
    """Was: a layer that each tensor rank had drawn by its own seed gave other outputs on each."""
    found = refusals(Toy(), Toy(seed=8), "tp")
    assert len(found) == 2
    assert all("of the 2 in group tp: 9 of 11 weights, such as inner.weight" in t for t in found)
    assert all("mark what is cut by set_tensor_model_parallel_attributes" in t for t in found)
    one, other = torch.nn.ModuleDict(), torch.nn.ModuleDict()
    for model, names in ((one, "ab"), (other, "ba")):  # adapters added in another order
        model.update({name: torch.nn.Linear(2, 2) for name in names})
    assert all("4 names, shapes and dtypes" in text for text in refusals(one, other, "tp"))


def test_t9_chunks_whose_parameters_have_one_name_are_both_compared():
    chunks, others = [Toy(), Toy()], [Toy(), Toy()]
    others[0].head.weight.data.add_(1.0)
    sent = []
    with (
        mock.patch("torch.distributed.ProcessGroup", PretendGroup),
        mock.patch.object(optimizer_setup, "all_reduce", lambda n, *_: sent.append(n.clone())),
    ):
        for model in (chunks, others):
            optimizer_setup.check_copies_alike(model, world(tp=PretendGroup(0, 2)))
    _, ours, _, theirs = sent  # names, and a number for each weight and its negative
    assert ours.numel() == 2 * 22 and (ours != theirs).sum() == 2


def test_t9_what_is_cut_is_left_out_and_experts_have_their_own_tensor_group():
    one, other = Toy(), Toy()
    other.head.weight.data.add_(1.0)
    for model in (one, other):
        model.head.weight.allreduce = False
    assert refusals(one, other, "tp") == []
    assert "1 of 1 weights, such as head.weight" in refusals(one, other, "expt_tp")[0]
    for model in (one, other):
        model.head.weight.tensor_model_parallel = True
    assert refusals(one, other, "expt_tp") == []
    assert len(refusals(one, other, "expt_dp")) == 2  # copies of a piece


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_s18_copies_that_are_alike_are_not_refused(dtype):
    assert refusals(Toy(dtype), Toy(dtype)) == []


def test_s18_the_first_good_step_asks_and_later_ones_do_not():
    model = Toy()
    optimizer = optimizer_of(model, world())
    with (
        mock.patch.object(optimizer_setup, "_difference", side_effect=ValueError),
        suppress(ValueError),
    ):
        optimizer.step()
    with mock.patch.object(optimizer_setup, "_difference", return_value="") as compare:
        for _ in range(2):
            backward(model)
            optimizer.step()
    assert compare.call_count == 5  # copies and tensor ranks of two kinds, and buffers


# -- S19: numbers of gradients that are elsewhere, or scaled --


@pytest.mark.parametrize(
    "ask", ["get_grad_norm", "clip_grad_norm", "count_zeros", "step_with_ready_grads"]
)
@pytest.mark.parametrize("options", [{}, {"fp16": True}, {"bf16": True}])
def test_s19_gradients_are_prepared_before_anybody_asks(ask, options):
    """Was: norm 0.0, no zeros, no update."""
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}
    dtype = half[next(iter(options))] if options else torch.float32
    ddp = wrapped(Toy(dtype), world(), grad_reduce_in_fp32=True)
    optimizer = optimizer_of(ddp, world(), **options)
    backward(ddp)
    arguments = (1.0,) if ask == "clip_grad_norm" else ()
    with pytest.raises(RuntimeError, match=r"gradients of 11 of 11 parameters are not where"):
        getattr(optimizer, ask)(*arguments)
    assert not optimizer.prepare_grads()
    getattr(optimizer, ask)(*arguments)


def test_s19_scaled_gradients_have_no_norm():
    """Was: the norm times the loss scale, of a model without wrapper."""
    model = Toy(torch.float32)
    optimizer = optimizer_of(model, world(), fp16=True, loss_scale=8.0)
    backward(model, 8.0)
    with pytest.raises(RuntimeError, match="multiplied by the loss scale"):
        optimizer.get_grad_norm()
    optimizer.prepare_grads()
    norm = optimizer.get_grad_norm()
    with pytest.raises(
        RuntimeError, match="twice in one step would divide by the loss scale twice"
    ):
        optimizer.step()
    assert optimizer.get_grad_norm() == norm
    optimizer.step_with_ready_grads()
    optimizer.zero_grad()
    backward(model, 8.0)
    assert optimizer.step()[0]


def test_s19_without_wrapper_and_scale_the_gradients_are_there_already():
    model = Toy(torch.float32)
    optimizer = optimizer_of(model, world())
    backward(model)
    assert optimizer.get_grad_norm() == optimizer.step()[1] > 0.0


# -- S21: weights that are converted, moved or replaced too late --


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (torch.nn.Module.bfloat16, "converted, moved"),
        (torch.nn.Module.half, "converted, moved"),
        (torch.nn.Module.double, "converted, moved"),
        (assigned, "others took their places"),
        (put_anew, "others took their places"),
    ],
)
def test_s21_a_model_that_changes_under_its_wrapper_is_refused(shard, change, words):
    """Was: the optimizer updated weights that no forward used, or in 8 binary digits."""
    options = {"use_distributed_optimizer": shard}
    ddp = wrapped(Toy(torch.float32), world(), **options)
    optimizer = optimizer_of(ddp, world(), **options)
    ddp.zero_grad_buffer()
    backward(ddp)
    assert optimizer.step()[0]
    change(ddp.module)
    with pytest.raises(ValueError, match=words):
        ddp.zero_grad_buffer()


@pytest.mark.parametrize("change", [torch.nn.Module.bfloat16, assigned, put_anew])
def test_s21_a_model_without_wrapper_that_changes_is_refused(change):
    model = Toy(torch.float32)
    optimizer = optimizer_of(model, world())
    change(model)
    backward(model)
    with pytest.raises(ValueError, match="converted, moved|others took their places"):
        optimizer.step()


def test_s21_with_zero_1_other_memory_is_refused_too():
    ddp = wrapped(Toy(), world(), use_distributed_optimizer=True)
    ddp.module.head.weight.data = ddp.module.head.weight.data.clone()
    with pytest.raises(ValueError, match="1 parameters, such as head.weight"):
        ddp.zero_grad_buffer()


def test_s21_moving_a_model_to_where_it_is_changes_nothing():
    ddp = wrapped(Toy(), world(), use_distributed_optimizer=True)
    ddp.to("cpu").double()
    ddp.zero_grad_buffer()


# -- T7: weights of which other ranks have updated parts --


def half_updated() -> DistributedDataParallel:
    options = dict.fromkeys(
        ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"), True
    )
    ddp = wrapped(Toy(), world(dp_cp=PretendGroup(0, 2)), **options)
    for group in ddp.all_bucket_groups:
        group.params_are_stale = True
    return ddp


@pytest.mark.parametrize("which", ["wrapper", "module", "layer"])
def test_t7_weights_that_are_half_updated_are_neither_given_away_nor_replaced(which):
    """Was: what was loaded was replaced by the update that arrived later. `state_dict` was refused."""
    ddp = half_updated()
    part = {"wrapper": ddp, "module": ddp.module, "layer": ddp.module.head}[which]
    state = {name: param.detach().clone() for name, param in part.named_parameters()}
    for use in (part.state_dict, lambda: part.load_state_dict(state)):
        with pytest.raises(
            RuntimeError, match=r"call start_param_sync\(force_sync=True\) on every"
        ):
            use()
    for group in ddp.all_bucket_groups:
        group.params_are_stale = False
    part.load_state_dict(part.state_dict())


def test_t7_a_checkpoint_gathers_weights_first(monkeypatch):
    """Was: `save_checkpoint` did, and `load_checkpoint` in the middle of a run did not."""
    ddp, seen = half_updated(), []
    monkeypatch.setattr(ddp, "start_param_sync", lambda force_sync: seen.append(force_sync))
    monkeypatch.setattr(parallel_state, "get_group", lambda name: ONE)
    assert len(list(sharded_model_state([ddp]))) == 11 and seen == [True]


# -- U2: parameters that a program adds to experts --


def with_low_rank(**mark: bool) -> GPTModel:
    """A part added inside each expert, and one beside the router."""
    model = experts()
    for layer in model.decoder.layers:
        layer.mlp.low = torch.nn.Linear(8, 8)
        for expert in layer.mlp.experts.local_experts:
            expert.low = torch.nn.Linear(8, 8, bias=False)
            vars(expert.low.weight).update(mark)
    return model


@pytest.mark.parametrize(("mark", "kind"), [({}, None), (False, "expert"), (True, "dense")])
def test_u2_what_is_added_to_an_expert_says_whose_it_is(mark, kind):
    """Was: taken for a dense one. Two experts of one name got the sum of both gradients."""
    model = with_low_rank(**({} if mark == {} else {"allreduce": mark}))
    groups = model.pg_collection
    groups.dp_cp, groups.expt_dp = PretendGroup(1, 2), PretendGroup()
    if kind is None:
        with pytest.raises(
            ValueError, match=r"1 parameters inside experts, .*experts.0.low.weight,"
        ):
            wrapped(model, groups)
        # What is frozen is summed nowhere.
        model.decoder.layers[0].mlp.experts.local_experts[0].low.requires_grad_(False)
        wrapped(model, groups)
        return
    ddp = wrapped(model, groups)
    weight = model.decoder.layers[0].mlp.experts.local_experts[0].low.weight
    group = ddp.param_to_bucket_group[weight].data_parallel_group
    assert group is getattr(groups, KINDS[kind].reduce)
    low = model.decoder.layers[0].mlp.low.weight
    assert ddp.param_to_bucket_group[low].data_parallel_group is groups.dp_cp
