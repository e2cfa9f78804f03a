"""The mixer: its sections and groups over played ranks, wide numbers in 16-bit models, first values."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from minimegatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from minimegatron.core.models.mamba.mamba_model import MambaModel
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.ssm.mamba_mixer import MambaMixer, RMSNormGated
from minimegatron.core.tensor_parallel.sharding import unshard_parameter
from minimegatron.core.transformer.module import Float16Module
from minimegatron.core.transformer.spec_utils import build_module
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.core.transformer.moe.test_moe_layer import PretendGroup, groups
from tests.played_ranks import play

SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_state_dim": 5,
    "init_method_std": 0.3,
}
LENGTH, BATCH = 6, 2
WIDE = ("A_log", "D", "dt_bias")


def mixer(group=None, chunk_size: int | None = 4, **options) -> MambaMixer:
    """Of this rank; the same whole mixer for any group, since ranks draw in step."""
    torch.manual_seed(3)
    group = group or PretendGroup()
    config = TransformerConfig(
        **{**SIZES, "tensor_model_parallel_size": group.size()} | options,
    )
    spec = dataclasses.replace(
        mamba_stack_spec.submodules.mamba_layer.submodules.mixer, params={"chunk_size": chunk_size}
    )
    return build_module(
        spec,
        config,
        d_model=config.hidden_size,
        layer_number=1,
        pg_collection=ProcessGroupCollection(tp=group),
    )


def inputs(dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (LENGTH, BATCH, SIZES["hidden_size"])
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def of_rank(group) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Output, weights and gradients, where the output's square counts."""
    made = mixer(group, params_dtype=torch.float64)
    output, _ = made(inputs())
    (output**2).sum().backward()
    params = dict(made.named_parameters())
    return output.detach(), params, {name: param.grad for name, param in params.items()}


def test_two_ranks_have_the_heads_of_one_mixer():
    output, params, grads = of_rank(PretendGroup())
    ranks = play(2, of_rank)
    for other, _, _ in ranks:
        assert (other - output).abs().max() < 1e-12
    for name, param in params.items():
        mark = ranks[0][1][name]
        whole = unshard_parameter([pieces[name].detach() for _, pieces, _ in ranks], mark)
        assert torch.equal(whole, param.detach()), name
        gradient = unshard_parameter([pieces[name] for _, _, pieces in ranks], mark)
        assert (gradient - grads[name]).abs().max() < 1e-12, name


def test_a_rank_has_its_part_of_every_section():
    """Of z and x 16 of 32 rows, of B and C 5 of 10, of dt 4 of 8."""
    whole = mixer().in_proj.weight.detach()
    second = mixer(PretendGroup(1, 2)).in_proj.weight.detach()
    rows = [*range(16, 32), *range(48, 64), *range(69, 74), *range(79, 84), *range(88, 92)]
    assert torch.equal(second, whole[rows])


def test_recurrence_and_chunks_are_one_mixer():
    by_token, by_chunk = (mixer(chunk_size=size, params_dtype=torch.float64) for size in (None, 4))
    assert (by_token(inputs())[0] - by_chunk(inputs())[0]).abs().max() < 1e-13
    with pytest.raises(ValueError, match="there are 33 tokens; give a chunk_size, or at most 32"):
        by_token(torch.zeros(33, 1, SIZES["hidden_size"], dtype=torch.float64))


def test_earlier_tokens_do_not_see_a_later_one():
    made = mixer(params_dtype=torch.float64)
    changed = inputs()
    changed[4] += 1.0
    before, after = made(inputs())[0], made(changed)[0]
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[5], after[5])


