"""BERT in one process: against torch's own encoder, what padding does, and what comes back."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from minimegatron import pretrain_bert, pretrain_gpt, pretrain_t5
from minimegatron.core.models.bert import BertModel
from minimegatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.tensor_parallel.sharding import full_shape, shard_parameter
from minimegatron.core.transformer.module_state import named_global_parameters
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.utils import get_device
from tests.groups import PretendGroup, pretend_groups
from tests.parity_bert import PAD_ID, bert_batches, bert_loss
from tests.played_ranks import play

HIDDEN, HEADS, LAYERS, VOCAB, SEQ = 32, 4, 2, 32, 8


def bert(binary_head=True, positions="learned_absolute", **options):
    config = TransformerConfig(
        num_layers=options.pop("num_layers", LAYERS),
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        pipeline_model_parallel_size=options.pop("pp", 1),
        init_method_std=0.2,
        tensor_model_parallel_size=options.pop("tp", 1),
        sequence_parallel=options.pop("sp", False),
        context_parallel_size=options.pop("cp", 1),
    )
    groups = options.pop("groups", None) or pretend_groups()
    model = BertModel(
        config,
        2 if binary_head else 0,
        bert_layer_local_spec,
        VOCAB,
        SEQ,
        position_embedding_type=positions,
        add_binary_head=binary_head,
        pg_collection=groups,
        **options,
    )
    for param in model.parameters():
        if param.dim() == 1:  # biases and norms begin all alike
            whole = 0.1 * torch.arange(*full_shape(param, groups.tp.size())).cos()
            param.data += shard_parameter(whole, param, groups.tp.rank(), groups.tp.size())
    return model.to(get_device())


def outputs(model, batch, labels=True):
    return model(
        batch["text"], batch["padding_mask"], batch["types"], batch["labels"] if labels else None
    )


# -- Against torch's encoder --


def as_torchs(weights: dict, layer: int) -> dict:
    """One layer's weights under the names of `torch.nn.TransformerEncoderLayer`.

    Ours has a head's query, key and value in one block of rows; torch has all queries first.
    """
    name = f"encoder.layers.{layer}"
    mine = {key.removeprefix(f"{name}."): value for key, value in weights.items() if name in key}
    by_head = mine["self_attention.linear_qkv.weight"].view(HEADS, 3, HIDDEN // HEADS, HIDDEN)
    bias = mine["self_attention.linear_qkv.bias"].view(HEADS, 3, HIDDEN // HEADS)
    found = {
        "self_attn.in_proj_weight": by_head.transpose(0, 1).reshape(3 * HIDDEN, HIDDEN),
        "self_attn.in_proj_bias": bias.transpose(0, 1).reshape(3 * HIDDEN),
    }
    for theirs, ours in {
        "self_attn.out_proj": "self_attention.linear_proj",
        "linear1": "mlp.linear_fc1",
        "linear2": "mlp.linear_fc2",
        "norm1": "input_layernorm",
        "norm2": "pre_mlp_layernorm",
    }.items():
        found |= {f"{theirs}.{kind}": mine[f"{ours}.{kind}"] for kind in ("weight", "bias")}
    return found


def plain_bert(weights: dict, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each token, binary logits), by torch's modules and functions."""

    def norm(x, name):
        return F.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    layer = torch.nn.TransformerEncoderLayer(
        HIDDEN, HEADS, 4 * HIDDEN, 0.0, F.gelu, batch_first=True, norm_first=True
    )
    layer = layer.to(get_device())
    words = weights["embedding.word_embeddings.weight"]
    x = words[batch["text"]] + weights["embedding.position_embeddings.weight"][:SEQ]
    x = x + weights["embedding.tokentype_embeddings.weight"][batch["types"]]
    hidden = {"src_key_padding_mask": batch["padding_mask"] == 0}
    for number in range(LAYERS):
        x = functional_call(layer, as_torchs(weights, number), (x,), hidden)
    x = norm(x, "encoder.final_layernorm")
    head = norm(F.gelu(linear(x, "lm_head.dense")), "lm_head.layer_norm")
    vocabulary = weights.get("output_layer.weight", words)
    logits = head @ vocabulary.T + weights["output_layer.bias"]
    losses = F.cross_entropy(
        logits.transpose(1, 2), batch["labels"], ignore_index=-1, reduction="none"
    )
    pooled = torch.tanh(linear(x[:, 0], "pooler.dense"))
    return losses, linear(pooled, "binary_head")


