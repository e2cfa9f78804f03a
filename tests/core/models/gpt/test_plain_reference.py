"""On one rank GPTModel equals a GPT that shares no code with it, and has the promised interface."""

import dataclasses

import pytest
import torch

from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.tensor_parallel.layers import drain_embedding_wgrad_compute
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.transformer.module import (
    Float16Module,
    global_parameter_name,
    named_global_parameters,
)
from minimegatron.core.transformer.transformer_block import Recompute
from tests.core.models.gpt_support import (
    CASES,
    RECOMPUTE,
    SEQUENCE,
    VOCABULARY,
    run_whole,
    sample,
    token_weights,
)
from tests.core.models.plain_gpt import plain_gpt_loss
from tests.groups import pretend_groups

GPT2, LLAMA, QWEN, MIXED, ODD = CASES.values()


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_the_plain_model(name):
    case = CASES[name]
    config = case.make_config()
    weights = {}
    for key, param in case.build(config).named_parameters():
        # Norm weights and biases start at 1 and 0, which would hide that they are not used.
        seed = torch.Generator().manual_seed(len(weights))
        noise = torch.randn(param.shape, generator=seed, dtype=param.dtype) * 0.1
        weights[key] = (param.detach() + noise).requires_grad_()
    batch = sample()
    rope = case.rotary_percent if case.positions == "rope" else 0.0
    expected = plain_gpt_loss(weights, config, batch["input_ids"], batch["labels"], rope)
    (expected * token_weights()).sum().backward()

    model = case.build(config)
    model.load_state_dict({key: value.detach() for key, value in weights.items()})
    losses = model(**batch)
    (losses * token_weights()).sum().backward()
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    for key, param in model.named_parameters():
        # Adding the same to every key changes no attention: the gradient of that is zero.
        useless = "k_layernorm.bias" in key
        assert (param.grad.abs().max() > 1e-6) != useless, f"{key} is not used"
        torch.testing.assert_close(param.grad, weights[key].grad, rtol=0, atol=1e-11, msg=key)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recompute_changes_nothing(name, dropout):
    """Bit for bit, with dropout too."""
    results = []
    for recompute in RECOMPUTE.values():
        torch.manual_seed(11)
        model_parallel_cuda_manual_seed(11, tp_rank=0)
        options = {"hidden_dropout": dropout, "attention_dropout": dropout}
        results.append(run_whole(CASES[name], **recompute, **options))
    losses, grads = results[0]
    for mode, (other_losses, other_grads) in zip(RECOMPUTE, results, strict=True):
        assert torch.equal(losses, other_losses), mode
        for key, grad in grads.items():
            assert torch.equal(grad, other_grads[key]), (mode, key)


def test_recompute_for_one_microbatch():
    """The schedule's word overrides the config's; the result stays the same."""
    expected, modes = run_whole(GPT2)[0], []
    for recompute in RECOMPUTE.values():
        config = GPT2.make_config(**recompute)
        model = GPT2.build(config)
        for word in (None, True, False):
            assert torch.equal(model(**sample(), checkpoint_activations_microbatch=word), expected)
            modes.append(tuple(dataclasses.astuple(Recompute.of(config, 3, word))))
    none, all_layers = (None, None, 0), ("full", "block", 3)
    selective = ("selective", None, 1)
    assert modes == [
        *((None, None, 1), all_layers, none),
        *(selective, selective, none),
        *(("full", "uniform", 1), ("full", "uniform", 1), none),
        *(("full", "uniform", 2), ("full", "uniform", 2), none),
        *(("full", "block", 2), all_layers, ("full", "block", 2)),
    ]


def test_recompute_saves_memory():
    """Elements that forward keeps for backward, per mode."""
    kept = {}
    for mode, recompute in RECOMPUTE.items():
        model, sizes = GPT2.build(GPT2.make_config(**recompute)), {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.update({t.data_ptr(): t.numel()}) or t, lambda t: t
        ):
            model(**sample())
        kept[mode] = sum(sizes.values())
    assert kept["uniform 2"] < kept["uniform 1"] < kept["block 2"] < kept["none"]
    assert kept["selective"] < kept["none"]


def test_outputs_have_the_promised_shapes_and_are_not_views():
    for batch_size, sequence in [(3, SEQUENCE), (1, SEQUENCE), (3, 1), (1, 1)]:
        batch = sample(sequence, batch_size)
        for case in CASES.values():
            model = case.build(case.make_config())
            losses = model(**batch)
            logits = model(**{**batch, "labels": None})
            assert losses.shape == (batch_size, sequence) and losses.dtype == torch.float64
            assert logits.shape == (batch_size, sequence, VOCABULARY)
            assert losses._base is None and logits._base is None
            assert losses.is_contiguous() and logits.is_contiguous()


