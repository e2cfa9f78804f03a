"""Norms, attention and specs against explicit formulas."""

import math
import re

import pytest
import torch

from minimegatron.core.models.common.embeddings.rotary_pos_embedding import (
    RotaryEmbedding,
    apply_rotary_pos_emb,
)
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.models.T5.t5_spec import decoder_model_with_local_spec
from minimegatron.core.tensor_parallel.random import get_cuda_rng_tracker
from minimegatron.core.transformer.dot_product_attention import DotProductAttention
from minimegatron.core.transformer.enums import AttnMaskType
from minimegatron.core.transformer.module import Float16Module
from minimegatron.core.transformer.spec_utils import ModuleSpec, build_module
from minimegatron.core.transformer.torch_norm import WrappedTorchNorm
from minimegatron.core.transformer.transformer_block import TransformerBlock
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.transformer.transformer_layer import bias_dropout_add
from tests.groups import PretendGroup, pretend_groups

S, B, HEADS, WIDTH = 6, 2, 4, 8


def make_config(**options) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": HEADS * WIDTH,
            "num_attention_heads": HEADS,
            "params_dtype": torch.float64,
            "attention_dropout": 0.0,
            **options,
        }
    )


def explicit_attention(q, k, v, hidden, scale):
    """[s, b, heads, d] each, `hidden` True where not to look."""
    served = q.size(2) // k.size(2)
    k, v = k.repeat_interleave(served, 2), v.repeat_interleave(served, 2)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * scale
    shares = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", shares, v).flatten(2)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_equals_explicit_math(groups, scale, dtype):
    generator = torch.Generator().manual_seed(0)
    shape = (S, B, HEADS, WIDTH)
    q = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    k, v = torch.randn(2, S, B, groups, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    future = torch.ones(S, S).triu(1).bool()
    padding = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    padding[1, ..., -2:] = True
    nothing = torch.zeros(S, S, dtype=torch.bool)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for mask_type, mask, hidden in [
        (AttnMaskType.causal, None, future),
        (AttnMaskType.causal, future[None, None], future),
        (AttnMaskType.causal, padding, future | padding),
        (AttnMaskType.padding_causal, padding, future | padding),
        (AttnMaskType.padding, padding, padding),
        (AttnMaskType.padding, None, nothing),
        (AttnMaskType.no_mask, padding, nothing),
    ]:
        core = DotProductAttention(make_config(), 1, mask_type, softmax_scale=scale)
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        exact = [tensor.double().clone().requires_grad_() for tensor in (q, k, v)]
        output = core(*leaves, mask)
        expected = explicit_attention(*exact, hidden, scale or WIDTH**-0.5)
        assert output.dtype == dtype and output.shape == (S, B, HEADS * WIDTH)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)
        output.double().sin().sum().backward()
        expected.sin().sum().backward()
        for leaf, reference in zip(leaves, exact, strict=True):
            torch.testing.assert_close(
                leaf.grad.double(), reference.grad, rtol=0, atol=3 * tolerance
            )


