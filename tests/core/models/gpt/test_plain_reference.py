"""On one rank GPTModel equals a GPT that shares no code with it, and has the promised interface."""

import dataclasses
import re

import pytest
import torch

from minimegatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding,
)
from minimegatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from minimegatron.core.tensor_parallel.layers import drain_embedding_wgrad_compute
from minimegatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from minimegatron.core.transformer.block_recompute import Recompute
from minimegatron.core.transformer.module import Float16Module
from minimegatron.core.transformer.module_state import (
    global_parameter_name,
    named_global_parameters,
)
from minimegatron.core.transformer.zigzag import take_part
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
from tests.core.transformer.moe.test_moe_layer import groups as groups_of_experts
from tests.groups import PretendGroup, pretend_groups

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


# -- Shapes that torch would broadcast --


def with_experts(case, **options):
    config = case.make_config(num_moe_experts=2, moe_router_topk=2, **options)
    spec = get_gpt_decoder_block_spec(config, pp_rank=0)
    return GPTModel(config, spec, VOCABULARY, SEQUENCE, pg_collection=groups_of_experts())


def with_further_token(case, **options):
    config = case.make_config(mtp_num_layers=1, **options)
    block = get_gpt_mtp_block_spec(config, get_gpt_layer_local_spec())
    groups = pretend_groups(cp=PretendGroup())
    return case.build(config, groups, mtp_block_spec=block)


MODELS = {
    "dense": lambda: GPT2.build(GPT2.make_config()),
    "grouped queries": lambda: LLAMA.build(LLAMA.make_config()),
    "full recompute": lambda: GPT2.build(GPT2.make_config(**RECOMPUTE["uniform 2"])),
    "selective recompute": lambda: GPT2.build(GPT2.make_config(**RECOMPUTE["selective"])),
    "experts": lambda: with_experts(MIXED),
    "further tokens": lambda: with_further_token(LLAMA),
}


@pytest.mark.parametrize("name", MODELS)
def test_a6_masks_with_other_dimensions_are_refused(name):
    """[b, s] with b = s, and with b = 1, would broadcast."""
    model = MODELS[name]()
    for size in (1, SEQUENCE):
        batch = sample(batch=size)
        model(**batch)
        mask = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        with pytest.raises(ValueError, match=rf"attention_mask is \[{size}, 8\]; give"):
            model(**batch | {"attention_mask": mask})


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_t4_a_mask_of_numbers_is_refused(dtype):
    """Was: every number but 0 hid its token, so that 1 for what is kept meant the contrary."""
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=dtype)
    refused({"attention_mask": mask}, f"attention_mask is {dtype}; give torch.bool", batch=1)


def refused(change: dict, words: str, model=None, **sizes) -> None:
    with pytest.raises(ValueError, match=words):
        (model or GPT2.build(GPT2.make_config()))(**sample(**sizes) | change)


def test_a6_positions_of_another_shape_are_refused():
    """[b, 1] would give all tokens of a sequence one position."""
    for shape in ((3, 1), (1, 1), (8, 3), (2, 8), (3, 8, 1)):
        refused(
            {"position_ids": torch.zeros(shape, dtype=torch.long)},
            rf"position_ids is {re.escape(str(list(shape)))}, but the tokens are \[3, 8\]",
        )


def test_a6_positions_that_all_sequences_share():
    model, batch = GPT2.build(GPT2.make_config()), sample()
    for positions in (batch["position_ids"][:1], batch["position_ids"][0]):
        assert torch.equal(model(**batch | {"position_ids": positions}), model(**batch))


def test_a6_labels_of_another_shape_are_refused():
    labels = sample()["labels"]
    for other in (labels[:1], labels[:, :1], labels.t(), labels[:, :-1]):
        refused({"labels": other}, r"targets are \[\d, \d\], but logits are \[8, 3, 64\]; give one")


def test_a6_a_loss_mask_of_another_shape_is_refused_where_it_is_used():
    ones, model = torch.ones(3, 8), with_further_token(LLAMA)
    for other in (ones[:, :1], ones[0], ones[:1], ones.t()):
        refused({"loss_mask": other}, r"loss_mask is .*for labels \[3, 8\]; give one", model)


def test_a6_given_states_of_other_tokens_are_refused():
    states = torch.zeros(8, 3, 32, dtype=torch.float64)
    for other in (states.transpose(0, 1), states[:4], states[:, :1]):
        words = r"decoder_input is .* tokens are \[3, 8\], and .* over 1 ranks; give \[8, 3, h\]"
        refused({"decoder_input": other}, words)
    refused({"decoder_input": states.transpose(0, 1), "input_ids": None}, "targets are .* logits")


# -- Positions that are left out --


def test_f6_positions_none_are_those_of_each_sequence():
    model, batch = GPT2.build(GPT2.make_config()), sample()
    assert torch.equal(model(**batch | {"position_ids": None}), model(**batch))
    with pytest.raises(ValueError, match=r"position_ids is None, but the tokens are \[3, 8\]"):
        model.embedding(batch["input_ids"], None)


def test_f6_positions_none_where_further_tokens_are_embedded():
    model, batch = with_further_token(GPT2), sample()
    gradients = []
    for positions in (batch["position_ids"], None):
        model.zero_grad()
        model(**batch | {"position_ids": positions}).sum().backward()
        gradients.append([param.grad.clone() for param in model.parameters()])
    assert all(map(torch.equal, *gradients))


def embedded_on_a_rank(group, position_ids) -> torch.Tensor:
    """The first layer's input, [s/c, b, h], of this rank's tokens."""
    groups = pretend_groups(cp=group)
    model = GPT2.build(GPT2.make_config(context_parallel_size=group.size()), groups)
    tokens = take_part(sample()["input_ids"], 1, group)
    if position_ids is not None:
        position_ids = take_part(position_ids, 1, group)
    return model._preprocess(tokens, position_ids)[0]