@pytest.mark.parametrize("is_tied", [True, False], ids=("tied", "untied"))
def test_losses_and_gradients_equal_torchs_encoder(is_tied):
    model = bert(share_embeddings_and_output_weights=is_tied)
    weights = {
        name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()
    }
    for batch in bert_batches(4):
        losses, logits = outputs(model, batch)
        plain_losses, plain_logits = plain_bert(weights, batch)
        counts = batch["loss_mask"] > 0
        torch.testing.assert_close(losses[counts], plain_losses[counts])
        torch.testing.assert_close(logits, plain_logits)
        bert_loss(batch["loss_mask"], batch["is_random"], (losses, logits))[0].backward()
        loss, _ = bert_loss(batch["loss_mask"], batch["is_random"], (plain_losses, plain_logits))
        loss.backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, weights[name].grad, msg=name)


# -- Padding --


@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
def test_no_token_looks_at_padding(positions):
    model = bert(positions=positions)
    batch = bert_batches(2)[1]
    text, tokens = batch["text"], batch["padding_mask"] > 0
    assert not tokens.all()
    logits, binary = outputs(model, batch, labels=False)
    others = batch | {"text": text.where(tokens, (text + 7) % VOCAB)}
    same_logits, same_binary = outputs(model, others, labels=False)
    assert torch.equal(logits[tokens], same_logits[tokens]) and torch.equal(binary, same_binary)

    # The short row by itself, without its padding.
    length = int(tokens[1].sum())
    short = {name: tensor[1:, :length] for name, tensor in batch.items() if tensor.dim() == 2}
    alone, _ = outputs(model, short, labels=False)
    torch.testing.assert_close(alone[0], logits[1, :length])


def test_tokens_look_both_ways():
    model = bert()
    batch = bert_batches(1)[0]
    before, _ = outputs(model, batch, labels=False)
    text = batch["text"].clone()
    text[:, -1] = (text[:, -1] + 1) % VOCAB
    after, _ = outputs(model, batch | {"text": text}, labels=False)
    assert (before != after).any(dim=-1).all()


def test_rows_of_padding_attend_to_nothing():
    """What `bert_extended_attention_mask` says of them: the output 0, gradients finite."""
    model = bert()
    core = model.encoder.layers[0].self_attention.core_attention
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], device=get_device())
    extended = model.bert_extended_attention_mask(mask)
    assert extended.shape == (2, 1, 5, 5) and extended.dtype == torch.bool
    assert extended[0, 0].tolist() == [[False] * 3 + [True] * 2] * 3 + [[True] * 5] * 2
    shape = (5, 2, HEADS, HIDDEN // HEADS)
    inputs = [
        torch.randn(shape, dtype=torch.float64, device=get_device(), requires_grad=True)
        for _ in range(3)
    ]
    output = core(*inputs, extended)
    assert not output[3:, 0].any() and not output[:, 1].any() and output[:3, 0].all()
    output.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in inputs)


def test_gradients_are_finite_with_a_row_of_padding_only():
    model = bert()
    batch = bert_batches(1)[0]
    batch["padding_mask"][1] = 0
    batch["text"][1] = PAD_ID
    losses, logits = outputs(model, batch)
    (losses[0].sum() + logits.sum()).backward()
    assert all(param.grad.isfinite().all() for param in model.parameters())


# -- Cut --


def loss_of(model, batch) -> torch.Tensor:
    return bert_loss(batch["loss_mask"], batch["is_random"], outputs(model, batch))[0]