def test_attention_dropout_needs_a_seed_and_evaluation_does_not():
    core = DotProductAttention(make_config(attention_dropout=0.1), 1, AttnMaskType.causal)
    q = torch.randn(S, B, HEADS, WIDTH)
    get_cuda_rng_tracker().reset()
    with pytest.raises(ValueError, match="call model_parallel_cuda_manual_seed"):
        core(q, q, q, None)
    core.eval()(q, q, q, None)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms(normalization, dtype):
    config = make_config(normalization=normalization, params_dtype=dtype, sequence_parallel=False)
    norm = WrappedTorchNorm(config, 32, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(S, B, 32, dtype=torch.float64) * 3
    centred = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = expected * norm.weight.double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    output = norm(x.to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)
    # A wider residual stream comes in as it is and goes out in the weights' dtype.
    assert norm(x).dtype == dtype


def test_norms_say_whose_gradients_are_partial():
    plain = make_config()
    cut = make_config(sequence_parallel=True, tensor_model_parallel_size=2)
    for config, given, expected in [
        (plain, None, False),
        (cut, None, True),
        (plain, True, True),
    ]:
        norm = WrappedTorchNorm(config, 8, gradient_is_partial=given)
        assert [param.sequence_parallel for param in norm.parameters()] == [expected] * 2


def test_rotary_positions():
    rotary = RotaryEmbedding(WIDTH, dtype=torch.float64)
    angles = rotary(S, device=torch.device("cpu"))
    assert angles.shape == (S, 1, 1, WIDTH) and angles.dtype == torch.float64
    assert angles[3, 0, 0, 1] == 3 * 10000 ** (-2 / WIDTH) == angles[3, 0, 0, 1 + WIDTH // 2]
    q, k = torch.randn(2, S, B, HEADS, WIDTH, dtype=torch.float64)
    turned_q, turned_k = apply_rotary_pos_emb(q, angles), apply_rotary_pos_emb(k, angles)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
    # Products depend on distance only: both one position later.
    later = rotary(S + 1, device=torch.device("cpu"))[1:]
    moved_q, moved_k = apply_rotary_pos_emb(q, later), apply_rotary_pos_emb(k, later)
    torch.testing.assert_close(
        torch.einsum("qbhd,kbhd->bhqk", turned_q, turned_k),
        torch.einsum("qbhd,kbhd->bhqk", moved_q, moved_k),
    )
    # Asked for fewer positions again, it gives the first ones.
    assert torch.equal(rotary(2, device=torch.device("cpu")), angles[:2])
    assert apply_rotary_pos_emb(q.bfloat16(), angles.float()).dtype == torch.bfloat16


def test_rotary_angles_survive_conversion_to_16_bit():
    rotary = RotaryEmbedding(WIDTH).bfloat16()
    assert rotary(S, device=torch.device("cpu")).dtype == torch.float32


def test_a_layer_takes_a_context_and_hands_it_on():
    """As Megatron's, by position too; what our layers do not have is refused by name."""
    groups = pretend_groups()
    spec = get_gpt_layer_local_spec()
    config = make_config(params_dtype=torch.float32)
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups).eval()
    hidden, context = torch.randn(S, B, HEADS * WIDTH), torch.randn(3, B, 5)
    alone, nothing = layer(hidden, None)
    output, same = layer(hidden, None, context, torch.ones(1), None)
    assert nothing is None and same is context and torch.equal(output, alone)
    with pytest.raises(ValueError, match="TransformerLayer.forward: attention_bias is tensor"):
        layer(hidden, None, context, None, attention_bias=torch.ones(1))


def test_a_config_that_says_one_stage_is_refused_among_four():
    groups = pretend_groups(pp_rank=0, pp_size=4)
    with pytest.raises(
        ValueError, match="pipeline_model_parallel_size=1, .* has 4 ranks; make them"
    ):
        TransformerBlock(make_config(), get_gpt_layer_local_spec(), pg_collection=groups)


def test_a_plain_module_in_16_bits_is_a_whole_model():
    class Plain(torch.nn.Linear):
        def forward(self, x, ids):
            seen.extend((x.dtype, ids.dtype))
            return super().forward(x)

    seen: list[torch.dtype] = []
    module = Float16Module(make_config(bf16=True), Plain(4, 4))
    output = module(torch.ones(2, 4), torch.ones(2, dtype=torch.int64))
    assert seen == [torch.bfloat16, torch.int64] and output.dtype == torch.float32
    half = module(torch.ones(2, 4), torch.ones(1), fp32_output=False)
    assert half.dtype == torch.bfloat16 and module.vp_stage is None


def test_bias_dropout_add():
    x, bias, residual = torch.randn(3, 4, 5)
    assert torch.equal(bias_dropout_add((x, bias), residual, 0.5, False), residual + (x + bias))
    assert torch.equal(bias_dropout_add((x, None), residual, 0.0, True), residual + x)
    wide = bias_dropout_add((x.bfloat16(), None), residual, 0.0, True)
    assert wide.dtype == torch.float32
    ones, zeros = torch.ones(10000), torch.zeros(10000)
    dropped = bias_dropout_add((ones, None), zeros, 0.25, True)
    assert set(dropped.tolist()) == {0.0, (ones / 0.75)[0].item()}
    assert abs((dropped == 0).float().mean() - 0.25) < 0.03


def test_specs():
    assert build_module(None) is None
    spec = ModuleSpec(dict, params={"a": 1, "b": 2}, submodules="parts")
    assert build_module(spec, b=3) == {"a": 1, "b": 3, "submodules": "parts"}
    assert build_module(dict, b=3) == {"b": 3}


# -- Shapes that torch would broadcast --


def core_and_inputs(s: int = S, b: int = B, keys: int | None = None) -> tuple:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(s, b, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, keys or s, b, HEADS, WIDTH, generator=generator, dtype=torch.float64)
    return DotProductAttention(make_config(), 1, AttnMaskType.padding), q, k, v


OTHER_MASKS = {
    "[b, s]": (B, S),
    "[s, s]": (S, S),
    "[s]": (S,),
    "[b, s, s]": (B, S, S),
    "[b, 1, s, 1]": (B, 1, S, 1),
    "[b, 1, 1, 1]": (B, 1, 1, 1),
    "[2 b, 1, s, s]": (2 * B, 1, S, S),
    "heads of two ranks": (B, 2 * HEADS, S, S),
    "[1, b, 1, 1, s]": (1, B, 1, 1, S),
    "keys of two ranks": (B, 1, S, 2 * S),
}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_a6_a_mask_of_another_shape_is_refused(name):
    core, *inputs = core_and_inputs()
    mask = torch.zeros(OTHER_MASKS[name], dtype=torch.bool)
    words = f"attention_mask is {list(mask.shape)}; give [2 or 1, 4 or 1, 6 or 1, 6]: sequences"
    with pytest.raises(ValueError, match=re.escape(words)):
        core(*inputs, mask)


@pytest.mark.parametrize("b", [1, S, HEADS], ids=("b = 1", "b = s", "b = heads"))
def test_a6_a_mask_that_happens_to_broadcast_is_refused_too(b):
    core, *inputs = core_and_inputs(b=b)
    for shape in ((b, S), (b, S, S)):
        with pytest.raises(ValueError, match="attention_mask is"):
            core(*inputs, torch.zeros(shape, dtype=torch.bool))


def test_a6_every_right_form_means_the_same():
    core, q, k, v = core_and_inputs(keys=5)
    hidden = torch.tensor([False, True, False, False, True])
    found = [
        core(q, k, v, hidden.expand(rows, heads, queries, 5))
        for rows in (1, B)
        for heads in (1, HEADS)
        for queries in (1, S)
    ]
    assert all(torch.equal(output, found[0]) for output in found)
    shares = explicit_attention(q, k, v, hidden, WIDTH**-0.5)
    torch.testing.assert_close(found[0], shares, rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match=r"6 or 1, 5\]: sequences"):
        core(q, k, v, torch.zeros(B, 1, S, S, dtype=torch.bool))


@pytest.mark.parametrize("shape", [(1, 1, 1, WIDTH), (WIDTH,), (S, WIDTH), (2 * S, 1, 1, WIDTH)])
def test_a6_angles_of_other_positions_are_refused(shape):
    """One row would turn all tokens alike: attention would know no order."""
    with pytest.raises(ValueError, match=r"rotary angles are \[.*; give \[6, 1, 1, d'\]"):
        apply_rotary_pos_emb(torch.zeros(S, B, HEADS, WIDTH), torch.ones(shape))


def test_a6_a_context_of_another_number_of_sequences_is_refused():
    layer = encoder_decoder_layer()
    states = torch.zeros(S, B, HEADS * WIDTH, dtype=torch.float64)
    layer(states, None, states[:4])
    for context in (states[:, :1], states.transpose(0, 1)):
        with pytest.raises(
            ValueError, match=r"attention of 2 sequences got a context .* \[s', 2, h\]"
        ):
            layer(states, None, context)


def encoder_decoder_layer() -> torch.nn.Module:
    spec = decoder_model_with_local_spec().submodules.cross_attention
    return build_module(
        spec, config=make_config(), layer_number=1, pg_collection=pretend_groups(cp=PretendGroup())
    )