def test_f6_positions_none_on_ranks_that_share_a_sequence():
    for rank in range(2):
        group = PretendGroup(rank, 2)
        wanted = embedded_on_a_rank(group, sample()["position_ids"])
        assert torch.equal(embedded_on_a_rank(group, None), wanted)


def test_f6_a_plan_of_the_forward_without_positions():
    model, batch = MIXED.build(MIXED.make_config()), sample()
    with torch.no_grad():
        plan = model.build_schedule_plan(**batch | {"position_ids": None})
        assert torch.equal(
            plan.pre_process.forward(), model._preprocess(*list(batch.values())[:2])[0]
        )


# -- Numbers without a row --


def embed(number: int, which: str, rank: int = 0, ranks: int = 1) -> None:
    """GPT's words and positions, BERT's token types."""
    model = LanguageModelEmbedding(
        GPT2.make_config(tensor_model_parallel_size=ranks),
        VOCABULARY,
        SEQUENCE,
        num_tokentypes=2,
        tp_group=PretendGroup(rank, ranks),
    )
    numbers = {name: torch.zeros(2, 3, dtype=torch.long) for name in ("ids", "positions", "types")}
    numbers[which][1, 1] = number
    model(*numbers.values())


@pytest.mark.parametrize("number", [-7, -1, VOCABULARY, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a10_an_id_of_no_rank_ends_the_run_on_all(number, ranks):
    """Each of several ranks took it for another's, and added zeros."""
    for rank in range(ranks):
        ends = sorted((0, number))
        words = f"token ids go from {ends[0]} to {ends[1]}, but the embedding has rows 0 to 63"
        with pytest.raises(ValueError, match=words):
            embed(number, "ids", rank, ranks)


def test_a10_positions_and_types_without_a_row():
    for which, words in (
        ("positions", "positions go from 0 to 8, but the embedding has rows 0 to 7"),
        ("types", "token types go from 0 to 8, but the embedding has rows 0 to 1"),
    ):
        with pytest.raises(ValueError, match=words):
            embed(8, which)


# -- A step after an evaluation in inference mode --


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("case", [GPT2, LLAMA, QWEN], ids=("learned", "rope", "half rope"))
def test_b14_a_step_after_an_evaluation_in_inference_mode(case, mode):
    RotaryEmbedding.forward.cache_clear()
    wanted = run_whole(case, **RECOMPUTE[mode])[1]
    RotaryEmbedding.forward.cache_clear()
    model = case.build(case.make_config(**RECOMPUTE[mode]))
    with torch.inference_mode():
        model.eval()(**sample())
    (model.train()(**sample()) * token_weights()).sum().backward()
    for name, param in model.named_parameters():
        assert torch.equal(param.grad, wanted[name]), name


@pytest.mark.parametrize("name", ["experts", "further tokens"])
def test_b14_layers_of_other_kinds_after_an_evaluation_in_inference_mode(name):
    """What they keep beside parameters, counts and losses, is not of that mode either."""
    gradients = []
    for evaluates in (False, True):
        model = MODELS[name]()
        for _ in range(2):
            if evaluates:
                with torch.inference_mode():
                    model(**sample())
            model.zero_grad()
            model(**sample()).sum().backward()
        gradients.append({key: param.grad for key, param in model.named_parameters()})
    for key, grad in gradients[0].items():
        assert torch.equal(grad, gradients[1][key]), key


@pytest.mark.parametrize("label", [-100, VOCABULARY])
def test_s20_a_model_with_a_mask_refuses_labels_of_no_token(label):
    """Was: a loss, without a word. Where the mask is 0, any label will do."""
    model, batch = GPT2.build(GPT2.make_config()), sample()
    mask = torch.ones_like(batch["labels"], dtype=torch.float32)
    batch["labels"][0, 1] = label
    with pytest.raises(ValueError, match=f"has label {label} where loss_mask is not 0"):
        model(**batch, loss_mask=mask)
    mask[0, 1] = 0.0
    assert model(**batch, loss_mask=mask).isfinite().all()


@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_s24_the_whole_batch_is_refused_where_ranks_share_it(positions):
    """Was, with room for more positions: each rank took the whole sequence for its part."""
    groups = pretend_groups(cp=PretendGroup(0, 2))
    config = GPT2.make_config(context_parallel_size=2)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        4 * SEQUENCE,
        position_embedding_type=positions,
        pg_collection=groups,
    )
    reached = []

    def step(data_iterator, model):
        ids = next(data_iterator)
        model._preprocess(ids, torch.arange(ids.size(1)).expand_as(ids))
        reached.append(ids.size(1))
        return torch.zeros((), requires_grad=True), lambda output: (output, {})

    def run(ids: torch.Tensor, seq_length: int = SEQUENCE) -> None:
        forward_backward_no_pipelining(
            forward_step_func=step,
            data_iterator=iter([ids]),
            model=model,
            num_microbatches=1,
            seq_length=seq_length,
            micro_batch_size=len(ids),
            pg_collection=groups,
        )

    whole = sample()["input_ids"]
    with pytest.raises(ValueError, match=f"each of 2 context-parallel ranks has {SEQUENCE} tokens"):
        run(whole)
    run(take_part(whole, 1, groups.cp))
    run(whole, 2 * SEQUENCE)  # the rank's part of sequences twice as long
    model._preprocess(whole, torch.arange(SEQUENCE).expand_as(whole))  # outside a step nobody knows
    assert reached == [SEQUENCE // 2, SEQUENCE]