def test_causal():
    """A later token changes no earlier loss; a mask can hide more."""
    batch = sample()
    model = LLAMA.build(LLAMA.make_config())
    losses = model(**batch)
    changed = batch["input_ids"].clone()
    changed[:, 5] = (changed[:, 5] + 1) % VOCABULARY
    other = model(**{**batch, "input_ids": changed})
    assert torch.equal(losses[:, :5], other[:, :5])
    assert not torch.equal(losses[:, 5:], other[:, 5:])
    # A second document from token 4 on: hidden from the first, as if it stood alone.
    mask = torch.zeros(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
    mask[..., 4:, :4] = True
    parted = model(**{**batch, "attention_mask": mask})
    alone = {key: batch[key][:, 4:] for key in ("input_ids", "labels")}
    alone |= {"position_ids": None, "attention_mask": None}
    torch.testing.assert_close(parted[:, 4:], model(**alone), rtol=0, atol=1e-12)


def test_decoder_input_replaces_the_embedding():
    batch = sample()
    model = GPT2.build(GPT2.make_config())
    embedded = model.embedding(batch["input_ids"], batch["position_ids"])
    given = model(None, None, None, decoder_input=embedded, labels=batch["labels"])
    assert torch.equal(given, model(**batch))


def test_dropout_is_off_in_evaluation():
    dropping = GPT2.build(GPT2.make_config(hidden_dropout=0.5, attention_dropout=0.5)).eval()
    assert torch.equal(dropping(**sample()), run_whole(GPT2)[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_models_show_float32(precision):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    config = LLAMA.make_config(params_dtype=torch.float32, **{precision: True})
    model = Float16Module(config, LLAMA.build(config))
    assert {param.dtype for param in model.parameters()} == {dtype}
    # The conversion keeps what the layers wrote on the parameters.
    assert model.module.decoder.layers[0].mlp.linear_fc1.weight.partition_stride == 2
    losses = model(**sample())
    assert losses.dtype == torch.float32
    assert model(**{**sample(), "labels": None}).dtype == torch.float32
    assert model(**{**sample(), "labels": None}, fp32_output=False).dtype == dtype
    # bf16 keeps 8 bits; a loss of 5 in steps of 0.03.
    torch.testing.assert_close(losses.double(), run_whole(LLAMA)[0], rtol=0.02, atol=0.2)
    names = [global_parameter_name(model, name) for name, _ in model.named_parameters()]
    assert names == [name for name, _ in model.module.named_parameters()]
    with pytest.raises(ValueError, match="both are off"):
        Float16Module(LLAMA.make_config(), model.module)


def test_fp32_residual_connection():
    config = LLAMA.make_config(
        params_dtype=torch.bfloat16, bf16=True, fp32_residual_connection=True
    )
    whole = Float16Module(config, LLAMA.build(config))
    error = (whole(**sample()).double() - run_whole(LLAMA)[0]).abs().max()
    assert error < 0.2
    config = dataclasses.replace(config, num_layers=4, pipeline_model_parallel_size=2)
    stage = LLAMA.build(config, pretend_groups(pp_rank=0, pp_size=2), post_process=False)
    assert stage(**sample()).dtype == torch.float32


def test_deferred_output_weight_gradient():
    for case in (GPT2, LLAMA):
        usual = run_whole(case)[1]
        model = case.build(case.make_config(defer_embedding_wgrad_compute=True))
        with torch.no_grad():
            model(**sample())
        assert not model.embedding_activation_buffer, "evaluation must leave nothing behind"
        (model(**sample()) * token_weights()).sum().backward()
        weight = model.output_layer.weight
        if case.tied:
            weight = model.shared_embedding_or_output_weight()
        drain_embedding_wgrad_compute(
            model.config,
            model.embedding_activation_buffer,
            model.grad_output_buffer,
            weight,
            model.tp_group,
        )
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad, usual[name], rtol=0, atol=1e-12, msg=name)


def test_block_spec_is_the_layer_spec_repeated():
    config = QWEN.make_config()
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config),
        VOCABULARY,
        SEQUENCE,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_percent=0.5,
        pg_collection=pretend_groups(),
    )
    assert torch.equal(model(**sample()), run_whole(QWEN)[0])


def test_parameters_carry_how_they_are_cut():
    params = dict(named_global_parameters(QWEN.build(QWEN.make_config())))
    layer = "decoder.layers.1."
    cut = {
        "embedding.word_embeddings.weight": (True, 0, 1),
        layer + "self_attention.linear_qkv.weight": (True, 0, 1),
        layer + "self_attention.linear_qkv.bias": (True, 0, 1),
        layer + "self_attention.linear_proj.weight": (True, 1, 1),
        layer + "mlp.linear_fc1.weight": (True, 0, 2),
        layer + "mlp.linear_fc2.weight": (True, 1, 1),
        layer + "input_layernorm.weight": (False, -1, 1),
        "decoder.final_layernorm.weight": (False, -1, 1),
    }
    for name, expected in cut.items():
        param = params[name]
        found = (param.tensor_model_parallel, param.partition_dim, param.partition_stride)
        assert found == expected, name
    partial = {name for name, param in params.items() if getattr(param, "sequence_parallel", False)}
    assert partial == {name for name in params if "q_layernorm" in name or "k_layernorm" in name}
    assert params["embedding.word_embeddings.weight"].is_embedding_or_output_parameter


def test_misuse_is_explained():
    spec, groups = get_gpt_layer_local_spec(), pretend_groups()
    config = GPT2.make_config()
    with pytest.raises(ValueError, match="use one of learned_absolute, rope, none"):
        GPTModel(config, spec, 64, 8, position_embedding_type="alibi", pg_collection=groups)
    with pytest.raises(ValueError, match="pass the same qk_layernorm"):
        GPTModel(QWEN.make_config(), spec, 64, 8, pg_collection=groups)
    with pytest.raises(ValueError, match="turns 3 features"):
        GPTModel(
            LLAMA.make_config(kv_channels=3),
            spec,
            64,
            8,
            position_embedding_type="rope",
            pg_collection=groups,
        )
    with pytest.raises(ValueError, match="9 tokens but the model has 8 learned positions"):
        GPT2.build(config)(**sample(sequence=9))
    with pytest.raises(ValueError, match="not 2"):
        GPT2.build(config).set_input_tensor([None, None])
    with pytest.raises(ValueError, match="call set_input_tensor"):
        LLAMA.build(LLAMA.make_config(), pre_process=False)(**sample())
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        GPTModel(config, spec, 64, 8)
