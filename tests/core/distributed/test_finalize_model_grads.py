"""What happens to gradients after the last backward, with values one can add up by hand."""

import dataclasses
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from minimegatron.core import parallel_state
from minimegatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from minimegatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
    _allreduce_word_embedding_grads,
    _divide_by_num_tokens,
    _is_partial_over_tp,
)
from minimegatron.core.orders.orders import register_order, unregister
from minimegatron.core.orders.placement import V
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tracing import observed_by
from tests.core.distributed.common import Recorder, make_config, make_groups
from tests.core.models.gpt_support import CASES
from tests.fake_transport import FakeGroup
from tests.ranks import run_ranks


def _weight(value: float, **attributes) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.full((3, 2), value, dtype=torch.float64))
    for name, attribute in attributes.items():
        setattr(param, name, attribute)
    return param


class _Layer(torch.nn.Module):
    """Parameters of every kind that tensor-parallel ranks may hold."""

    def __init__(self):
        super().__init__()
        self.split = _weight(0.0, tensor_model_parallel=True, sequence_parallel=False)
        self.replicated = _weight(0.0, sequence_parallel=False)
        self.norm = _weight(0.0, sequence_parallel=True)
        self.norm_bias = _weight(0.0, sequence_parallel=True)
        self.q_layernorm = torch.nn.LayerNorm(4).double()
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)


def _partial_gradients_are_summed_over_tp():
    groups = make_groups(tp=2)  # and dp=2
    tp, dp = groups.tp.rank(), groups.dp_cp.rank()
    ddp = DistributedDataParallel(
        make_config(), DistributedDataParallelConfig(), _Layer(), pg_collection=groups
    )
    mine = 1.0 + tp + 10.0 * dp
    for param in ddp.bucket_groups[0].params:
        param.main_grad.fill_(mine)
    recorder = Recorder()
    with observed_by(recorder):
        finalize_model_grads([ddp], pg_collection=groups)
    layer = ddp.module
    mean_over_dp = 1.0 + tp + 5.0
    sum_over_tp = (1.0 + 5.0) + (2.0 + 5.0)
    for name, expected in {
        "split": mean_over_dp,
        "replicated": mean_over_dp,
        "norm": sum_over_tp,
        "norm_bias": sum_over_tp,
        "q_layernorm.weight": sum_over_tp,
        "q_layernorm.bias": sum_over_tp,
    }.items():
        assert layer.get_parameter(name).main_grad.eq(expected).all(), name
    # One message for all of them, after the data-parallel one.
    names = [call.name for call in recorder.calls]
    assert names.count("all-reduce") == 2
    assert names.index("bucket-launch") < names.index("non-tensor-parallel-grads-all-reduce")
    # Dense parameters need one group, and no wrapper; arguments by position are Megatron's.
    bare = _Layer()
    bare.norm.grad = torch.full_like(bare.norm, 1.0 + tp)
    _allreduce_non_tensor_model_parallel_grads([bare], make_config(), groups.tp)
    assert bare.norm.grad.eq(1.0 + 2.0).all()


def test_t12_a_marked_parameters_gradient_is_the_mean_over_tp(monkeypatch):
    """Was: the mark was not read. It comes before the others, as in Megatron."""
    layer = _Layer()
    layer.replicated.average_gradients_across_tp_domain = True
    layer.norm_bias.average_gradients_across_tp_domain = True
    for name in ("split", "replicated", "norm", "norm_bias"):
        param = layer.get_parameter(name)
        param.grad = torch.full_like(param, 1.0)

    def other_rank_has_3(tensor, group):
        tensor += 3.0

    module = sys.modules[_allreduce_word_embedding_grads.__module__]
    monkeypatch.setattr(module, "all_reduce", other_rank_has_3)
    _allreduce_non_tensor_model_parallel_grads([layer], tp_group=FakeGroup(0, 2))
    found = {
        name: param.grad.unique().tolist()
        for name, param in layer.named_parameters()
        if param.grad is not None
    }
    assert found == {"split": [1.0], "replicated": [2.0], "norm": [4.0], "norm_bias": [2.0]}


class _Experts(torch.nn.Module):
    """A replicated parameter of each kind, whose gradient is partial."""

    def __init__(self):
        super().__init__()
        self.norm = _weight(0.0, sequence_parallel=True)
        self.expert_norm = _weight(0.0, sequence_parallel=True, allreduce=False)