def gradients(model, batch) -> dict[str, torch.Tensor]:
    loss_of(model, batch).backward()
    return {name: param.grad for name, param in named_global_parameters(model)}


@pytest.mark.parametrize("is_tied", [True, False], ids=("tied", "untied"))
def test_three_stages_are_the_same_model(is_tied):
    """The middle one has the mask too; the last has a bias of its own where the weight is tied."""
    options = {"num_layers": 3, "share_embeddings_and_output_weights": is_tied}
    whole, batch = bert(**options), bert_batches(2)[1]
    loss = loss_of(whole, batch)
    loss.backward()
    wanted = {name: param.grad for name, param in whole.named_parameters()}
    stages = [
        bert(
            **options,
            pp=3,
            pre_process=rank == 0,
            post_process=rank == 2,
            groups=pretend_groups(pp_rank=rank, pp_size=3),
        )
        for rank in range(3)
    ]
    copies = [param for stage in stages for _, param in named_global_parameters(stage)]
    assert len(copies) == len(wanted) + is_tied
    hidden_states = None
    for stage in stages[:-1]:
        stage.set_input_tensor([hidden_states])
        hidden_states = outputs(stage, batch)
        assert hidden_states.shape == (SEQ, 2, HIDDEN) and hidden_states._base is None
    stages[-1].set_input_tensor(hidden_states)
    found = loss_of(stages[-1], batch)
    torch.testing.assert_close(found, loss)
    found.backward()
    sums: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, param in named_global_parameters(stage):
            sums[name] = sums.get(name, 0) + param.grad
    for name, grad in wanted.items():
        torch.testing.assert_close(sums[name], grad, msg=name)


def on_one_of_two(group, batch):
    model = bert(sp=True, tp=2, groups=ProcessGroupCollection(tp=group, pp=PretendGroup()))
    return gradients(model, batch), dict(model.named_parameters())


def test_two_ranks_that_cut_the_sequence_equal_one_process():
    """Gradients marked as partial are terms of a sum, and the others are whole: head and pooler."""
    batch = bert_batches(2)[1]
    wanted = gradients(bert(), batch)
    (first, params), (second, _) = play(2, on_one_of_two, batch)
    partial = {name for name, param in params.items() if getattr(param, "sequence_parallel", False)}
    assert {name for name in partial if "encoder" not in name} == {
        *("lm_head.dense.weight", "lm_head.dense.bias"),
        *("lm_head.layer_norm.weight", "lm_head.layer_norm.bias"),
    }
    for name, grad in wanted.items():
        for rank, found in enumerate((first[name], second[name])):
            total = first[name] + second[name] if name in partial else found
            piece = shard_parameter(grad, params[name], rank, 2)
            torch.testing.assert_close(total, piece, msg=name)


def losses_and_gradients_of(group, batch, **options):
    groups = ProcessGroupCollection(tp=group, pp=PretendGroup())
    model = bert(tp=group.size(), groups=groups, **options)
    return loss_of(model, batch).detach(), gradients(model, batch), dict(model.named_parameters())


@pytest.mark.parametrize("is_tied", [True, False], ids=("tied", "untied"))
def test_a1_losses_with_parallel_output_false_are_those_of_one_rank(is_tied):
    batch = bert_batches(1)[0]
    options = {"share_embeddings_and_output_weights": is_tied, "parallel_output": False}
    loss, wanted, _ = losses_and_gradients_of(PretendGroup(), batch, **options)
    ranks = play(2, lambda group: losses_and_gradients_of(group, batch, **options))
    for rank, (found, grads, params) in enumerate(ranks):
        torch.testing.assert_close(found, loss, rtol=0, atol=1e-12)
        for name, grad in wanted.items():
            piece = shard_parameter(grad, params[name], rank, 2)
            torch.testing.assert_close(grads[name], piece, rtol=0, atol=1e-11, msg=name)


def whole_logits_of(group, batch):
    groups = ProcessGroupCollection(tp=group, pp=PretendGroup())
    model = bert(tp=group.size(), groups=groups, parallel_output=False)
    return outputs(model, batch, labels=False)[0]


