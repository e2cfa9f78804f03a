"""Chunks of any (pp, vp), chained by hand in one process, are the whole model."""

from itertools import product
from typing import Any

import pytest
import torch

from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.tensor_parallel.sharding import unshard_parameter
from minimegatron.core.transformer.module_state import named_global_parameters
from tests.core.models.gpt_support import CASES, RECOMPUTE, Case, run_whole, sample, token_weights
from tests.groups import pretend_groups
from tests.parity_frozen import freeze

TIED, UNTIED = CASES["gpt2: LayerNorm, GELU, learned, tied"], list(CASES.values())[1]


def build_chunks(case: Case, p: int, v: int | None, **options: Any) -> list[GPTModel]:
    """All chunks, in model order, as their ranks would build them."""
    config = case.make_config(
        pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v, **options
    )
    last = p * (v or 1) - 1
    return [
        case.build(
            config,
            pretend_groups(pp_rank=stage % p, pp_size=p),
            pre_process=stage == 0,
            post_process=stage == last,
            vp_stage=None if v is None else stage // p,
        )
        for stage in range(last + 1)
    ]


def run_chunks(chunks: list[GPTModel]) -> torch.Tensor:
    """Forward and backward as a schedule does them: outputs detached, gradients handed back."""
    outputs, inputs = [], []
    for chunk in chunks:
        received = outputs[-1].detach().requires_grad_() if outputs else None
        inputs.append(received)
        chunk.set_input_tensor([received])
        outputs.append(chunk(**sample()))
    for output in outputs:
        assert output._base is None
    losses = outputs[-1].detach()
    (outputs.pop() * token_weights()).sum().backward()
    while outputs:
        output, grad = outputs.pop(), inputs.pop().grad
        if output.requires_grad:
            torch.autograd.backward(output, grad)
    return losses


CUTS = [
    (2, None, {"num_layers": 6}),
    (3, None, {"num_layers": 6}),
    (2, 3, {"num_layers": 6}),
    (3, 2, {"num_layers": 6}),
    (2, 2, {"num_layers": 8, "num_layers_in_last_pipeline_stage": 2}),
    (2, 2, {"num_layers": 4, "pipeline_model_parallel_layout": "E|tt||ttL"}),
    (4, None, {"num_layers": 4, "pipeline_model_parallel_layout": "Et*3|t||L"}),
    (
        2,
        2,
        {
            "num_layers": 2,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    ),
]


@pytest.mark.parametrize("case", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"pp{cut[0]}-vp{cut[1]}-{cut[2]}")
def test_any_cut_is_the_same_model(case, cut):
    p, v, options = cut
    num_layers = options["num_layers"]
    whole = case.build(case.make_config(num_layers=num_layers))
    expected_losses, expected_grads = run_whole(case, num_layers=num_layers)
    chunks = build_chunks(case, p, v, **options)

    # -- The same parameters: each once, in order, bit for bit --
    weights: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, param in named_global_parameters(chunk):
            if name in weights:
                assert case.tied and name == "embedding.word_embeddings.weight"
                assert param.shared and param.shared_embedding
                assert torch.equal(param, weights[name])
            weights.setdefault(name, param)
    expected = dict(whole.named_parameters())
    assert list(weights) == list(expected)
    for name, param in expected.items():
        assert torch.equal(param, weights[name]), name
    total = sum(param.numel() for param in whole.parameters())
    assert sum(param.numel() for param in weights.values()) == total

    # -- The same losses and gradients --
    losses = run_chunks(chunks)
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-12)
    grads: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, param in named_global_parameters(chunk):
            grads[name] = grads[name] + param.grad if name in grads else param.grad
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-12, msg=name)


def test_a_chunk_without_layers_returns_neither_its_input_nor_a_view():
    """Its output is freed after sending; its input must survive that."""
    layout = {"num_layers": 4, "pipeline_model_parallel_layout": "Et|||tttL"}
    for recompute in RECOMPUTE.values():
        empty = build_chunks(TIED, 4, None, **layout, **recompute)[1]
        assert not list(empty.parameters())
        received = torch.randn(8, 3, 32, dtype=torch.float64, requires_grad=True)
        empty.set_input_tensor(received)
        output = empty(**sample())
        assert torch.equal(output, received) and output._base is None
        assert output.data_ptr() != received.data_ptr() and output.requires_grad
        output.data = torch.empty(1, dtype=torch.float64)
        assert received.abs().sum() > 0
    # The embedding alone, with one sequence: its transpose would be a view.
    first = build_chunks(TIED, 2, 2, num_layers=4, pipeline_model_parallel_layout="E|tt||ttL")[0]
    assert first(**sample(batch=1))._base is None