def _each_kind_is_summed_over_its_own_tensor_group():
    """Four ranks: dense tp=2 x dp=2; experts are whole, or cut over all four."""
    for expert_tp in (1, 4):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(2, expert_tensor_parallel_size=expert_tp)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        ddp = DistributedDataParallel(
            make_config(), DistributedDataParallelConfig(), _Experts(), pg_collection=groups
        )
        tp, dp = groups.tp.rank(), groups.dp_cp.rank()
        layer = ddp.module
        for param in layer.parameters():
            param.main_grad.fill_(1.0 + tp + 10.0 * dp)
        finalize_model_grads([ddp], pg_collection=groups)
        assert layer.norm.main_grad.eq((1.0 + 5.0) + (2.0 + 5.0)).all()
        # All four ranks' gradients, over the two that have a loss of their own.
        assert layer.expert_norm.main_grad.eq((1.0 + 2.0 + 11.0 + 12.0) / 2).all()


class _Stage(torch.nn.Module):
    """A stage with its copy of the tied embedding, and something else before or behind it."""

    share_embeddings_and_output_weights = True

    def __init__(self, is_first: bool, tied: bool = True):
        super().__init__()
        self.share_embeddings_and_output_weights = tied
        self.position_embeddings = torch.nn.Embedding(4, 2).double()
        self.embedding = self if is_first else None
        self.word = _weight(0.0, shared_embedding=tied, shared=tied and not is_first)

    def parameters(self, recurse=True):  # `embedding` is this module itself
        return iter([self.position_embeddings.weight, self.word])

    def named_parameters(self, *args, **kwargs):
        yield "position_embeddings.weight", self.position_embeddings.weight
        yield "word", self.word

    def shared_embedding_or_output_weight(self):
        return self.word

    def __setattr__(self, name, value):
        if value is self:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)


def _look(seen, name, model, pg_collection):
    """A step that runs when gradients are final."""
    weight = model[0].module.position_embeddings.weight
    seen.append((name, model, pg_collection, weight.main_grad.flatten()[0].item()))


def _tied_gradients_and_tokens():
    groups = make_groups(pp=2)  # and dp=2
    stage, dp = groups.pp.rank(), groups.dp_cp.rank()
    for sharded in (False, True):
        for tied in (True, False):
            config = make_config(calculate_per_token_loss=True)
            ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
            module = _Stage(stage == 0, tied)
            ddp = DistributedDataParallel(config, ddp_config, module, pg_collection=groups)
            for param in ddp.bucket_groups[0].params:
                param.main_grad.fill_(1.0 + stage + 10.0 * dp)
            # Only the last stage's count is a count; the first stage's must not matter.
            num_tokens = torch.tensor(7 + dp if stage == 1 else -99)
            seen = []
            config.after_grads_funcs = (partial(_look, seen, "a"), partial(_look, seen, "b"))
            finalize_model_grads([ddp], num_tokens, groups, force_all_reduce=True)
            # Both saw what the optimizer will see, in their order.
            weight = module.position_embeddings.weight.main_grad.flatten()[0].item()
            assert seen == [("a", [ddp], groups, weight), ("b", [ddp], groups, weight)]
            assert int(num_tokens) == (7 + dp if stage == 1 else -99)
            sums = [1.0 + 11.0, 2.0 + 12.0]  # over dp, per stage
            expected = (sum(sums) if tied else sums[stage]) / (7 + 8)
            for param, value in (
                (module.word, expected),
                (module.position_embeddings.weight, sums[stage] / 15),
            ):
                assert (param.main_grad / value - 1.0).abs().max() < 1e-15
    # No tokens at all: gradients are zero anyway, and must not become NaN.
    ddp.zero_grad_buffer()
    finalize_model_grads([ddp], torch.tensor(0), groups)
    assert not ddp.module.word.main_grad.any()
    # A position embedding on several stages, as in an encoder-decoder.
    ddp = DistributedDataParallel(
        make_config(),
        DistributedDataParallelConfig(),
        _Stage(is_first=True, tied=False),
        pg_collection=groups,
    )
    both = ProcessGroupCollection(
        tp=groups.tp, pp=groups.pp, embd=groups.embd, pos_embd=groups.pp, dp_cp=groups.dp_cp
    )
    for param in ddp.bucket_groups[0].params:
        param.main_grad.fill_(1.0 + stage)
    finalize_model_grads([ddp], pg_collection=both)
    assert ddp.module.position_embeddings.weight.main_grad.eq(3.0).all()
    assert ddp.module.word.main_grad.eq(1.0 + stage).all()


