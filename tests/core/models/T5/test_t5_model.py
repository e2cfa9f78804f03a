"""On one rank T5Model equals a T5 that shares no code with it; on several, each has its part."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from minimegatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from minimegatron.core.models.T5.stack_split import (
    StackSplit,
    ranks_with_position_embedding_of_t5,
    ranks_with_word_embedding_of_t5,
)
from minimegatron.core.models.T5.t5_model import T5Model
from minimegatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.sharding import shard_parameter
from minimegatron.core.transformer.attention import CrossAttention
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.core.models.plain_t5 import plain_t5_loss
from tests.groups import PretendGroup, pretend_groups
from tests.played_ranks import play

VOCABULARY, S_ENC, S_DEC, BATCH = 64, 10, 7, 3

LLAMA = {
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": F.silu,
}
KINDS = {"tied, learned": (True, "learned_absolute", {}), "untied, rope": (False, "rope", LLAMA)}


def make_config(num_layers: int = 2, **options) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": num_layers,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "ffn_hidden_size": 48,
            "params_dtype": torch.float64,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "init_method_std": 0.15,
            **options,
        }
    )


def build(
    kind: str,
    pp_rank: int = 0,
    pp_size: int = 1,
    split=None,
    groups=None,
    of_model=None,
    **options,
) -> T5Model:
    tied, positions, style = KINDS[kind]
    if pp_size > 1:
        options |= {"pipeline_model_parallel_size": pp_size, "pipeline_dtype": torch.float64}
    config = make_config(**style, **options)
    stages = StackSplit(pp_size, split)
    return T5Model(
        config,
        stages.encoder_config(config, 3 if pp_size == 1 else 2),
        encoder_model_with_local_spec(),
        decoder_model_with_local_spec(),
        VOCABULARY,
        S_ENC,
        pre_process=stages.begins(pp_rank),
        post_process=stages.ends(pp_rank),
        share_embeddings_and_output_weights=tied,
        position_embedding_type=positions,
        add_encoder=stages.has_encoder(pp_rank),
        add_decoder=stages.has_decoder(pp_rank),
        pg_collection=groups or pretend_groups(pp_rank=pp_rank, pp_size=pp_size),
        **of_model or {},
    )


def sample() -> dict[str, torch.Tensor]:
    seed = torch.Generator().manual_seed(3)
    answer = torch.randint(VOCABULARY, (BATCH, S_DEC + 1), generator=seed)
    return {
        "text": torch.randint(VOCABULARY, (BATCH, S_ENC), generator=seed),
        "answer": answer[:, :-1],
        "labels": answer[:, 1:],
        "enc_pad": torch.arange(S_ENC) >= torch.tensor([10, 4, 7])[:, None],
        "dec_pad": torch.arange(S_DEC) >= torch.tensor([3, 7, 5])[:, None],
    }


def run(model: T5Model, batch, **options) -> torch.Tensor:
    enc, dec = batch["enc_pad"][:, None, None], batch["dec_pad"][:, None, None]
    return model(batch["text"], batch["answer"], enc, dec, enc, batch["labels"], **options)


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_equal_the_plain_model(kind, recompute):
    model = build(kind, recompute_granularity=recompute, **OF_RECOMPUTE[recompute])
    weights = {}
    for key, param in model.named_parameters():
        # Norm weights and biases start at 1 and 0, which would hide that they are not used.
        seed = torch.Generator().manual_seed(len(weights))
        noise = torch.randn(param.shape, generator=seed, dtype=param.dtype) * 0.1
        weights[key] = (param.detach() + noise).requires_grad_()
    batch = sample()
    counts = batch["dec_pad"].logical_not()
    rope = 1.0 if kind == "untied, rope" else 0.0
    expected = plain_t5_loss(weights, model.config, model.encoder_config, **batch, rope=rope)
    (expected * counts).sum().backward()

    model.load_state_dict({key: value.detach() for key, value in weights.items()})
    losses = run(model, batch)
    (losses * counts).sum().backward()
    torch.testing.assert_close(losses[counts], expected[counts], rtol=0, atol=1e-12)
    for key, param in model.named_parameters():
        assert param.grad.abs().max() > 1e-6, f"{key} is not used"
        torch.testing.assert_close(param.grad, weights[key].grad, rtol=0, atol=1e-11, msg=key)


OF_RECOMPUTE = {
    None: {},
    "selective": {},
    "full": {"recompute_method": "uniform", "recompute_num_layers": 1},
}


def test_the_encoder_alone_and_given_states():
    model, batch = build("tied, learned").eval(), sample()
    states = run(model, batch, output_encoder_hidden_only=True)
    assert states.shape == (S_ENC, BATCH, 32)
    again = run(model, batch, encoder_hidden_states=states)
    assert torch.equal(again, run(model, batch))


def test_logits_without_labels():
    logits = run(build("tied, learned"), sample() | {"labels": None})
    assert logits.shape == (BATCH, S_DEC, VOCABULARY) and logits._base is None


def on_one_of_the_ranks(group, kind: str, labels: bool = True):
    """Output, gradients and parameters, with whole logits asked for."""
    groups = ProcessGroupCollection(tp=group, pp=PretendGroup(), cp=PretendGroup())
    sizes = {"tensor_model_parallel_size": group.size()}
    model = build(kind, groups=groups, of_model={"parallel_output": False}, **sizes)
    output = run(model, sample() if labels else sample() | {"labels": None})
    if labels:
        (output * torch.arange(1, S_DEC + 1)).sum().backward()
    params = dict(model.named_parameters())
    return output.detach(), {name: param.grad for name, param in params.items()}, params


@pytest.mark.parametrize("kind", KINDS)
def test_a1_losses_with_parallel_output_false_are_those_of_one_rank(kind):
    losses, wanted, _ = on_one_of_the_ranks(PretendGroup(), kind)
    for rank, (found, grads, params) in enumerate(play(2, on_one_of_the_ranks, kind)):
        torch.testing.assert_close(found, losses, rtol=0, atol=1e-12)
        for name, grad in wanted.items():
            piece = shard_parameter(grad, params[name], rank, 2)
            torch.testing.assert_close(grads[name], piece, rtol=0, atol=1e-11, msg=name)


def test_a1_logits_with_parallel_output_false_are_whole():
    whole, *_ = on_one_of_the_ranks(PretendGroup(), "tied, learned", labels=False)
    for found, *_ in play(2, on_one_of_the_ranks, "tied, learned", False):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


def test_layers_may_be_given_as_those_of_a_stage():
    config = make_config()
    model = T5Model(
        config,
        dataclasses.replace(config, num_layers=3),
        get_t5_encoder_with_local_block_spec(3),
        get_t5_decoder_with_local_block_spec(2),
        VOCABULARY,
        S_ENC,
        pg_collection=pretend_groups(),
    )
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (3, 2)
    assert all(layer.cross_attention is None for layer in model.encoder.layers)
    assert all(isinstance(layer.cross_attention, CrossAttention) for layer in model.decoder.layers)


# -- Stages --


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pp_size, split", [(2, 1), (3, 1), (3, 2), (4, 2)])
def test_stages_have_all_weights_of_the_whole_with_the_same_values(kind, pp_size, split):
    whole = dict(named_global_parameters(build(kind, num_layers=2)))
    whole = {name: param for name, param in whole.items() if "encoder.layers.2." not in name}
    found: dict[str, list[torch.nn.Parameter]] = {}
    for rank in range(pp_size):
        for name, param in named_global_parameters(build(kind, rank, pp_size, split)):
            found.setdefault(name, []).append(param)
    assert found.keys() == whole.keys()
    for name, copies in found.items():
        assert all(torch.equal(copy, whole[name]) for copy in copies), name
        # The gradient norm and a checkpoint take one copy: that which is not "shared".
        assert [getattr(copy, "shared", False) for copy in copies].count(False) == 1, name
    tied = KINDS[kind][0]
    copies = 2 + (tied and split < pp_size - 1)
    assert len(found["embedding.word_embeddings.weight"]) == copies
    assert all(word.shared_embedding for word in found["embedding.word_embeddings.weight"])
    if tied:
        assert len(found["embedding.position_embeddings.weight"]) == 2


def test_every_copy_has_a_bucket_of_its_own():
    """With ZeRO-1 a rank has a part of each bucket: of copies, the same elements on every stage."""
    buffer = SimpleNamespace(ddp_config=SimpleNamespace(use_distributed_optimizer=True))
    found = {
        (rank, name)
        for rank in range(3)
        for name, param in named_global_parameters(build("tied, learned", rank, 3, 1))
        if _ParamAndGradBuffer._needs_own_bucket(buffer, param)
    }
    words, positions = (f"embedding.{kind}_embeddings.weight" for kind in ("word", "position"))
    assert found == {(0, words), (0, positions), (1, words), (1, positions), (2, words)}


def test_which_ranks_share_weights():
    split = StackSplit(4, 2)
    ranks = [10, 11, 12, 13]
    assert ranks_with_word_embedding_of_t5(split, True, ranks) == [10, 12, 13]
    assert ranks_with_word_embedding_of_t5(split, False, ranks) == [10, 12]
    assert ranks_with_position_embedding_of_t5(split, True, ranks) == [10, 12]
    assert ranks_with_position_embedding_of_t5(split, False, ranks) == [10]
    assert ranks_with_word_embedding_of_t5(StackSplit(2, 1), True, [4, 5]) == [4, 5]
    assert ranks_with_word_embedding_of_t5(StackSplit(1, None), True, [7]) == [7]


def test_what_travels():
    models = [build("tied, learned", rank, 4, 2) for rank in range(4)]
    enc, dec = [[S_ENC, 1, 32]], [[S_DEC, 1, 32]]
    shapes = [model.message_shapes(enc, dec) for model in models]
    assert shapes == [(enc, enc), (enc, enc), (enc, dec + enc), (dec + enc, dec + enc)]
    a, e = torch.zeros(1), torch.ones(1)
    assert [m.extra_outputs([a, e]) for m in models] == [[], [], [e], []]
    assert models[2].extra_outputs([e]) == [e]


@pytest.mark.parametrize("rank, number, given", [(1, 1, 2), (2, 1, 2), (3, 2, 1)])
def test_another_number_of_tensors_is_refused(rank, number, given):
    model = build("tied, learned", rank, 4, 2)
    with pytest.raises(ValueError, match=f"takes {number} input tensors, not {given}"):
        model.set_input_tensor([torch.zeros(1)] * given)


def test_stages_without_a_split_are_refused():
    config = make_config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float64)
    with pytest.raises(ValueError, match="parallel_size 2 needs .*split_rank is 2; give 1, or use"):
        T5Model(config, config, None, None, 8, 8, pg_collection=pretend_groups(pp_size=2))
    with pytest.raises(ValueError, match="stage 0 of 2 with split rank 1 has .* pass these"):
        encoder_config = dataclasses.replace(config, pipeline_model_parallel_size=1)
        groups = pretend_groups(pp_size=2)
        T5Model(config, encoder_config, None, None, 8, 8, pg_collection=groups)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"mtp_num_layers": 1}, "mtp_num_layers is 1, but T5"),
        ({"num_moe_experts": 2}, "num_moe_experts is 2, but a layer of T5 has one MLP"),
        ({"defer_embedding_wgrad_compute": True}, "defer_embedding_wgrad_compute is on, but T5"),
    ],
)
def test_other_features_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        build("tied, learned", **options)


def test_cross_attention_needs_a_key_for_each_head():
    with pytest.raises(ValueError, match="num_query_groups is 2, but each of 4 heads"):
        build("tied, learned", num_query_groups=2)


@pytest.mark.parametrize("which", [2, 3, 4], ids=("encoder", "decoder", "cross"))
def test_a6_masks_of_three_dimensions_are_refused(which):
    """[b, s, s], as Megatron's T5 takes them, would be taken for one of the heads."""
    model, batch = build("tied, learned"), sample()
    lengths = {2: (S_ENC, S_ENC), 3: (S_DEC, S_DEC), 4: (S_DEC, S_ENC)}[which]
    arguments = [batch["text"], batch["answer"], None, None, None, batch["labels"]]
    for sequences in (BATCH, 1):
        arguments[which] = torch.zeros(sequences, *lengths, dtype=torch.bool)
        with pytest.raises(
            ValueError, match=rf"attention_mask is \[{sequences}, .*; give \[3 or 1, 4"
        ):
            model(*arguments)
        arguments[which] = arguments[which][:, None]
        model(*arguments)