def test_recompute_in_chunks():
    expected, _ = run_whole(UNTIED, num_layers=6)
    for recompute in RECOMPUTE.values():
        chunks = build_chunks(UNTIED, 2, None, num_layers=6, **recompute)
        torch.testing.assert_close(run_chunks(chunks), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", ["embedding", "all but middle layer", "all but last layer"])
def test_a2_recompute_above_frozen_weights_changes_nothing(frozen):
    """Was: gradients of the first recomputed layers were zero, with one stage and with two."""
    found = []
    for p, recompute in product((1, 2), RECOMPUTE.values()):
        chunks = build_chunks(TIED, p, None, num_layers=4, **recompute)
        for chunk in chunks:
            freeze(chunk, chunk.config, frozen)
        run_chunks(chunks)
        grads: dict[str, torch.Tensor] = {}
        for name, param in (pair for chunk in chunks for pair in named_global_parameters(chunk)):
            if param.requires_grad:
                grads[name] = param.grad
        found.append(grads)
    first, *others = found
    assert first and all(grad.abs().sum() > 0 for name, grad in first.items() if "bias" not in name)
    for grads in others:
        assert grads.keys() == first.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, first[name], rtol=0, atol=1e-12, msg=name)


def test_a2_frozen_layers_before_all_others_are_not_run_again():
    number, frozen = [], build_chunks(TIED, 1, None, num_layers=4, **RECOMPUTE["uniform 1"])[0]
    freeze(frozen, frozen.config, "all but last layer")
    for layer in frozen.decoder.layers:
        layer.register_forward_hook(lambda *_: number.append(1))
    run_chunks([frozen])
    assert len(number) == 4 + 1


def test_recompute_of_an_uneven_group_of_layers():
    """Three layers in groups of two: the last group is shorter."""
    recompute = dict(RECOMPUTE["uniform 2"], hidden_dropout=0.3)
    results = []
    for options in ({"hidden_dropout": 0.3}, recompute):
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1, tp_rank=0)
        results.append(run_whole(TIED, num_layers=3, **options))
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("name", CASES)
def test_initial_weights_do_not_depend_on_tensor_parallel_size(name):
    case = CASES[name]
    whole = dict(case.build(case.make_config()).named_parameters())
    for size in (2, 4):
        config = case.make_config(tensor_model_parallel_size=size)
        ranks = [
            dict(case.build(config, pretend_groups(rank, size)).named_parameters())
            for rank in range(size)
        ]
        for key, param in whole.items():
            shards = [rank[key].detach() for rank in ranks]
            assert torch.equal(unshard_parameter(shards, ranks[0][key]), param), (size, key)
        shared = sum(p.numel() for p in ranks[0].values() if not p.tensor_model_parallel)
        cut = sum(p.numel() for r in ranks for p in r.values() if p.tensor_model_parallel)
        assert shared + cut == sum(param.numel() for param in whole.values())


def test_initial_weights_do_not_depend_on_dtype_or_on_what_was_drawn_before():
    torch.manual_seed(1)
    exact = dict(UNTIED.build(UNTIED.make_config()).named_parameters())
    torch.manual_seed(2)
    before = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16):
        model = UNTIED.build(UNTIED.make_config(params_dtype=dtype))
        for name, param in model.named_parameters():
            assert param.dtype == dtype
            assert torch.equal(param, exact[name].float().to(dtype)), name
    assert torch.equal(torch.get_rng_state(), before), (
        "building a model must not move the generator"
    )


def test_initial_weights_differ_between_layers_and_seeds():
    first = dict(UNTIED.build(UNTIED.make_config()).named_parameters())
    other = dict(UNTIED.build(UNTIED.make_config(init_seed=5)).named_parameters())
    key = "decoder.layers.{}.mlp.linear_fc1.weight"
    assert not torch.equal(first[key.format(0)], first[key.format(1)])
    assert not torch.equal(first[key.format(0)], other[key.format(0)])
    for name, param in first.items():
        if "norm" in name:
            assert torch.equal(param, torch.ones_like(param))
        elif name.endswith("bias"):
            assert torch.equal(param, torch.zeros_like(param))
        else:
            scale = (2 * 3) ** 0.5 if "linear_proj" in name or "linear_fc2" in name else 1.0
            assert abs(param.std() * scale - 0.15) < 0.02, name
            assert abs(param.mean()) < 0.02, name


def test_padding_the_vocabulary_keeps_the_real_rows():
    """1001 tokens padded to multiples of 128 x tp, and not padded."""
    tables = []
    for padded in (1001, 1024, 1280):
        # 1001 x 24 is no multiple of 16, the number of values torch draws at once.
        config = TIED.make_config(params_dtype=torch.float32, hidden_size=24)
        model = GPTModel(
            config, get_gpt_layer_local_spec(), padded, 8, pg_collection=pretend_groups()
        )
        tables.append((model.embedding.word_embeddings.weight, model.output_layer.weight))
    for embedding, output in tables:
        assert torch.equal(embedding[:1001], tables[0][0])
        assert torch.equal(output[:1001], tables[0][1])
    assert tables[2][0][128:].std() > 0.1