def _both_ends_on_one_rank():
    register_order("v", placement=V)(_both_ends_on_one_rank)
    groups = make_groups(pp=2, vp=2, placement=V(2))  # and dp=2
    stage, dp = groups.pp.rank(), groups.dp_cp.rank()
    assert (groups.embd is None) == (stage == 1)
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    config = make_config(calculate_per_token_loss=True, pipeline_schedule="v", **sizes)
    for sharded in (False, True):
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
        chunks = [_Stage(chunk == 0, tied=stage == 0) for chunk in range(2)]
        chunks = [
            DistributedDataParallel(config, ddp_config, chunk, pg_collection=groups)
            for chunk in chunks
        ]
        for number, chunk in enumerate(chunks):
            for param in chunk.bucket_groups[0].params:
                param.main_grad.fill_(1.0 + number + 10.0 * dp)
        # The model ends on the pipeline's first rank; what the other counts must not matter.
        num_tokens = torch.tensor(7 + dp if stage == 0 else -99)
        finalize_model_grads(chunks, num_tokens, groups, force_all_reduce=True)
        sums = [1.0 + 11.0, 2.0 + 12.0]  # over dp, per chunk
        for number, chunk in enumerate(chunks):
            word = sum(sums) if stage == 0 else sums[number]
            for param, value in (
                (chunk.module.word, word / 15),
                (chunk.module.position_embeddings.weight, sums[number] / 15),
            ):
                assert (param.main_grad / value - 1.0).abs().max() < 1e-15
    unregister("v")


def _a_rank_without_a_copy_says_so():
    groups = make_groups(pp=4)
    everybody = ProcessGroupCollection(
        tp=groups.tp, pp=groups.pp, embd=groups.pp, pos_embd=None, dp_cp=groups.dp_cp
    )
    module = _Stage(is_first=False)
    module.word.shared_embedding = False
    ddp = DistributedDataParallel(
        make_config(), DistributedDataParallelConfig(), module, pg_collection=groups
    )
    with pytest.raises(RuntimeError, match="is in the embedding group, but none of its 1 chunks"):
        finalize_model_grads([ddp], pg_collection=everybody)
    ddp.zero_grad_buffer()
    module.word.shared_embedding = True
    nobody = ProcessGroupCollection(**vars(everybody) | {"embd": None})
    with pytest.raises(RuntimeError, match="has a copy of the word embedding, but is not in"):
        finalize_model_grads([ddp], pg_collection=nobody)


def _whole_models_in_the_embedding_group():
    """Bare ones, without buffers: a tied embedding counts as a copy, another is left alone."""
    groups = make_groups(pp=2)
    for tied, is_frozen in ((True, False), (True, True), (False, False)):
        case = dataclasses.replace(next(iter(CASES.values())), tied=tied)
        model = case.build(case.make_config())
        for param in model.parameters():
            param.requires_grad = not is_frozen
            param.grad = None if is_frozen else torch.full_like(param, 1.0 + groups.pp.rank())
        _allreduce_word_embedding_grads([model], embd_group=groups.embd, pp_group=groups.pp)
        for name, param in model.named_parameters():
            is_summed = tied and name == "embedding.word_embeddings.weight"
            wanted = 3.0 if is_summed else 1.0 + groups.pp.rank()
            assert param.grad is None if is_frozen else param.grad.eq(wanted).all(), name


def test_f_whole_models_in_the_embedding_group():
    run_ranks(_whole_models_in_the_embedding_group, 2)


@pytest.mark.parametrize("tokens, factor", [(0.25, 4.0), (4.0, 0.25), (0.0, 1.0)])
def test_s16_gradients_are_divided_by_the_weights_that_there_are(tokens, factor):
    """Was: by 1 at least, also where the tokens of the whole batch weigh less."""
    factors, group = [], FakeGroup()
    chunk = SimpleNamespace(scale_gradients=factors.append, config=make_config())
    _divide_by_num_tokens([chunk], torch.tensor(tokens), group, group)
    assert [each.item() for each in factors] == [factor]


def _finalize_over_ranks():
    _partial_gradients_are_summed_over_tp()
    _each_kind_is_summed_over_its_own_tensor_group()
    _tied_gradients_and_tokens()
    _both_ends_on_one_rank()
    _a_rank_without_a_copy_says_so()


def test_finalize_over_real_ranks():
    run_ranks(_finalize_over_ranks, 4)


@pytest.mark.parametrize(
    ("name", "is_partial"),
    [
        ("layers.0.self_attention.q_layernorm.weight", True),
        ("k_layernorm.bias", True),
        ("block_layernorm.weight", False),
        ("mask_layernorm.bias", False),
        ("seq_layernorm.weight", False),
    ],
)
def test_t1_a_norm_of_ones_own_is_not_that_of_queries_and_keys(name, is_partial):
    """Was: its gradient was added up over tensor ranks that each had all of it."""
    assert _is_partial_over_tp(name, torch.nn.Parameter(torch.ones(2))) == is_partial