def test_the_gate_is_inside_the_norm_of_each_group():
    norm = RMSNormGated(6, 2, 1e-5, torch.float64, PretendGroup())
    y, z = inputs()[..., :6], inputs()[..., 6:12]
    gated = y * z * torch.sigmoid(z)
    for group in (slice(0, 3), slice(3, 6)):
        part = gated[..., group]
        wanted = part / (part.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        assert (norm(y, z)[..., group] - wanted).abs().max() < 1e-14


# -- 16-bit models --


def model(**options) -> MambaModel:
    return MambaModel(
        TransformerConfig(**SIZES | options),
        mamba_stack_spec,
        vocab_size=32,
        max_sequence_length=8,
        hybrid_override_pattern="M*",
        pg_collection=groups(),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_three_numbers_per_head_stay_float32(dtype):
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    config = {name: True, "params_dtype": dtype}
    wrapped = Float16Module(TransformerConfig(**SIZES | config), model(**config))
    reference = dict(model().named_parameters())
    for name, param in wrapped.module.named_parameters():
        is_wide = name.rpartition(".")[2] in WIDE
        assert param.dtype == (torch.float32 if is_wide else dtype), name
        assert torch.equal(param, reference[name].to(param.dtype)), name
    loss = wrapped(torch.zeros(1, 8, dtype=torch.int64), None, None, labels=torch.ones(1, 8).long())
    loss.mean().backward()
    decay = wrapped.module.decoder.layers[0].mixer.A_log
    assert decay.grad.dtype == torch.float32 and decay.grad.abs().max() > 0


def test_a_move_takes_all():
    moved = mixer().to("meta")
    assert {param.device.type for param in moved.parameters()} == {"meta"}


# -- First values --


def test_first_values():
    made = model(mamba_num_heads=512, mamba_head_dim=1).decoder.layers[0].mixer
    rates = made.A_log.exp()
    assert 1.0 <= rates.min() < 1.2 and 15.8 < rates.max() <= 16.0
    assert rates.mean().item() == pytest.approx(8.5, abs=1.0)
    steps = F.softplus(made.dt_bias)
    assert 0.999e-3 < steps.min() < 1.2e-3 and 0.08 < steps.max() < 0.1001
    assert steps.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.3)
    assert torch.equal(made.D, torch.ones(512)) and torch.equal(made.norm.weight, torch.ones(512))
    for weights in (made.conv1d.weight, made.conv1d.bias):
        assert 0.4 < weights.abs().max() <= 0.5


def test_vectors_are_not_decayed():
    config = OptimizerConfig(lr=0.1, weight_decay=0.5)
    chunk = model()
    optimizer = get_megatron_optimizer(config, [chunk], pg_collection=groups())
    decayed = {
        id(param)
        for group in optimizer.param_groups
        if group["weight_decay"] > 0
        for param in group["params"]
    }
    names = {name for name, param in chunk.named_parameters() if id(param) in decayed}
    kept = {name.partition("mixer.")[2] for name in names if "mixer" in name}
    assert kept == {"in_proj.weight", "conv1d.weight", "out_proj.weight"}


# -- Beside another implementation --


def test_outputs_and_gradients_are_those_of_transformers():
    theirs = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = theirs.Mamba2Config(
        hidden_size=16,
        num_heads=8,
        head_dim=4,
        n_groups=2,
        state_size=5,
        chunk_size=4,
        num_hidden_layers=1,
        layer_norm_epsilon=1e-5,
    )
    other, ours = theirs.Mamba2Mixer(config, layer_idx=0), mixer()
    with torch.no_grad():
        ours.norm.weight.uniform_(0.5, 1.5)
        ours.D.uniform_(0.5, 1.5)
    other.load_state_dict(ours.state_dict())
    x = inputs(torch.float32)
    found, wanted = ours(x)[0], other(x.transpose(0, 1)).transpose(0, 1)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    for output in (found, wanted):
        output.square().sum().backward()
    grads = dict(other.named_parameters())
    for name, param in ours.named_parameters():
        scale = grads[name].grad.abs().max()
        assert (param.grad - grads[name].grad).abs().max() < 1e-4 * scale, name