def test_a1_logits_with_parallel_output_false_are_whole():
    batch = bert_batches(1)[0]
    for logits in play(2, whole_logits_of, batch):
        torch.testing.assert_close(logits, outputs(bert(), batch, labels=False)[0])


# -- What comes back --


def test_four_forms_of_the_output():
    batch = bert_batches(1)[0]
    shape = batch["text"].shape
    losses, binary = outputs(bert(), batch)
    assert losses.shape == shape and binary.shape == (shape[0], 2)
    logits, _ = outputs(bert(), batch, labels=False)
    assert logits.shape == (*shape, VOCAB) and logits._base is None
    model = bert(binary_head=False)
    assert model(batch["text"], batch["padding_mask"], lm_labels=batch["labels"])[1] is None
    assert not any("pooler" in name or "type" in name for name, _ in model.named_parameters())


def test_what_is_refused():
    batch = bert_batches(1)[0]
    with pytest.raises(ValueError, match="return_embeddings"):
        bert(return_embeddings=True)
    with pytest.raises(
        ValueError, match=r"'none' is unknown to BERT; use learned_absolute or rope"
    ):
        bert(positions="none")
    with pytest.raises(ValueError, match="context_parallel_size is 2, but BERT"):
        bert(cp=2)
    with pytest.raises(
        ValueError, match="token types are given to an embedding without them, or miss"
    ):
        bert()(batch["text"], batch["padding_mask"])
    with pytest.raises(ValueError, match="token types are given"):
        outputs(bert(binary_head=False), batch)


def test_a6_other_shapes_than_those_of_the_tokens_are_refused():
    """A mask of one row, [1, s], would be that of all sequences; types [b, 1] that of all tokens."""
    model, batch = bert(), bert_batches(2)[0]
    mask, types, labels = batch["padding_mask"], batch["types"], batch["labels"]
    wrong = [({"padding_mask": x}, "attention_mask is") for x in (mask[:1], mask[:, :1], mask[0])]
    wrong += [({"padding_mask": mask[:, None, None]}, "attention_mask is")]
    wrong += [({"types": x}, "tokentype_ids is") for x in (types[:1], types[:, :1], types[0])]
    wrong += [({"labels": x}, "targets are") for x in (labels[:1], labels[:, :1], labels.t())]
    for change, words in wrong:
        with pytest.raises(ValueError, match=words):
            outputs(model, batch | change)
    groups = pretend_groups(pp_rank=1, pp_size=3)
    middle = bert(pp=3, pre_process=False, post_process=False, num_layers=3, groups=groups)
    for other in (mask[0], mask[:, None, None]):
        with pytest.raises(ValueError, match=r"BERT's attention_mask is .*; give \[b, s\]"):
            middle(batch["text"], other)


@pytest.mark.parametrize("loss_func", [pretrain_gpt.loss_func, pretrain_t5.loss_func])
def test_a6_a_loss_mask_for_other_tokens_is_refused(loss_func):
    """With one sequence, [1, 1] would broadcast; [s, b] would weigh other tokens."""
    for losses, mask in (
        (torch.ones(1, 6), torch.ones(1, 1)),
        (torch.ones(2, 6), torch.ones(6, 2)),
        (torch.ones(2, 6), torch.ones(6)),
        (torch.ones(2, 6), torch.ones(2, 1)),
    ):
        with pytest.raises(ValueError, match=r"loss_mask is \[.*\], but there are losses \[., 6\]"):
            loss_func(loss_mask=mask, model=None, output_tensor=losses)


def test_a6_a_loss_mask_for_other_tokens_is_refused_by_bert():
    wrong = {"loss_mask": torch.ones(1, 1), "sentence_order": torch.zeros(1), "model": None}
    with pytest.raises(ValueError, match=r"loss_mask is \[1, 1\], but there are losses \[1, 6\]"):
        pretrain_bert.loss_func(**wrong, output_tensor=(torch.ones(1, 6), None))
